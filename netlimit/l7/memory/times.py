"""The times of hits that a log keeps, however much they weigh."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge as heap_merge
from heapq import nlargest
from itertools import accumulate, pairwise
from operator import itemgetter


class Times(deque[int]):
    """The times at which there were hits, the oldest first. Where one weighed more than one, it stands here once, and
    `ends` says of each time how many hits there were up to it, of which the first `start` are forgotten.

    So long as each weighs one, `ends` is None: that is the usual, and who is in a hurry may use this as what it is, the
    time of each hit.
    """

    __slots__ = ("ends", "start")

    def __init__(self, times: Iterable[int] = ()) -> None:
        super().__init__(times)
        self.ends: deque[int] | None = None
        self.start = 0

    @property
    def size(self) -> int:
        """How many hits."""
        return len(self) if self.ends is None else self.ends[-1] - self.start if self else 0

    @property
    def cost(self) -> int:
        """How many numbers are kept."""
        return len(self) if self.ends is None else 2 * len(self)

    def find(self, number: int) -> int:
        """When the hit of this number was; the oldest is 1."""
        return self[number - 1] if self.ends is None else self[bisect_left(self.ends, self.start + number)]

    def forget(self, old: int, now: int) -> int:
        """Forget what was until `old`, and what comes only after `now`, for the clock has been set back; how many hits
        are left."""
        while self and not old < self[0] <= now:
            self.popleft()
            if self.ends is not None:
                self.start = self.ends.popleft()
        if not self:
            self.ends, self.start = None, 0
        return self.size

    def add(self, now: int, hits: int, most: int) -> int:
        """Keep that there were so many hits, and the newest `most` of all; how many those are."""
        if self.ends is None:
            self.ends = deque(range(1, len(self) + 1))
        self.append(now)
        self.ends.append((self.ends[-1] if self.ends else self.start) + hits)
        self._keep_newest(most)
        return self.size

    def _keep_newest(self, most: int) -> None:
        assert self.ends is not None
        self.start = max(self.start, self.ends[-1] - most)
        while self.ends and self.ends[0] <= self.start:
            self.popleft()
            self.ends.popleft()
        if not self:
            self.ends, self.start = None, 0

    def list_newest(self) -> Iterator[tuple[int, int]]:
        """Each time, the newest first, and how many hits there were then."""
        if self.ends is None:
            return ((time, 1) for time in reversed(self))
        ends = reversed((self.start, *self.ends))
        return ((time, end - before) for time, (end, before) in zip(reversed(self), pairwise(ends), strict=True))


def merge(logs: Sequence[Times]) -> Times:
    """As many hits as there are in the largest, and the newest of all. Nobody is answered meanwhile: no more of them
    is looked at than that."""
    most = max(log.size for log in logs)
    # The newest n hits are of those n logs, at most, that end last.
    latest = nlargest(most, filter(None, logs), key=itemgetter(-1))
    times: deque[int] = deque()
    weights: deque[int] = deque()
    left = most
    for time, weight in heap_merge(*(log.list_newest() for log in latest), reverse=True):
        if left <= 0:
            break
        times.appendleft(time)
        weights.appendleft(min(weight, left))
        left -= weight
    merged = Times(times)
    if len(merged) < most - max(left, 0):
        merged.ends = deque(accumulate(weights))
    return merged
