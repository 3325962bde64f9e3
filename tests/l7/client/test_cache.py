"""What comes from a cache costs nothing, and is nobody else's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from hishel import AsyncRedisStorage, SqliteStorage
from redis.asyncio import Redis

from netlimit.client import AsyncTransport, BudgetExhausted, QuotaExhausted, Retry, Transport
from netlimit.client.cache import AsyncCachingTransport, CachingTransport
from tests.l7.client.script import Answer, Script
from tests.l7.redis.servers import Server

IMPATIENT = Retry(patience=1)


def keep(body: bytes = b"kept", **headers: str) -> Answer:
    """An answer to keep; the script's own Date would make it an old one."""
    return Answer(200, {"Cache-Control": "max-age=60", "Date": "", **headers}, body)


@pytest.fixture
def client(tmp_path: Path) -> httpx.Client:
    transport = Transport(budgets={"*": "1/day"}, retry=IMPATIENT)
    return httpx.Client(transport=CachingTransport(transport, SqliteStorage(database_path=tmp_path / "answers.db")))


def test_what_is_kept_costs_nothing_and_waits_for_nobody(script: Script, client: httpx.Client) -> None:
    script.play(keep(RateLimit='"default";r=0;t=3600'))
    with client:
        assert [client.get(script.url).content for _ in range(3)] == [b"kept"] * 3
        with pytest.raises(QuotaExhausted):
            client.get(f"{script.url}/other")
    assert len(script.heard) == 1


def test_so_it_is_with_tasks(script: Script, redis: Server) -> None:
    async def run() -> list[bytes]:
        transport = AsyncTransport(budgets={"*": "1/day"}, retry=IMPATIENT)
        storage = AsyncRedisStorage(client=Redis(port=redis.port))
        async with httpx.AsyncClient(transport=AsyncCachingTransport(transport, storage)) as client:
            answers = [(await client.get(script.url)).content for _ in range(3)]
            with pytest.raises(BudgetExhausted):
                await client.get(f"{script.url}/other")
            return answers

    script.play(keep())
    assert asyncio.run(run()) == [b"kept"] * 3
    assert len(script.heard) == 1


def test_what_may_not_be_kept_is_asked_for(script: Script, tmp_path: Path) -> None:
    storage = SqliteStorage(database_path=tmp_path / "answers.db")
    script.play(Answer(200, {"Cache-Control": "no-store"}, b"one"), Answer(200, {"Date": ""}, b"two"))
    with httpx.Client(transport=CachingTransport(Transport(), storage)) as client:
        assert [client.get(script.url).content for _ in range(3)] == [b"one", b"two", b""]


def test_one_accounts_answers_are_not_anothers(script: Script, tmp_path: Path) -> None:
    storage = SqliteStorage(database_path=tmp_path / "answers.db")
    script.play(keep(b"ones"), keep(b"twos"))
    with httpx.Client(transport=CachingTransport(Transport(), storage)) as client:
        for whose in ("one", "two", "one", "two"):
            answer = client.get(script.url, headers={"Authorization": f"Bearer {whose}"})
            assert answer.content == f"{whose}s".encode()
    assert len(script.heard) == 2
