"""The sliding window log: the times of the newest requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf

from netlimit.l7.decision import Crowded, Decision, new
from netlimit.l7.limit import BOUNDLESS, Limit
from netlimit.l7.memory.budget import ENTRY_BYTES, KEY_BYTES, Budget
from netlimit.l7.memory.counter import CROWD, FEW, SECOND, Clock, Counter
from netlimit.l7.memory.shares import Shares
from netlimit.l7.memory.times import Times, merge

_FEW_ENTRIES = 32 * FEW
"""Below so many times nothing is looked through."""


class SlidingWindowLog(Counter):
    """The times of the newest hits of each key; those in (now - w, now] count.

    Refused hits are logged too unless `count_refused` is off, but no more than the newest `amount` of all are kept: of
    as many as that one that is older cannot change an answer. Where the amount was larger within the last `seconds`, so
    many are: it may be raised again, and what was admitted counts then.
    """

    def __init__(self, limit: Limit, clock: Clock, keys: int, budget: Budget | None = None) -> None:
        self._logs: dict[str, Times] = {}
        self._entries, self._entry_room, self._crowded_until = 0, _FEW_ENTRIES, 0
        self._former, self._former_until = 0, 0  # an amount that was larger, and until when it counts
        super().__init__(limit, clock, keys, budget)
        self._amount = limit.amount
        self._period = limit.seconds * SECOND
        self._seconds = float(limit.seconds)
        self._count_refused = limit.count_refused

    def hit(self, key: str, hits: int = 1, slack: int = 0, charge: bool = False, longest: float = inf) -> Decision:
        """Count and answer."""
        self._acquire()
        try:
            now, asked = self._clock(), key
            weight, ceiling = hits or 1, self._amount + slack
            log = self._logs.get(key)
            full = self._entries >= self._entry_room
            if full and not (log and self._is_over(log, now, weight, ceiling)):
                key = self._admit_entries(key)
                log, full = self._logs.get(key), False
            if log is None:
                if len(self._logs) >= self._room:
                    key = self._admit_key(key)
                log = self._logs.get(key)
                if log is None:
                    log = Times()
                    if hits:
                        self._logs[key] = log
            old = now - self._period
            if log.ends is None:
                while log and not old < log[0] <= now:  # later than now: the clock has been set back
                    log.popleft()
                size = len(log)
            else:
                size = log.forget(old, now)
            admitted = size + weight <= ceiling
            if hits and (admitted or charge or self._count_refused):
                most = ceiling if slack < BOUNDLESS else 2 * self._amount
                if now < self._former_until:
                    most = max(most, self._former)
                if full and not admitted:  # what is refused takes the place of what was there
                    most = size
                before = log.cost
                if hits == 1 and log.ends is None:
                    log.append(now)
                    size += 1
                    while size > most:
                        log.popleft()
                        size -= 1
                else:
                    size = log.add(now, hits, most)
                self._entries += log.cost - before
                reset = self._seconds if size else 0.0
            else:
                reset = (log[-1] - old) / SECOND if size else 0.0
            excess = size + weight - ceiling  # so many must be forgotten before the next may come
            wait = 0.0
            if excess > 0:
                wait = (log.find(excess) - old) / SECOND if weight <= ceiling else inf
            left = self._amount - size
            if not admitted and 1 < hits <= self._amount:
                self._note_want(key, hits)
            kind = Decision if key is asked else Crowded
            return new(kind, (admitted, left if left > 0 else 0, wait, reset, 0.0, admitted and left < 0 < hits))
        finally:
            self._release()

    def _is_over(self, log: Times, now: int, weight: int, ceiling: int) -> bool:
        """Whether a log leaves no room for a request of this weight: of so many newest hits the first still counts."""
        number = ceiling - weight + 1
        return number <= 0 or (log.size >= number and log.find(log.size - number + 1) > now - self._period)

    def _find_place(self, key: str) -> str:
        log = self._logs.get(key)
        if self._entries >= self._entry_room and not (log and self._is_over(log, self._clock(), 1, self._amount)):
            key = self._admit_entries(key)
        return super()._find_place(key)

    def _admit_entries(self, key: str) -> str:
        """Make room for more times; the key itself, or that of the crowd for a while."""
        now = self._clock()
        if now < self._crowded_until:
            return CROWD
        self._sweep(now)
        for log in self._logs.values():
            log.forget(now - self._period, now)
        room = (self._budget.offer(self) - self._due * KEY_BYTES) // ENTRY_BYTES
        if self._count_entries() > room * 3 // 4 and self.shares is not None:
            self._doubt_shares(now)
            self._merge_all(self.shares.cut(self._logs, room // 2, lambda log: log.cost))
        if self._count_entries() > room * 3 // 4 and self.forgets:
            self._drop_within(now)
        if self._count_entries() >= room:
            self._crowded_until = now + SECOND
            return CROWD
        self._entry_room = max(min(_FEW_ENTRIES, room), min(2 * self._entries, room))
        self._set_room(self._due)
        return key

    def _count_entries(self) -> int:
        self._entries = sum(log.cost for log in self._logs.values())
        return self._entries

    def _offer(self) -> int:
        return max(1, (self._budget.offer(self) - self._held_entries * ENTRY_BYTES) // KEY_BYTES)

    def _hold(self, keys: int) -> None:
        self._budget.hold(self, keys * KEY_BYTES + self._held_entries * ENTRY_BYTES)

    @property
    def _held_entries(self) -> int:
        return self._entry_room if self._entry_room > _FEW_ENTRIES else 0

    def _adopt(self, other: Counter) -> None:
        assert isinstance(other, SlidingWindowLog)
        self._logs = other._logs
        now = self._clock()
        self._former, self._former_until = other._amount, now + self._period
        if other._former > self._former and now < other._former_until:
            self._former = other._former

    def _holds(self, key: str) -> bool:
        return key in self._logs

    def __len__(self) -> int:
        return len(self._logs)

    def _list_keys(self) -> Iterable[str]:
        return self._logs

    def _sweep(self, now: int) -> None:
        old = now - self._period
        self._logs = {key: log for key, log in self._logs.items() if log and old < log[-1] <= now}

    def _drop_within(self, now: int) -> None:
        want, amount = self._wants.get, self._amount
        self._logs = {
            key: log for key, log in self._logs.items() if self._is_over(log, now, int(want(hash(key), 1)), amount)
        }

    def _cut(self, shares: Shares, room: int) -> Mapping[str, Sequence[str]]:
        return shares.cut(self._logs, room)

    def _merge(self, keys: Sequence[str], crowd: str) -> None:
        logs = [self._logs.pop(key) for key in keys]
        logs.append(self._logs.get(crowd, Times()))
        merged = merge(logs)
        self._logs[crowd] = merged
        self._entries += merged.cost - sum(log.cost for log in logs)
