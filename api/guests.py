"""Whose connections have room of their own: this host's, the safe set's, and those of who has shown a good token."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from netlimit.errors import StoreError
from netlimit.rules import Target
from netlimit.store import Store

from .room import Standing
from .visitors import Visitors

FRESH_SECONDS = 5.0
"""What the gateway says of its safe set is read again after so long, if somebody comes who is not known."""
log = logging.getLogger(__name__)


class Guests:
    """Knows how an address stands. Asked for each connection, so it waits for nobody: the safe set is read in a thread,
    and counts for the next who comes."""

    def __init__(
        self, store: Store, host: str, visitors: Visitors, safe: Sequence[Target] = (), proxies: Sequence[Target] = ()
    ) -> None:
        self._store, self._host, self._visitors = store, host, visitors
        self._settled, self._proxies = tuple(safe), tuple(proxies)
        self._single: frozenset[str] = frozenset()
        self._networks: tuple[IPv4Network | IPv6Network, ...] = ()
        self._due = 0.0
        self._reader = ThreadPoolExecutor(1, "guests")

    def find_standing(self, place: str | None, here: str | None) -> Standing:
        """How who comes from `place` stands; `here` is the address of this host that he came to."""
        if place is None:
            return Standing.STRANGER
        address = ip_address(place)
        if any(address in proxy for proxy in self._proxies):
            return Standing.PROXY
        if address.is_loopback or place == here:  # the kernel takes neither from outside
            return Standing.LOCAL
        if place in self._single or self._visitors.knows(place):
            return Standing.KNOWN
        if any(address in network for network in (*self._settled, *self._networks)):
            return Standing.KNOWN
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + FRESH_SECONDS
            self._reader.submit(self.read)
        return Standing.STRANGER

    def read(self) -> None:
        """Read the safe set of this gateway, and who has spoken to its API lately."""
        try:
            safe = [network for each in self._store.hosts() if each.host == self._host for network in each.safe]
            safe += self._store.clients(self._host)
        except StoreError as error:
            log.debug("%s Who is safe stays as it was known.", error)
            return
        networks = [ip_network(text, strict=False) for text in safe]
        self._single = frozenset(str(each.network_address) for each in networks if each.num_addresses == 1)
        self._networks = tuple(each for each in networks if each.num_addresses > 1)
