"""Who is logged in by SSH at the moment, and the ports on which others can log in."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from ipaddress import ip_address
from itertools import product
from pathlib import Path
from typing import NamedTuple

from netlimit.kernel.base import Door
from netlimit.kernel.sockets import ESTABLISHED, LISTENING, Socket, read_sockets
from netlimit.plain import decode_name, read_text

_PORT = re.compile(r"^\s*port\s+(\d+)\s*$", re.IGNORECASE | re.MULTILINE)
_STREAM = re.compile(r"^\s*ListenStream\s*=\s*(?:\S*:)?(\d+)\s*$", re.MULTILINE)
_USUAL_PORT, _ROOT = 22, 0
_PROC, _NAME, _START = "/proc", b"sshd", 4096
_SESSION = re.compile(rb"sshd(-session)?: .+@.*[^\]]")  # "sshd: user@domain [priv]" still waits for a proof
_USER = re.compile(rb"^Uid:\t(\d+)", re.MULTILINE)
_PARENT = re.compile(rb"^PPid:\t(\d+)", re.MULTILINE)
_UNITS = (
    Path("/usr/lib/systemd/system"),
    Path("/lib/systemd/system"),
    Path("/run/systemd"),
    Path("/etc/systemd/system"),
)


def list_root_sockets() -> list[Socket]:
    """Those of root that listen or are connected. Raises OSError."""
    return list(read_sockets([ESTABLISHED, LISTENING], owners=[_ROOT]))


def read_sessions(
    read: Callable[[], Iterable[Socket]] = list_root_sockets, logins: Path = Path("/run/systemd/sessions")
) -> tuple[tuple[str, ...], tuple[Door, ...]]:
    """The far ends of SSH sessions, and where sshd listens; `read` tells root's sockets. Raises OSError.

    Other people's sockets may be looked at only with CAP_SYS_PTRACE. Without it, systemd's list of `logins` tells who
    is there, and sshd's configuration the ports. So it does where no sshd is seen: systemd may listen for it and start
    one for each connection, or it runs in another container.
    """
    sessions, daemons = _find_processes()
    sockets = list(read())
    doors = _find_doors(daemons, [each for each in sockets if each.state == LISTENING])
    ports = {door.port for door in doors}
    connections = [each for each in sockets if each.state == ESTABLISHED]
    peers = {peer for process in sessions for peer in _find_peers(process, connections, ports)}
    return tuple(sorted(peers.union(_read_logins(logins)))), tuple(sorted(doors))


# -- processes ------------------------------------------------------------------------------------------------------


class _Process(NamedTuple):
    """A process that is called sshd: its number, the user that it really is, and its parent."""

    number: str
    user: int
    parent: str

    @property
    def is_root_s(self) -> bool:
        """Whether nobody but root can have started it."""
        return self.user == 0


def _find_processes() -> tuple[list[Path], list[Path]]:
    """The processes of sshd that serve somebody who has proved who he is (their title is "sshd: user@terminal"), and
    those of root that listen or wait for a proof.

    An open connection to the port proves nothing: else anybody could exempt himself by opening one. The parent of a
    session must be root's sshd, for a title alone can be anybody's. Nor is a title read but of its children: it lies in
    the memory of the process, is as long as its user likes, and who reads it may have to wait for him.
    """
    found = {number: _read_process(number) for number in os.listdir(_PROC) if number.isdecimal()}
    sessions, daemons = [], []
    for each in (each for each in found.values() if each is not None):
        parent = found.get(each.parent)
        begun = parent is not None and parent.is_root_s
        if begun and _SESSION.fullmatch(_read_start(each.number, "cmdline").partition(b"\0")[0].strip()):
            sessions.append(Path(_PROC, each.number))
        elif each.is_root_s:
            daemons.append(Path(_PROC, each.number))
    return sessions, daemons


def _read_process(number: str) -> _Process | None:
    """A process that says it is sshd; None if it does not, or has ended."""
    if _NAME not in _read_start(number, "comm"):
        return None
    status = _read_start(number, "status")
    user, parent = _USER.search(status), _PARENT.search(status)
    return _Process(number, int(user[1]), decode_name(parent[1])) if user and parent else None


def _read_start(number: str, file: str) -> bytes:
    """How a file of a process begins; nothing if the process has ended, or may not be looked at."""
    with suppress(OSError):
        descriptor = os.open(f"{_PROC}/{number}/{file}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, _START)
        finally:
            os.close(descriptor)
    return b""


def _find_sockets(process: Path) -> Iterator[int]:
    """The inodes of its sockets."""
    try:
        for descriptor in (process / "fd").iterdir():
            kind, _, inode = os.readlink(descriptor).partition(":[")
            if kind == "socket":
                yield int(inode.rstrip("]"))
    except OSError:
        return


# -- their sockets --------------------------------------------------------------------------------------------------


def _find_doors(daemons: Iterable[Path], listeners: Iterable[Socket]) -> set[Door]:
    """Where root's sshd listens."""
    sockets = {inode for process in daemons for inode in _find_sockets(process)}
    listening = list(listeners)
    found = {Door(each.near_port, each.near) for each in listening if each.inode in sockets}
    configured = set() if found else _read_configured()
    return found or {Door(each.near_port, each.near) for each in listening if each.near_port in configured}


def _find_peers(process: Path, connections: Iterable[Socket], ports: set[int]) -> Iterator[str]:
    """The far end of a session; not those that it forwards to, where that can be told. `connections` are root's: his
    sshd has accepted it, and what a user opens is his own. Titles, and even a parent of root's, can be feigned."""
    sockets = set(_find_sockets(process))
    mine = [each for each in connections if each.inode in sockets]
    served = [each for each in mine if each.near_port in ports]
    yield from (each.far for each in served or mine if not ip_address(each.far).is_loopback)


# -- and what is known without a look at them -----------------------------------------------------------------------


def _read_logins(directory: Path) -> Iterator[str]:
    """The addresses from which somebody has logged in by SSH, as systemd-logind keeps them (sd-login(3)): PAM tells it
    of nobody who has not proved who he is."""
    with suppress(OSError):
        for path in directory.iterdir():
            said: dict[str, str] = {}
            with suppress(OSError):
                said = dict(line.split("=", 1) for line in read_text(path).splitlines() if "=" in line)
            if said.get("SERVICE") == "sshd" and said.get("STATE") != "closing":
                with suppress(ValueError):  # a name, or nothing
                    address = ip_address(said.get("REMOTE_HOST", "").partition("%")[0])
                    if not address.is_loopback:
                        yield str(address)


def _read_configured(directory: Path = Path("/etc/ssh"), units: Iterable[Path] = _UNITS) -> set[int]:
    """The ports in sshd's configuration, and in that of the socket by which systemd starts it (systemd.socket(5))."""
    paths = [(_PORT, directory / "sshd_config"), *((_PORT, path) for path in directory.glob("sshd_config.d/*.conf"))]
    for place, name in product(units, ("ssh", "sshd")):
        for wanted in (f"{name}.socket", f"{name}.socket.d/*.conf", f"generator*/{name}.socket.d/*.conf"):
            paths += [(_STREAM, path) for path in place.glob(wanted)]
    found: set[int] = set()
    for pattern, path in paths:
        with suppress(OSError):
            found.update(map(int, pattern.findall(read_text(path))))
    return found or {_USUAL_PORT}
