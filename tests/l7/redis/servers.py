"""Real Redis servers on loopback, without persistence; they die with the process that has started them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from redis import Redis
from redis.exceptions import RedisError

from tests.ports import free_port_of_cluster

START_SECONDS = 120.0
CLUSTER = ["--cluster-enabled", "yes", "--cluster-require-full-coverage", "no", "--cluster-node-timeout", "5000"]
SLOTS = 16384
SHARE = SLOTS // 3
"""Of each node of a cluster of three; the last one has one more."""


class Server:
    """One redis-server; can be killed, and started again at the same place."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.port = free_port_of_cluster()
        self.directory = directory / str(self.port)
        self.directory.mkdir(parents=True)
        self.options = options
        self.client = Redis(port=self.port, socket_timeout=60)
        self.start()

    def start(self) -> None:
        """Start it, empty, and wait until it answers."""
        own = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        place = ["--dir", str(self.directory), "--unixsocket", str(self.directory / "socket")]
        command = ["setpriv", "--pdeathsig", "KILL", "redis-server", *own, *place, *self.options]
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
        self.process.wait(60)

    def close(self) -> None:
        """End it for good."""
        self.client.close()
        self.kill()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"


@contextmanager
def run_server() -> Iterator[Server]:
    """A server for as long as the block lasts."""
    with TemporaryDirectory() as directory:
        server = Server(Path(directory))
        try:
            yield server
        finally:
            server.close()


class Nodes:
    """A cluster of three masters, which serves what it can while a node is away."""

    def __init__(self, directory: Path) -> None:
        self.servers = [Server(directory, *CLUSTER) for _ in range(3)]
        self._moved: set[int] = set()
        for number, server in enumerate(self.servers):
            first, last = number * SHARE, SLOTS - 1 if number == 2 else (number + 1) * SHARE - 1
            server.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            server.client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
            server.client.execute_command("CLUSTER", "MEET", "127.0.0.1", self.servers[0].port)
        self._wait_until_ready()

    def revive(self, server: Server) -> None:
        """Start a node that was killed."""
        server.start()
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not all(map(self._is_ready, self.servers)):
            if time.monotonic() > deadline:
                self.close()
                raise TimeoutError("The nodes did not find each other.")
            time.sleep(0.02)

    @staticmethod
    def _is_ready(server: Server) -> bool:
        """Whether a node serves, and knows of every slot who has it."""
        ranges = server.client.execute_command("CLUSTER", "SLOTS")
        known = sum(last - first + 1 for first, last, *_ in ranges)
        return known == SLOTS and b"cluster_state:ok" in server.client.execute_command("CLUSTER", "INFO")

    def find(self, slot: int) -> Server:
        """The node that a slot was given at first."""
        return self.servers[min(slot // SHARE, 2)]

    def move(self, slot: int) -> Server:
        """Move a slot and what is in it to another node, which is returned."""
        target = self.begin_to_move(slot)
        source = self.find(slot).client
        for key in source.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
            source.execute_command("MIGRATE", "127.0.0.1", target.port, key, 0, 5000)
        self._set_owner(slot, target)
        return target

    def begin_to_move(self, slot: int) -> Server:
        """Say that a slot is moving to another node, which is returned, and move nothing yet."""
        source = self.find(slot)
        target = self.servers[(self.servers.index(source) + 1) % 3]
        target.client.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", self._read_id(source))
        source.client.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", self._read_id(target))
        self._moved.add(slot)
        return target

    def inherit(self, slot: int) -> Server:
        """Give a slot of a node that is dead to another, as if that had been its replica."""
        dead = self.find(slot)
        others = [server for server in self.servers if server is not dead]
        heir = others[0]
        for server in others:
            server.client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", self._read_id(heir))
        self._moved.add(slot)
        return heir

    def restore(self) -> None:
        """Forget what is in slots that have moved, and move them back."""
        for server in self.servers:
            server.client.flushall()
        for slot in self._moved:
            self._set_owner(slot, self.find(slot))
        self._moved.clear()

    def _set_owner(self, slot: int, owner: Server) -> None:
        for server in (owner, *self.servers):
            server.client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", self._read_id(owner))

    @staticmethod
    def _read_id(server: Server) -> str:
        return str(server.client.execute_command("CLUSTER", "MYID").decode())

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in self.servers)

    def close(self) -> None:
        for server in self.servers:
            server.close()
