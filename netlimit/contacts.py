"""Whom this host itself talks to: resolvers, next hops of routes, upstreams, whatever programs here have connected to.

It is read from what any user may read, so that controller and limiter know the same. Any user can also make it long, so
nobody waits for it but a thread. And any user can name whomever he likes, by a socket that he connects and never uses:
what a person, or nobody, has begun counts once it is answered; what root or a service has, at once.
"""

from __future__ import annotations

import logging
import os
import pwd
import re
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from ipaddress import ip_address
from itertools import chain
from pathlib import Path

from netlimit.kernel.sockets import ESTABLISHED, LISTENING, OPEN, Socket, read_sockets
from netlimit.l7.identity import find_block
from netlimit.rules import Target

REMEMBERED_SECONDS = 1800.0
"""How long somebody counts after he was seen last."""
REST_SECONDS, REST_SHARE = 5.0, 50
"""A look is followed by so much rest, or by so many times what it took, where that is more."""
PATIENCE = 0.25
"""Seconds that a look may take; after that, what was known before is gone by."""
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
_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_PORTS = (32768, 60999)
_LOGINS = Path("/etc/login.defs")
_FIRST_PERSON = re.compile(rb"^\s*UID_MIN\s+([0-9]{1,9})\s*$", re.MULTILINE)
_USUAL_FIRST_PERSON = 1000
_DYNAMIC = range(61_184, 65_520)
"""Users that systemd gives to services for as long as they run (DynamicUser=)."""
SYN_SENT, _TIME_WAIT = 2, 6
_TALKING = frozenset({*OPEN, SYN_SENT, _TIME_WAIT})
_LONGEST = 2**20
UNKNOWN = "It is not known yet whom this host talks to."
RESOLVER, HOP, PEER = "a resolver of this host", "a next hop of its routes", "somebody whom this host has connected to"

log = logging.getLogger(__name__)


class Contacts:
    """Whom this host talks to, or did a while ago, each with what it is. For any thread."""

    def __init__(
        self,
        read: Callable[[], Iterable[tuple[str, str]]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read or read_contacts
        self._clock = clock
        self._known = OrderedDict[str, tuple[float, str]]()
        """When each was seen last, and as what, from the one whom nobody has seen for longest."""
        self._index: Mapping[str, str] | None = None
        self._due = float("-inf")
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def look(self) -> Mapping[str, str] | None:
        """Everybody, and the /64 of each IPv6 address, with a sentence; read anew if that has rested. It is another
        mapping only if it holds something else, and None as long as nothing has been read."""
        with self._lock:
            begun = self._begin()
        if begun is not None:
            begun.join(PATIENCE)
        return self._index

    def _begin(self) -> threading.Thread | None:
        """A reading that has just begun; None where one goes on, or none is due."""
        if (self._thread is not None and self._thread.is_alive()) or self._clock() < self._due:
            return None
        thread = threading.Thread(target=self._remember, name="contacts", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the host has no room for one; it may have soon
            return None
        self._thread = thread
        return thread

    def _remember(self) -> None:
        began = self._clock()
        try:
            for address, what in self._read():
                self._known[address] = began, what
                self._known.move_to_end(address)
                if len(self._known) > MOST:
                    self._known.popitem(last=False)
            while self._known and began - next(iter(self._known.values()))[0] >= REMEMBERED_SECONDS:
                self._known.popitem(last=False)
            index = {
                place: f"{address} is {what}."
                for address, (_, what) in self._known.items()
                for place in (address, find_block(address))
            }
            if index != self._index:
                self._index = index
        finally:
            self._due = began + max(REST_SECONDS, REST_SHARE * (self._clock() - began))


def find_contact(target: Target, known: Mapping[str, str] | None) -> str | None:
    """What of a target, an address or an IPv6 /64, is among those that a look has found, as a sentence."""
    if known is None:
        return UNKNOWN
    single = target.prefixlen == target.max_prefixlen
    return known.get(str(target.network_address) if single else str(target))


def read_contacts() -> Iterator[tuple[str, str]]:
    """Everybody of this moment, with what it is; who is named last is named best, and forgotten last."""
    try:
        yield from ((each, PEER) for each in _read_peers())
    except OSError as error:
        log.warning("Whom this host has connected to cannot be read: %s", error)
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
    listening = {each.near_port for each in read_sockets([LISTENING])}
    for each in chain(_read_tcp(), _read_udp()):
        if lowest <= each.near_port <= highest and each.near_port not in listening:
            yield each.far


def _read_tcp() -> Iterator[Socket]:
    """Connections that are answered, whoever has begun them, and what services begin."""
    believed = _choose_believed()
    return (each for each in read_sockets(_TALKING) if each.state != SYN_SENT or believed(each))


def _read_udp() -> Iterator[Socket]:
    """Sockets that services have connected: the kernel does not tell whether anything has come back by one."""
    return filter(_choose_believed(), read_sockets([ESTABLISHED], protocol=socket.IPPROTO_UDP))


def _choose_believed() -> Callable[[Socket], bool]:
    """Tells whether a socket is one of root, of this process, or of a user that services run as. The kernel names root,
    too, for one that no process has."""
    first, own, nobody = find_first_person(), os.geteuid(), _find_nobody()

    def is_believed(each: Socket) -> bool:
        service = each.owner < first or each.owner in _DYNAMIC
        return each.inode != 0 and (each.owner == own or (service and each.owner != nobody))

    return is_believed


def find_first_person(path: Path = _LOGINS) -> int:
    """The lowest number of a user who is a person."""
    found = _FIRST_PERSON.search(_read(path))
    return int(found[1]) if found else _USUAL_FIRST_PERSON


def _find_nobody() -> int | None:
    """The user that is nobody's, and anybody's: on some systems his number is one of a service."""
    try:
        return pwd.getpwnam("nobody").pw_uid
    except KeyError:
        return None


def _read_ports() -> tuple[int, int]:
    """The ports that the kernel gives to who asks for any."""
    with suppress(OSError, ValueError):
        lowest, highest = map(int, _PORTS.read_bytes().split())
        return lowest, highest
    return _USUAL_PORTS


def _read_lines(path: Path) -> list[str]:
    return _read(path).decode("utf-8", "replace").splitlines()


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_LONGEST)
    except OSError:
        return b""
