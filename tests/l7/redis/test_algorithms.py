"""The suite of algorithms over Redis, whose scripts are told the time here instead of asking for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from math import ceil, inf
from random import Random

import pytest

from netlimit.l7.decision import Decision
from netlimit.l7.limit import Algorithm, Limit, Refill
from netlimit.l7.redis.algorithms import (
    Bucket,
    FixedWindow,
    IntervalBucket,
    LeaseMove,
    Leases,
    SlidingWindowCounter,
    SlidingWindowLog,
)
from netlimit.l7.redis.opening import open_store
from netlimit.l7.redis.script import CLOCK, Script
from netlimit.l7.redis.url import read_url
from netlimit.l7.rules import Rule
from netlimit.l7.store import Ask
from tests.l7.algorithms import BUCKETS, TestExamples, TestLeases, TestPromises
from tests.l7.counting import SECOND, Counting, MemoryCounting, Subjects, moment
from tests.l7.redis.driving import PATIENT
from tests.l7.redis.servers import Server

__all__ = ["TestExamples", "TestLeases", "TestPromises"]

# Keys live a thousand times longer, too: how long they do goes by the server's clock.
TOLD = """
local now, server = tonumber(redis.call('GET', 'clock')), redis
local redis = {call = function(...)
  local words = {...}
  local life = words[1] == 'PEXPIRE' and 3 or words[4] == 'PX' and 5
  if life then words[life] = math.min(words[life] * 1000, 1e15) end
  return server.call(unpack(words))
end}
"""


@pytest.fixture
def counting(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    for kind in (Bucket, FixedWindow, IntervalBucket, LeaseMove, Leases, SlidingWindowCounter, SlidingWindowLog):
        script = kind.script
        assert script.source.startswith(CLOCK)
        told = Script(script.source.replace(CLOCK, TOLD), script.arguments, script.width)
        monkeypatch.setattr(kind, "script", told)
    told_time = ToldCounting(server)
    yield told_time
    told_time.close()


class ToldCounting:
    """Redis at the time that a test sets."""

    def __init__(self, server: Server) -> None:
        self.now = moment("1:00:00")
        self._server = server
        self._loop = asyncio.new_event_loop()
        self._store = open_store(read_url(server.url + PATIENT))

    def ask(self, ask: Ask) -> Decision:
        self._set_clock()
        return self._loop.run_until_complete(self._store.decide([ask]))[0]

    def release(self, ask: Ask) -> None:
        self._set_clock()
        self._loop.run_until_complete(self._store.release([ask]))

    def renew(self, ask: Ask) -> None:
        self._set_clock()
        self._loop.run_until_complete(self._store.renew([ask]))

    def close(self) -> None:
        self._loop.run_until_complete(self._store.aclose())
        self._loop.close()

    def _set_clock(self) -> None:
        self._server.client.set("clock", self.now // 1000)


@pytest.mark.parametrize("seed", range(5))
def test_redis_and_memory_answer_alike(counting: ToldCounting, seed: int) -> None:
    """To the microsecond, whatever is asked and however much time passes."""
    random = Random(seed)
    memory = MemoryCounting()
    for number in range(24):
        limit = _draw_limit(random)
        leased = limit.algorithm is Algorithm.CONCURRENCY
        rule = Rule("alike", f"{seed} {number}", None if leased else limit, limit if leased else None)
        for step in range(16):
            counting.now = memory.now
            hits = random.choice([0, 1, 1, 1, 2, random.randint(1, limit.capacity + 1)])
            ask = Ask(rule, limit, "alice", hits, random.choice([0, 0, 0, 1, 5]), charge=random.random() < 0.1)
            ask = ask._replace(longest=random.choice([inf, inf, 0, random.uniform(0, 2 * limit.seconds)]))
            ask = ask._replace(lease=f"lease {step}") if leased else ask
            here, there = memory.ask(ask), counting.ask(ask)
            exact = (here.admitted, here.remaining, here.over) == (there.admitted, there.remaining, there.over)
            assert exact, (limit, ask, here, there)
            assert (there.retry_after, there.reset_after, there.delay) == pytest.approx(
                (here.retry_after, here.reset_after, here.delay), abs=2e-6, rel=0
            ), (limit, ask, here, there)
            waits = [0, 0, 1000, random.randrange(limit.seconds * 10**6) * 1000, limit.seconds * SECOND]
            memory.now += random.choice([*waits, ceil(min(here.retry_after, 60) * 10**6) * 1000])


def _draw_limit(random: Random) -> Limit:
    algorithm = random.choice(list(Algorithm))
    return Limit(
        random.choice([0, 1, 2, 3, 7, 10, 60]),
        random.choice([1, 2, 7, 60, 3600, 86_400]),
        algorithm,
        random.choice([None, 1, 3, 50]) if algorithm in BUCKETS else None,
        random.choice(list(Refill)) if algorithm is Algorithm.TOKEN_BUCKET else Refill.CONTINUOUS,
        algorithm is not Algorithm.SLIDING_WINDOW_LOG or random.random() < 0.5,
    )


def test_an_interval_bucket_whose_clock_is_set_back_is_filled_again(subject: Subjects) -> None:
    bucket = subject(Limit(2, 60, Algorithm.TOKEN_BUCKET, refill=Refill.INTERVAL)).at("9:00:00")
    assert bucket.hits(3) == [True, True, False]
    assert bucket.at("3:00:00").hit().admitted is False
    assert bucket.at("3:01:00").hits(3) == [True, True, False]
