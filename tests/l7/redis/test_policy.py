"""A Redis that throws counters away is told of: at the start, in /healthz, and by the doctor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from netlimit.l7.redis.policy import EvictionWatch
from netlimit.l7.redis.url import read_url
from tests.cli.conftest import make_directory  # noqa: F401  a fixture
from tests.cli.running import until
from tests.cli.test_limiter import RULES, Running
from tests.l7.redis.servers import Server

SAID = "throws counters away when its memory is full (maxmemory-policy allkeys-lru)"


@pytest.fixture
def limiter(mortal: Server, make_directory: Callable[[], Path]) -> Iterator[Running]:  # noqa: F811
    mortal.client.config_set("maxmemory-policy", "allkeys-lru")
    running = Running(make_directory(), RULES % 2, NETLIMIT_COUNTERS_URL=mortal.url)
    yield running
    running.http.close()
    running.server.end()


def test_it_is_told_in_health_why_the_counters_cannot_be_asked(
    mortal: Server,
    make_directory: Callable[[], Path],  # noqa: F811
) -> None:
    mortal.client.config_set("requirepass", "secret")
    running = Running(make_directory(), RULES % 2, NETLIMIT_COUNTERS_URL=mortal.url.replace("//", "//:mistyped@"))
    try:
        question = {"domain": "web", "descriptors": [{"entries": [{"key": "user", "value": "alice"}]}]}
        running.http.post("/json", json=question)
        told = " ".join(running.http.get("/healthz").json()["troubles"])
        assert f"127.0.0.1:{mortal.port} cannot be asked: invalid username-password" in told
        assert told in running.server.said()
        assert "mistyped" not in told
    finally:
        running.http.close()
        running.server.end()


def test_it_is_told_at_the_start_and_in_health_and_by_the_doctor(limiter: Running, mortal: Server) -> None:
    until(lambda: SAID in limiter.server.said(), limiter.server.said)
    (trouble,) = [each for each in limiter.http.get("/healthz").json()["troubles"] if SAID in each]
    assert "set maxmemory-policy noeviction there" in trouble
    done = limiter.netlimit.run("doctor", "--json")
    assert SAID in done.stdout, done
    mortal.client.config_set("maxmemory-policy", "noeviction")
    assert SAID not in limiter.netlimit.run("doctor", "--json").stdout


def test_counters_that_are_lost_are_told(mortal: Server, caplog: pytest.LogCaptureFixture) -> None:
    one, other = (EvictionWatch(read_url(mortal.url)) for _ in range(2))
    for watch in (one, other, one):
        watch._look()
    assert (one.lost, one.troubles, caplog.messages) == (0, (), [])
    mortal.client.flushall()
    for watch in (one, other, one, other):
        watch._look()
    assert [watch.lost for watch in (one, other)] == [1, 1]
    assert f"127.0.0.1:{mortal.port} has lost its counters" in one.troubles[0]
    assert len(caplog.messages) == 2
    mortal.kill()
    one._look()
    assert one.lost == 1  # it is away; whether it has lost anything is not known
    mortal.start()
    one._look()
    assert one.lost == 2
