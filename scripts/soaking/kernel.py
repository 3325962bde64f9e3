"""Random changes of rules and random faults over a real kernel, compared with what is desired after each.

The same seed makes the same changes and faults (rules end by the clock, though). Everything happens in a network
namespace of its own, which is removed at the end. Run it as root, with the packages of scripts/setup.
"""

from __future__ import annotations

import argparse
import logging
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime

from netlimit import controller as control
from netlimit.compile import compile_rules
from netlimit.errors import KernelError, NetlimitError, RuleError
from netlimit.kernel.base import observe
from netlimit.kernel.linux import LinuxKernel
from netlimit.limits import Facts, own_addresses, parse_safe
from netlimit.plan import Step, diff
from netlimit.rules import Rule, parse_rule
from netlimit.state import TABLES
from netlimit.store import Store
from scripts.soaking.namespace import do, run_inside
from tests.unit.strategies import LIMITS, SAFE, SELECTORS, TARGETS

HOST = "soak"
MOST_TICKS = 400
HOOKS = {"raw": ["PREROUTING"], "mangle": ["PREROUTING", "INPUT", "FORWARD", "OUTPUT"]}


class FaultyKernel(LinuxKernel):
    """Refuses a step when it is told to."""

    failing: int | None = None

    def apply(self, step: Step) -> None:
        if self.failing == 0:
            self.failing = None
            raise KernelError(str(step), "told to fail")
        if self.failing is not None:
            self.failing -= 1
        super().apply(step)


class Soak:
    """One run: a store, a controller that is driven by hand, and the world around it."""

    def __init__(self, directory: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.store = Store(f"sqlite:///{directory}/netlimit.db")
        self.store.upgrade()
        self.kernel = FaultyKernel()
        self.done: Counter[str] = Counter()
        self.restart()

    def restart(self) -> None:
        """The controller was killed: a new one knows only what store and kernel hold."""
        self.controller = control.Controller(self.store, self.kernel, control.Setup(HOST, safe=SAFE))

    def act(self) -> str:
        """One change or fault."""
        choices = {
            self.add: 8, self.remove: 6, self.alter: 6, self.restart: 1, self.fail: 3, self.flush_table: 2,
            self.flush_set: 2, self.crowd_out: 2, self.unhook: 2, self.meddle: 2, self.destroy: 1, self.wait: 1,
        }  # fmt: skip
        (chosen,) = self.random.choices(list(choices), list(choices.values()))
        chosen()
        self.done[chosen.__name__] += 1
        return chosen.__name__

    # -- changes

    def add(self) -> None:
        for _ in range(self.random.choice([1, 1, 3, 20])):
            self.keep(self.make())

    def remove(self) -> None:
        for rule in self.pick(self.random.choice([1, 2, 5])):
            self.store.remove(rule.id, "soak", datetime.now(UTC))

    def alter(self) -> None:
        for rule in self.pick(2):
            try:
                self.store.replace(rule.id, replace(self.make(), id=rule.id), "soak", datetime.now(UTC))
            except NetlimitError:  # another rule says the same
                continue

    def wait(self) -> None:
        """Let rules end."""
        time.sleep(1.2)

    def make(self) -> Rule:
        while True:
            fields: dict[str, object] = {
                "target": self.random.choice(TARGETS),
                "direction": self.random.choice(["from", "to"]),
                "action": self.random.choice(["drop", "drop", "drop", "reject", "observe", "allow", "block"]),
                **self.random.choice(SELECTORS),
            }
            if fields["action"] not in ("allow", "block"):
                fields |= self.random.choice(LIMITS)
                fields["per"] = self.random.choice(["host", "target", "peer", "/24", "/28", "/64", "/120"])
            if self.random.random() < 0.15:
                fields["ttl"] = self.random.choice([1, 2, 3, 3600])
            if self.random.random() < 0.05:
                fields["enabled"] = False
            try:
                return parse_rule(fields, datetime.now(UTC))
            except RuleError:
                continue

    def keep(self, rule: Rule) -> None:
        try:
            self.store.add([rule], "soak", datetime.now(UTC))
        except NetlimitError:  # another rule says the same
            return

    def pick(self, count: int) -> list[Rule]:
        rules = [kept.rule for kept in self.store.select(limit=1000)[0]]
        return self.random.sample(rules, min(count, len(rules)))

    # -- faults

    def fail(self) -> None:
        self.kernel.failing = self.random.randrange(6)
        self.add()

    def flush_table(self) -> None:
        do(self.program(), "-w", "-t", self.random.choice(TABLES), "-F")

    def flush_set(self) -> None:
        for name in self.sets(1):
            do("ipset", "flush", name)

    def crowd_out(self) -> None:
        """Somebody puts a rule before ours."""
        table = self.random.choice(list(HOOKS))
        hook = self.random.choice(HOOKS[table])
        do(self.program(), "-w", "-t", table, "-I", hook, "-p", "udp", "--dport", "7", "-j", "RETURN")

    def unhook(self) -> None:
        table = self.random.choice(list(HOOKS))
        hook = self.random.choice(HOOKS[table])
        do(self.program(), "-w", "-t", table, "-D", hook, "-j", f"NL-{hook}")

    def meddle(self) -> None:
        """Somebody changes the entries of a set of ours."""
        for name in self.sets(2):
            lines = do("ipset", "save", name).splitlines()
            for line in self.random.sample(lines[1:], min(2, len(lines) - 1)):
                do("ipset", "del", name, line.split()[2])
            do("ipset", "add", name, "192.0.2.77" if "family inet " in lines[0] else "2001:db8::77")

    def destroy(self) -> None:
        """Somebody takes all of it away, and more."""
        for program in ("iptables-legacy", "ip6tables-legacy"):
            for table in TABLES:
                do(program, "-w", "-t", table, "-F")
                do(program, "-w", "-t", table, "-X")
        do("ipset", "destroy")

    def program(self) -> str:
        return self.random.choice(["iptables-legacy", "iptables-legacy", "ip6tables-legacy"])

    def sets(self, count: int) -> list[str]:
        names = [name for name in sorted(do("ipset", "list", "-n").split()) if name.startswith("nl-")]
        return self.random.sample(names, min(count, len(names)))

    # -- what must be true

    def settle(self) -> None:
        """Let the controller work until all is as it should be. Raises AssertionError if that takes too long."""
        foreign, lack = self.foreign(), ""
        for _ in range(MOST_TICKS):
            try:
                self.controller.tick()
            except KernelError as error:
                if error.reason != "told to fail":
                    raise
                self.controller._in_step = False  # as `run` does it
                continue
            lack = self.lack()  # once: a rule may end at any moment
            if not lack:
                break
        assert not lack, f"after {MOST_TICKS} ticks there is still to do:\n{lack}"
        assert self.foreign() == foreign, f"rules of others were {foreign}, and are {self.foreign()}"

    def lack(self) -> str:
        """What would have to be done so that the kernel holds what the database says."""
        now = datetime.now(UTC)
        _, rules = self.store.load(HOST)
        facts = Facts(host=HOST, own=own_addresses(self.kernel.addresses().own), safe=parse_safe(SAFE))
        state, _, problems = compile_rules(
            [rule for rule in rules if rule.in_force(now, HOST)], facts, self.store.numbering(HOST)
        )
        assert set(problems) == set(self.store.marked(HOST)), problems
        plan = diff(state, observe(self.kernel))
        return str(plan) if plan else ""

    def foreign(self) -> list[str]:
        text = do("iptables-legacy-save") + do("ip6tables-legacy-save")
        lines = [line for line in text.splitlines() if line.startswith("-A")]
        return [line for line in lines if not line.startswith("-A NL-") and "-j NL-" not in line]


def soak(seconds: float, seed: int) -> None:
    """Run inside a namespace."""
    logging.disable(logging.WARNING)
    control.STRUCTURE_SECONDS, control.SWEEP_SHARE = 0.0, 0
    for line in ("link set lo up", "link add lan type veth peer name far", "addr add 10.1.0.1/16 dev lan"):
        subprocess.run(["ip", *line.split()], check=True)
    subprocess.run(["ip", "addr", "add", "fd00:1::1/64", "dev", "lan", "nodad"], check=True)
    with tempfile.TemporaryDirectory() as directory:
        world = Soak(directory, seed)
        end, history = time.monotonic() + seconds, []
        try:
            while time.monotonic() < end:
                history.append(world.act())
                world.settle()
        except BaseException:
            print(f"seed {seed}, after {len(history)} actions, the last: {', '.join(history[-5:])}", file=sys.stderr)
            raise
    print(f"{len(history)} actions: " + ", ".join(f"{name} {count}" for name, count in world.done.most_common()))


def add_options(parser: argparse.ArgumentParser) -> None:
    """How long."""
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    """Make a namespace, and run this again inside it."""
    if options.inside:
        soak(options.seconds, options.seed)
        return 0
    return run_inside("kernel", "--inside", f"--seconds={options.seconds}", f"--seed={options.seed}")
