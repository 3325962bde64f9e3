"""Races for one key, with every algorithm in turn: exactly the limit must be admitted, each time.

A hundred tasks and sixteen threads race in memory; a hundred tasks and eight processes race on a Redis server of their
own, for which redis-server must be installed.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from itertools import cycle, islice

from netlimit.l7.limit import Limit
from tests.l7.racing import DAY, make_limits, race_tasks, race_threads
from tests.l7.redis import racing
from tests.l7.redis.driving import PATIENT, opened
from tests.l7.redis.servers import run_server

AMOUNT = 37
PROCESSES, TASKS = 8, 13


def add_options(parser: argparse.ArgumentParser) -> None:
    """How often."""
    parser.add_argument("--times", type=int, default=1000, help="races of each kind")


def run(options: argparse.Namespace) -> int:
    """Race. Gives the exit status."""
    times: int = options.times
    with run_server() as server:
        outcomes = [
            _race("a hundred tasks in memory", lambda: race_tasks(make_limits(AMOUNT, times))),
            _race("sixteen threads in memory", lambda: race_threads(make_limits(AMOUNT, times))),
            _race("a hundred tasks on Redis", lambda: asyncio.run(_race_on_redis(server.url, times))),
            _race("eight processes on Redis", lambda: _race_processes(server.url, times)),
        ]
    return 0 if all(outcomes) else 1


def _race(who: str, race: Callable[[], list[int]]) -> bool:
    began = time.monotonic()
    admitted = race()
    wrong = [number for number in admitted if number != AMOUNT]
    seconds = time.monotonic() - began
    print(f"{who}: {len(admitted) - len(wrong):,} of {len(admitted):,} races exact, {seconds:.0f} s", flush=True)
    if wrong:
        print(f"  {AMOUNT} was the limit; admitted were {sorted(set(wrong))}")
    return not wrong


async def _race_on_redis(url: str, times: int) -> list[int]:
    async with opened(url + PATIENT) as store:
        return [
            await racing.race_tasks(store, Limit(AMOUNT, DAY, algorithm), f"tasks{number}", 100)
            for number, algorithm in enumerate(islice(cycle(racing.ALGORITHMS), times))
        ]


def _race_processes(url: str, times: int) -> list[int]:
    with racing.Racers(url + PATIENT, PROCESSES) as racers:
        return racers.race_often(times, AMOUNT, TASKS)
