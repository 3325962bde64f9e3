"""The suite of algorithms over Redis, whose scripts are told the time here instead of asking for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from netlimit.l7.decision import Decision
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
from netlimit.l7.store import Ask
from tests.l7.algorithms import TestExamples, TestLeases, TestPromises
from tests.l7.counting import Counting, moment
from tests.l7.redis.servers import Server

__all__ = ["TestExamples", "TestLeases", "TestPromises"]

# Keys live a thousand times longer, too: how long they do goes by the server's clock.
TOLD = """
local now, server = tonumber(redis.call('GET', 'clock')), redis
local redis = {call = function(...)
  local words = {...}
  local life = words[1] == 'PEXPIRE' and 3 or words[4] == 'PX' and 5
  if life then words[life] = words[life] * 1000 end
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
        self._store = open_store(read_url(server.url))

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
