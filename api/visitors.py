"""Who speaks to the API from elsewhere: such addresses join the safe set of the gateway that it runs on."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address, IPv6Address, ip_address

from netlimit.clientele import Client, choose, find_most
from netlimit.errors import StoreError
from netlimit.roles import Role
from netlimit.safety import REMEMBERED_SECONDS
from netlimit.store import Store

EVERY_SECONDS = 60.0
"""An address is kept again after so long."""
_BROADCAST = ip_address("255.255.255.255")
_START = datetime(2000, 1, 1, tzinfo=UTC)
"""From which a clock that nobody sets is counted here."""

log = logging.getLogger(__name__)


class Visitors:
    """Keeps the addresses that show good tokens, each at most once a minute, and no more than count as safe. Nobody
    waits for that."""

    def __init__(self, store: Store, host: str) -> None:
        self._store, self._host = store, host
        self._seen: dict[str, Client] = {}
        self._kept_at: dict[str, float] = {}
        self._tokens: Counter[str | None] = Counter()
        self._cleared_at = -math.inf
        self._told: set[str] = set()
        self._writer = ThreadPoolExecutor(1, "visitors")

    def see(self, address: str, token: str, role: Role) -> None:
        """Keep an address that was permitted what it asked, unless nobody can come from there."""
        now = time.monotonic()
        known = self._seen.get(address)
        moment = _START + timedelta(seconds=now)
        client = Client(address, moment, moment, token, role).meet(known)
        better = known is None or client.rank > known.rank
        if not better and now - self._kept_at.get(address, -math.inf) < EVERY_SECONDS:
            return
        if not _may_come_from(ip_address(address)):
            return
        if now - self._cleared_at >= EVERY_SECONDS:
            self._clear(now)
        if known is None and self._tokens[token] >= find_most(role):
            self._tell(token)
            return
        self._seen[address] = client
        if better and not self._choose(address):
            self._tell(token)
            return
        self._kept_at[address] = now
        self._writer.submit(self._keep, address, token, role)

    def knows(self, address: str) -> bool:
        """Whether an address has shown a good token lately, and counts."""
        return time.monotonic() - self._kept_at.get(address, -math.inf) < REMEMBERED_SECONDS

    def _clear(self, now: float) -> None:
        """Forget who was not seen for long."""
        self._cleared_at = now
        long_ago = _START + timedelta(seconds=now - REMEMBERED_SECONDS)
        self._seen = {address: each for address, each in self._seen.items() if each.seen > long_ago}
        self._choose()

    def _choose(self, address: str | None = None) -> bool:
        """Forget those for whom there is no room; whether an address stays."""
        self._seen = {each.address: each for each in choose(self._seen.values())}
        self._kept_at = {each: self._kept_at.get(each, -math.inf) for each in self._seen}
        self._tokens = Counter(each.token for each in self._seen.values())
        self._told = {name for name in self._told if name in self._tokens}
        return address in self._seen

    def _tell(self, token: str) -> None:
        """Say once that a token is shown from too many addresses."""
        if token not in self._told:
            self._told.add(token)
            log.warning(
                "The token %r is shown from more addresses than count as safe; those that came first do, until they "
                "have not been seen for half an hour.",
                token,
            )

    def _keep(self, address: str, token: str, role: Role) -> None:
        try:
            self._store.saw_client(self._host, address, token=token, role=role)
        except StoreError as error:
            log.warning("Cannot keep that %s speaks to the API: %s", address, error)
            self._kept_at.pop(address, None)


def _may_come_from(address: IPv4Address | IPv6Address) -> bool:
    """Whether a client can come from there; a proxy passes on whatever a header says."""
    odd = address.is_multicast or address.is_unspecified or address == _BROADCAST
    return not (odd or address.is_loopback)
