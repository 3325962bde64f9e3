"""The server that the application runs in, with all that it is told."""

from __future__ import annotations

import socket
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI

from netlimit.settings import Settings

from .admission import HEAD_BYTES
from .connections import IDLE_SECONDS, Connection, Door
from .guests import Guests

GRACE_SECONDS = 5
"""How long it waits for answers that are under way when it is told to end."""


def open_door(settings: Settings, app: FastAPI, listening: socket.socket) -> Door:
    """The door in the place of a listening socket. Asks the database who is safe."""
    state = app.state
    guests = Guests(state.store, settings.host, state.visitors, settings.safe, settings.trusted_proxies)
    guests.read()
    return Door(listening, guests.find_standing)


def configure(settings: Settings, app: FastAPI, door: Door) -> uvicorn.Config:
    """How the API is served. `load()` reads the certificate and its key, after which nobody needs to be able to."""
    protocol: Any = partial(Connection, door=door, on_end=app.state.waiting.end)
    return uvicorn.Config(
        app,
        http=protocol,
        loop="asyncio",  # uvloop, which may be installed for the limiter, accepts connections past the door
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=4096,  # as much as Linux allows: who is refused must not keep others waiting at the door
        h11_max_incomplete_event_size=HEAD_BYTES,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=[str(proxy) for proxy in settings.trusted_proxies],
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )
