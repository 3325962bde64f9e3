"""Who is logged in by SSH at the moment, and the ports on which others can log in."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from ipaddress import ip_address
from itertools import product
from pathlib import Path
from typing import NamedTuple

from netlimit.kernel.base import Door
from netlimit.kernel.cgroups import find_groups
from netlimit.kernel.sockets import ESTABLISHED, LISTENING, Socket, read_sockets
from netlimit.kernel.sshd_config import USUAL_PORT, read_ports
from netlimit.plain import decode_name, read_text
from netlimit.several import say_more

_STREAM = re.compile(r"^\s*ListenStream\s*=\s*(?:\S*:)?(\d{1,5})\s*$", re.MULTILINE)
_ROOT = 0
_PROC, _NAME, _START = "/proc", b"sshd", 4096
_SESSION = re.compile(rb"sshd(-session)?: .+@.*[^\]]")  # "sshd: user@domain [priv]" still waits for a proof
_USER = re.compile(rb"^Uid:\t(\d+)", re.MULTILINE)
_PARENT = re.compile(rb"^PPid:\t(\d+)", re.MULTILINE)
LEFT = Path("/run/netlimit/ssh-ports")
"""The ports of sshd as root has found them, for a controller that sees less: numbers, apart by spaces."""
_CONFIGURATION = Path("/etc/ssh")
_UNITS = (
    Path("/usr/lib/systemd/system"),
    Path("/lib/systemd/system"),
    Path("/run/systemd"),
    Path("/etc/systemd/system"),
)
_NAMELESS = frozenset({"", "UNKNOWN", "localhost"})
_LONGEST_NAME = 253
UNPLACED = "sshd runs, but on which port it listens here is not known"
UNNAMED = "Somebody is logged in by SSH from"
"""How the notes begin."""
TELL_UNPLACED = (
    f"{UNPLACED}, so that rules may cut open SSH connections and close its port. Put the addresses of those who manage "
    "this host into NETLIMIT_SAFE, and run `netlimit prepare`, as root, while sshd listens: it tells the controller. A "
    "sshd in a container that has a network of its own does not matter."
)


class Sessions(NamedTuple):
    """The far ends of SSH sessions, where sshd listens, and what an operator should know of them: sentences."""

    peers: tuple[str, ...]
    doors: tuple[Door, ...]
    notes: tuple[str, ...] = ()


def list_root_sockets() -> list[Socket]:
    """Those of root that listen or are connected. Raises OSError."""
    return list(read_sockets([ESTABLISHED, LISTENING], owners=[_ROOT]))


def read_sessions(
    read: Callable[[], Iterable[Socket]] = list_root_sockets, logins: Path = Path("/run/systemd/sessions")
) -> Sessions:
    """Who is logged in by SSH, and where others can; `read` tells root's sockets. Raises OSError.

    Other people's sockets may be looked at only with CAP_SYS_PTRACE. Without it, systemd's list of `logins` tells who
    is there, and the control groups of sshd, or else its configuration, the ports. So it does where no sshd is seen:
    systemd may listen for it and start one for each connection, or it runs in another container.
    """
    sessions, daemons = _find_processes()
    sockets = list(read())
    doors = _find_doors(daemons, [each for each in sockets if each.state == LISTENING])
    ports = {door.port for door in doors}
    connections = [each for each in sockets if each.state == ESTABLISHED]
    peers = {peer for process in sessions for peer in _find_peers(process, connections, ports)}
    addresses, names = _read_logins(logins)
    unplaced = [] if doors or not any(map(_is_hidden, daemons)) else [TELL_UNPLACED]
    unnamed = [tell_names(names)] if names and any(map(_is_hidden, [*sessions, *daemons])) else []
    return Sessions(tuple(sorted(peers | addresses)), tuple(sorted(doors)), (*unplaced, *unnamed))


def tell_names(names: Collection[str]) -> str:
    """The note on logins of which logind has a name, at least one."""
    more = say_more(names)
    return (
        f"{UNNAMED} {min(names)[:_LONGEST_NAME]}{more}, and is not safe by that, for the address is not known, but a "
        "name: put it into NETLIMIT_SAFE, or set UseDNS no in sshd_config."
    )


# -- processes ------------------------------------------------------------------------------------------------------


class _Process(NamedTuple):
    """A process that is called sshd: its number, the user that it really is, and its parent."""

    number: str
    user: int
    parent: str

    @property
    def is_root_s(self) -> bool:
        """Whether nobody but root can have started it."""
        return self.user == _ROOT


def _find_processes() -> tuple[list[Path], list[Path]]:
    """The processes of sshd that may serve somebody, and those of root that listen or wait for a proof.

    An open connection to the port proves nothing: else anybody could exempt himself by opening one. The parent of a
    session must be root's sshd, for a name can be anybody's; whether it has proved who it is, its title tells.
    """
    found = {number: _read_process(number) for number in os.listdir(_PROC) if number.isdecimal()}
    sessions, daemons = [], []
    for each in (each for each in found.values() if each is not None):
        parent = found.get(each.parent)
        begun = parent is not None and parent.is_root_s
        if begun and (not each.is_root_s or _is_proved(each.number)):
            sessions.append(Path(_PROC, each.number))
        elif each.is_root_s:
            daemons.append(Path(_PROC, each.number))
    return sessions, daemons


def _is_proved(number: str) -> bool:
    """Whether a process of sshd says, by its title, that it serves somebody who has proved who he is."""
    title = _read_start(number, "cmdline").partition(b"\0")[0]
    return _SESSION.fullmatch(title.strip()) is not None


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


def _is_hidden(process: Path) -> bool:
    """Whether its sockets may not be looked at."""
    try:
        os.listdir(process / "fd")
    except OSError as error:
        return isinstance(error, PermissionError)
    return False


def _is_stranger(number: str) -> bool:
    """Whether a process is root's, and not called sshd; one of another container's (0) may be."""
    user = _USER.search(_read_start(number, "status"))
    return number == "0" or (user is not None and int(user[1]) == _ROOT and _read_process(number) is None)


# -- their sockets --------------------------------------------------------------------------------------------------


def _find_doors(daemons: Collection[Path], listeners: Collection[Socket]) -> set[Door]:
    """Where root's sshd listens: by its sockets; else by its control groups and where root has seen it, for there can
    be several of them; else by its configuration."""
    sockets = {inode for process in daemons for inode in _find_sockets(process)}
    found = [each for each in listeners if each.inode in sockets]
    if not found:
        groups, left = find_groups(daemons, _is_stranger), _read_left()
        found = [each for each in listeners if each.group in groups or each.near_port in left]
    if not found:
        configured = _list_configured(_CONFIGURATION, _UNITS) or {USUAL_PORT}
        found = [each for each in listeners if each.near_port in configured]
    return {Door(each.near_port, each.near) for each in found}


def _find_peers(process: Path, connections: Iterable[Socket], ports: set[int]) -> Iterator[str]:
    """The far end of a session; not those that it forwards to, where that can be told. `connections` are root's: his
    sshd has accepted it, and what a user opens is his own. Titles, and even a parent of root's, can be feigned.

    A title lies in the memory of its process, and who reads it may have to wait for all its threads: so none is read
    but of who holds such a connection, which no user can put into a process of his making."""
    sockets = set(_find_sockets(process))
    mine = [each for each in connections if each.inode in sockets]
    if mine and _is_proved(process.name):
        served = [each for each in mine if each.near_port in ports]
        yield from (each.far for each in served or mine if not ip_address(each.far).is_loopback)


# -- and what is known without a look at them -----------------------------------------------------------------------


def _read_logins(directory: Path) -> tuple[set[str], set[str]]:
    """The addresses, and the names, from which somebody has logged in by SSH, as systemd-logind keeps them
    (sd-login(3)): PAM tells it of nobody who has not proved who he is."""
    addresses, names = set(), set()
    for host in _read_remotes(directory):
        try:
            address = ip_address(host.partition("%")[0])
        except ValueError:
            names.add(host)
        else:
            addresses.update([] if address.is_loopback else [str(address)])
    return addresses, names - _NAMELESS


def _read_remotes(directory: Path) -> Iterator[str]:
    """Where those come from who are logged in, as sshd has told it."""
    with suppress(OSError):
        for path in directory.iterdir():
            said: dict[str, str] = {}
            with suppress(OSError):
                said = dict(line.split("=", 1) for line in read_text(path).splitlines() if "=" in line)
            if said.get("SERVICE") == "sshd" and said.get("STATE") != "closing":
                yield said.get("REMOTE_HOST", "")


def list_ports() -> list[int]:
    """The ports of sshd that are seen in use or configured: what root leaves to others in `LEFT`. Raises OSError."""
    return sorted({door.port for door in read_sessions().doors} | _list_configured(_CONFIGURATION, _UNITS))


def _read_left(left: Path = LEFT) -> set[int]:
    """The ports of sshd as root has found them."""
    with suppress(OSError, ValueError):
        return set(map(int, read_text(left).split()))
    return set()


def _list_configured(directory: Path, units: Iterable[Path]) -> set[int]:
    """The ports in sshd's configuration, and in that of the socket by which systemd starts it (systemd.socket(5))."""
    found: set[int] = set()
    for path in (directory / "sshd_config", *directory.glob("sshd_config.d/*.conf")):
        found |= read_ports(path, directory)
    for place, name in product(units, ("ssh", "sshd")):
        for wanted in (f"{name}.socket", f"{name}.socket.d/*.conf", f"generator*/{name}.socket.d/*.conf"):
            for path in place.glob(wanted):
                with suppress(OSError):
                    found.update(map(int, _STREAM.findall(read_text(path))))
    return found
