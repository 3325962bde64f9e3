"""Both servers of the limiter, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator

import uvicorn

from netlimit.l7.service.application import Service
from netlimit.l7.service.connection import Connection
from netlimit.l7.service.rpc import RpcServer

GRACE_SECONDS = 5
"""How long answers that are under way have when it is told to end."""
MOST_CONNECTIONS = 8192
"""Connections over HTTP at most; more are answered 503."""
IDLE_SECONDS = 75
"""How long a connection may be idle: longer than proxies keep theirs (60 s in nginx), so that they close them first."""

log = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
    """uvicorn, which leaves signals to who runs it."""

    def __init__(self, service: Service) -> None:
        config = uvicorn.Config(
            service,
            loop="none",
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


async def serve(service: Service, rpc: RpcServer, listening: socket.socket) -> None:
    """Answer over HTTP as well until SIGTERM or SIGINT; then end both."""
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    http = HttpServer(service)
    running = asyncio.create_task(http.serve([listening]))
    running.add_done_callback(lambda done: ending.set())
    await ending.wait()
    service.ending = http.should_exit = True
    await asyncio.gather(running, rpc.stop(GRACE_SECONDS))
