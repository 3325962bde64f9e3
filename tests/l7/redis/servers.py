"""Real Redis servers on loopback, without persistence, ended by their processes."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from socket import socket

from redis import Redis
from redis.exceptions import RedisError

START_SECONDS = 20.0


def find_port() -> int:
    """A port that nobody listens on, nor on the one of the cluster's bus above it."""
    while True:
        with socket() as one, socket() as other:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            try:
                other.bind(("127.0.0.1", port + 10000))
            except (OSError, OverflowError):
                continue
            return port


class Server:
    """One redis-server; can be killed, and started again at the same place."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.port = find_port()
        self.directory = directory / str(self.port)
        self.directory.mkdir(parents=True)
        self.options = options
        self.client = Redis(port=self.port, socket_timeout=5)
        self.start()

    def start(self) -> None:
        """Start it, empty, and wait until it answers."""
        own = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        place = ["--dir", str(self.directory), "--unixsocket", str(self.directory / "socket")]
        command = ["redis-server", *own, *place, *self.options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self.client.ping()
                return
            except (RedisError, OSError):
                assert self.process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        """End it for good."""
        self.client.close()
        self.kill()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"
