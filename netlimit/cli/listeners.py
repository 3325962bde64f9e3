"""Whose the listener is that a connection to this host has reached.

Any user may listen at a port above 1023 that is free, as the API's is while it restarts. So before anything is said to
what listens on this host, the kernel is asked whose it is. That is done before connecting and after: a listener that
was there both times is the one that was reached. Else the other end of the connection tells who has accepted it.
"""

from __future__ import annotations

import os
import pwd
import socket
import stat
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from netlimit.addresses import read_address
from netlimit.cli.database import find_token_file
from netlimit.cli.errors import CommandError
from netlimit.cli.privileges import USER, find_keepers
from netlimit.kernel.sockets import LISTENING, OPEN, Socket, read_sockets
from netlimit.settings import Settings

_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104  # nobody listens by this
_STARTED, _COMPLETE = "connection.connect_tcp.started", "connection.connect_tcp.complete"


class ListenerError(CommandError):
    """Whose a listener on this host is cannot be told."""


class StrangerError(ListenerError):
    """Somebody else listens in the API's place."""


class Witness:
    """Looks on while one connection is made."""

    def __init__(self, owners: frozenset[int]) -> None:
        """`owners` are the users (uid) who may listen for the API."""
        self._owners = owners
        self._before: tuple[Socket, ...] = ()
        self._unread: OSError | None = None

    def look(self, port: int) -> None:
        """See who listens, before the connection is made."""
        self._before, self._unread = (), None
        try:
            self._before = tuple(read_sockets([LISTENING], port))
        except OSError as error:  # what is elsewhere is reached without it
            self._unread = error

    def check(self, connection: socket.socket) -> None:
        """Raise StrangerError if what was reached on this host is another user's, ListenerError if that cannot be
        told. What is not on this host passes, and so does what only root can have led a connection to: there is
        neither a listener nor the other end here, but in the network namespace of a container, say."""
        (near, near_port), (far, far_port) = connection.getsockname()[:2], connection.getpeername()[:2]
        here = _is_same(near, far) or read_address(far).is_loopback
        try:
            if self._unread is not None:
                raise self._unread
            after = tuple(read_sockets([LISTENING], far_port))
            settled = here and after and set(after) == set(self._before)
            ends = () if settled else read_sockets(OPEN, far_port)  # of many connections, that takes milliseconds
            facing = (each for each in ends if each.far_port == near_port)
            served = next((each for each in facing if _is_same(each.far, near) and _is_same(each.near, far)), None)
        except (OSError, ValueError) as error:
            if here:
                raise ListenerError(_tell_unread(far, far_port, error)) from None
            return
        if here or served is not None:
            stranger = judge(self._before, after, served, far, self._owners)
            if stranger is not None:
                raise StrangerError(_tell_stranger(stranger))


def find_reached(listeners: Iterable[Socket], address: str) -> frozenset[Socket]:
    """Those of the listeners at one port whom a connection to this address of the host reaches: who listens at the
    address itself, else at all of its family, else at all of IPv6 (which may stand for both)."""
    found = list(listeners)
    for place in (address, *_EVERYWHERE[read_address(address).version == 6 :]):
        reached = frozenset(each for each in found if _is_same(each.near, place))
        if reached:
            return reached
    return frozenset()


def judge(
    before: Iterable[Socket], after: Iterable[Socket], served: Socket | None, address: str, owners: frozenset[int]
) -> Socket | None:
    """The socket of a stranger's that a connection to `address` has, or may have, reached; None if it is none.

    `before` and `after` it was made, these listened at its port; `served` is its other end, if that is here. Raises
    ListenerError where it cannot be told."""
    then, now = find_reached(before, address), find_reached(after, address)
    accepted = (served,) if served is not None and served.inode else ()
    strangers = [each for each in (*accepted, *sorted(now), *sorted(then)) if each.owner not in owners]
    if then == now and now:
        # It was reached, whoever accepts for its owner: root's API does so as another user.
        return next((each for each in strangers if each not in accepted), None)
    if strangers or accepted:
        return next(iter(strangers), None)
    if served is not None or now or then:
        raise ListenerError(
            f"Who listens at {_write(address, next(iter(now or then), served))} has just changed, as when the API is "
            "restarted. Nothing was said to it; try again."
        )
    return None


def find_owners(settings: Settings) -> frozenset[int]:
    """The users who may listen for the API: root, whom the API runs as, and who has the file with its token, unless
    anybody could have put that there; and this process's own."""
    owners = find_keepers(USER)
    file = find_token_file(settings.database_url)
    try:
        place, found = os.stat(file.parent), os.lstat(file)
    except (OSError, ValueError):
        return owners
    private = stat.S_ISREG(found.st_mode) and not place.st_mode & stat.S_IWOTH
    return owners | {found.st_uid} if private else owners


def watch(settings: Settings) -> Mapping[str, Any]:
    """What is to be given to httpx as `extensions` of each request to the API: a connection by which a stranger would
    be spoken to is closed, and StrangerError or ListenerError raised, before anything is said. A certificate tells by
    itself whose it is (https), and of what a proxy is asked for, only the proxy could be seen."""
    import httpx

    url = httpx.URL(settings.url)
    return {} if url.scheme == "https" else {"trace": _make_trace(url.host, Witness(find_owners(settings)))}


def _make_trace(host: str, witness: Witness) -> Callable[[str, Mapping[str, Any]], None]:
    meant = False

    def trace(event: str, told: Mapping[str, Any]) -> None:
        nonlocal meant
        if event == _STARTED:
            meant = told["host"] == host
            if meant:
                witness.look(told["port"])
        elif event == _COMPLETE and meant:
            stream = told["return_value"]
            try:
                witness.check(stream.get_extra_info("socket"))
            except BaseException:
                stream.close()
                raise

    return trace


def _is_same(one: str, other: str) -> bool:
    return read_address(one) == read_address(other)


def _write(address: str, known: Socket | None) -> str:
    place = f"[{address}]" if ":" in address else address
    return place if known is None else f"{place}:{known.near_port}"


def _tell_stranger(found: Socket) -> str:
    try:
        who = f"the user {pwd.getpwuid(found.owner).pw_name} (uid {found.owner})"
    except KeyError:
        who = f"a user without a name (uid {found.owner})"
    return (
        f"At {_write(found.near, found)}, in the API's place, {who} listens, who is neither root nor whom the API runs "
        "as. Nothing was said to him, and no token shown. Look for the process as root: "
        f"`ss -ltnp 'sport = :{found.near_port}'`; end it, and restart the API. If it is to be there (a forward), run "
        "this as that user, or reach the API by https."
    )


def _tell_unread(address: str, port: int, error: BaseException) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    place = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return (
        f"Whose the listener at {place} is cannot be read from the kernel (sock_diag: {reason}), so no token was shown "
        "to it. Run this where netlink is permitted, or reach the API by https."
    )
