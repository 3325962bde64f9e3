"""Whose addresses must not be cut off: the host's own, and those of whoever is logged in by SSH at the moment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from pyroute2 import IPRoute

from netlimit.kernel.base import Addresses
from netlimit.tree import INGRESS_DEVICE

_ESTABLISHED = "01"


def read_addresses() -> Addresses:
    """Own addresses by netlink; peers are the far ends of the connections of SSH sessions."""
    with IPRoute() as ipr:
        ours = ipr.link_lookup(ifname=INGRESS_DEVICE)
        messages = [message for message in ipr.get_addr() if message["index"] not in ours]
    own = {message.get_attr("IFA_LOCAL") or message.get_attr("IFA_ADDRESS") for message in messages}
    sockets = {inode for process in _find_sessions() for inode in _read_sockets(process)}
    return Addresses(tuple(sorted(own)), tuple(sorted(set(_read_peers(sockets)))))


def _find_sessions() -> Iterator[Path]:
    """The processes of sshd that serve somebody who has proved who he is: their title is "sshd: user@terminal".

    An open connection to the port proves nothing: else anybody could exempt himself by opening one. The parent must be
    root's sshd, for a title alone can be anybody's.
    """
    for process in Path("/proc").glob("[0-9]*"):
        if _read_title(process).startswith(("sshd: ", "sshd-session: ")) and "@" in _read_title(process):
            parent = _read_parent(process)
            if parent and parent.stat().st_uid == 0 and "sshd" in _read_title(parent).split(" ")[0]:
                yield process


def _read_title(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    except OSError:  # it has ended
        return ""


def _read_parent(process: Path) -> Path | None:
    try:
        number = (process / "stat").read_text().rpartition(")")[2].split()[1]
    except OSError:
        return None
    parent = Path("/proc", number)
    return parent if parent.exists() else None


def _read_sockets(process: Path) -> Iterator[str]:
    """The inodes of its sockets."""
    try:
        for descriptor in (process / "fd").iterdir():
            kind, _, inode = os.readlink(descriptor).partition(":[")
            if kind == "socket":
                yield inode.rstrip("]")
    except OSError:
        return


def _read_peers(sockets: set[str]) -> Iterator[str]:
    for path in ("/proc/net/tcp", "/proc/net/tcp6") if sockets else ():
        try:
            lines = Path(path).read_text().splitlines()[1:]
        except OSError:  # a kernel without IPv6 has no such file
            continue
        for line in lines:
            words = line.split()
            if words[3] == _ESTABLISHED and words[9] in sockets:
                address = _parse_hex(words[2].partition(":")[0])
                if not ip_address(address).is_loopback:
                    yield address


def _parse_hex(text: str) -> str:
    """An address as /proc/net/tcp has it: 32-bit words in the byte order of the host (here little-endian)."""
    raw = bytes.fromhex(text)
    address = ip_address(b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4)))
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)
