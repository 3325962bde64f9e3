"""The safe set: what no rule may touch, why, and for how long after the reason has gone.

It grows by itself: who is logged in by SSH, who has spoken to the API with a token that is good, the default gateways,
and the hosts of the database and of the counter store. Nobody joins who has not proved who he is, or whom the settings
do not name.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from ipaddress import ip_address, ip_network

from netlimit.records import SafeReason

log = logging.getLogger(__name__)

SETTINGS, SESSION, CLIENT, GATEWAY = "settings", "SSH session", "API client", "default gateway"
DATABASE, COUNTERS = "database host", "counter store (Redis) host"
REMEMBERED_SECONDS = 1800.0
"""How long an address stays safe after its reason has gone, so that who comes back is not locked out."""
LOOK_UP_SECONDS = 180.0
"""How often the hosts of servers are looked up."""
FIRST_LOOK_UP_SECONDS = 1.0
"""How long the first look-up is waited for, at most."""


class SafeSet:
    """What is safe on one gateway, by network, each with its reason. Not thread-safe."""

    def __init__(self, settings: Iterable[str], servers: Mapping[str, str] | None = None) -> None:
        """`settings` are networks that always are; `servers` are names of hosts, with their reason."""
        self._settings = tuple(settings)
        self._here: frozenset[str] = frozenset()
        self._were_here: dict[str, float] = {}
        self.reasons = self._settled
        self._lookup = Lookup(servers or {})

    def recall(self, reasons: Mapping[str, SafeReason]) -> None:
        """Take in what an earlier process knew; `update` then forgets what is too old."""
        self.reasons = {**{network: why for network, why in reasons.items() if why.seen}, **self._settled}

    def update(
        self,
        now: float,
        sessions: Iterable[str],
        gateways: Iterable[str],
        clients: Iterable[str],
        own: Iterable[str] = (),
        reached: Iterable[str] = (),
    ) -> None:
        """Note who is there at `now` (Unix time), and where the database was `reached`. Of several reasons the first
        counts.

        The host's `own` addresses are never safe, whatever the reason: all that others send to it would be spared. One
        that is another host's now is as any other; but who spoke to the API from it may have been this host itself.
        """
        here = frozenset(str(ip_address(each)) for each in own)
        for network in self._settings:
            if _strip(network) in here - self._here:
                log.warning("NETLIMIT_SAFE names %s, an address of this host's own, which is never safe.", network)
        self._here = here
        kept = {each: last for each, last in self._were_here.items() if now - last < REMEMBERED_SECONDS}
        self._were_here = {**kept, **dict.fromkeys(here, now)}
        present = {
            **self._lookup.addresses(),
            **{each: DATABASE for each in reached if not ip_address(each).is_loopback},
            **dict.fromkeys(gateways, GATEWAY),
            **dict.fromkeys((each for each in clients if each not in self._were_here), CLIENT),
            **dict.fromkeys(sessions, SESSION),
        }
        known = {
            network: why for network, why in self.reasons.items() if why.seen and now - why.seen < REMEMBERED_SECONDS
        }
        seen = {network: SafeReason(reason, now) for network, reason in present.items()}
        others = {network: why for network, why in {**known, **seen}.items() if _strip(network) not in here}
        self.reasons = {**others, **self._settled}

    @property
    def _settled(self) -> dict[str, SafeReason]:
        return {each: SafeReason(SETTINGS) for each in self._settings if _strip(each) not in self._here}


def _strip(network: str) -> str:
    """One address without the length of its prefix."""
    parsed = ip_network(network)
    return str(parsed.network_address) if parsed.prefixlen == parsed.max_prefixlen else network


class Lookup:
    """The addresses of hosts by name, looked up in a thread: a resolver that does not answer holds up nobody. What was
    found stays until something else is."""

    def __init__(self, names: Mapping[str, str], resolve: Callable[[str], Iterable[str]] | None = None) -> None:
        """`names` are hosts, each with what it is (the reason that its addresses have)."""
        self._names = {name.partition("%")[0] if _is_address(name) else name: what for name, what in names.items()}
        self._resolve = resolve or _resolve
        self._found: dict[str, tuple[str, ...]] = {name: (name,) for name in self._names if _is_address(name)}
        self._thread: threading.Thread | None = None
        self._due = 0.0

    def addresses(self) -> dict[str, str]:
        """Every address, with what it is; those of this host itself are left out."""
        names = [name for name in self._names if not _is_address(name)]
        if names and time.monotonic() >= self._due and not (self._thread and self._thread.is_alive()):
            first, self._due = self._thread is None, time.monotonic() + LOOK_UP_SECONDS
            self._thread = threading.Thread(target=self._look_up, args=(names,), daemon=True)
            self._thread.start()
            if first:
                self._thread.join(FIRST_LOOK_UP_SECONDS)
        return {
            address: what
            for name, what in self._names.items()
            for address in self._found.get(name, ())
            if not ip_address(address).is_loopback
        }

    def _look_up(self, names: list[str]) -> None:
        for name in names:
            try:
                self._found[name] = tuple(self._resolve(name))
            except (OSError, UnicodeError) as error:
                log.warning("The %s %s cannot be looked up: %s.", self._names[name], name, error)


def name_servers(databases: Iterable[str], counters: Iterable[str]) -> dict[str, str]:
    """The hosts of the database and of the counter store, by name or address, each with what it is."""
    return {**dict.fromkeys(counters, COUNTERS), **dict.fromkeys(databases, DATABASE)}


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _resolve(name: str) -> set[str]:
    """Raises OSError."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return {str(where[0]).partition("%")[0] for *_, where in found}
