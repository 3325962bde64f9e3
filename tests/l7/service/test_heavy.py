"""Long questions over gRPC: what they take, and that all others are answered meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from netlimit.l7.service.rpc import SERVICE, SHORT
from tests.cli.conftest import make_directory  # noqa: F401  a fixture
from tests.cli.test_limiter import Running, read_memory
from tests.l7.service.serving import Asker, Served, describe
from tests.l7.service.unfinished import Unfinished

RULES = "domain: web\ndescriptors:\n  - key: user\n    rate_limit: {unit: hour, requests_per_unit: 1000000}\n"


@pytest.fixture
def limiter(make_directory: Callable[[], Path]) -> Iterator[Running]:  # noqa: F811
    running = Running(make_directory(), RULES)
    yield running
    running.http.close()
    running.server.end()


def test_questions_that_never_end_take_so_much_memory_and_no_more(limiter: Running) -> None:
    before, most = read_memory(limiter), 0
    asker = Asker(limiter.grpc_place)
    floods = [Unfinished(limiter.grpc_place, 200) for _ in range(4)]
    try:
        end = time.monotonic() + 8
        while time.monotonic() < end and most < 2**31:
            most = max(most, read_memory(limiter) - before)
            asker.ask(describe(user="alice"))
            time.sleep(0.02)
    finally:
        for each in floods:
            each.close()
        asker.close()
    assert sum(each.sent for each in floods) > 2**29, "there was enough to see it"
    assert most < 900 * 2**20


def test_of_long_questions_that_wait_there_are_so_many_bytes(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is room for none, short ones are answered all the same."""
    with grpc.insecure_channel(served.grpc_place) as channel:
        ask = channel.unary_unary(f"/{SERVICE}/ShouldRateLimit")
        long = b"x" * (SHORT + 1)
        for _ in range(3):  # this is no question, and that is said of what is looked at
            assert ask.future(long, timeout=30).code() is grpc.StatusCode.UNKNOWN
        monkeypatch.setattr("netlimit.l7.service.rpc.HELD_BYTES", SHORT)
        assert ask.future(long, timeout=30).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        asker = Asker(served.grpc_place)
        asker.ask(describe(guest="alice"))
        asker.close()
        monkeypatch.setattr("netlimit.l7.service.rpc.HELD_BYTES", SHORT + 1)  # those before hold nothing any more
        assert ask.future(long, timeout=30).code() is grpc.StatusCode.UNKNOWN
