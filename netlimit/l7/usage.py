"""What becomes of the requests that each limit sees."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from netlimit.l7.decision import Decision
from netlimit.l7.detail import Detail, Space
from netlimit.l7.distinct import Distinct
from netlimit.l7.limit import Limit
from netlimit.l7.rules import BROUGHT, Rule

MOST = 2**14
"""Limits of rules that are counted each by itself."""
MOST_BROUGHT = 512
"""The same of limits that requests bring: they may be invented."""


class Counts:
    """Hits that one limit has seen since it is what it is. Each is in one of admitted, refused and observed."""

    __slots__ = (
        "admitted", "capacity", "deferred", "detail", "fresh", "least", "limit", "limited", "near", "nearly",
        "observed", "observes", "over", "queued", "refused", "rule", "since",
    )  # fmt: skip

    def __init__(self, rule: Rule, limit: Limit, now: float, space: Space | None = None) -> None:
        """`space` is that of values, for rules that tell of them."""
        self.limit = limit
        self.capacity = self.least = limit.capacity
        """The least that an admitted request has ever left to its key."""
        self.nearly = -(-limit.capacity // 5)
        """With less than this left a key is near its limit: four fifths are used, as in Envoy's ratelimit."""
        self.since = now
        """Seconds since 1970."""
        self.admitted = 0
        self.refused = 0
        self.observed = 0
        """Admitted though the limit was reached, since the rule only observes."""
        self.over = 0
        """Of the admitted ones: beyond the limit, as a soft or elastic one tolerates."""
        self.near = 0
        """Of the admitted ones: with four fifths of the limit used."""
        self.queued = 0
        """Made to wait for their turn, by a leaky bucket or after a refusal."""
        self.deferred = 0
        """Of the refused ones: kept, to be replayed later."""
        self.fresh = Distinct()
        """Keys that had the whole limit before them."""
        self.limited = Distinct()
        """Keys that were over it."""
        self.detail = Detail(rule, space or Space()) if rule.detailed_metric or rule.value_to_metric else None
        self.follow(rule)

    def follow(self, rule: Rule) -> None:
        """Be for this rule, as it has been read last."""
        self.rule = rule
        self.observes = rule.observes

    def record(self, key: str, hits: int, decision: Decision) -> None:
        """Count what was decided. It is on the way of every request: no more is done than must be."""
        admitted, left, _, _, delay, over = decision
        if admitted:
            self.admitted += hits
            if left < self.nearly:
                self.near += hits
                if over:
                    self.over += hits
            if left + hits == self.capacity:
                self.fresh.add(key)
            if left < self.least:
                self.least = left
            if delay:
                self.queued += hits
        else:
            if self.observes:
                self.observed += hits
            else:
                self.refused += hits
            self.limited.add(key)
        if self.detail is not None:
            self.detail.record(key, hits, admitted)

    def leave(self) -> None:
        """Make room for others' values: nothing is counted here any more."""
        if self.detail is not None:
            self.detail.leave()

    @property
    def seen(self) -> int:
        """All hits."""
        return self.admitted + self.refused + self.observed

    @property
    def keys(self) -> int:
        """About how many keys there were."""
        return self.fresh.merge(self.limited).estimate()


class Usage:
    """Counts by limit: a rule may have one on its rate, and one on its requests in flight."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._counts: dict[str, dict[str, dict[bool, Counts]]] = {}  # by domain, rule, and whether it is of concurrency
        self._room, self._brought_room = MOST, MOST_BROUGHT
        self._space = Space()
        self._clock = clock
        self.others = Counts(Rule("", ""), Limit(0, 1), clock())
        """What came when so many were counted already."""

    def __iter__(self) -> Iterator[tuple[bool, Counts]]:
        """What each limit has counted, and whether it is one of concurrency. Those of rules come first: whoever invents
        limits has none of them left out where not all are told."""
        for brought in (False, True):
            for rules in self._counts.values():
                for name, limits in rules.items():
                    if name.startswith(BROUGHT) is brought:
                        yield from limits.items()

    @property
    def troubles(self) -> tuple[str, ...]:
        """Where metrics tell less than rules want, as sentences."""
        return self._space.troubles

    def get(self, rule: Rule, concurrency: bool = False) -> Counts | None:
        """What has been counted of a rule's limit, if it has been asked for."""
        return self._counts.get(rule.domain, {}).get(rule.name, {}).get(concurrency)

    def forget_gone(self, rules: Iterable[Rule]) -> None:
        """These are the rules from now on. If there is no room left, what was counted of others makes room for them;
        limits that requests bring stay, and have room of their own."""
        if self._room and self._space.left:
            return
        known = {(rule.domain, rule.name) for rule in rules}
        for domain, counted in self._counts.items():
            gone = [name for name in counted if (domain, name) not in known and not name.startswith(BROUGHT)]
            for name in gone:
                for counts in counted.pop(name).values():
                    counts.leave()
        self._room = max(0, MOST - sum(not counts.rule.is_brought for _, counts in self))

    def find_counts(self, rule: Rule, limit: Limit, concurrency: bool = False) -> Counts:
        """The counts of a rule's limit; they begin anew when it has become another."""
        try:
            counts = self._counts[rule.domain][rule.name][concurrency]
        except KeyError:
            if not self._take_room(rule):
                self.others.observes = rule.observes
                return self.others
            return self._begin(rule, limit, concurrency)
        if counts.rule is rule:
            return counts
        if counts.limit != limit:
            return self._begin(rule, limit, concurrency)
        counts.follow(rule)
        return counts

    def _take_room(self, rule: Rule) -> bool:
        """Take the room of one limit, if there is any."""
        room = self._brought_room if rule.is_brought else self._room
        if room and rule.is_brought:
            self._brought_room -= 1
        elif room:
            self._room -= 1
        return room > 0

    def _begin(self, rule: Rule, limit: Limit, concurrency: bool) -> Counts:
        limits = self._counts.setdefault(rule.domain, {}).setdefault(rule.name, {})
        if concurrency in limits:
            limits[concurrency].leave()
        counts = limits[concurrency] = Counts(rule, limit, self._clock(), self._space)
        return counts
