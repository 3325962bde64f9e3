"""What counts as having come to a line, with the limits that reject: what passes and what is kept, and of each network
by itself where several have one counter."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from netlimit.l7.counters import open_counters
from netlimit.l7.decision import Decision
from netlimit.l7.deferral.application import DeferralApp
from netlimit.l7.deferral.backlog import NOBODY, Backlog, Bounds, Claim
from netlimit.l7.deferral.deferral import Deferral
from netlimit.l7.deferral.redis import RedisBacklog
from netlimit.l7.deferral.request import State
from netlimit.l7.deferral.sqlite import SqliteBacklog
from netlimit.l7.document import parse_document
from netlimit.l7.extraction import Extraction
from netlimit.l7.identity import EXTRACTORS
from netlimit.l7.limiter import Limiter
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.middleware import RateLimit
from netlimit.l7.rules import ARRIVALS, Descriptor, Entry, RuleSet
from netlimit.l7.store import Ask, Store
from tests.l7.asking import Asking, begin, hello, make_scope

pytestmark = pytest.mark.anyio
OWN_DEFERS = """
domain: app
descriptors:
- key: remote_address
  rate_limit: {unit: day, requests_per_unit: 2}
  on_limit: defer
- key: path
  value: /jobs
  rate_limit: {unit: day, requests_per_unit: 6}
"""
"""Each client's own limit defers, and the one that all share rejects."""
SHARED_DEFERS = """
domain: app
descriptors:
- key: path
  value: /jobs
  rate_limit: {unit: day, requests_per_unit: 1}
  on_limit: defer
- key: remote_address
  rate_limit: {unit: day, requests_per_unit: 5}
"""
ATTACKER, NEIGHBOUR, BOB, CAROL = "198.51.100.7", "198.51.100.8", "192.0.2.1", "203.0.113.9"


class Site:
    """An application whose requests are limited: by itself (the middleware), or by what is in front of it."""

    def __init__(self, limits: str, store: Store, backlog: Backlog, proxied: bool) -> None:
        rules = RuleSet({"app": parse_document(limits).root})
        self.store, self.backlog = store, backlog
        self.limiter = Limiter(lambda: rules, store)
        self.deferral = Deferral(backlog, "http://127.0.0.1:9" if proxied else None, largest=1000)
        self.proxied = proxied
        self.app: Any
        if proxied:
            self.app = DeferralApp(self.deferral, self.limiter, lambda: rules, "app", EXTRACTORS)
        else:
            self.app = RateLimit(hello, limits=lambda: rules, domain="app", counters=store, deferral=self.deferral)
        self._extraction = Extraction(lambda: rules, "app", EXTRACTORS)

    async def begin(self, who: str, messages: Sequence[dict[str, Any]] | None = None, **others: Any) -> Asking | None:
        """A request that has been sent; None for one that has passed by the proxy."""
        if self.proxied:
            descriptors = self._extraction(make_scope("/jobs", "POST", who))
            if (await self.limiter.decide("app", descriptors, client=who)).allowed:
                return None
        place = "/v1/defer/jobs" if self.proxied else "/jobs"
        if messages is None:
            return begin(self.app, place, method="POST", peer=who, **others)
        return Asking(self.app, make_scope(place, "POST", who, **others), messages)

    async def post(self, who: str, times: int = 1, **others: Any) -> list[int | None]:
        return [200 if (asking := await self.begin(who, **others)) is None else (await asking.end()).status
                for _ in range(times)]  # fmt: skip

    async def post_at_once(self, who: str, times: int) -> Counter[int | None]:
        async def post() -> int | None:
            return (await self.post(who))[0]

        return Counter(await asyncio.gather(*(post() for _ in range(times))))

    async def end_all(self) -> int:
        """End all that is kept, whoever has claimed it; how many those are."""
        number, late = 0, self.backlog.now() + 1e6
        while (claim := await self.backlog.claim(late)) is not None:
            await self.backlog.finish(claim.request, State.DONE, late, None, "")
            number += 1
        return number

    async def count_left(self) -> int:
        """How many more /jobs may be served by the limit that all clients share."""
        verdict = await self.limiter.decide("app", [Descriptor((Entry("path", "/jobs"),))], 0)
        (status,) = verdict.statuses
        assert status.decision is not None
        return status.decision.remaining


OpenSite = Callable[..., Site]


@pytest.fixture(params=["memory and sqlite", "redis"])
def stored(request: pytest.FixtureRequest) -> bool:
    """Whether all is in Redis."""
    return bool(request.param == "redis")


@pytest.fixture(params=["middleware", "application"])
async def open_site(request: pytest.FixtureRequest, stored: bool, tmp_path: Path) -> AsyncIterator[OpenSite]:
    opened: list[Site] = []

    def open_one(limits: str = OWN_DEFERS, **bounds: int) -> Site:
        store: Store = MemoryStore()
        backlog: Backlog
        if stored:
            server, keeping = request.getfixturevalue("server"), request.getfixturevalue("mortal")
            server.client.flushall()
            backlog = RedisBacklog(keeping.url, Bounds(**bounds))
            # By itself counts each process on a busy machine that waits no longer than usual.
            store = open_counters(f"{server.url}?timeout_ms=5000")
        else:
            backlog = SqliteBacklog(tmp_path / "deferred.db", Bounds(**bounds))
        opened.append(Site(limits, store, backlog, request.param == "application"))
        return opened[-1]

    yield open_one
    for site in opened:
        with suppress(RuntimeError):
            await site.deferral.stop()
        await site.store.aclose()


async def send_too_much(site: Site) -> int | None:
    return (await site.post(ATTACKER, headers={"Content-Length": "2000000"}))[0]


async def send_more_than_is_told(site: Site) -> int | None:
    return (await site.post(ATTACKER, body=b"x" * 1001))[0]


async def send_no_path(site: Site) -> int | None:
    return (await site.post(ATTACKER, raw_path=b"jobs"))[0]


HALF = {"type": "http.request", "body": b"half", "more_body": True}


async def send_half(site: Site) -> int | None:
    return (await site.post(ATTACKER, messages=[HALF]))[0]


async def go(site: Site) -> int | None:
    return (await site.post(ATTACKER, messages=[HALF, {"type": "http.disconnect"}]))[0]


@pytest.mark.parametrize(
    ("send", "status"),
    [(send_too_much, 413), (send_more_than_is_told, 413), (send_no_path, 400), (send_half, 408), (go, None)],
)
async def test_what_is_not_kept_has_not_come(
    open_site: OpenSite, monkeypatch: pytest.MonkeyPatch, send: Any, status: int | None
) -> None:
    monkeypatch.setattr("netlimit.l7.deferral.intake._SECONDS", 0.05)
    site = open_site()
    assert await site.post(ATTACKER, 2) == [200, 200]
    assert [await send(site) for _ in range(8)] == [status] * 8
    assert await site.count_left() == 4
    assert await site.post(NEIGHBOUR, 2) == [200, 200], "he has the same network's arrivals"
    assert await site.post(BOB, 2) == [200, 200]
    assert await site.post(CAROL) == [429], "six have been served"


async def test_nor_for_which_there_is_no_room(open_site: OpenSite) -> None:
    site = open_site(most_of_one=1)
    assert await site.post(ATTACKER, 11) == [200, 200, 202] + [429] * 8
    assert await site.post(NEIGHBOUR, 3) == [200, 200, 202]
    assert await site.count_left() == 2


async def test_nor_of_many_at_once(open_site: OpenSite) -> None:
    site = open_site(SHARED_DEFERS, most_of_one=3)
    assert await site.post(BOB) == [200]
    assert await site.post_at_once(ATTACKER, 20) == {202: 2, 429: 18}, "a network leaves as much of a line as it has"
    assert await site.end_all() == 2
    assert await site.post(ATTACKER, 3) == [202, 202, 429], "he has come as often as he was kept"


async def test_nor_what_no_backlog_takes(open_site: OpenSite, request: pytest.FixtureRequest, stored: bool) -> None:
    site = open_site()
    assert await site.post(ATTACKER, 2) == [200, 200]
    if stored:
        request.getfixturevalue("mortal").kill()
    else:
        assert isinstance(site.backlog, SqliteBacklog)
        await site.backlog._run(site.backlog._connection.close)  # in the thread that asks it
    assert await site.post(ATTACKER, 8) == [503] * 8
    assert await site.post(NEIGHBOUR, 2) == [200, 200]
    assert await site.post(BOB, 2) == [200, 200]


async def test_nor_what_a_limit_refuses_that_has_been_used_up(open_site: OpenSite) -> None:
    site = open_site(SHARED_DEFERS.replace("- key: remote", "- key: method\n  rate_limit: {unit: day, "
                                           "requests_per_unit: 4}\n- key: remote"))  # fmt: skip
    descriptors = site._extraction(make_scope("/other", "POST", BOB))
    assert await site.post(ATTACKER, 2) == [200, 202]
    for _ in range(3):
        assert (await site.limiter.decide("app", descriptors, client=BOB)).allowed
    assert await site.post(ATTACKER, 8) == [429] * 8, "all that may come by this method have been served"
    own = next(each for each in site._extraction(make_scope("/jobs", "POST", ATTACKER)) if "remote" in str(each))
    assert [(await site.limiter.decide("app", [own], client=ATTACKER)).allowed for _ in range(5)] == [True] * 4 + [
        False
    ]


async def test_by_what_is_only_kept_no_network_closes_a_limit_that_others_share(open_site: OpenSite) -> None:
    site = open_site()
    assert await site.post(ATTACKER, 20) == [200, 200] + [202] * 4 + [429] * 14, "nor is it kept without end"
    assert await site.count_left() == 4
    assert await site.post(BOB, 3) == [200, 200, 202]
    assert await site.post(CAROL, 3) == [200, 200, 429], "six have been served"


async def test_of_many_who_come_at_once_no_more_are_kept_than_may_come(open_site: OpenSite, stored: bool) -> None:
    """Of several processes neither, which share what is in Redis."""
    sites = [open_site(SHARED_DEFERS) for _ in range(1 + stored)]
    assert await sites[0].post(BOB) == [200]
    answers = await asyncio.gather(*(site.post_at_once(ATTACKER, 40 // len(sites)) for site in sites))
    assert sum(answers, Counter()) == {202: 5, 429: 35}
    assert sum([await site.end_all() for site in sites]) == 5


class Slow(MemoryStore):
    """Counters that are not heard of once they are to count who comes."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.answers = asyncio.Event(), True

    async def decide(self, asks: Sequence[Ask]) -> list[Decision]:
        if not self.answers and any(ask.hits and ask.rule.name.startswith(ARRIVALS) for ask in asks):
            self.asked.set()
            await asyncio.Future()
        return await super().decide(asks)


class Unclaimed(SqliteBacklog):
    """A backlog out of which nobody takes anything: what is being tried at that moment is not taken back."""

    async def claim(self, now: float, places: Mapping[str, int] = NOBODY, most: int = 1) -> Claim | None:
        return None


async def test_who_is_given_up_before_he_is_counted_is_not_kept(tmp_path: Path) -> None:
    """Else one would be kept as often as he likes, who goes in time from a server that ends his requests then."""
    store, backlog = Slow(), Unclaimed(tmp_path / "deferred.db")
    site = Site(SHARED_DEFERS, store, backlog, proxied=False)
    assert await site.post(BOB) == [200]
    store.answers = False
    asking = await site.begin(ATTACKER)
    assert asking is not None
    await store.asked.wait()
    assert await backlog.is_waiting("app|path=/jobs|")
    asking.task.cancel()
    with suppress(asyncio.CancelledError):
        await asking.task
    assert not await backlog.is_waiting("app|path=/jobs|")
    await site.deferral.stop()
