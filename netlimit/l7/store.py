"""What a counter store does, in memory or in Redis."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from math import inf
from typing import NamedTuple, Protocol

from netlimit.l7.decision import Decision
from netlimit.l7.limit import Limit
from netlimit.l7.rules import Rule


class Ask(NamedTuple):
    """A question to a counter: may `hits` more of `key` pass `limit`?"""

    rule: Rule
    limit: Limit
    """The rule's limit, its concurrency, or what a request wants instead of them."""
    key: str
    """Whose counter it is, within the rule and the limit: different texts, different counters, whatever is in them."""
    hits: int = 1
    """The request's weight. 0 counts nothing and tells whether one hit would be admitted."""
    slack: int = 0
    """So many hits beyond the limit's capacity are tolerated now; BOUNDLESS is any number."""
    lease: str = ""
    """For concurrency: the name of the lease that an admitted request gets, unique among all."""
    charge: bool = False
    """Whether refused hits are counted too, as what has happened already must be (an answer's bytes, tokens that a
    model has used) and as Envoy's ratelimit does: a window's count goes over its limit, a bucket owes no more than
    `bound_debt` says."""
    longest: float = inf
    """For a leaky bucket: seconds that the request can wait for its turn. One whose turn comes later is refused, and
    leaves its place to others."""
    window: int = 0
    """For Redis, of what has been counted elsewhere before: in which window that was, numbered since 1970. What was
    counted in one that is over counts as such. 0: now."""


def name_lease() -> str:
    """A name for a lease, unique among those of all processes; nobody who has not been told it can end the lease."""
    return secrets.token_hex(12)


class Store(Protocol):
    """Counters. Each decision is one atomic step: no two requests ever share what only one of them may have.

    The counter of an Ask is that of its rule's domain and name, its limit and its key; a limit that changes its
    algorithm, its unit or its burst begins anew, one that only changes its amount, or how long leases last, goes on.
    Hits of one Ask are admitted together or not at all; the Asks of one call are independent of each other. What a
    store keeps of a key ends by itself once it no longer makes a difference. A clock that jumps never refuses anybody
    for longer than the limit's unit (or, for buckets, the time in which a full one drains).
    """

    async def decide(self, asks: Sequence[Ask]) -> list[Decision]:
        """Count and answer, in order. Raises CountersUnavailable when the counters cannot be asked."""
        ...

    async def release(self, asks: Sequence[Ask]) -> None:
        """End the leases of these asks; one that has ended already is no error."""
        ...

    async def renew(self, asks: Sequence[Ask], anew: bool = False) -> bool:
        """Let the leases of these asks last their whole time from now; whether none had ended. One that had stays so,
        or is taken `anew`, whatever the limit, for who knows that the request is still in flight."""
        ...

    async def aclose(self) -> None:
        """Let go of connections."""
        ...
