"""systemd's store of descriptors, where the API's listening socket stays while the API restarts (sd_notify(3),
FDSTORE=1; sd_listen_fds(3)): its place is never free for another user of the host.

Without systemd, or where it does not answer, everything goes on as if there were no store.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import suppress

from netlimit.settings import Listen

NAME = "api"
"""What the socket is called in the store."""
_FIRST = 3
_MOST = 64
_SECONDS = 5.0
"""How long systemd may take to hear."""

log = logging.getLogger(__name__)


def take(place: Listen) -> socket.socket | None:
    """The socket that the store has given back, if it listens where it should. Any other is closed, and taken out of
    the store: where the API listened before, nobody answers."""
    taken: socket.socket | None = None
    given = list(_read_given())
    for name, descriptor in given:
        found = _open(descriptor)
        if found is not None and taken is None and name == NAME and _listens_at(found, place):
            taken = found
        elif found is not None:
            found.close()
    if taken is None and any(name == NAME for name, _ in given):
        _tell(f"FDSTOREREMOVE=1\nFDNAME={NAME}")
    return taken


def keep(listening: socket.socket) -> None:
    """Give the store a listening socket."""
    _tell(f"FDSTORE=1\nFDNAME={NAME}", listening.fileno())


def _read_given() -> Iterator[tuple[str, int]]:
    """The descriptors that this process was started with, by name; its children are not to have them."""
    words = {name: os.environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")}
    if words["LISTEN_PID"] != str(os.getpid()) or not words["LISTEN_FDS"].isdecimal():
        return
    names = words["LISTEN_FDNAMES"].split(":")
    for number in range(min(int(words["LISTEN_FDS"]), _MOST)):
        yield names[number] if number < len(names) else "", _FIRST + number


def _open(descriptor: int) -> socket.socket | None:
    try:
        os.set_inheritable(descriptor, False)
        return socket.socket(fileno=descriptor)
    except OSError:  # there is none, or it is no socket
        with suppress(OSError):
            os.close(descriptor)
        return None


def _listens_at(found: socket.socket, place: Listen) -> bool:
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    try:
        if (found.family, found.type) != (family, socket.SOCK_STREAM):
            return False
        if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        wanted = socket.getaddrinfo(place.host, place.port, family, socket.SOCK_STREAM)
        return any(each[4][:2] == found.getsockname()[:2] for each in wanted)
    except OSError:
        return False


def _tell(text: str, *descriptors: int) -> None:
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as told:
            told.settimeout(_SECONDS)
            told.connect("\0" + path[1:] if path.startswith("@") else path)
            socket.send_fds(told, [text.encode()], list(descriptors))
    except (OSError, ValueError) as error:
        log.warning(
            "systemd does not hear of the API's listening socket (%s): its place is free while it restarts.", error
        )
