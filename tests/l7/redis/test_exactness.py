"""Whoever races for a key: exactly the limit is admitted."""

from __future__ import annotations

import asyncio
from itertools import cycle, islice

from netlimit.l7.limit import Limit
from tests.l7.redis.driving import PATIENT, opened
from tests.l7.redis.racing import ALGORITHMS, Racers, race_tasks
from tests.l7.redis.servers import Nodes, Server

TIMES = 50


def test_a_hundred_tasks(server: Server) -> None:
    assert asyncio.run(_race_tasks(server.url)) == [37] * TIMES


def test_a_hundred_tasks_on_a_cluster(nodes: Nodes) -> None:
    assert asyncio.run(_race_tasks(nodes.url)) == [37] * TIMES


async def _race_tasks(url: str) -> list[int]:
    async with opened(url + PATIENT) as store:
        return [
            await race_tasks(store, Limit(37, 86_400, algorithm), f"tasks{number}", 100)
            for number, algorithm in enumerate(islice(cycle(ALGORITHMS), TIMES))
        ]


def test_eight_processes(server: Server) -> None:
    with Racers(server.url + PATIENT, 8) as racers:
        assert racers.race_often(TIMES, 61, 13) == [61] * TIMES
