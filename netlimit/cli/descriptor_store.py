"""systemd's store of descriptors, where the sockets of the API and of the limiter stay while these restart
(sd_notify(3), FDSTORE=1; sd_listen_fds(3)): their places are never free for another user of the host.

Without systemd, or where it does not answer, everything goes on as if there were no store.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress

from netlimit.settings import AnyListen, LocalListen

API, LIMITER, GRPC = "api", "limiter", "limiter-grpc"
"""What sockets are called in the store. The one of gRPC, which listens by sockets of its own, keeps the place alone."""
_FIRST = 3
_MOST = 64
_SECONDS = 5.0
"""How long systemd may take to hear."""

log = logging.getLogger(__name__)


def take(places: Mapping[str, AnyListen]) -> dict[str, socket.socket]:
    """The sockets that the store has given back, by name, as far as they are where they should be. Any other is closed,
    and taken out of the store: where the API listened before, nobody answers."""
    taken: dict[str, socket.socket] = {}
    given = list(_read_given())
    for name, descriptor in given:
        found = _open(descriptor)
        if found is not None and name in places and name not in taken and _is_at(found, places[name], name != GRPC):
            taken[name] = found
        elif found is not None and name in places and name not in taken:
            leave(found)
        elif found is not None:
            found.close()
    for name in {name for name, _ in given} & places.keys() - taken.keys():
        forget(name)
    return taken


def keep(name: str, held: socket.socket) -> None:
    """Give the store a socket."""
    # systemd lets go of what polls as hung up, as a socket does that does not listen.
    _tell(name, "FDSTORE=1\nFDPOLL=0", held.fileno())


def forget(name: str) -> None:
    """Have the store let go of a socket."""
    _tell(name, "FDSTOREREMOVE=1")


def leave(former: socket.socket) -> None:
    """Close a socket that is not to be kept any more. The store lets go of it only when it gets to it: until then, too,
    it keeps this process from no place."""
    with suppress(OSError):  # it is none of TCP's, say
        # Both, for a new one may stand beside (socket(7)); and not where one listens.
        former.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        former.shutdown(socket.SHUT_RDWR)
    former.close()


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


def _is_at(found: socket.socket, place: AnyListen, listens: bool) -> bool:
    if isinstance(place, LocalListen):  # that one's directory keeps it from others, and nothing need be kept here
        return False
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    try:
        if (found.family, found.type) != (family, socket.SOCK_STREAM):
            return False
        if bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) != listens:
            return False
        wanted = socket.getaddrinfo(place.host, place.port, family, socket.SOCK_STREAM)
        return any(each[4][:2] == found.getsockname()[:2] for each in wanted)
    except OSError:
        return False


def _tell(name: str, text: str, *descriptors: int) -> None:
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as told:
            told.settimeout(_SECONDS)
            told.connect("\0" + path[1:] if path.startswith("@") else path)
            socket.send_fds(told, [f"{text}\nFDNAME={name}".encode()], list(descriptors))
    except (OSError, ValueError) as error:
        log.warning("systemd does not hear of the socket %r (%s): its place is free during a restart.", name, error)
