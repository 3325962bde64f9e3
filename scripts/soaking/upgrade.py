"""A gateway that runs the code of another checkout is brought to this one's, again and again, while traffic passes.

The other checkout (`git worktree add`, and its own scripts/setup) has its controller in a lab's gateway, with rules of
each kind. It is ended or killed, the database brought to the newest schema, and this checkout's controller started.
Nothing that is allowed may be lost meanwhile, nobody who is blocked may pass, and no limit may be away.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from scripts.soaking.namespace import ROOT
from scripts.testbed import streams
from scripts.testbed.namespaces import SERVER, Lab
from scripts.testbed.reports import ReceiveReport, SendReport

HOST = "upgraded"
FREE, ALLOWED, BLOCKED = "10.1.82.1", "10.1.81.1", "10.1.81.9"
LIMITED, REFUSED, PORT, SHARED, BITS, SHAPED = (f"10.1.8{number}.1" for number in (3, 4, 5, 6, 7, 8))
RULES: list[dict[str, object]] = [
    {"target": "10.1.81.0/24", "action": "block"},
    {"target": ALLOWED, "action": "allow"},
    {"target": "10.1.83.0/24", "rate": "100 packets/s", "per": "host"},
    {"target": "10.1.84.0/24", "rate": "100 packets/s", "per": "host", "action": "reject"},
    {"target": PORT, "rate": "100 packets/s", "protocol": "udp", "ports": "9000-9010"},
    {"target": "10.1.86.0/24", "rate": "100 packets/s", "per": "target"},
    {"target": BITS, "rate": "200 kbit/s"},
    {"target": SHAPED, "rate": "200 kbit/s", "action": "shape"},
    {"target": "10.1.90.0/24", "rate": "20 connections", "per": "host"},
    {"target": "10.1.91.1", "direction": "to", "rate": "10 connections/s", "per": "peer"},
    {"target": "10.1.92.0/24", "rate": "10 packets/s", "per": "host", "action": "observe"},
]
CAP: dict[str, object] = {
    "target": "0.0.0.0/0",
    "direction": "to",
    "interface": "wan",
    "per": "target",
    "action": "shape",
}
"""Of all that leaves for the server."""
LIMITS = LIMITED, REFUSED, PORT, SHARED
"""Of a hundred packets a second each."""
FAST = BITS, SHAPED
SOURCES = FREE, ALLOWED, BLOCKED, *LIMITS, *FAST
"""Of 200 kbit/s each."""
OFFERED = 1000
TRICKLE = 200
"""Packets a second from each source: of those that are over, and of all others."""
STRETCH = 0.1
MOST = 100 * STRETCH + 30
"""Packets that one of LIMITS may have in a stretch: its rate, and the burst of a bucket that is new."""
PATIENCE = 60.0
KERNEL = {
    "sets": ("ipset", "save"),
    "tables4": ("iptables-legacy-save",),
    "tables6": ("ip6tables-legacy-save",),
}
RESTORE = {
    "sets": ("ipset", "restore"),
    "tables4": ("iptables-legacy-restore", "-w"),
    "tables6": ("ip6tables-legacy-restore", "-w"),
}
DATABASE = "database.sql"


@dataclass(frozen=True)
class Passage:
    """What an upgrade did to traffic: packets lost of those that nothing limits, packets passed of the blocked, and
    the seconds in which a limit was away."""

    lost: int
    blocked: int
    away: Mapping[str, float]
    seconds: float

    @property
    def clean(self) -> bool:
        """Whether nobody saw anything."""
        return not (self.lost or self.blocked or any(self.away.values()))

    def __str__(self) -> str:
        away = ", ".join(f"{source} {seconds:.1f} s" for source, seconds in self.away.items() if seconds) or "none"
        return f"{self.lost} lost, {self.blocked} of the blocked passed, limits away: {away}; {self.seconds:.1f} s"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--before", type=Path, required=True, metavar="CHECKOUT", help="the code of before, set up")
    parser.add_argument("--count", type=int, default=4, help="upgrades (default 4): ended and killed by turns")
    parser.add_argument("--cap", metavar="RATE", help="a device's cap as well, such as '50 Mbit/s'")
    parser.add_argument("--record", type=Path, metavar="DIRECTORY", help="upgrade nothing; write what is there before")


def run(options: argparse.Namespace) -> int:
    """Upgrade so often; the exit status tells whether nobody saw anything."""
    if options.record:
        record(options.before.resolve(), options.record)
        return 0
    gaps = 0
    rules = [*RULES, *([{**CAP, "rate": options.cap}] if options.cap else [])]
    for number in range(options.count):
        how = signal.SIGKILL if number % 2 else signal.SIGTERM
        passage = upgrade(options.before.resolve(), how, rules)
        print(f"{how.name}: {passage}", flush=True)
        gaps += not passage.clean
    return 1 if gaps else 0


def upgrade(before: Path, how: signal.Signals, rules: Sequence[Mapping[str, object]] = RULES) -> Passage:
    """One upgrade in a lab of its own."""
    with _former(before, rules) as (lab, directory, old), offered(lab, FAST) as traffic:

        def change() -> None:
            old.send_signal(how)
            old.wait(20)
            time.sleep(0.5)
            _bring_up(lab, directory)

        return traffic.watch(change)


def record(before: Path, directory: Path) -> None:
    """Write down what a gateway holds that runs the code of before: its database, sets and tables. Its queues are left
    out, for nothing reads them back."""
    with _former(before) as (lab, place, _):
        directory.mkdir(parents=True, exist_ok=True)
        for name, command in KERNEL.items():
            (directory / name).write_text(lab.gateway.run(*command).stdout)
        with closing(sqlite3.connect(place / "netlimit.db")) as database:
            (directory / DATABASE).write_text("\n".join(database.iterdump()) + "\n")


def upgrade_recorded(directory: Path) -> Passage:
    """One upgrade of a gateway that holds what was written down."""
    with Lab() as lab, tempfile.TemporaryDirectory() as name:
        with closing(sqlite3.connect(f"{name}/netlimit.db")) as database:
            database.executescript((directory / DATABASE).read_text())
        for part, command in RESTORE.items():
            lab.gateway.run(*command, input=(directory / part).read_text())
        lab.add_client_addresses(*SOURCES)
        with offered(lab, FAST[:1]) as traffic:
            return traffic.watch(lambda: _bring_up(lab, Path(name)))


def _bring_up(lab: Lab, directory: Path) -> None:
    _manage(ROOT, directory, "db", "upgrade")
    with _controller(lab, ROOT, directory):
        _wait_until_applied(directory, ROOT)
        time.sleep(2)


@contextmanager
def _former(
    before: Path, rules: Sequence[Mapping[str, object]] = RULES
) -> Iterator[tuple[Lab, Path, subprocess.Popen[str]]]:
    """A gateway that runs the code of before, and holds these rules."""
    with Lab() as lab, tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        lab.add_client_addresses(*SOURCES)
        _manage(before, directory, "db", "upgrade")
        _ask(before, directory, _ADD, json.dumps(rules))
        with _controller(lab, before, directory) as old:
            _wait_until_applied(directory, before)
            yield lab, directory, old


@dataclass
class Traffic:
    """Traffic through a gateway, of everybody whom the rules name, and of one whom they do not."""

    receiver: streams.Stream[ReceiveReport]
    others: streams.Stream[SendReport]
    flood: streams.Stream[SendReport]
    fast: streams.Stream[SendReport]

    def watch(self, change: Callable[[], None]) -> Passage:
        """What a change does to it."""
        time.sleep(1)
        began = time.time()
        change()
        ended = time.time()
        sent = self.others.stop().packets
        flooded = self.flood.stop().packets
        self.fast.stop()
        assert flooded > OFFERED * len(LIMITS) * (ended - began) / 2, "the flood was none"
        return judge(self.receiver.stop(), sent, began, ended)


@contextmanager
def offered(lab: Lab, fast: Sequence[str]) -> Iterator[Traffic]:
    """All of it, for a minute at most."""
    others, flood = [FREE, ALLOWED, BLOCKED], len(LIMITS) * OFFERED
    with (
        streams.receive(lab.server) as receiver,
        streams.sending(lab.client, SERVER, rate=3 * TRICKLE, seconds=PATIENCE, sources=others) as allowed,
        streams.sending(lab.client, SERVER, rate=flood, seconds=PATIENCE, sources=LIMITS) as over,
        streams.sending(lab.client, SERVER, rate=100 * len(fast), seconds=PATIENCE, size=1000, sources=fast) as large,
    ):
        yield Traffic(receiver, allowed, over, large)


def judge(report: ReceiveReport, sent: int, began: float, ended: float) -> Passage:
    """What was seen of an upgrade between two Unix times; `sent` are the packets of the three that nothing limits."""
    third = sent // 3
    lost = sum(max(0, third - report.by_source.get(source, 0)) for source in (FREE, ALLOWED)) + report.lost
    away = {}
    for source in LIMITS:
        stretches: dict[int, int] = {}
        for number, packets, _ in report.series.get(source, []):
            at = report.start + number * report.bin_seconds
            if began <= at < ended:
                stretch = int((at - began) / STRETCH)
                stretches[stretch] = stretches.get(stretch, 0) + packets
        away[source] = STRETCH * sum(packets > MOST for packets in stretches.values())
    for source in FAST:
        rates = report.rates(source, every=0.5, begin=began, end=ended)
        away[source] = 0.5 * sum(rate > 400_000 for rate in rates)
    return Passage(lost, report.by_source.get(BLOCKED, 0), away, ended - began)


_ADD = """
from datetime import UTC, datetime
import json, os, sys
from netlimit.rules import parse_rule
from netlimit.store import Store
now = datetime.now(UTC)
store = Store(os.environ["NETLIMIT_DATABASE_URL"])
store.add([parse_rule(each, now) for each in json.loads(sys.argv[1])], "soak", now)
store.close()
"""
_LOOK = f"""
import os, sys
from netlimit.store import Store
store = Store(os.environ["NETLIMIT_DATABASE_URL"])
assert not store.marked("{HOST}"), store.marked("{HOST}")
hosts = [each for each in store.hosts() if each.host == "{HOST}" and each.seen_at.timestamp() > float(sys.argv[1])]
print(sum(each.applied_revision >= store.revision() and each.last_error is None for each in hosts))
store.close()
"""


def _wait_until_applied(directory: Path, checkout: Path) -> None:
    since, end = time.time(), time.monotonic() + PATIENCE
    while _ask(checkout, directory, _LOOK, str(since)).strip() != "1":
        assert time.monotonic() < end, (directory / "log").read_text()[-2000:]


@contextmanager
def _controller(lab: Lab, checkout: Path, directory: Path) -> Iterator[subprocess.Popen[str]]:
    with (directory / "log").open("a") as log:
        process = lab.gateway.popen(
            *(_python(checkout), "-m", "netlimit.cli.main", "controller"),
            cwd=checkout,
            stdout=log,
            stderr=log,
            env=_settings(checkout, directory),
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


def _python(checkout: Path) -> str:
    return str(checkout / ".venv/bin/python")


def _settings(checkout: Path, directory: Path) -> dict[str, str]:
    return {
        **os.environ,
        "NETLIMIT_DATABASE_URL": f"sqlite:///{directory}/netlimit.db",
        "NETLIMIT_HOST": HOST,
        "PYTHONPATH": str(checkout),
    }


def _manage(checkout: Path, directory: Path, *words: str) -> None:
    command = [_python(checkout), "-m", "netlimit.cli.main", *words]
    subprocess.run(command, check=True, capture_output=True, cwd=checkout, env=_settings(checkout, directory))


def _ask(checkout: Path, directory: Path, program: str, *words: str) -> str:
    command = [_python(checkout), "-c", program, *words]
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, cwd=checkout, env=_settings(checkout, directory)
    ).stdout
