"""What a controller reads from a database that is slow or away, and tells it, in one go and in a thread: whoever waits
for each answer keeps the kernel waiting, too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from netlimit.origins import Origin
from netlimit.overdue import read_clock
from netlimit.records import Changes, Exceptional, HostStatus, Outcome, Repair, RuleCounters, Window

if TYPE_CHECKING:  # for the types alone: a store is handed over
    from netlimit.store import Store

Key = TypeVar("Key")
Value = TypeVar("Value")
Numbering = Mapping[tuple[str, str], int]


@dataclass
class Ledger:
    """What the database is known to have of one gateway: the states of its rules, and its mark numbers. None where that
    is not known, or another process has given out numbers, too."""

    marks: dict[int, Exceptional] | None = None
    numbers: dict[tuple[str, str], int] | None = None


@dataclass(frozen=True)
class News:
    """What has changed in the rules since the revision `since` with its stamp; `whole`: `changes` are all rules.
    `missed` is what has changed since the copy was written last, if it is behind. `window` is the last window of
    confirmation, and `end` (a time of `read_clock`) how long this may be in force: until that ends, if it is open.
    `origin` tells of which database all rules are, for that may be another one."""

    since: tuple[int, int]
    changes: Changes
    whole: bool
    missed: Changes | None
    window: Window | None
    end: float
    origin: Origin | None = None


@dataclass
class Exchange:
    """One exchange. What it begins with is not changed by anybody meanwhile; whoever has begun it reads, when it is
    over, or `news` as soon as they are there, what has come of it. `watches`: the window of confirmation is looked at
    even if no rule has changed. `lacks`: since when the copy is behind, if it is. `says_all`: what is told seldom is
    told, too. `held` is the revision that the copy has."""

    store: Store
    status: HostStatus
    since: tuple[int, int] | None
    watches: bool
    lacks: tuple[int, int] | None
    says_all: bool
    marks: Mapping[int, Exceptional]
    numbers: Numbering
    repairs: Sequence[Repair]
    counts: Mapping[int, RuleCounters]
    ledger: Ledger
    held: int = 0
    news: News | None = None
    clients: Mapping[str, float] | None = None
    told_repairs: Sequence[Repair] = ()
    told_counts: Sequence[RuleCounters] = ()
    _changes: Changes | None = field(default=None, init=False)

    def read(self) -> None:
        """Ask what has changed. Raises StoreError."""
        if self.since is None:
            self.store.revision()
        else:
            self._changes = self.store.changes(self.since[0], self.status.host, self.since[1])

    def go_on(self) -> None:
        """All the rest, for a database that answers slowly: first what the kernel needs, last how the gateway stands.
        Raises StoreError."""
        if self.since is not None:
            self._find_news(self.since)
            self._tell_marks()
        if self.repairs:
            self.store.note_repairs(self.status.host, self.repairs)
            self.told_repairs = self.repairs
        self.store.report(self.status)
        if self.since is not None:
            self._tell_numbers()
        if self.says_all:
            self._tell_counts()
            self.clients = self.store.clients(self.status.host)

    def _find_news(self, since: tuple[int, int]) -> None:
        changes, whole, origin = self._changes, self._changes is None, None
        if changes is None:
            origin = self.store.origin(self.held)
            revision, stamp, every = self.store.load_stamped(self.status.host)
            changes = Changes(revision, tuple(every), (), stamp)
        elif changes.revision == since[0] and not self.watches and self.lacks is None:
            return
        if changes.rules:
            self.ledger.marks = None  # one that has gone and come back took with it how it stood
        missed = None if self.lacks is None else self.store.changes(self.lacks[0], self.status.host, self.lacks[1])
        began = read_clock()
        window, left = self.store.window_left()  # asked last: should it have opened since, these are from before
        end = _find_end(window, changes.revision, began + left)
        self.news = News(since, changes, whole, missed, window, end, origin)

    def _tell_counts(self) -> None:
        if self.counts:
            counts = list(self.counts.values())
            self.store.count(self.status.host, counts)
            self.told_counts = counts

    def _tell_numbers(self) -> None:
        """Numbers that another process has given out stay: then whoever returns to the database loads everything."""
        host, known = self.status.host, self.ledger.numbers
        added = find_changed(known, self.numbers)[0] if known is not None else {}
        if known is None or not added:
            return
        if not {number for key, number in known.items() if key not in added} & {*added.values()}:
            is_told = self.store.number_beside(host, added, known)
            self.ledger.numbers = {**known, **added} if is_told else None

    def _tell_marks(self) -> None:
        host = self.status.host
        known = self.store.marked(host) if self.ledger.marks is None else self.ledger.marks
        changed, cleared = find_changed(known, self.marks)
        self.ledger.marks = None
        if changed or cleared:
            self.store.mark(host, [*changed.values()], cleared)
        self.ledger.marks = dict(self.marks)


def find_changed(known: Mapping[Key, object], wanted: Mapping[Key, Value]) -> tuple[dict[Key, Value], list[Key]]:
    """What has to be written, and what forgotten, where this is known and that is wanted."""
    changed = {key: value for key, value in wanted.items() if known.get(key) != value}
    return changed, [key for key in known if key not in wanted]


def _find_end(window: Window | None, revision: int, end: float) -> float:
    """Until when a revision may be in force, where the window, if it is open, ends then. One from before a window was
    undone may not at all: it is what nobody has confirmed."""
    if window is None or window.outcome is Outcome.CONFIRMED:
        return math.inf
    if window.outcome is None:
        return end
    return -math.inf if window.revision is not None and revision < window.revision else math.inf


def renumber(changes: Changes, known: set[int]) -> Changes:
    """All rules, as what has changed for who knows these."""
    return replace(changes, removed=tuple(known - {rule.id for rule in changes.rules}))
