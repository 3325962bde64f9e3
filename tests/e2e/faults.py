"""Faults, one after the other, while traffic passes: what it met meanwhile, and how long until all was right."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from netlimit.errors import StoreError
from netlimit.rules import parse_rule
from netlimit.tree import format_classid
from scripts.testbed import streams
from scripts.testbed.namespaces import SERVER, Lab
from scripts.testbed.reports import ReceiveReport
from tests.e2e.gateway import HOST, Gateway
from tests.e2e.loads import MEGABIT, offer

LIMITED, FREE, ALLOWED, BLOCKED, SHAPED = "10.1.80.1", "10.1.82.1", "10.1.81.1", "10.1.81.9", "10.1.83.1"
RULES: list[dict[str, object]] = [
    {"target": "10.1.80.0/24", "rate": "100 packets/s", "per": "host"},
    {"target": "10.1.81.0/24", "action": "block"},
    {"target": ALLOWED, "action": "allow"},
    {"target": SHAPED, "rate": "1 Mbit/s", "action": "shape", "per": "host"},
]
FLOOD, TRICKLE = 1500, 600
"""Packets a second: of the flood from LIMITED, and of all others together."""
NEVER = 1e9
LONGEST = 300.0
"""Seconds after which the traffic ends in any case."""


@dataclass
class World:
    """A gateway with rules of netlimit's and of others, and traffic through it."""

    lab: Lab
    gateway: Gateway
    disk: Path
    """A small disk of its own, with the database in `db`."""

    @property
    def database(self) -> Path:
        return self.disk / "db" / "netlimit.db"

    def run(self, line: str, text: str | None = None) -> None:
        """A command in the gateway."""
        self.lab.gateway.run(*line.split(), input=text)

    def repairs(self) -> int:
        """How often its controller has repaired something; it begins at nought when it starts."""
        return next((status.drift for status in self.gateway.store.hosts() if status.host == HOST), 0)

    def meddle(self, *lines: str) -> None:
        """Somebody runs commands; wait until what they did is repaired."""
        before = self.repairs()
        for line in lines:
            self.run(line)
        self.gateway.wait(lambda: self.repairs() > before, f"{lines} to be repaired")

    def restart(self, *command: str) -> None:
        """Start the controller again; wait until it has seen to everything."""
        self.gateway.start(*command)

    def alone(self) -> None:
        """Wait until the controller says that it goes on without its database."""
        self.gateway.wait(lambda: "Going on without it" in self._said(), "the controller to be alone")

    def back(self) -> None:
        """Wait until it has its database again."""
        self.gateway.wait(lambda: "The database answers again" in self._said(), "the database to be back")

    def hide(self) -> None:
        """Take the database away; the controller's own copy of the rules stays."""
        self.gateway.store.close()
        (self.disk / "away").mkdir()
        for file in self.database.parent.glob("netlimit.db*"):
            file.rename(self.disk / "away" / file.name)

    def show(self) -> None:
        """Bring it back."""
        for file in (self.disk / "away").iterdir():
            file.rename(self.database.parent / file.name)
        (self.disk / "away").rmdir()

    def mend(self) -> None:
        """Somebody flushes a chain; wait until that is put right."""
        self.run("iptables-legacy -t mangle -F NL-FORWARD")
        self.gateway.wait(lambda: "-A" in self.lab.gateway.run(*CHAIN).stdout, "the chain to be repaired")

    def forget(self) -> None:
        """What the log says is of a former fault."""
        self._read = len(self.gateway.log.read_text())

    def _said(self) -> str:
        return self.gateway.log.read_text()[self._read :]

    _read: int = field(default=0, init=False)


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong. `happen` returns when it is over and all is right again. `lapse`: the most seconds for
    which a limit may be missing meanwhile, by what is promised; `NEVER` where that is what the operator asked for."""

    name: str
    happen: Callable[[World], None]
    lapse: float = 0.0


@dataclass(frozen=True)
class Row:
    """What a fault did: seconds without the limit, packets of the blocked that passed, seconds in which the shaped got
    more than its rate, and the seconds until all was right."""

    fault: Fault
    lapse: float
    blocked: int
    unshaped: float
    repaired: float


@contextmanager
def small_disk(directory: Path) -> Iterator[Path]:
    """A disk of six megabytes."""
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(directory)], check=True)
    try:
        (directory / "db").mkdir()
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def suffer(world: World, faults: list[Fault]) -> tuple[list[Row], ReceiveReport, int]:
    """Let every fault happen while traffic passes. The rows, what the server received, and how many packets those sent
    that nothing limits."""
    times = []
    with (
        streams.receive(world.lab.server, limit=LONGEST) as receiver,
        streams.sending(
            world.lab.client, SERVER, rate=TRICKLE, seconds=LONGEST, sources=[FREE, ALLOWED, BLOCKED]
        ) as others,
        streams.sending(world.lab.client, SERVER, rate=FLOOD, seconds=LONGEST, sources=[LIMITED]) as flood,
        offer(world.lab.client, SERVER, SHAPED, megabits=2, seconds=LONGEST) as shaped,
    ):
        time.sleep(0.5)
        for fault in faults:
            world.forget()
            began = time.time()
            fault.happen(world)
            times.append((began, time.time()))
            time.sleep(0.3)
        sent = others.stop().packets
        flood.stop()
        shaped.stop()
    report = receiver.report()
    return [evaluate(fault, report, *span) for fault, span in zip(faults, times, strict=True)], report, sent


def evaluate(fault: Fault, report: ReceiveReport, began: float, ended: float) -> Row:
    """What happened to traffic between two Unix times."""

    def bins(source: str) -> list[tuple[float, int]]:
        found = [(report.start + number * report.bin_seconds, n) for number, n, _ in report.series.get(source, [])]
        return [(at, packets) for at, packets in found if began <= at < ended + 0.2]

    # A hundred a second are one a bin, and a new bucket holds five; without a limit fifteen come.
    lapse = sum(report.bin_seconds for _, packets in bins(LIMITED) if packets > 7)
    every = 0.2
    rates = report.rates(SHAPED, every=every, begin=began, end=began + max(every, ended - began))
    unshaped = every * sum(rate > 1.5 * MEGABIT for rate in rates)
    blocked = sum(packets for _, packets in bins(BLOCKED))
    return Row(fault, lapse, blocked, unshaped, ended - began)


def put_rules(world: World) -> None:
    """The rules of this world, in place of all others."""
    now = datetime.now(UTC)
    world.gateway.store.add([parse_rule(fields, now) for fields in RULES], "test", now)


# -- what goes wrong ------------------------------------------------------------------------------------------------

RELOADED = """*raw
COMMIT
*mangle
:OTHER - [0:0]
-A FORWARD -m set --match-set other src -j OTHER
COMMIT
*filter
-A FORWARD -p tcp -m tcp --dport 6 -j DROP
COMMIT
"""
"""What a distribution's own unit would load: the rules of others, and none of netlimit's."""


def flush_mangle(world: World) -> None:
    world.meddle("iptables-legacy -t mangle -F NL-FORWARD")


def lose_place(world: World) -> None:
    world.meddle("iptables-legacy -t mangle -I FORWARD -p udp --dport 7 -j RETURN")
    world.run("iptables-legacy -t mangle -D FORWARD -p udp --dport 7 -j RETURN")


def reload_tables(world: World) -> None:
    before = world.repairs()
    world.run("iptables-legacy-restore", RELOADED)
    world.gateway.wait(lambda: world.repairs() > before, "the reload to be repaired")


def destroy_sets(world: World) -> None:
    """ipset refuses to destroy what rules use: so the rules go first."""
    before = world.repairs()
    world.run("iptables-legacy-restore", RELOADED)
    sets = [name for name in world.lab.gateway.run("ipset", "list", "-n").stdout.split() if name.startswith("nl-")]
    for name in sets:
        subprocess.run([*world.lab.gateway.argv("ipset", "destroy", name)], check=False, capture_output=True)
    world.gateway.wait(lambda: world.repairs() > before, "the sets to be repaired")


def delete_entry(world: World) -> None:
    text = world.lab.gateway.run("ipset", "save").stdout
    name = next(line.split()[1] for line in text.splitlines() if line.startswith("add nl-") and "10.1.80.0/24" in line)
    world.meddle(f"ipset del {name} 10.1.80.0/24")


def delete_queues(world: World) -> None:
    """Not the root: what waited in it, of whomever, would be lost with it."""
    children = world.gateway.kernel.queues().trees["wan"].children
    world.meddle(f"tc qdisc del dev wan parent {format_classid(min(children.values()))}")


def kill_controller(world: World) -> None:
    world.gateway.stop(signal.SIGKILL)
    world.restart()


def kill_in_pass(world: World) -> None:
    """Killed after the first step of making everything anew."""
    world.gateway.stop(signal.SIGKILL)
    world.run("iptables-legacy-restore", RELOADED)
    world.gateway.launch("-m", "tests.e2e.mortal", "1")
    world.gateway.wait(lambda: world.gateway.dead, "the mortal controller to die")
    world.restart()


def start_second(world: World) -> None:
    done = world.gateway.attempt("controller")
    assert done.returncode == 1, done
    assert "another controller runs here already" in " ".join(done.stderr.split()), done.stderr


def lose_database(world: World) -> None:
    """Gone with the copy that the controller keeps beside it, and somebody flushes a chain meanwhile."""
    world.gateway.store.close()
    (world.disk / "db").rename(world.disk / "away")
    world.alone()
    world.mend()
    (world.disk / "away").rename(world.disk / "db")
    world.back()


def start_without_database(world: World) -> None:
    """The controller dies, and starts again while the database is gone; a chain is flushed."""
    world.gateway.stop(signal.SIGKILL)
    world.hide()
    world.gateway.launch()
    world.alone()
    world.mend()
    world.show()
    world.back()
    world.gateway.wait_until_applied()


def reboot(world: World) -> None:
    """The kernel forgets sets and tables, and the database is not there yet when the rules come back."""
    world.gateway.stop(signal.SIGKILL)
    world.hide()
    world.run("iptables-legacy-restore", RELOADED)
    world.run("ip6tables-legacy-restore", "*raw\nCOMMIT\n*mangle\nCOMMIT\n*filter\nCOMMIT\n")
    for name in world.lab.gateway.run("ipset", "list", "-n").stdout.split():
        if name.startswith("nl-"):
            world.run(f"ipset destroy {name}")
    world.gateway.do("apply", "--last")
    world.show()
    world.restart()


def fill_disk(world: World) -> None:
    """No room for the database to grow, in which somebody flushes a chain; then there is room again."""
    filler = world.disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    now, many = datetime.now(UTC), range(2, 200)
    big = [parse_rule({"target": f"10.{n}.99.0/24", "action": "block", "comment": "x" * 200}, now) for n in many]
    with pytest.raises(StoreError, match=r"[Mm]ake room"):
        world.gateway.store.add(big, "test", now)
    world.alone()
    world.mend()
    filler.unlink()
    world.back()


def damage_database(world: World) -> None:
    """The controller starts on a file full of garbage, and goes on with what was applied last."""
    world.gateway.stop()
    world.gateway.store.close()
    sound = world.database.read_bytes()
    log = world.database.with_name("netlimit.db-wal")
    assert not log.exists() or not log.stat().st_size
    world.database.write_bytes(sound[:4096] + bytes(255 - byte for byte in sound[4096:]))
    world.gateway.launch()
    world.alone()
    world.mend()
    world.gateway.stop()
    for file in world.database.parent.glob("netlimit.db*"):
        file.unlink()
    world.database.write_bytes(sound)
    world.restart()


def set_clock(world: World) -> None:
    """An hour on, and back: no rule ends by it here."""
    world.gateway.stop()
    offset = world.disk / "offset"
    offset.write_text("0")
    world.gateway.start("-m", "tests.e2e.shifted", str(offset))
    for seconds, sign in ((3600, "+3600"), (0, "-3600")):
        offset.write_text(str(seconds))
        world.gateway.wait(lambda sign=sign: f"set by {sign} s" in world._said(), "the clock to be heeded")
    world.gateway.stop()
    world.restart()


def end_while_down(world: World) -> None:
    """A ban ends while no controller runs: by the kernel's own clock."""
    now = datetime.now(UTC)
    (rule,) = world.gateway.put({"target": SHORT, "action": "block", "ttl": 6})
    world.gateway.stop(signal.SIGKILL)
    assert banned(world)
    world.gateway.wait(lambda: not banned(world), "the ban to end")
    assert datetime.now(UTC) - now < timedelta(seconds=6 + 20)
    world.restart()
    world.gateway.erase(rule)
    world.gateway.wait_until_applied()


def banned(world: World) -> bool:
    """Whether the set of what is blocked has the address."""
    text = world.lab.gateway.run("ipset", "save").stdout
    return any(line.startswith("add nl-b4-") and f" {SHORT} " in line for line in text.splitlines())


CHAIN = ("iptables-legacy", "-t", "mangle", "-S", "NL-FORWARD")
SHORT = "10.1.84.1"
FAULTS = [
    Fault("A chain is flushed", flush_mangle, 3.0),
    Fault("A rule is put before ours", lose_place),
    Fault("`iptables-restore` of a file without netlimit", reload_tables, 3.0),
    Fault("All of our sets are destroyed", destroy_sets, 3.0),
    Fault("An entry is deleted", delete_entry, 15.0),
    Fault("The queues of hosts are deleted", delete_queues),
    Fault("The controller is killed", kill_controller),
    Fault("The tables are reset, and the controller is killed while it puts them right", kill_in_pass, NEVER),
    Fault("A second controller starts", start_second),
    Fault("The database is gone for a while with the copy, and a chain is flushed meanwhile", lose_database, 3.0),
    Fault(
        "The controller is killed, starts while the database is gone, and a chain is flushed",
        start_without_database,
        3.0,
    ),
    Fault("The machine starts anew, and the database is gone (`netlimit apply --last`)", reboot, NEVER),
    Fault("The disk is full, and a chain is flushed meanwhile", fill_disk, 3.0),
    Fault("The controller starts on a damaged database, and a chain is flushed", damage_database, 3.0),
    Fault("The clock is set an hour on, and back", set_clock),
    Fault("A ban ends while no controller runs", end_while_down),
]
