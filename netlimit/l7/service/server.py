"""Both servers of the limiter, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn

from netlimit.l7.service.application import Service
from netlimit.l7.service.connection import Connection
from netlimit.l7.service.pace import Pace
from netlimit.l7.service.room import BACKLOG, Room, find_most
from netlimit.l7.service.rpc import RpcServer

GRACE_SECONDS = 5
"""How long answers that are under way have when it is told to end."""
HELD_BYTES = 64 * 2**10
"""What the kernel holds of a connection until it is read, and so what is read of one at most before it was its turn. Of
one to a Unix socket it holds what the other end chooses, and 256 kB are read."""
log = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
    """uvicorn, which leaves connections to `Connection`, and signals to who runs it."""

    def __init__(self, service: Service) -> None:
        self._room = Room(find_most())
        protocol: Any = partial(Connection, respond=service.answer, room=self._room, pace=Pace())
        config = uvicorn.Config(
            service,
            loop="none",
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
            backlog=BACKLOG,
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        for each in sockets or ():
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, HELD_BYTES)  # connections have it from there
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        """What uvicorn does ten times a second: whether to end."""
        self._room.pass_time(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

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
