"""Whom this host itself talks to: resolvers, next hops of routes, upstreams, whatever programs here have connected to.

It is read from files that any user may read, so that controller and limiter know the same.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from netlimit.kernel.sockets import ESTABLISHED, LISTENING, OPEN, read_listed
from netlimit.l7.identity import find_block
from netlimit.rules import Target

REMEMBERED_SECONDS = 1800.0
"""How long somebody counts after he was seen last."""
REST_SECONDS, REST_SHARE = 5.0, 50
"""A look is followed by so much rest, or by so many times what it took, where that is more."""
MOST = 65_536
"""So many are remembered; those that were seen last."""
_RESOLVERS = tuple(
    map(
        Path,
        (
            "/etc/resolv.conf",
            "/run/systemd/resolve/resolv.conf",
            "/run/NetworkManager/resolv.conf",
            "/run/NetworkManager/no-stub-resolv.conf",
            "/run/resolvconf/resolv.conf",
            "/run/dnsmasq/resolv.conf",
        ),
    )
)
_NET = Path("/proc/self/net")
_FAMILIES = (("", socket.AF_INET), ("6", socket.AF_INET6))
_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_PORTS = (32768, 60999)
_SYN_SENT, _TIME_WAIT = 2, 6
_TALKING = frozenset({*OPEN, _SYN_SENT, _TIME_WAIT, LISTENING})
_LONGEST = 2**20
RESOLVER, HOP, PEER = "a resolver of this host", "a next hop of its routes", "somebody whom this host has connected to"


class Contacts:
    """Whom this host talks to, or did a while ago, each with what it is. For any thread."""

    def __init__(
        self,
        read: Callable[[], Iterable[tuple[str, str]]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read or read_contacts
        self._clock = clock
        self._known: dict[str, tuple[float, str]] = {}
        self._index: Mapping[str, str] = {}
        self._due = float("-inf")
        self._lock = threading.Lock()

    def look(self) -> Mapping[str, str]:
        """Everybody, and the /64 of each IPv6 address, with a sentence; read anew if that has rested."""
        with self._lock:
            began = self._clock()
            if began >= self._due:
                for address, what in self._read():
                    self._known.pop(address, None)
                    self._known[address] = began, what
                recent = [(address, known) for address, known in self._known.items()
                          if began - known[0] < REMEMBERED_SECONDS]  # fmt: skip
                self._known = dict(recent[-MOST:])
                self._index = {
                    place: f"{address} is {what}."
                    for address, (_, what) in self._known.items()
                    for place in (address, find_block(address))
                }
                self._due = began + max(REST_SECONDS, REST_SHARE * (self._clock() - began))
            return self._index

    def find(self, target: Target) -> str | None:
        """What of a target, an address or an IPv6 /64, this host talks to, as a sentence."""
        single = target.prefixlen == target.max_prefixlen
        return self.look().get(str(target.network_address) if single else str(target))


def read_contacts() -> Iterator[tuple[str, str]]:
    """Everybody of this moment, with what it is; who is named last is named best."""
    yield from ((each, PEER) for each in _read_peers())
    yield from ((each, HOP) for each in _read_hops(_NET / "route", _NET / "ipv6_route"))
    yield from ((each, RESOLVER) for path in _RESOLVERS for each in _read_resolvers(path))


def _read_resolvers(path: Path) -> Iterator[str]:
    for line in _read_lines(path):
        words = line.split()
        if len(words) > 1 and words[0] == "nameserver":
            with suppress(ValueError):
                yield str(ip_address(words[1].partition("%")[0]))


def _read_hops(path4: Path, path6: Path) -> Iterator[str]:
    """The next hops of all routes of the main table."""
    for line in _read_lines(path4)[1:]:
        words = line.split()
        if len(words) > 2 and (gateway := int(words[2], 16)):
            yield socket.inet_ntop(socket.AF_INET, struct.pack("=I", gateway))
    for line in _read_lines(path6):
        words = line.split()
        if len(words) > 4 and int(words[4], 16):
            yield socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[4]))


def _read_peers() -> Iterator[str]:
    """The far ends of connections that begin here. Those that others have made end at a port where something listens,
    or at one that no program gets by chance."""
    lowest, highest = _read_ports()
    for number, family in _FAMILIES:
        sockets = list(read_listed(_NET / f"tcp{number}", family, _TALKING))
        listening = {each.near_port for each in sockets if each.state == LISTENING}
        sockets += read_listed(_NET / f"udp{number}", family, (ESTABLISHED,))
        for each in sockets:
            if each.state != LISTENING and lowest <= each.near_port <= highest and each.near_port not in listening:
                yield each.far


def _read_ports() -> tuple[int, int]:
    """The ports that the kernel gives to who asks for any."""
    with suppress(OSError, ValueError):
        lowest, highest = map(int, _PORTS.read_bytes().split())
        return lowest, highest
    return _USUAL_PORTS


def _read_lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            return file.read(_LONGEST).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
