"""A line that several clients share, each of whom has a limit of his own beside it that rejects."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from netlimit.l7.deferral.backlog import Backlog, BacklogFull, Bounds
from netlimit.l7.deferral.deferral import Deferral, find_lines
from netlimit.l7.deferral.redis import RedisBacklog
from netlimit.l7.deferral.request import State
from netlimit.l7.deferral.sqlite import SqliteBacklog
from netlimit.l7.limit import Limit
from netlimit.l7.middleware import RateLimit
from netlimit.l7.rules import Match, OnLimit, Rule
from tests.l7.asking import Answer, ask
from tests.l7.deferral.backlogs import OpenBacklog, make_request

pytestmark = pytest.mark.anyio
JOBS = """
domain: app
descriptors:
- key: path
  value: /jobs
  rate_limit: {unit: second, requests_per_unit: 4, algorithm: gcra, burst: 2}
  on_limit: defer
- key: remote_address
"""
A_DAY = "{unit: day, requests_per_unit: 5, algorithm: gcra}"
ATTACKER, BOB, CAROL, DAN = "192.0.2.7", "192.0.2.8", "198.51.100.9", "203.0.113.5"


class Site:
    """An application with a shared limit that defers at /jobs, and what it has served."""

    def __init__(self, limits: Path, own: str, counters: str, backlog: Backlog, **others: Any) -> None:
        limits.write_text(f"{JOBS}  rate_limit: {own}\n")
        self.served: list[tuple[str, str, bytes, float]] = []
        self.backlog = backlog
        self.app = RateLimit(
            self._serve, limits=limits, domain="app", counters=counters, deferral=Deferral(backlog), **others
        )

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for _ in range(2):
                await send({"type": f"{(await receive())['type']}.complete"})
            return
        body = (await receive())["body"]
        self.served.append((scope["client"][0], scope["path"], body, time.monotonic()))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    async def post(self, who: str, times: int = 1, path: str = "/jobs", body: bytes = b"") -> list[Answer]:
        return [await ask(self.app, path, body, method="POST", peer=who) for _ in range(times)]

    async def count(self, who: str, times: int = 1, path: str = "/jobs") -> list[int | None]:
        return [answer.status for answer in await self.post(who, times, path)]

    async def find_state(self, accepted: Answer) -> str:
        state: str = (await ask(self.app, accepted.headers["location"])).json()["state"]
        return state

    async def await_end(self, accepted: Answer, seconds: float = 30.0) -> str:
        deadline = time.monotonic() + seconds
        while (state := await self.find_state(accepted)) == "waiting" and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return state


OpenSite = Callable[..., Any]


@pytest.fixture(params=["memory and sqlite", "redis"])
def open_site(request: pytest.FixtureRequest, tmp_path: Path) -> OpenSite:
    @asynccontextmanager
    async def open_one(own: str = A_DAY, bounds: Bounds | None = None, **others: Any) -> AsyncIterator[Site]:
        backlog: Backlog
        if request.param == "redis":
            server = request.getfixturevalue("server")
            server.client.flushall()
            counters, backlog = server.url, RedisBacklog(server.url, bounds)
        else:
            counters, backlog = "memory://", SqliteBacklog(tmp_path / "deferred.db", bounds)
        site = Site(tmp_path / "limits.yaml", own, counters, backlog, **others)
        incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        outgoing: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        living = asyncio.create_task(site.app({"type": "lifespan", "state": {}}, incoming.get, outgoing.put))
        incoming.put_nowait({"type": "lifespan.startup"})
        await outgoing.get()
        try:
            async with asyncio.timeout(60):
                yield site
        finally:
            incoming.put_nowait({"type": "lifespan.shutdown"})
            await living

    return open_one


async def test_who_is_over_a_limit_that_rejects_is_not_kept_though_others_wait(open_site: OpenSite) -> None:
    async with open_site() as site:
        assert await site.count(ATTACKER, 6, "/other") == [200] * 5 + [429]
        bob = await site.post(BOB, 4)
        assert [answer.status for answer in bob] == [200, 200, 202, 202]
        refused = await site.post(ATTACKER)
        assert refused[0].status == 429
        assert int(refused[0].headers["retry-after"]) > 3600
        assert b"remote_address" in refused[0].body
        carol = (await site.post(CAROL))[0]
        assert carol.status == 202
        assert await site.await_end(carol) == "done"
        assert await site.count(ATTACKER, 20) == [429] * 20
        assert (await site.post(DAN))[0].status in (200, 202)
    assert Counter(who for who, path, *_ in site.served if path == "/jobs")[ATTACKER] == 0


async def test_of_whom_requests_wait_no_more_are_kept_than_come_within_his_own_limit(open_site: OpenSite) -> None:
    """Though it counts what waits only when it is served."""
    async with open_site() as site:
        answers = await site.post(BOB, 8)
        assert [answer.status for answer in answers] == [200, 200, 202, 202, 202, 429, 429, 429]
        ends = [await site.await_end(answer, 5.0) for answer in answers[2:5]]
        assert ends == ["done"] * 3
        assert [(who, path) for who, path, *_ in site.served] == [(BOB, "/jobs")] * 5
        assert await site.count(BOB, 1, "/other") == [429], "each has been counted"
        carol = await site.post(CAROL, 2)
        assert [await site.await_end(answer) for answer in carol if answer.status == 202] in (
            ["done"],
            ["done"] * 2,
            [],
        )


async def test_what_is_served_of_what_waits_is_counted_once(open_site: OpenSite) -> None:
    async with open_site() as site:
        answers = await site.post(BOB, 4)
        assert [answer.status for answer in answers] == [200, 200, 202, 202]
        assert [await site.await_end(answer, 5.0) for answer in answers[2:]] == ["done"] * 2
        assert await site.count(BOB, 2, "/other") == [200, 429]


async def test_who_uses_up_another_limit_while_he_waits_lets_others_pass(open_site: OpenSite) -> None:
    own = "{unit: minute, unit_multiplier: 1, requests_per_unit: 20, algorithm: gcra, burst: 3}"  # one in 3 seconds
    async with open_site(own) as site:
        assert await site.count(BOB, 2) == [200, 200]
        first = await site.post(ATTACKER, 2)
        assert [answer.status for answer in first] == [202, 202]
        used_up = await site.count(ATTACKER, 4, "/other")
        assert used_up[-1] == 429
        carol = await site.post(CAROL, 2)
        assert [answer.status for answer in carol] == [202, 202]
        began = time.monotonic()
        assert [await site.await_end(answer) for answer in carol] == ["done", "done"]
        assert time.monotonic() - began < 2.5
        assert "waiting" in [await site.find_state(answer) for answer in first]
        assert [await site.await_end(answer) for answer in first] == ["done", "done"], "it is only later"
        times = [at for who, path, _, at in site.served if (who, path) == (ATTACKER, "/jobs")]
        assert times == sorted(times)
        assert times[1] - times[0] > 2.5, "at his own rate"


async def test_who_stands_aside_has_nobody_wait_who_comes_later(open_site: OpenSite) -> None:
    """Else one request would have all others kept for as long as its own limit lasts, and served one by one."""
    async with open_site() as site:
        assert await site.count(BOB, 2) == [200, 200]
        mine = (await site.post(ATTACKER))[0]
        assert mine.status == 202
        assert await site.count(ATTACKER, 6, "/other") == [200] * 5 + [429]
        await asyncio.sleep(1.5)
        for who in (CAROL, DAN, BOB):
            assert await site.count(who) == [200]
            await asyncio.sleep(0.4)
        assert await site.count(ATTACKER) == [429]
        assert await site.find_state(mine) == "waiting"


async def test_those_of_one_client_stay_in_order_while_others_pass(open_site: OpenSite) -> None:
    own = "{unit: second, requests_per_unit: 1, algorithm: gcra, burst: 6}"
    async with open_site(own) as site:
        await site.post(BOB, 2)
        mine = [(await site.post(ATTACKER, body=b"%d" % number))[0] for number in range(5)]
        assert [answer.status for answer in mine] == [202] * 5
        await site.count(ATTACKER, 7, "/other")
        carol = await site.post(CAROL, 3)
        assert [await site.await_end(answer) for answer in [*carol, *mine]] == ["done"] * 8
        order = [body for who, path, body, _ in site.served if (who, path) == (ATTACKER, "/jobs")]
        last_of_carol = max(at for who, *_, at in site.served if who == CAROL)
    assert order == [b"%d" % number for number in range(5)]
    assert last_of_carol < site.served[-1][-1]


async def test_nobody_is_served_beyond_his_own_limit_by_what_he_has_had_kept(open_site: OpenSite) -> None:
    own = "{unit: second, requests_per_unit: 2, algorithm: sliding_window_log}"
    async with open_site(own) as site:
        await site.post(BOB, 2)
        kept = 0
        began = time.monotonic()
        while time.monotonic() - began < 3.0:
            for path in ("/jobs", "/other"):
                kept += (await site.count(ATTACKER, 1, path)).count(202)
            await asyncio.sleep(0.05)
        while await site.backlog.is_waiting("app|path=/jobs|"):
            await asyncio.sleep(0.05)
    times = sorted(at for who, *_, at in site.served if who == ATTACKER)
    assert 0 < kept <= 8
    for first, third in zip(times, times[2:], strict=False):
        assert third - first > 0.9, times


async def test_a_heavy_request_stands_aside_as_well(open_site: OpenSite) -> None:
    own = "{unit: second, requests_per_unit: 1, algorithm: gcra, burst: 4}"
    async with open_site(own, hits=lambda scope: 3 if scope["path"] == "/other" else 2) as site:
        assert await site.count(BOB) == [200]
        mine = (await site.post(ATTACKER))[0]
        assert mine.status == 202
        assert await site.count(ATTACKER, 2, "/other") == [200, 429]
        carol = (await site.post(CAROL))[0]
        assert [await site.await_end(answer) for answer in (carol, mine)] == ["done", "done"]
    assert [who for who, path, *_ in site.served if path == "/jobs"] == [BOB, CAROL, ATTACKER]


async def test_a_leaky_bucket_of_ones_own_holds_up_nobody_else(open_site: OpenSite) -> None:
    own = "{unit: minute, requests_per_unit: 20, algorithm: leaky_bucket, burst: 9}"
    async with open_site(own) as site:
        await asyncio.gather(site.post(BOB), site.post(DAN))
        mine = (await site.post(ATTACKER))[0]
        elsewhere = asyncio.create_task(site.post(ATTACKER, path="/other"))
        waiting = asyncio.create_task(site.post(ATTACKER, path="/other"))
        await asyncio.sleep(0.01)
        carol = (await site.post(CAROL))[0]
        assert (mine.status, carol.status) == (202, 202)
        began = time.monotonic()
        assert await site.await_end(carol) == "done"
        assert time.monotonic() - began < 2.5
        assert await site.await_end(mine) == "done"
        await asyncio.gather(elsewhere, waiting)


async def test_a_limit_that_logs_refusals_counts_what_waits_once(tmp_path: Path) -> None:
    limits = JOBS.replace("gcra, burst: 2", "sliding_window_log").replace("- key: remote_address\n", "")
    (tmp_path / "limits.yaml").write_text(limits)
    backlog = SqliteBacklog(tmp_path / "deferred.db")
    served = list[float]()

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        served.append(time.monotonic())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    deferral = Deferral(backlog)
    app = RateLimit(serve, limits=tmp_path / "limits.yaml", domain="app", deferral=deferral)
    began = time.monotonic()
    answers = [await ask(app, "/jobs", method="POST") for _ in range(12)]
    assert [answer.status for answer in answers] == [200] * 4 + [202] * 8
    async with asyncio.timeout(10):
        while len(served) < 12:
            await asyncio.sleep(0.02)
    assert 1.9 < served[-1] - began < 3.0
    await deferral.stop()


async def test_a_shared_line_is_filled_by_no_network(open_site: OpenSite) -> None:
    async with open_site("{unit: day, requests_per_unit: 1000}", Bounds(most_of_one=16)) as site:
        await site.post(BOB, 2)
        kept = Counter(status for status in await site.count(ATTACKER, 20))
        served = sum(who == ATTACKER for who, *_ in site.served)
        assert kept[202] <= 8 + served, "some may have been served meanwhile"
        assert await site.count(CAROL) == [202]


async def test_nor_by_who_asks_very_often_at_once(open_site: OpenSite, request: pytest.FixtureRequest) -> None:
    """Redis may count some of what asks it at the same time in part: for these he waits, and nobody else does."""
    in_part = "redis" in request.node.name
    async with open_site() as site:
        await site.post(BOB, 2)
        answers = [each[0] for each in await asyncio.gather(*(site.post(ATTACKER) for _ in range(60)))]
        assert Counter(answer.status for answer in answers)[429] >= 55
        ends = [await site.await_end(answer, 5.0) for answer in answers if answer.status == 202]
        assert set(ends) <= {"done", "waiting" if in_part else "done"}
        carol = (await site.post(CAROL))[0]
        assert carol.status == 200 or await site.await_end(carol) == "done"
    assert Counter(who for who, *_ in site.served)[ATTACKER] <= 5


async def test_many_who_stand_aside_keep_nobody_waiting(open_site: OpenSite) -> None:
    """Though each of them tries again and again."""
    crowd = [f"192.0.{network}.1" for network in range(100, 160)]
    async with open_site("{unit: second, unit_multiplier: 3, requests_per_unit: 1, algorithm: gcra, burst: 2}") as site:
        await site.post(BOB, 2)
        kept = [(await site.post(who))[0] for who in crowd]
        assert {answer.status for answer in kept} == {202}
        ending = asyncio.get_running_loop().time() + 12

        async def use_up() -> None:
            while asyncio.get_running_loop().time() < ending:
                for who in crowd:
                    await site.post(who, path="/other")
                await asyncio.sleep(0.2)

        using = asyncio.create_task(use_up())
        await asyncio.sleep(6)
        carol = (await site.post(CAROL))[0]
        began = time.monotonic()
        assert carol.status == 200 or await site.await_end(carol) == "done"
        assert time.monotonic() - began < 4
        await using


async def test_a_limit_of_ones_own_that_defers_too(open_site: OpenSite) -> None:
    """All that is kept is served, each client's in order, none beyond either limit, and none waits for another's."""
    own = "{unit: second, requests_per_unit: 1, algorithm: gcra}\n  on_limit: defer"
    async with open_site(own) as site:
        mine = [(await site.post(ATTACKER, body=b"%d" % number))[0] for number in range(5)]
        carol = (await site.post(CAROL))[0]
        assert carol.status == 200 or await site.await_end(carol, 2.0) == "done"
        assert [await site.await_end(answer) for answer in mine if answer.status == 202] == ["done"] * 4
    jobs = [(body, at) for who, _, body, at in site.served if who == ATTACKER]
    assert [body for body, _ in jobs] == [b"%d" % number for number in range(5)]
    assert all(later - earlier > 0.8 for (_, earlier), (_, later) in itertools.pairwise(jobs))


@pytest.mark.parametrize("bounds", [{"most_of_one": 16}, {"most_bytes_of_one": 170_000}], ids=["requests", "bytes"])
async def test_each_network_leaves_room_in_a_line_that_is_shared(
    open_backlog: OpenBacklog, bounds: dict[str, int]
) -> None:
    backlog = open_backlog(**bounds)

    async def fill(network: int, key: str = "path", shared: bool = True) -> int:
        for number in range(20):
            client = f"192.0.{network}.{number} 80"
            try:
                await backlog.put(make_request(key, body=b"x" * 10_000, client=client, shared=shared))
            except BacklogFull:
                return number
        return 20

    assert [await fill(network) for network in range(3)] == [8, 4, 2]
    assert await fill(9, "alice", shared=False) in (15, 16), "her own line is hers"
    while (claim := await backlog.claim(time.time())) is not None:
        await backlog.finish(claim.request, State.DONE, time.time(), None, "")
    assert await fill(7) == 8, "what has ended takes up nothing"


class TestStandingAside:
    async def test_others_pass_and_he_has_his_place_again(self, open_backlog: OpenBacklog) -> None:
        backlog = open_backlog()
        first, second, third = (make_request(target=f"/{other}", others=other) for other in "abc")
        for each in (first, second, third):
            await backlog.put(each)
        now = time.time()
        assert await backlog.claim(now) == (first, 1)
        await backlog.postpone(first, now + 5, tried=False, aside=True)
        assert await backlog.claim(now) == (second, 1)
        assert await backlog.claim(now + 6) is None, "one of a line is tried at a time"
        await backlog.postpone(second, now + 7, tried=False)
        assert await backlog.claim(now + 6) is None, "the line waits for its own limit"
        assert await backlog.claim(now + 7) == (first, 1), "in his old place"
        await backlog.finish(first, State.DONE, now, None, "")
        assert await backlog.claim(now + 7) == (second, 1)

    async def test_those_under_the_same_other_limits_wait_for_him(self, open_backlog: OpenBacklog) -> None:
        backlog = open_backlog()
        first, same, other = (make_request(target=f"/{n}", others=who) for n, who in enumerate("aab"))
        for each in (first, same, other):
            await backlog.put(each)
        now = time.time()
        assert await backlog.claim(now) == (first, 1)
        await backlog.postpone(first, now + 5, tried=False, aside=True)
        claim = await backlog.claim(now)
        assert claim == (other, 1)
        await backlog.finish(other, State.DONE, now, None, "")
        assert await backlog.claim(now + 4) is None
        assert await backlog.claim(now + 5) == (first, 1)

    async def test_he_has_none_wait_but_those_under_the_same_other_limits(self, open_backlog: OpenBacklog) -> None:
        backlog, asking = open_backlog(), open_backlog()  # those who come are others' business in Redis
        first, behind, other = (make_request(target=f"/{n}", others=who) for n, who in enumerate("aab"))
        now = backlog.now()
        for each in (first, behind):
            await backlog.put(each)
        assert [await asking.comes_behind("alice", who) for who in "abc"] == [True, True, True]
        assert await backlog.claim(now) == (first, 1)
        await backlog.postpone(first, now + 3, tried=False, aside=True)
        assert [await asking.comes_behind("alice", who) for who in "abc"] == [True, False, False]
        assert not await asking.comes_behind("bob", "a")
        await backlog.put(other)
        assert [await asking.comes_behind("alice", who) for who in "abc"] == [True, True, True]
        assert await backlog.claim(now) == (other, 1)
        await backlog.finish(other, State.DONE, now, None, "")
        assert [await asking.comes_behind("alice", who) for who in "abc"] == [True, False, False]
        await asyncio.sleep(max(0.0, now + 3.1 - asking.now()))
        assert [await asking.comes_behind("alice", who) for who in "abc"] == [True, True, True], "his turn has come"
        for each in (first, behind):
            assert await backlog.claim(now + 4) == (each, 1)
            await backlog.finish(each, State.DONE, now, None, "")
        assert [await asking.comes_behind("alice", who) for who in "abc"] == [False, False, False]

    async def test_who_has_not_stood_aside_closes_the_line(self, open_backlog: OpenBacklog) -> None:
        backlog = open_backlog()
        first, second = (make_request(target=f"/{other}", others=other) for other in "ab")
        await backlog.put(first)
        await backlog.put(second)
        now = time.time()
        assert await backlog.claim(now) == (first, 1)
        await backlog.postpone(first, now + 5, tried=False)
        assert await backlog.claim(now + 4) is None

    async def test_who_stands_aside_is_not_lost_with_his_worker(self, open_backlog: OpenBacklog) -> None:
        one, other = open_backlog(), open_backlog()
        request = make_request(others="a")
        await one.put(request)
        now = time.time()
        assert await one.claim(now) == (request, 1)
        await one.postpone(request, now + 5, tried=False, aside=True)
        await one.sweep(now)  # all is read anew
        assert await one.claim(now + 4) is None
        if isinstance(one, RedisBacklog):
            await one.aclose()
        assert await other.claim(now + 6) == (request, 1)


@pytest.mark.parametrize(
    ("name", "shared"),
    [
        ("path=/jobs", True), ("path", True), ("host,path", True), ("path=/a\\,b", True), ("path=/a\\=b,method", True),
        ("tenant=blue", True), ("remote_address", False), ("path=/jobs,remote_address", False), ("user", False),
        ("api_key,path", False), ("remote_address=10.*", True),
    ],
)  # fmt: skip
def test_whose_lines_are_shared(name: str, shared: bool) -> None:
    rule = Rule("app", name, Limit(1, 1), on_limit=OnLimit.DEFER)
    (line,) = find_lines([None, Match(rule, "key"), Match(Rule("app", "other", Limit(1, 1)), "x")])
    assert line.shared == shared
