"""The decision service: how much of what the same server can do at most is left, over HTTP and gRPC.

What counts is how many answers a server gives in a second of its CPU: that is what one worker does when nothing else is
in its way, and it is the same on a busy machine. Answers in a second by the clock are told beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import httpx

from scripts.benchmarks.figures import Figure
from scripts.benchmarks.limiter.load import QUESTIONS, RPC, SLOW
from tests.cli.running import Netlimit, settings_in, until
from tests.ports import free_port

ROOT = Path(__file__).parents[3]
RULES = "domain: bench\ndescriptors:\n  - key: user\n    rate_limit: {unit: minute, requests_per_unit: 1000000}\n"
PART = 0.6
ROUNDS, SECONDS = 7, 1.0
_TICK = os.sysconf("SC_CLK_TCK")


class Target(NamedTuple):
    """A server: its process, and where it is."""

    process: int
    http: str
    grpc: str


class Rates(NamedTuple):
    """Answers of a server, by second of its CPU and by second of the clock."""

    by_cpu: float
    by_clock: float


def measure() -> list[Figure]:
    """The limiter as it is started, one worker; and the bare server. They are asked in turns, by another process."""
    with _limiter() as ours, _program("bare") as bare, _program("load") as load:
        assert bare.stdout is not None
        http, grpc = bare.stdout.readline().split()
        least = Target(bare.pid, http, grpc)
        return [_compare(load, what, ours, least) for what in (*QUESTIONS, RPC)]


@contextmanager
def _limiter() -> Iterator[Target]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)  # root becomes somebody else
        (directory / "rules.yaml").write_text(RULES)
        place, grpc_place = (f"127.0.0.1:{free_port()}" for _ in range(2))
        settings = settings_in(
            directory,
            NETLIMIT_LIMITS=str(directory / "rules.yaml"),
            NETLIMIT_LIMITER_LISTEN=place,
            NETLIMIT_LIMITER_GRPC_LISTEN=grpc_place,
        )
        netlimit = Netlimit(settings)
        netlimit.make_database()
        server = netlimit.start("limiter", *(("--user", "nobody") if os.geteuid() == 0 else ()))
        try:
            until(lambda: server.ended or _is_ready(place), server.said)
            assert not server.ended, server.said()
            yield Target(server.process.pid, place, grpc_place)
        finally:
            server.end()


def _is_ready(place: str) -> bool:
    try:
        return httpx.get(f"http://{place}/readyz", trust_env=False).is_success
    except httpx.TransportError:
        return False


@contextmanager
def _program(name: str) -> Iterator[subprocess.Popen[str]]:
    """One of the programs beside this one."""
    command = (sys.executable, "-c", f"from {__package__}.{name} import main; main()")
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _compare(load: subprocess.Popen[str], what: str, ours: Target, bare: Target) -> Figure:
    found: dict[Target, list[Rates]] = {ours: [], bare: []}
    for turn in range(-1, ROUNDS):
        for target, rates in found.items():
            measured = _ask(load, what, target)
            if turn >= 0:
                rates.append(measured)
    (our_cpu, our_clock), (bare_cpu, bare_clock) = (
        (median(each.by_cpu for each in rates), median(each.by_clock for each in rates)) for rates in found.values()
    )
    part = our_cpu / bare_cpu
    value = f"{our_cpu:,.0f} answers a CPU second of {bare_cpu:,.0f}: {100 * part:.0f} %"
    value += f"\n{our_clock:,.0f} a second of {bare_clock:,.0f}: {100 * our_clock / bare_clock:.0f} %"
    least = "an empty handler" if what == RPC else "a bare hello"
    if what == SLOW:
        return Figure(what, value)
    return Figure(what, value, f"{100 * PART:.0f} % of {least}", part >= PART)


def _ask(load: subprocess.Popen[str], what: str, target: Target) -> Rates:
    assert load.stdin is not None
    assert load.stdout is not None
    before = _read_cpu(target.process)
    print(json.dumps([what, target.grpc if what == RPC else target.http, SECONDS]), file=load.stdin, flush=True)
    answers, seconds = json.loads(load.stdout.readline())
    return Rates(answers / (_read_cpu(target.process) - before), answers / seconds)


def _read_cpu(process: int) -> float:
    """Seconds of CPU that a process has used, in all its threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK
