"""Two gateways with keepalived, on one link with a host: each has a controller, and both share a database.

host 10.5.0.9 ── switch ── 10.5.0.1 one, 10.5.0.2 two; 10.5.0.100 is on the one that is MASTER
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from netlimit.store import Store
from scripts.testbed.namespaces import PREFIXES, QUIET, Namespace
from tests import warm

HOST, VIRTUAL = "10.5.0.9", "10.5.0.100"
ADDRESSES = {"one": "10.5.0.1", "two": "10.5.0.2"}
PRIORITIES = {"one": 150, "two": 100}
ADVERT_SECONDS = 0.2
"""Who hears none for a bit more than three of them becomes MASTER."""
PATIENCE = 60.0
CONFIGURATION = """
global_defs {{
  router_id {name}
  vrrp_version 3
  vrrp_garp_master_delay 0
}}
vrrp_instance link {{
  interface lan
  state BACKUP
  virtual_router_id 51
  priority {priority}
  advert_int {seconds}
  {unicast}
  virtual_ipaddress {{
    {virtual}/16
  }}
}}
"""


@dataclass
class Node:
    """One gateway of the pair."""

    name: str
    namespace: Namespace
    directory: Path
    url: str
    started: list[warm.Started] = field(default_factory=list)
    keepalived: subprocess.Popen[str] | None = None

    @property
    def other(self) -> str:
        """The address of the other one."""
        return next(address for name, address in ADDRESSES.items() if name != self.name)

    @property
    def has_virtual_address(self) -> bool:
        """Whether it is MASTER, and so has the address that moves."""
        return f" {VIRTUAL}/" in self.namespace.run("ip", "-4", "-o", "addr", "show", "dev", "lan").stdout

    def start_controller(self) -> None:
        """Start it, and wait for nothing."""
        settings = {
            "NETLIMIT_DATABASE_URL": self.url,
            "NETLIMIT_HOST": self.name,
            "NETLIMIT_BACKEND": "iptables",
            "NETLIMIT_STATE_DIRECTORY": str(self.directory / f"{self.name}-state"),
        }
        place: dict[str, Any] = {"env": {**os.environ, **settings}, "namespace": self.namespace.name}
        with (self.directory / f"{self.name}.log").open("w") as log, open(os.devnull) as nothing:
            command = ("netlimit.cli.main", "controller")
            self.started.append(warm.start(*command, **place, stdin=nothing, stdout=log, stderr=log))

    def start_keepalived(self, unicast: bool = False) -> None:
        """Start it; it becomes MASTER or BACKUP by itself."""
        path = self.directory / f"{self.name}.conf"
        peers = f"unicast_peer {{\n {self.other}\n }}" if unicast else ""
        values = {"name": self.name, "priority": PRIORITIES[self.name], "virtual": VIRTUAL, "unicast": peers}
        path.write_text(CONFIGURATION.format(seconds=ADVERT_SECONDS, **values))
        files = (f"--{kind}pid={self.directory / f'{self.name}.{kind}pid'}" for kind in ("", "vrrp_"))
        with (self.directory / f"{self.name}-keepalived.log").open("a") as log:
            self.keepalived = self.namespace.popen(
                *("keepalived", "--dont-fork", "--log-console", "--vrrp", f"--use-file={path}", *files),
                stdout=log,
                stderr=log,
            )

    def stop_keepalived(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it with its children; killed, it says goodbye to nobody and leaves its address."""
        assert self.keepalived is not None
        os.killpg(self.keepalived.pid, number)
        self.keepalived.wait(60)

    def close(self) -> None:
        """End what runs."""
        for process in self.started:
            process.kill()
            process.wait(60)


@dataclass
class Pair:
    """Both, the host, and their database."""

    one: Node
    two: Node
    host: Namespace
    store: Store

    @property
    def nodes(self) -> tuple[Node, Node]:
        """The gateways."""
        return self.one, self.two

    @property
    def masters(self) -> list[str]:
        """The names of those that are MASTER."""
        return [node.name for node in self.nodes if node.has_virtual_address]

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
        """Wait for something that must come soon."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"Waited too long for {what}; MASTER: {self.masters}"
            time.sleep(0.02)

    def wait_until_applied(self) -> None:
        """Until both gateways hold the newest revision, and know each other."""
        wanted = self.store.revision()

        def applied() -> bool:
            found = {each.host: each for each in self.store.hosts() if each.applied_revision >= wanted}
            return found.keys() == ADDRESSES.keys() and all(each.last_error is None for each in found.values())

        self.wait(applied, f"revision {wanted} on both")


@contextmanager
def open_pair(directory: Path, url: str) -> Iterator[Pair]:
    """The pair, on links of its own; nothing runs yet but the database."""
    unique = f"{os.getpid()}-{secrets.token_hex(2)}"
    names = {role: f"{prefix}{unique}-{role}" for role, prefix in (
        ("host", PREFIXES[0]), ("one", PREFIXES[1]), ("two", PREFIXES[1]), ("switch", PREFIXES[2])
    )}  # fmt: skip
    spaces = {role: Namespace(name, role) for role, name in names.items()}
    with ExitStack() as opened:
        for role, name in names.items():
            subprocess.run(["ip", "netns", "add", name], check=True)
            opened.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
            opened.callback(spaces[role].end_processes)
            spaces[role].run("sysctl", "-qw", *QUIET)
        _join(spaces)
        store = Store(url)
        opened.callback(store.close)
        nodes = [Node(name, spaces[name], directory, url) for name in ADDRESSES]
        for node in nodes:
            opened.callback(node.close)
        yield Pair(*nodes, spaces["host"], store)


def _join(spaces: dict[str, Namespace]) -> None:
    switch = spaces["switch"]
    switch.ip("link add switch type bridge mcast_snooping 0", "link set switch up", "link set lo up")
    for role, address in {"host": HOST, **ADDRESSES}.items():
        device = "lan" if role in ADDRESSES else "eth0"
        switch.ip(
            f"link add port-{role} type veth peer name {device} netns {spaces[role].name}",
            f"link set port-{role} master switch up",
        )
        spaces[role].ip("link set lo up", f"link set {device} up", f"addr add {address}/16 dev {device}")
        spaces[role].run("ethtool", "-K", device, "tx", "off")
