"""What keeps requests for later, behind nginx-defer.conf."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from netlimit.l7.deferral.application import DeferralApp
from netlimit.l7.deferral.deferral import Deferral
from netlimit.l7.identity import EXTRACTORS, ClientAddress
from tests.l7.service.serving import Served
from tests.ports import free_port


@contextmanager
def deferring(served: Served, directory: Path, application: str) -> Iterator[str]:
    """A DeferralApp before the application; where it is."""
    extractors = {**EXTRACTORS, "remote_address": ClientAddress(["127.0.0.1"])}
    deferral = Deferral(f"sqlite://{directory}/deferred.db", upstream=f"http://{application}")
    app = DeferralApp(deferral, served.limiter, lambda: served.rules, "web", extractors)
    port = free_port()
    config = uvicorn.Config(app, port=port, log_level="warning", lifespan="on", ws="none", proxy_headers=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
