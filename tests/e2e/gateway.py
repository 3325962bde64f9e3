"""A controller in a lab's gateway: rules are put into its database, and what it counts is read back."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from netlimit.controller import Controller, Setup
from netlimit.plan import Plan
from netlimit.records import Counts, Exceptional, HostStatus, State
from netlimit.rules import Rule, parse_rule
from netlimit.store import Store
from netlimit.tree import QueueClass, classid
from scripts.testbed.namespaces import Lab
from tests import warm
from tests.forcing import make_rule
from tests.kernel.worker import RemoteKernel

HOST = "gw"
PATIENCE = float(os.environ.get("TESTS_PATIENCE", "60"))
"""Seconds; an emulated machine takes ten times as long as others."""
MODULE = "netlimit.cli.main"
COMMAND = ("-c", "from netlimit.cli.main import app; app()")
"""For Python: one that imports what it needs."""


class Gateway:
    """The gateway of a lab, with its database in a directory."""

    def __init__(self, lab: Lab, directory: Path, safe: tuple[str, ...] = ()) -> None:
        self.lab = lab
        self.safe = safe
        self.url = f"sqlite:///{directory}/netlimit.db"
        self.log = directory / "controller.log"
        self.store = Store(self.url)
        self.store.upgrade()
        self._process: subprocess.Popen[str] | warm.Started | None = None
        self._started: list[subprocess.Popen[str] | warm.Started] = []
        self._launched = datetime.now(UTC)
        self._kernel: RemoteKernel | None = None

    # -- the controller

    def start(self, *command: str) -> None:
        """Start the controller, or what stands for it; it has applied everything on return, and looked at what others
        have here: until then what was told of rules before stands."""
        self.launch(*command)
        self.wait_until_taken_in()
        self.wait(lambda: self._find_told() == [], "nothing to be said of rules")

    def launch(self, *command: str) -> subprocess.Popen[str] | warm.Started:
        """Start it and do not wait. A module has its imports done already; any other command of Python's has not."""
        self._launched = datetime.now(UTC)
        option, *words = command or ("-m", MODULE, "controller")
        with self.log.open("a") as log, open(os.devnull) as nothing:
            if option == "-m":
                self._process = warm.start(*words, **self._place, stdin=nothing, stdout=log, stderr=log)
            else:
                self._process = self.lab.gateway.popen(
                    *(sys.executable, option, *words), stdout=log, stderr=log, cwd=warm.ROOT, env=self._environment
                )
        self._started.append(self._process)
        return self._process

    def tell_to_end(self) -> None:
        """Send SIGTERM, and wait for nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it; what is in the kernel stays."""
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(60)

    @contextmanager
    def serving(self, listen: str, token: str) -> Iterator[None]:
        """The API listens at an address and port of the gateway, as root."""
        extra = {"NETLIMIT_LISTEN": listen, "NETLIMIT_BOOTSTRAP_TOKEN": token}
        place = {**self._place, "env": {**self._place["env"], **extra}}
        with self.log.open("a") as log, open(os.devnull) as nothing:
            process = warm.start(
                *(MODULE, "api", "--user", "root"), **place, stdin=nothing, stdout=log, stderr=log, imported=warm.API
            )
        self._started.append(process)
        try:
            port = listen.rpartition(":")[2]
            shown = ("ss", "-Hltn", f"sport = :{port}")
            self.wait(lambda: bool(self.lab.gateway.run(*shown).stdout), "the API to listen")
            yield
        finally:
            process.kill()
            process.wait(60)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """It does nothing meanwhile."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def do(self, *command: str) -> str:
        """Run a command of netlimit's to its end; what it printed."""
        return self.attempt(*command, check=True).stdout

    def attempt(self, *command: str, check: bool = False) -> subprocess.CompletedProcess[str]:
        """Run a command of netlimit's to its end, well or not."""
        done = warm.run(MODULE, *command, **self._place)
        assert not (check and done.returncode), done
        return done

    @property
    def _place(self) -> dict[str, Any]:
        return {"env": {**os.environ, **self._environment}, "namespace": self.lab.gateway.name}

    @property
    def _environment(self) -> dict[str, str]:
        return {
            "NETLIMIT_DATABASE_URL": self.url,
            "NETLIMIT_HOST": HOST,
            "NETLIMIT_SAFE": ",".join(self.safe),
            "NETLIMIT_BACKEND": "iptables",
        }

    @property
    def dead(self) -> bool:
        """Whether the controller has ended."""
        return self._process is None or self._process.poll() is not None

    def close(self) -> None:
        """End what still runs, and close the database."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.wait(60)
        self.store.close()
        if self._kernel is not None:
            self._kernel.close()

    # -- rules

    def put(self, *wanted: dict[str, object]) -> list[Rule]:
        """Add rules as one change; they are in force on return."""
        rules = self.add(*wanted)
        assert self._find_told() == []
        return rules

    def add(self, *wanted: dict[str, object]) -> list[Rule]:
        """The same, but there may be something to say of them."""
        rules = self.write(*wanted)
        self.wait_until_taken_in()
        return rules

    def write(self, *wanted: dict[str, object]) -> list[Rule]:
        """Add rules to the database, and wait for nothing."""
        now = datetime.now(UTC)
        return self.store.add([make_rule(fields, now) for fields in wanted], "test", now)

    def replace(self, rule: Rule, **fields: object) -> Rule:
        """Put another rule in the place of one."""
        now = datetime.now(UTC)
        kept = self.store.replace(rule.id, replace(parse_rule(fields, now), id=rule.id), "test", now)
        self.wait_until_applied()
        return kept.rule

    def remove(self, rule: Rule) -> None:
        """Take one rule away."""
        self.store.remove(rule.id, "test", datetime.now(UTC))
        self.wait_until_applied()

    def clear(self) -> None:
        """Take all rules away."""
        self.erase(*(kept.rule for kept in self.store.select(limit=1000)[0]))
        self.wait_until_applied()

    def erase(self, *rules: Rule) -> None:
        """Take rules out of the database, and wait for nothing."""
        for rule in rules:
            self.store.remove(rule.id, "test", datetime.now(UTC))

    def wait_until_applied(self) -> None:
        """Wait until this gateway holds the newest revision, without any problem."""
        self.wait_until_taken_in()
        assert self._find_told() == []

    def _find_told(self) -> list[Exceptional]:
        """What is said of rules, but that nobody has forced them: tests need not."""
        return [each for each in self.store.marked(HOST).values() if "nobody has forced that" not in each.message]

    def wait_until_taken_in(self) -> None:
        """Wait until this gateway holds what it can of the newest revision."""
        wanted = self.store.revision()

        def applied() -> bool:
            hosts = [status for status in self.store.hosts() if status.host == HOST]
            return any(each.applied_revision >= wanted and each.last_error is None for each in filter(heard, hosts))

        def heard(status: HostStatus) -> bool:
            return status.seen_at is not None and status.seen_at >= self._launched

        self.wait(applied, f"revision {wanted} to be applied")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for something that must come soon."""
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, f"Waited too long for {what}:\n{self.log.read_text()[-2000:]}"
            time.sleep(0.02)  # a look at the database takes most of a millisecond

    # -- what it says

    def state(self, rule: Rule) -> tuple[State, str]:
        """How a rule in force stands here, and what is said of it."""
        found = self.store.marked(HOST).get(rule.id)
        return (found.state, found.message) if found else (State.APPLIED, "")

    def wait_for_state(self, rule: Rule, state: State) -> str:
        """Wait until a rule stands so; what is said of it then."""
        self.wait(lambda: self.state(rule)[0] is state, f"`{rule}` to be {state}; it is {self.state(rule)}")
        return self.state(rule)[1]

    def classes(self, device: str) -> dict[int, QueueClass]:
        """The classes on a device, by classid."""
        tree = self.kernel.queues().trees.get(device)
        return dict(tree.classes) if tree else {}

    def class_of(self, address: str) -> int:
        """The classid that an address has in a set; 0 without one."""
        place = self._find_place(address)
        return classid(int(place[2], 16), int(place[3], 16)) if place else 0

    def set_of(self, address: str) -> str:
        """The name of the set in which an address has a class."""
        place = self._find_place(address)
        assert place
        return place[1]

    def _find_place(self, address: str) -> re.Match[str] | None:
        entry = rf"^add (nl-q\S+) {re.escape(address)} .*skbprio (\w+):(\w+)"
        return re.search(entry, self.lab.gateway.run("ipset", "save").stdout, re.MULTILINE)

    def count(self, rule: Rule) -> Counts:
        """What a rule has counted until now."""
        question = self.store.ask(HOST, "counters", {"rules": [rule.id]})
        self.wait(lambda: self.store.answered(question) is not None, "counters")
        found = self.store.counters(rule.id).get(HOST)
        return found.total if found else Counts()

    def foreign(self) -> list[str]:
        """The rules and sets in the gateway that are not netlimit's."""
        text = ""
        for program in (("iptables-legacy-save",), ("ip6tables-legacy-save",), ("ipset", "save")):
            text += self.lab.gateway.run(*program).stdout
        lines = [line for line in text.splitlines() if line.startswith(("-A", "create", "add"))]
        return [
            line for line in lines if not line.startswith(("-A NL-", "create nl-", "add nl-")) and " NL-" not in line
        ]

    def drift(self) -> Plan:
        """What would have to be done so that the kernel holds what the database says, asked of nobody else."""
        return Controller(self.store, self.kernel, Setup(HOST, safe=self.safe)).plan()

    @property
    def kernel(self) -> RemoteKernel:
        """The gateway's, for a look at it."""
        self._kernel = self._kernel or RemoteKernel(self.lab.gateway.name)
        return self._kernel
