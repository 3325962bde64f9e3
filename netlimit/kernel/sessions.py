"""Who is logged in by SSH at the moment, and the ports on which others can log in."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple

_ESTABLISHED, _LISTENING = "01", "0A"
_PORT = re.compile(r"^\s*port\s+(\d+)\s*$", re.IGNORECASE | re.MULTILINE)
_USUAL_PORT = 22


class Connection(NamedTuple):
    """A TCP socket of this network namespace; `owner` is a user id."""

    state: str
    port: int
    peer: str
    owner: int
    inode: str


def read_sessions(logins: Path = Path("/run/systemd/sessions")) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The far ends of SSH sessions, and the ports on which sshd listens.

    Other people's sockets may be looked at only with CAP_SYS_PTRACE. Without it, systemd's list of `logins` tells who
    is there, and sshd's configuration the ports.
    """
    sessions, daemons = _find_processes()
    if not sessions and not daemons and os.geteuid() == 0:
        return tuple(sorted(set(_read_logins(logins)))), ()  # root sees every process
    connections = list(_read_connections())
    ports = _find_ports(daemons, connections)
    peers = {peer for process in sessions for peer in _find_peers(process, connections, ports)}
    return tuple(sorted(peers.union(_read_logins(logins)))), tuple(sorted(ports))


# -- processes ------------------------------------------------------------------------------------------------------


def _find_processes() -> tuple[list[Path], list[Path]]:
    """The processes of sshd that serve somebody who has proved who he is (their title is "sshd: user@terminal"), and
    those of root that listen or wait for a proof.

    An open connection to the port proves nothing: else anybody could exempt himself by opening one. The parent of a
    session must be root's sshd, for a title alone can be anybody's.
    """
    sessions, daemons = [], []
    for process in Path("/proc").glob("[0-9]*"):
        title = _read_title(process)
        if title.startswith(("sshd: ", "sshd-session: ")) and "@" in title:
            parent = _read_parent(process)
            if parent and _is_daemon(parent, _read_title(parent)):
                sessions.append(process)
        elif _is_daemon(process, title):
            daemons.append(process)
    return sessions, daemons


def _is_daemon(process: Path, title: str) -> bool:
    """Whether it is root's sshd."""
    try:
        return "sshd" in title.split(" ")[0] and process.stat().st_uid == 0
    except OSError:  # it has ended
        return False


def _read_title(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    except OSError:
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


# -- their sockets --------------------------------------------------------------------------------------------------


def _find_ports(daemons: Iterable[Path], connections: Iterable[Connection]) -> set[int]:
    """Where root's sshd listens."""
    sockets = {inode for process in daemons for inode in _read_sockets(process)}
    listening = [each for each in connections if each.state == _LISTENING and each.owner == 0]
    found = {each.port for each in listening if each.inode in sockets}
    return found or {each.port for each in listening} & _read_configured()


def _find_peers(process: Path, connections: Iterable[Connection], ports: set[int]) -> Iterator[str]:
    """The far end of a session; not those that it forwards to, where that can be told."""
    sockets = set(_read_sockets(process))
    open_ones = [each for each in connections if each.state == _ESTABLISHED and each.inode in sockets]
    served = [each for each in open_ones if each.port in ports]
    yield from (each.peer for each in served or open_ones if not ip_address(each.peer).is_loopback)


def _read_connections() -> Iterator[Connection]:
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        lines: list[str] = []
        with suppress(OSError):  # a kernel without IPv6 has no such file
            lines = Path(path).read_text().splitlines()[1:]
        for line in lines:
            words = line.split()
            port = int(words[1].rpartition(":")[2], 16)
            yield Connection(words[3], port, _parse_hex(words[2].partition(":")[0]), int(words[7]), words[9])


def _parse_hex(text: str) -> str:
    """An address as /proc/net/tcp has it: 32-bit words in the byte order of the host (here little-endian)."""
    raw = bytes.fromhex(text)
    address = ip_address(b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4)))
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)


# -- and what is known without a look at them -----------------------------------------------------------------------


def _read_logins(directory: Path) -> Iterator[str]:
    """The addresses from which somebody has logged in by SSH, as systemd-logind keeps them (sd-login(3)): PAM tells it
    of nobody who has not proved who he is."""
    with suppress(OSError):
        for path in directory.iterdir():
            said: dict[str, str] = {}
            with suppress(OSError, UnicodeDecodeError):
                said = dict(line.split("=", 1) for line in path.read_text().splitlines() if "=" in line)
            if said.get("SERVICE") == "sshd" and said.get("STATE") != "closing":
                with suppress(ValueError):  # a name, or nothing
                    address = ip_address(said.get("REMOTE_HOST", "").partition("%")[0])
                    if not address.is_loopback:
                        yield str(address)


def _read_configured(directory: Path = Path("/etc/ssh")) -> set[int]:
    """The ports in sshd's configuration."""
    found: set[int] = set()
    for path in (directory / "sshd_config", *directory.glob("sshd_config.d/*.conf")):
        with suppress(OSError, UnicodeDecodeError):
            found.update(map(int, _PORT.findall(path.read_text())))
    return found or {_USUAL_PORT}
