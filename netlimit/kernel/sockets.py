"""The TCP and UDP sockets of this network namespace, as the kernel tells them (sock_diag(7)).

Those that listen it finds at once. For others it goes through a table with room for all that this host could have,
which takes milliseconds, once for each family. A kernel without sock_diag has the same in files.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from ipaddress import IPv6Address
from pathlib import Path
from typing import NamedTuple

from netlimit.plain import read_text

_NETLINK_SOCK_DIAG = 4
_BY_FAMILY = 20
_REQUEST, _DUMP = 0x1, 0x300
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=IHHII")
_REQUEST_BODY = struct.Struct("=BBBxI")
_ENDS = struct.Struct("!HH16s16s")
_ENDS_AT = 4
_OWNER = struct.Struct("=II")
_OWNER_AT = 64
"""The user and the inode (0: no process has the socket), the last of struct inet_diag_msg."""
_ATTRIBUTES_AT = 72
_ATTRIBUTE = struct.Struct("=HH")
_GROUP, _GROUP_NUMBER = 21, struct.Struct("=Q")
"""The number of a control group (INET_DIAG_CGROUP_ID), since Linux 5.9."""
_COOKIE = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
"""Any interface, and no cookie (struct inet_diag_sockid)."""
ESTABLISHED, LISTENING = 1, 10
_FIN_WAIT1, _FIN_WAIT2, _CLOSE_WAIT = 4, 5, 8
OPEN = (ESTABLISHED, _FIN_WAIT1, _FIN_WAIT2, _CLOSE_WAIT)
"""The states in which both ends have agreed to the connection, and may still have something to say."""
_MAPPED = bytes(10) + b"\xff\xff"
_ROOM = 1 << 16
_FILES: Mapping[tuple[int, int], Path] = {
    (socket.IPPROTO_TCP, socket.AF_INET): Path("/proc/thread-self/net/tcp"),
    (socket.IPPROTO_TCP, socket.AF_INET6): Path("/proc/thread-self/net/tcp6"),
    (socket.IPPROTO_UDP, socket.AF_INET): Path("/proc/thread-self/net/udp"),
    (socket.IPPROTO_UDP, socket.AF_INET6): Path("/proc/thread-self/net/udp6"),
}


class Socket(NamedTuple):
    """A socket: its state (of UDP: ESTABLISHED if it is connected), its two ends, the user who owns it, the number of
    its inode (0: no process has it), and, if it listens, that of the control group in which it was made (0: not
    known)."""

    state: int
    near: str
    near_port: int
    far: str
    far_port: int
    owner: int
    inode: int
    group: int = 0


def read_sockets(
    states: Iterable[int],
    port: int = 0,
    owners: Collection[int] | None = None,
    strays: int = 0,
    protocol: int = socket.IPPROTO_TCP,
) -> Iterator[Socket]:
    """The sockets in some states, of all ports or of one, of every user or of some; then, of those that no process has,
    so many `strays` at most. Raises OSError."""
    wanted, sieve = frozenset(states), _Sieve(owners, strays)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as asked:
        for family in (socket.AF_INET, socket.AF_INET6):
            asked.send(_write_request(family, wanted, port, protocol))
            try:
                yield from (_parse(body) for body in _read_answers(asked) if sieve.passes(*_read_owner(body)))
            except FileNotFoundError:
                listed = read_listed(_FILES[protocol, family], family, wanted)
                yield from (
                    each for each in listed if port in (0, each.near_port) and sieve.passes(each.owner, each.inode)
                )


class _Sieve:
    """Parts the sockets that are wanted from those of others."""

    def __init__(self, owners: Collection[int] | None, strays: int) -> None:
        self._owners = owners
        self._strays = strays

    def passes(self, owner: int, inode: int) -> bool:
        """Whether this one is wanted. One that no process has may be anybody's, whatever user the kernel names."""
        if self._owners is None:
            return True
        if inode:
            return owner in self._owners
        self._strays -= 1
        return self._strays >= 0


def read_listed(path: Path, family: int, states: Collection[int]) -> Iterator[Socket]:
    """The sockets as /proc/net/tcp has them, and those of UDP (proc_net_tcp(5) of the kernel's documentation)."""
    try:
        lines = read_text(path).splitlines()[1:]
    except OSError:  # a kernel without IPv6 has no such file
        return
    for line in lines:
        words = line.split()
        (near, _, near_port), (far, _, far_port) = words[1].rpartition(":"), words[2].rpartition(":")
        state, ports = int(words[3], 16), (int(near_port, 16), int(far_port, 16))
        if state in states:
            ends = (_tell(family, _unpack(near)), ports[0], _tell(family, _unpack(far)), ports[1])
            yield Socket(state, *ends, int(words[7]), int(words[9]))


def _unpack(text: str) -> bytes:
    """An address that is printed as 32-bit words in the byte order of this host."""
    raw = bytes.fromhex(text)
    words = struct.unpack(f">{len(raw) // 4}I", raw)
    return struct.pack(f"={len(words)}I", *words)


def _write_request(family: int, states: Collection[int], port: int, protocol: int) -> bytes:
    """The kernel compares the near port of a request that asks for all."""
    ends = _ENDS.pack(port, 0, bytes(16), bytes(16)) + _COOKIE
    body = _REQUEST_BODY.pack(family, protocol, 0, sum(1 << state for state in states)) + ends
    return _HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST | _DUMP, 0, 0) + body


def _read_answers(asked: socket.socket) -> Iterator[bytes]:
    while True:
        data, at = asked.recv(_ROOM), 0
        while at < len(data):
            length, kind, *_ = _HEADER.unpack_from(data, at)
            if kind == _DONE:
                return
            if kind == _ERROR:
                code = -struct.unpack_from("=i", data, at + _HEADER.size)[0]
                raise OSError(code, f"open connections cannot be read: {os.strerror(code)}")
            yield data[at + _HEADER.size : at + length]
            at += length + 3 & ~3


def _read_owner(body: bytes) -> tuple[int, int]:
    """The user and the inode: they can be told in a fraction of the time that reading all of it takes."""
    owner, inode = _OWNER.unpack_from(body, _OWNER_AT)
    return owner, inode


def _parse(body: bytes) -> Socket:
    near_port, far_port, near, far = _ENDS.unpack_from(body, _ENDS_AT)
    group = _read_group(body) if body[1] == LISTENING else 0
    return Socket(body[1], _tell(body[0], near), near_port, _tell(body[0], far), far_port, *_read_owner(body), group)


def _read_group(body: bytes) -> int:
    """The control group, among the attributes behind the message."""
    at = _ATTRIBUTES_AT
    while at + _ATTRIBUTE.size <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, at)
        if kind == _GROUP:
            return int(_GROUP_NUMBER.unpack_from(body, at + _ATTRIBUTE.size)[0])
        at += max(length, _ATTRIBUTE.size) + 3 & ~3
    return 0


def _tell(family: int, address: bytes) -> str:
    if family == socket.AF_INET:
        return socket.inet_ntop(family, address[:4])
    return str(IPv6Address(address).ipv4_mapped) if address.startswith(_MAPPED) else socket.inet_ntop(family, address)
