"""Which clients of the API count as safe where there are many: nobody can fill the safe set by showing one token from
ever new addresses.

Those of tokens that may do more come before others; among equals, who came first stays as long as he is seen. So no
newcomers push out an administrator who has been there before them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import lru_cache
from ipaddress import IPv6Address, ip_network
from typing import NamedTuple

from netlimit.roles import MAY, Act, Role

MOST = 256
"""So many addresses of each gateway's clients count."""
MOST_OF_TOKEN = 64
"""So many of them by one token, if it may change rules."""
MOST_OF_VIEWER = 16
"""So many by one that may only look."""
MOST_OF_BLOCK = {64: 16, 48: 64}
"""So many of one block of IPv6 addresses, by the length of its prefix: whoever has one of them has all."""
MOST_SESSIONS_OF_BLOCK = {48: 192}
"""So many SSH sessions of one: those people have logged in, and a whole office may be in one /64."""
_RANKS = {role: rank for rank, role in enumerate(Role)}


class Client(NamedTuple):
    """Somebody who has spoken to the API: from where, with which token of which role, since when and when last. Of one
    that an earlier version has kept, token and role are not known."""

    address: str
    since: datetime
    seen: datetime
    token: str | None = None
    role: Role | None = None

    @property
    def rank(self) -> int:
        """How much the token may do."""
        return _RANKS[self.role or Role.OPERATOR]

    def meet(self, known: Client | None) -> Client:
        """The same, with what was `known` of this address before: it is whose it was with the token that may more."""
        if known is None:
            return self
        better = known if known.rank >= self.rank else self
        return Client(self.address, min(known.since, self.since), self.seen, better.token, better.role)


class Blocks:
    """Counts addresses by the blocks that they lie in."""

    def __init__(self, most: Mapping[int, int] = MOST_OF_BLOCK) -> None:
        """`most` says how many of one block, by the length of its prefix."""
        self._most = tuple(most.items())
        self._counts: Counter[tuple[int, int]] = Counter()

    def take(self, address: str) -> bool:
        """Count one, if its blocks have room for it."""
        number = _read_number(address)
        blocks = {} if number is None else {(length, number >> 128 - length): most for length, most in self._most}
        if any(self._counts[block] >= most for block, most in blocks.items()):
            return False
        self._counts.update(blocks.keys())
        return True


def find_most(role: Role | None) -> int:
    """How many addresses count by one token of a role."""
    return MOST_OF_VIEWER if role is not None and Act.CHANGE not in MAY[role] else MOST_OF_TOKEN


def choose(clients: Iterable[Client]) -> list[Client]:
    """Those that count."""
    chosen: list[Client] = []
    blocks, tokens = Blocks(), Counter[str]()
    for client in sorted(clients, key=lambda each: (-each.rank, each.since, each.address)):
        if len(chosen) == MOST:
            break
        if client.token is not None and tokens[client.token] >= find_most(client.role):
            continue
        if blocks.take(client.address):
            tokens.update(() if client.token is None else (client.token,))
            chosen.append(client)
    return chosen


@lru_cache(4096)
def _read_number(address: str) -> int | None:
    """An IPv6 address as a number; None for one of IPv4."""
    parsed = ip_network(address, strict=False).network_address
    return int(parsed) if isinstance(parsed, IPv6Address) else None
