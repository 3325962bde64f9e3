"""Random sequences of changes and faults over a real kernel; at the end of each all must be exactly as desired.

Hypothesis makes the sequences (a rule-based state machine) in a network namespace of their own: changes of rules that
limit and that shape, returns to former revisions, windows of confirmation, and in between passes that break off at any
step, controllers that are killed, a database that is gone for a while, a clock that is set, devices that go and come,
and whatever other programs do to sets, chains and queues. Run it as root, with the packages of scripts/setup.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import socket
import struct
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import ClassVar

from hypothesis import HealthCheck, Phase, note, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from netlimit import controller as control
from netlimit import drift, outage
from netlimit.errors import KernelError, NetlimitError
from netlimit.kernel import ipset
from netlimit.kernel.base import HostFacts, observe
from netlimit.kernel.linux import LinuxKernel
from netlimit.plan import Step
from netlimit.records import Exceptional, State
from netlimit.rules import OnFailure, Rule, parse_rule
from netlimit.state import TABLES
from netlimit.store import Replica, Store, open_replica
from scripts.soaking.namespace import do, run_inside
from tests.unit.strategies import SAFE, rules

HOST = "soak"
WORK = 4
"""Turns of the controller's loop between two looks at whether all is as desired."""
MOST_LOOKS = 60
PROGRAMS = ["iptables-legacy", "iptables-legacy", "ip6tables-legacy"]
PLACES = [(table, hook) for table in ("raw", "mangle") for hook in ("PREROUTING", "FORWARD", "OUTPUT", "INPUT")]
SHAPES: tuple[dict[str, object], ...] = (
    {"target": "10.1.0.0/16", "direction": "to", "per": "target", "rate": "10 Mbit/s"},
    {"target": "10.1.0.0/24", "direction": "to", "per": "target", "rate": "20 Mbit/s", "ceil": "30 Mbit/s"},
    {"target": "10.1.0.0/16", "direction": "to", "per": "host", "rate": "1 Mbit/s"},
    {"target": "10.1.0.2", "direction": "to", "rate": "2 Mbit/s"},
    {"target": "10.1.0.3", "rate": "3 Mbit/s"},
    {"target": "10.1.0.1", "direction": "to", "rate": "4 Mbit/s"},
    {"target": "fd00:1::2", "direction": "to", "rate": "5 Mbit/s"},
    {"target": "0.0.0.0/0", "per": "target", "rate": "50 Mbit/s", "interface": "lan"},
    {"target": "0.0.0.0/0", "per": "target", "rate": "60 Mbit/s", "interface": "wan"},
)
NETWORK = (
    "link add lan type veth peer name far",
    "addr add 10.1.0.1/16 dev lan",
    "addr add fd00:1::1/64 dev lan nodad",
    "link set lan up",
    "link set far up",
)
UPLINK = (
    "link add wan type veth peer name internet",
    "addr add 10.2.0.1/16 dev wan",
    "link set wan up",
    "link set internet up",
    "route replace default via 10.2.0.254 dev wan",
)


class Killed(BaseException):
    """The controller was killed in the middle of a pass."""


class Clock:
    """A clock that can be set; the kernel's ends go by it too, since they are told as seconds from now."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def time(self) -> float:
        """Seconds since 1970."""
        return time.time() + self.ahead

    def __call__(self) -> datetime:
        return datetime.fromtimestamp(self.time(), UTC)


class FaultyKernel(LinuxKernel):
    """Refuses a step, or ends the controller before it, when it is told to. What the host can do is found out once."""

    failing: int | None = None
    fault: Callable[[str], BaseException] = Killed
    found: HostFacts | None = None

    def probe(self) -> HostFacts:
        """Find out what this host can do, the first time."""
        if FaultyKernel.found is None:  # shared on purpose: probing takes half a second
            FaultyKernel.found = super().probe()
        return FaultyKernel.found

    def apply(self, step: Step) -> None:
        """Take one step, or not."""
        if self.failing == 0:
            self.failing = None
            raise self.fault(str(step))
        if self.failing is not None:
            self.failing -= 1
        super().apply(step)


class Sequences(RuleBasedStateMachine):
    """One sequence: a store, a controller whose loop is turned by hand, and the world around it."""

    done: ClassVar[Counter[str]] = Counter()
    template: ClassVar[Path]

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="netlimit-soak-"))
        shutil.copy(self.template, self.database)
        self.store = Store(f"sqlite:///{self.database}")
        self.kernel, self.witness = FaultyKernel(), FaultyKernel()
        self.clock = Clock()
        ipset.time = self.clock  # type: ignore[attr-defined, assignment]  # the module's own name for it
        self.replica: Replica | None = None
        self.controller = self.start()
        self.matched: Counter[int] = Counter()
        self.window_base: int | None = None
        self.uplink: str | None = "wan"

    @property
    def database(self) -> Path:
        return self.directory / "netlimit.db"

    def start(self) -> control.Controller:
        """A new controller knows only what store, copy and kernel hold."""
        if self.replica is not None:
            self.replica.close()
        self.replica = open_replica(self.directory / "controller", HOST)
        setup = control.Setup(HOST, safe=SAFE)
        self.controller = control.Controller(self.store, self.kernel, setup, self.clock, self.replica)
        return self.controller

    def count(self, what: str) -> None:
        """Note a step."""
        self.done[what] += 1
        note(what)

    @property
    def away(self) -> bool:
        return not self.database.exists()

    def kept(self) -> list[Rule]:
        """The rules of the store, by id."""
        return [each.rule for each in self.store.select(limit=1000)[0]]

    def change(self, what: str, make: Callable[[datetime], object]) -> None:
        """Change rules; what the store refuses is no fault."""
        self.count(what)
        try:
            make(self.clock())
        except NetlimitError as error:
            note(str(error))

    # -- the world

    @initialize(
        limits=st.lists(rules(), min_size=2, max_size=8, unique_by=lambda each: each.identity),
        shapes=st.lists(st.sampled_from(SHAPES), max_size=4, unique_by=str),
    )
    def make_world(self, limits: list[Rule], shapes: list[dict[str, object]]) -> None:
        """A gateway with two devices and what is of others, where some rules are in force already."""
        for line in (*NETWORK, *UPLINK, "link add other type veth peer name another", "link set other up"):
            ip(line)
        do("tc", "qdisc", "add", "dev", "other", "root", "handle", "1:", "pfifo", "limit", "77")
        do("iptables-legacy", "-w", "-t", "mangle", "-A", "FORWARD", "-p", "udp", "--dport", "9", "-j", "ACCEPT")
        do("ipset", "create", "foreign", "hash:ip")
        do("ipset", "add", "foreign", "192.0.2.1")
        for each in (*limits, *map(as_shape, shapes)):
            self.change("begin with", lambda now, each=each: self.store.add([each], "soak", now))  # type: ignore[misc]  # mypy cannot type such a lambda
        self.turn(WORK)

    # -- changes

    @precondition(lambda self: not self.away)
    @rule(new=rules(), ttl=st.none() | st.sampled_from([2, 60, 7200]), failure=st.sampled_from(OnFailure))
    def add(self, new: Rule, ttl: int | None, failure: OnFailure) -> None:
        def keep(now: datetime) -> None:
            ends = now + timedelta(seconds=ttl) if ttl else None
            self.store.add([replace(new, expires_at=ends, on_failure=failure)], "soak", now)

        self.change("add", keep)

    @precondition(lambda self: not self.away)
    @rule(fields=st.sampled_from(SHAPES))
    def add_shape(self, fields: dict[str, object]) -> None:
        self.change(
            "add a shape", lambda now: self.store.add([parse_rule({**fields, "action": "shape"}, now)], "soak", now)
        )

    @precondition(lambda self: not self.away)
    @rule(batch=st.lists(rules(), min_size=5, max_size=12, unique_by=lambda each: each.identity))
    def add_many(self, batch: list[Rule]) -> None:
        for each in batch:
            self.change("add one of many", lambda now, each=each: self.store.add([each], "soak", now))  # type: ignore[misc]  # mypy cannot type such a lambda

    @precondition(lambda self: not self.away)
    @rule(which=st.integers(0, 50), new=rules() | st.sampled_from(SHAPES).map(lambda fields: as_shape(fields)))
    def alter(self, which: int, new: Rule) -> None:
        kept = self.kept()
        if kept:
            self.change(
                "alter", lambda now: self.store.replace(kept[which % len(kept)].id, replace(new, id=0), "soak", now)
            )

    @precondition(lambda self: not self.away)
    @rule(which=st.integers(0, 50))
    def switch(self, which: int) -> None:
        kept = self.kept()
        if kept:
            each = kept[which % len(kept)]
            self.change(
                "switch", lambda now: self.store.replace(each.id, replace(each, enabled=not each.enabled), "soak", now)
            )

    @precondition(lambda self: not self.away)
    @rule(which=st.integers(0, 50))
    def remove(self, which: int) -> None:
        kept = self.kept()
        if kept:
            self.change("remove", lambda now: self.store.remove(kept[which % len(kept)].id, "soak", now))

    @precondition(lambda self: not self.away)
    @rule(back=st.integers(1, 6))
    def roll_back(self, back: int) -> None:
        revision = max(self.store.revision() - back, 0)
        before = as_they_say([each.rule for each in self.store.rules_at(revision)])
        self.change("roll back", lambda now: self.store.rollback(revision, "soak", now))
        assert as_they_say(self.kept()) == before

    @precondition(lambda self: not self.away and self.window_base is None)
    @rule()
    def open_window(self) -> None:
        self.window_base = self.store.revision()
        self.change("open a window", lambda now: self.store.open_window(600, "soak", now, forces=True))

    @precondition(lambda self: not self.away and self.window_base is not None)
    @rule(confirmed=st.booleans())
    def end_window(self, confirmed: bool) -> None:
        base, window = self.window_base, self.store.window()
        assert base is not None
        assert window is not None
        wanted = self.kept() if confirmed else [each.rule for each in self.store.rules_at(base)]
        self.window_base = None
        if confirmed:
            self.change("confirm", lambda now: self.store.confirm("soak", now))
        else:
            self.change("let a window end", lambda now: self.store.expire(window, "soak", now))
        assert as_they_say(self.kept()) == as_they_say(wanted)

    # -- the controller

    @rule(turns=st.integers(1, 6))
    def work(self, turns: int) -> None:
        self.count("work")
        self.turn(turns)

    @rule(step=st.integers(0, 6), killed=st.booleans())
    def break_off(self, step: int, killed: bool) -> None:
        """The next pass comes to this step and no further."""
        self.count("kill in a pass" if killed else "refuse a step")
        self.kernel.failing = step
        self.kernel.fault = Killed if killed else lambda text: KernelError(text, "told to fail")

    @rule()
    def restart(self) -> None:
        self.count("restart")
        self.start()

    @rule(seconds=st.sampled_from([-86400.0, -3600.0, 5.0, 90.0, 3600.0]))
    def set_clock(self, seconds: float) -> None:
        self.count("set the clock")
        self.clock.ahead += seconds

    @precondition(lambda self: not self.away)
    @rule()
    def lose_database(self) -> None:
        self.count("lose the database")
        self.store.close()
        move(self.directory, "netlimit.db", "lost.db")

    @precondition(lambda self: self.away)
    @rule()
    def find_database(self) -> None:
        move(self.directory, "lost.db", "netlimit.db")

    # -- what others do

    @rule(
        program=st.sampled_from(["iptables-legacy", "iptables-legacy", "ip6tables-legacy"]),
        table=st.sampled_from(TABLES),
    )
    def flush_table(self, program: str, table: str) -> None:
        self.count("flush a table")
        do(program, "-w", "-t", table, "-F")

    @rule()
    def destroy_all(self) -> None:
        self.count("destroy all")
        for program in ("iptables-legacy", "ip6tables-legacy"):
            for table in TABLES:
                do(program, "-w", "-t", table, "-F")
                do(program, "-w", "-t", table, "-X")
        for name in our_sets():
            do("ipset", "destroy", name)

    @rule(which=st.integers(0, 50))
    def flush_set(self, which: int) -> None:
        names = our_sets()
        if names:
            self.count("flush a set")
            do("ipset", "flush", names[which % len(names)])

    @rule(which=st.integers(0, 50))
    def meddle(self, which: int) -> None:
        """Somebody takes an entry out of a set, and puts another in."""
        names = our_sets()
        if names:
            self.count("meddle with entries")
            name = names[which % len(names)]
            head, *lines = do("ipset", "save", name).splitlines()
            for line in lines[:1]:
                do("ipset", "del", name, line.split()[2])
            do("ipset", "add", name, "192.0.2.77" if "family inet " in head else "2001:db8::77")

    @rule(place=st.sampled_from(PLACES), ours=st.booleans())
    def take_place(self, place: tuple[str, str], ours: bool) -> None:
        """Our place in a chain of the kernel's is lost, or somebody stands before it."""
        self.count("take our place")
        table, hook = place
        program = "iptables-legacy"
        if ours:
            do(program, "-w", "-t", table, "-D", hook, "-j", f"NL-{hook}")
        else:
            do(program, "-w", "-t", table, "-I", hook, "-p", "udp", "--dport", "7", "-j", "RETURN")

    @rule(device=st.sampled_from(["lan", "wan", "nl-in"]), which=st.integers(0, 50))
    def change_class(self, device: str, which: int) -> None:
        lines = [line.split() for line in do("tc", "class", "show", "dev", device).splitlines()]
        classes = [words[2] for words in lines if words[:2] == ["class", "htb"] and words[2].startswith(("6e", "70"))]
        if classes:
            self.count("change a class")
            do(
                "tc",
                "class",
                "change",
                "dev",
                device,
                "classid",
                classes[which % len(classes)],
                "htb",
                "rate",
                "777kbit",
            )

    @rule(device=st.sampled_from(["lan", "wan", "nl-in"]), root=st.booleans())
    def delete_queues(self, device: str, root: bool) -> None:
        self.count("delete queues" if root else "clear an ingress")
        do("tc", "qdisc", "del", "dev", device, "root" if root else "clsact")

    @rule(renamed=st.booleans())
    def change_uplink(self, renamed: bool) -> None:
        """The device goes; next time it comes back, under its name or another."""
        self.count("uplink goes" if self.uplink else "uplink comes")
        if self.uplink is not None:
            if renamed:
                do("ip", "link", "set", self.uplink, "down")
                other = "up0" if self.uplink == "wan" else "wan"
                do("ip", "link", "set", self.uplink, "name", other)
                do("ip", "link", "set", other, "up")
                do("ip", "route", "replace", "default", "via", "10.2.0.254", "dev", other)
                self.uplink = other
            else:
                do("ip", "link", "del", self.uplink)
                self.uplink = None
            return
        for line in UPLINK:
            ip(line)
        self.uplink = "wan"

    @rule(host=st.integers(2, 9))
    def send(self, host: int) -> None:
        """Hosts behind lan say something: it is counted, and who is new may get a class."""
        self.count("send")
        send_frames("far", "lan", f"10.1.0.{host}", "10.1.0.1", 3)

    # -- what must be true

    def turn(self, turns: int) -> None:
        """Let the controller's loop go round so often. Others' things must be the same after it."""
        foreign, left = read_foreign(), turns

        def stopped() -> bool:
            nonlocal left
            left -= 1
            return left < 0

        try:
            self.controller.run(stopped)
        except Killed:
            self.start()
        assert read_foreign() == foreign, f"what is of others was\n{foreign}\nand is\n{read_foreign()}"
        self.look_at_counters()

    def look_at_counters(self) -> None:
        """Nothing is ever counted backwards."""
        if self.away:
            return
        found = {
            rule_id: sum(each.total.matched_packets for each in hosts.values())
            for rule_id, hosts in self.store.counters_of([each.id for each in self.kept()]).items()
        }
        for rule_id, packets in found.items():
            assert packets >= self.matched[rule_id], f"rule {rule_id}: {self.matched[rule_id]} packets became {packets}"
        self.matched = Counter(found)

    def lack(self) -> str:
        """What a controller that knows nothing would still have to do; it looks with a kernel of its own."""
        fresh = control.Controller(self.store, self.witness, control.Setup(HOST, safe=SAFE), self.clock)
        plan = fresh.plan()
        said, marked = errors(fresh._find_exceptional()), errors(self.store.marked(HOST))
        if not plan and said != marked:
            return f"in error are {said}, but as such are marked {marked}"
        return str(plan) if plan else ""

    def teardown(self) -> None:
        """The faults are over: all must come to be exactly as desired."""
        try:
            if self.away:
                move(self.directory, "lost.db", "netlimit.db")
            self.kernel.failing = None
            self.settle()
        finally:
            self.clear()

    def settle(self) -> None:
        lack = "never looked"
        for _ in range(MOST_LOOKS):
            self.turn(WORK)
            lack = self.lack()
            if not lack and self.controller._outage is None:
                break
        assert not lack, f"there is still to do:\n{lack}\n{observe(self.witness)}"
        self.done["sequences"] += 1

    def clear(self) -> None:
        """Make room for the next sequence."""
        self.store.close()
        if self.replica is not None:
            self.replica.close()
        for program in ("iptables-legacy", "ip6tables-legacy"):
            for table in TABLES:
                do(program, "-w", "-t", table, "-F")
                do(program, "-w", "-t", table, "-X")
        do("ipset", "destroy")
        for device in ("lan", "wan", "up0", "other", "nl-in"):
            do("ip", "link", "del", device)
        shutil.rmtree(self.directory)


def errors(said: Mapping[int, Exceptional]) -> dict[int, str]:
    """The rules that are in error, and why: the kernel cannot enforce them, or no packet meets them (a device that is
    not there)."""
    return {number: each.message for number, each in sorted(said.items()) if each.state is State.ERROR}


def as_shape(fields: dict[str, object]) -> Rule:
    """A rule that shapes."""
    return parse_rule({**fields, "action": "shape"}, datetime(2030, 1, 1, tzinfo=UTC))


def as_they_say(kept: list[Rule]) -> list[Rule]:
    """Rules without their revisions."""
    return sorted((replace(each, revision=0) for each in kept), key=lambda each: each.id)


def move(directory: Path, name: str, other: str) -> None:
    """Rename a SQLite file with all that belongs to it."""
    for suffix in ("-wal", "-shm", ""):
        if (directory / f"{name}{suffix}").exists():
            (directory / f"{name}{suffix}").rename(directory / f"{other}{suffix}")


def our_sets() -> list[str]:
    """The names of netlimit's sets."""
    return [name for name in sorted(do("ipset", "list", "-n").split()) if name.startswith("nl-")]


def read_foreign() -> str:
    """Rules, sets and queues of others. The clsact on their device is ours: what comes by it may end here."""
    text = do("iptables-legacy-save") + do("ip6tables-legacy-save")
    lines = [line for line in text.splitlines() if line.startswith("-A")]
    lines = [line for line in lines if not line.startswith("-A NL-") and " NL-" not in line]
    return "\n".join([*lines, do("ipset", "save", "foreign"), do("tc", "qdisc", "show", "dev", "other", "root")])


def send_frames(out: str, to: str, src: str, dst: str, count: int) -> None:
    """UDP packets, as they come in by a device."""
    try:
        mac = Path(f"/sys/class/net/{to}/address").read_text().strip()
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as raw:
            raw.bind((out, 0))
            payload = struct.pack("!HHHH", 1024, 53, 12, 0) + b"soak"
            ends = ip_address(src).packed + ip_address(dst).packed
            head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(payload), 1, 0, 64, 17, 0) + ends
            total = sum(struct.unpack("!10H", head))
            total = (total & 0xFFFF) + (total >> 16)
            head = head[:10] + struct.pack("!H", ~total & 0xFFFF) + head[12:]
            frame = bytes.fromhex(mac.replace(":", "")) + bytes(6) + b"\x08\x00" + head + payload
            for _ in range(count):
                raw.send(frame)
    except OSError as error:  # the device may be gone
        note(str(error))


def ip(line: str) -> None:
    """Run ip, which must do it."""
    subprocess.run(["ip", *line.split()], check=True)


def soak(count: int, number: int, steps: int) -> None:
    """Run inside a namespace."""
    logging.disable(logging.CRITICAL)
    control.STRUCTURE_SECONDS, control.SWEEP_SHARE, control.HEARTBEAT_SECONDS = 0.0, 0, 0.5
    control._FIRST_RETRY, outage.FIRST_RETRY, outage.LAST_RETRY = 0.01, 0.01, 0.05
    drift.FIRST_REST, drift.LAST_REST = 0.0, 0.0
    ip("link set lo up")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        Sequences.template = Path(directory) / "fresh.db"
        store = Store(f"sqlite:///{Sequences.template}")
        store.upgrade()
        store.close()
        wanted = settings(
            max_examples=count,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        run_state_machine_as_test(seed(number)(Sequences), settings=wanted)
    done = Sequences.done
    made = done.pop("sequences")
    print(
        f"{made} sequences, {sum(done.values())} steps in {time.monotonic() - began:.0f} s: all as desired, nothing of "
        "others touched. " + ", ".join(f"{name} {number}" for name, number in done.most_common())
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """How many, and how long."""
    parser.add_argument("--count", type=int, default=200, help="sequences")
    parser.add_argument("--steps", type=int, default=15, help="the most changes and faults of one")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    """Make a namespace, and run this again inside it."""
    if options.inside:
        soak(options.count, options.seed, options.steps)
        return 0
    chosen = (f"--count={options.count}", f"--steps={options.steps}", f"--seed={options.seed}")
    return run_inside("sequences", "--inside", *chosen)
