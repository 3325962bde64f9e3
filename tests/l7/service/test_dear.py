"""Questions that are dear to answer keep nobody else from his answer."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import Awaitable, Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from netlimit.cli.daemons import stay_prompt
from netlimit.l7.document import parse_document
from netlimit.l7.limiter import Limiter
from netlimit.l7.listening import Message
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.rules import Descriptor, Entry, RuleSet
from netlimit.l7.service.answers import Answer
from netlimit.l7.service.application import Service
from netlimit.l7.service.pieces import PIECE, in_pieces
from netlimit.shared import Shared

NUMBER = 5 * PIECE
RULES = "domain: web\ndescriptors:\n" + "".join(
    f"- key: key{number}\n  detailed_metric: true\n  rate_limit: {{unit: day, requests_per_unit: 2}}\n"
    for number in range(NUMBER)
)


async def silence() -> Message:
    """Of a client that waits for its answer."""
    await asyncio.sleep(3600)
    return {"type": "http.disconnect"}


class Fields(list[tuple[bytes, bytes]]):
    """Header fields that know how often they have been looked through."""

    looks = 0

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        self.looks += 1
        return super().__iter__()


class Desk:
    """A service without sockets, each of whose rules has been asked for."""

    def __init__(self, rules: RuleSet | None = None) -> None:
        document = parse_document(RULES)
        rules = rules or RuleSet({document.domain: document.root})
        self.limiter = Limiter(lambda: rules, MemoryStore())
        self.service = Service(self.limiter, lambda: rules)

    async def use(self, numbers: range = range(NUMBER)) -> None:
        for number in numbers:
            await self.limiter.decide("web", [Descriptor((Entry(f"key{number}", "value"),))])

    async def ask(self, path: str, query: str = "", fields: list[tuple[bytes, bytes]] | None = None) -> Answer:
        return await self.service.answer(
            {
                "type": "http",
                "client": ("127.0.0.1", 4000),
                "method": "GET",
                "path": path,
                "query_string": query.encode(),
                "headers": fields or [],
            },
            silence,
        )

    async def count_answers(self, dear: Awaitable[Answer]) -> int:
        """How many questions of proxies are answered, one after the other, before a dear one is."""
        answer = asyncio.ensure_future(dear)
        number = 0
        while not answer.done():
            assert (await self.ask("/v1/auth", "domain=web&key=key0=value")).status in (200, 403)
            await asyncio.sleep(0)
            number += 1
        assert answer.result().status == 200
        return number


@pytest.mark.parametrize("path", ["/metrics", "/v1/report"])
def test_proxies_are_answered_between_the_pieces(path: str) -> None:
    async def run() -> int:
        desk = Desk()
        await desk.use()
        return await desk.count_answers(desk.ask(path))

    assert asyncio.run(run()) >= NUMBER // PIECE


def test_pieces_are_all_of_it_and_each_family_stands_once() -> None:
    async def run() -> tuple[str, list[dict[str, str]]]:
        desk = Desk()
        await desk.use()
        return (await desk.ask("/metrics")).body.decode(), json.loads((await desk.ask("/v1/report")).body)["limits"]

    text, limits = asyncio.run(run())
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families) == text.count("# TYPE") == text.count("# HELP")
    numbers = {family.name: len(family.samples) for family in families}
    hits = {
        f"netlimit_limiter_{name}": number * NUMBER for name, number in (("hits", 3), ("value_hits", 2), ("keys", 2))
    }
    assert hits.items() <= numbers.items()
    names = [each["rule"] for each in limits]
    assert names == sorted(f"key{number}" for number in range(NUMBER))


def test_what_comes_while_metrics_are_written_is_in_those_that_are_asked_for_later() -> None:
    async def run() -> tuple[bytes, bytes]:
        desk = Desk()
        await desk.use(range(NUMBER - 1))
        first = asyncio.create_task(desk.ask("/metrics"))
        for _ in range(3):
            await asyncio.sleep(0)
        await desk.use(range(NUMBER - 1, NUMBER))
        second = await desk.ask("/metrics")
        return (await first).body, second.body

    first, second = asyncio.run(run())
    last = b'value_hits_total{domain="web",limit="rate",outcome="admitted",rule="key%d"' % (NUMBER - 1)
    assert last not in first
    assert last in second


def test_it_is_made_once_for_all_who_ask_meanwhile_and_once_at_a_time() -> None:
    under_way, most, made = 0, 0, 0

    async def make() -> int:
        nonlocal under_way, most, made
        under_way += 1
        most = max(most, under_way)
        async for _ in in_pieces(range(3 * PIECE)):
            pass
        under_way -= 1
        made += 1
        return made

    async def run() -> list[int]:
        shared = Shared(make)
        asked = []
        for _ in range(3):
            asked += [asyncio.create_task(shared.find()) for _ in range(10)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        asked[0].cancel()  # who goes takes it from nobody
        return list(await asyncio.gather(*asked[1:]))

    assert asyncio.run(run()) == [1] * 9 + [2] * 20
    assert (most, made) == (1, 2)


@pytest.mark.parametrize(
    ("keys", "fields"),
    [
        (["host"], [(b"x-forwarded-host", b"www.example")]),
        (["host", "method=GET,host"], [(b"x-forwarded-host", b"www.example")]),
        (["header:host", "header:Host", "header:HOST,k=1"], [(b"host", b"www.example")]),
        (["path,host"], [(b"x-forwarded-host", b"www.example"), (b"x-forwarded-uri", b"/a/../b")]),
        (["header:user"], []),
    ],
)
def test_what_many_keys_tell_of_a_request_is_found_once(keys: list[str], fields: list[tuple[bytes, bytes]]) -> None:
    async def count_looks(keys: list[str]) -> int:
        seen = Fields(fields)
        answer = await Desk().ask("/v1/auth", "&".join(["domain=web", *(f"key={key}" for key in keys)]), seen)
        assert answer.status == 200
        return seen.looks

    async def run() -> None:
        assert await count_looks(30 * keys) <= await count_looks(keys[:1])

    asyncio.run(run())


def test_repeated_keys_count_each_time_and_of_every_reading() -> None:
    async def run() -> list[int]:
        document = parse_document(
            "domain: web\ndescriptors:\n- key: path\n  rate_limit: {unit: day, requests_per_unit: 5}\n"
        )
        desk = Desk(RuleSet({document.domain: document.root}))
        query = "domain=web&key=path&key=path&hits=2"
        asked = [(b"x-forwarded-uri", b"/a/../b")], [(b"x-forwarded-uri", b"/b")], [(b"x-forwarded-uri", b"/a/../c")]
        return [(await desk.ask("/v1/auth", query, fields)).status for fields in asked]

    assert asyncio.run(run()) == [200, 403, 200]


@pytest.fixture
def prompt() -> Iterator[None]:
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    gc.collect()
    stay_prompt()
    yield
    gc.set_threshold(*threshold)
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("prompt")
def test_to_read_many_rules_looks_for_garbage_among_few_objects_at_a_time() -> None:
    looked: list[int] = []

    def count(phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            looked.append(sum(len(gc.get_objects(generation)) for generation in range(about["generation"] + 1)))

    rules = "".join(
        f"- {{key: user, value: u{number}, rate_limit: {{unit: day, requests_per_unit: 3}}}}\n"
        for number in range(3000)
    )
    gc.callbacks.append(count)
    try:
        parse_document(f"domain: web\ndescriptors:\n{rules}")
    finally:
        gc.callbacks.remove(count)
    assert looked
    assert max(looked) <= 25_000
    assert sys.getswitchinterval() < 0.001
