"""Races for one key by many processes and tasks: what scripts/soak repeats by the thousand, and the tests a few times.

As a program it is one of the processes: it takes part in a race for every line that it is given, and prints how many of
its tasks were admitted.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Self

from netlimit.l7.limit import Algorithm, Limit
from netlimit.l7.redis.opening import open_store
from netlimit.l7.redis.url import read_url
from netlimit.l7.rules import Rule
from netlimit.l7.store import Ask

ROOT = Path(__file__).parents[3]
ALGORITHMS = [algorithm for algorithm in Algorithm if algorithm is not Algorithm.CONCURRENCY]


async def race_tasks(store: Any, limit: Limit, name: str, tasks: int) -> int:
    """How many of so many tasks are admitted that all ask at once."""
    rule = Rule("race", name, limit)
    decisions = await asyncio.gather(*(store.decide([Ask(rule, limit, "key")]) for _ in range(tasks)))
    return sum(decision.admitted for (decision,) in decisions)


class Racers:
    """So many processes that race for one key after another in one Redis."""

    def __init__(self, url: str, processes: int) -> None:
        self._url = url
        self._processes = processes
        self._ending = ExitStack()

    def __enter__(self) -> Self:
        command = (sys.executable, "-m", __spec__.name, self._url)
        self.running = [
            self._ending.enter_context(
                subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            for _ in range(self._processes)
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running:
            process.kill()
        self._ending.close()

    def race(self, limit: Limit, name: str, tasks: int) -> int:
        """How many are admitted if so many tasks in every process ask at once."""
        self.start(limit, name, tasks)
        return sum(int(process.stdout.readline()) for process in self.running if process.stdout)

    def start(self, limit: Limit, name: str, tasks: int) -> None:
        """Start a race and do not wait for its end."""
        line = json.dumps([limit.amount, limit.seconds, limit.algorithm, name, tasks])
        for process in self.running:
            assert process.stdin
            print(line, file=process.stdin, flush=True)

    def race_often(self, times: int, amount: int, tasks: int) -> list[int]:
        """What was admitted in each of so many races for so much a day, by all algorithms in turn."""
        algorithms = islice(cycle(ALGORITHMS), times)
        return [
            self.race(Limit(amount, 86_400, algorithm), f"race{number}", tasks)
            for number, algorithm in enumerate(algorithms)
        ]


def main() -> None:
    with asyncio.Runner() as runner:
        store = open_store(read_url(sys.argv[1]))
        for line in sys.stdin:
            amount, seconds, algorithm, name, tasks = json.loads(line)
            limit = Limit(amount, seconds, Algorithm(algorithm))
            print(runner.run(race_tasks(store, limit, name, tasks)), flush=True)


if __name__ == "__main__":
    main()
