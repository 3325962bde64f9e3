"""What the suite of algorithms asks of any store: a limit, a key, and a clock that the test sets."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from math import ceil, inf
from typing import Protocol

from netlimit.l7.decision import Decision
from netlimit.l7.limit import Algorithm, Limit
from netlimit.l7.memory.counter import Clock
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.rules import Rule
from netlimit.l7.store import Ask

SECOND = 10**9
_names = itertools.count()


def moment(text: str) -> int:
    """Nanoseconds since 1970 of a time of day, "1:00:30" or "10:00:30.5", of one day in 2026 (UTC)."""
    hours, minutes, seconds = text.split(":")
    day = datetime(2026, 3, 4, int(hours), int(minutes), tzinfo=UTC)
    return int(day.timestamp()) * SECOND + int(float(seconds) * SECOND)


class Counting(Protocol):
    """A store with a clock that stands where it is set."""

    now: int
    """Nanoseconds since 1970."""

    def ask(self, ask: Ask) -> Decision: ...

    def release(self, ask: Ask) -> None: ...

    def renew(self, ask: Ask) -> None: ...


class MemoryCounting:
    """The memory store."""

    def __init__(self, keys: int = 2**18) -> None:
        self.now = moment("1:00:00")
        self.store = MemoryStore(Clock(lambda: self.now, 0), keys)

    def ask(self, ask: Ask) -> Decision:
        return self.store.decide_now([ask])[0]

    def release(self, ask: Ask) -> None:
        self.store.release_now([ask])

    def renew(self, ask: Ask) -> None:
        self.store.renew_now([ask])


class Subject:
    """One rule whose counters a test drives through time."""

    def __init__(self, counting: Counting, limit: Limit) -> None:
        self.counting = counting
        self.limit = limit
        concurrency = limit if limit.algorithm is Algorithm.CONCURRENCY else None
        self.rule = Rule("test", f"rule{next(_names)}", None if concurrency else limit, concurrency)

    def change_lease(self, seconds: int) -> Subject:
        """Have leases last another time from now on."""
        self.limit = replace(self.limit, seconds=seconds)
        self.rule = replace(self.rule, concurrency=self.limit)
        return self

    def at(self, when: str | int) -> Subject:
        """Set the clock."""
        self.counting.now = moment(when) if isinstance(when, str) else when
        return self

    def after(self, seconds: float) -> Subject:
        """Let time pass; parts of a nanosecond count as whole ones."""
        self.counting.now += ceil(seconds * SECOND)
        return self

    def make_lease(self) -> str:
        """A lease that nobody else has; none where there are no leases."""
        return f"lease {next(_names)}" if self.rule.concurrency else ""

    def make_ask(
        self,
        hits: int = 1,
        key: str = "alice",
        slack: int = 0,
        charge: bool = False,
        lease: str = "",
        longest: float = inf,
    ) -> Ask:
        return Ask(self.rule, self.limit, key, hits, slack, lease, charge, longest)

    def hit(
        self,
        hits: int = 1,
        key: str = "alice",
        slack: int = 0,
        charge: bool = False,
        lease: str = "",
        longest: float = inf,
    ) -> Decision:
        return self.counting.ask(self.make_ask(hits, key, slack, charge, lease, longest))

    def hits(self, number: int) -> list[bool]:
        """Whether each of so many requests is admitted."""
        return [self.hit().admitted for _ in range(number)]


Subjects = Callable[[Limit], Subject]
