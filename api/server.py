"""The server that the application runs in, with all that it is told."""

from __future__ import annotations

from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI

from api.admission import HEAD_BYTES
from api.connections import IDLE_SECONDS, Connection
from netlimit.settings import Settings

GRACE_SECONDS = 5
"""How long it waits for answers that are under way when it is told to end."""


def configure(settings: Settings, app: FastAPI) -> uvicorn.Config:
    """How the API is served. `load()` reads the certificate and its key, after which nobody needs to be able to."""
    protocol: Any = partial(Connection, proxies=settings.trusted_proxies)
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=HEAD_BYTES,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=[str(proxy) for proxy in settings.trusted_proxies],
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )
