"""What nobody confirms comes back by itself: the rules, and the packets that they cut off."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from netlimit.errors import KernelError
from netlimit.kernel.base import observe
from netlimit.kernel.lock import is_locked
from netlimit.plan import diff
from netlimit.records import Outcome, Window
from netlimit.state import State
from scripts.testbed.namespaces import CLIENT, LAN, Lab
from tests.e2e.gateway import COMMAND, HOST, MODULE, Gateway
from tests.warm import ROOT

CUT: dict[str, object] = {"name": "cut", "target": CLIENT, "action": "block"}
"""The rule by which the operator, who sits at the client, cuts himself off."""
HARMLESS: dict[str, object] = {"name": "harmless", "target": "10.1.50.0/24", "rate": "100 packets/s", "per": "host"}
SECONDS = 5
"""Of a window: long enough for all that is to happen while it is open, also on a busy machine."""
SEEN = "test has opened a window of confirmation: revision"


class Site(Gateway):
    """A gateway with a guard besides its controller."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        super().__init__(lab, directory)
        self.directory = directory
        self.guard = Gateway(lab, directory)

    def start_guard(self) -> None:
        """Start a guard of its own; it watches when this returns."""
        self.guard.launch("-m", MODULE, "guard")
        self.wait(lambda: HOST in self.store.guards(), "a guard")

    def end(self) -> None:
        """Let nothing run any more."""
        for process in (self, self.guard):
            if not process.dead:
                process.stop(signal.SIGKILL)

    def open(self, seconds: int = SECONDS) -> Window:
        """Open a window; the guard watches over it when this returns."""
        seen = self.log.read_text().count(SEEN)
        window = self.store.open_window(seconds, "test", datetime.now(UTC))
        self.wait(lambda: self.log.read_text().count(SEEN) > seen, "the guard to see the window")
        return window

    def cut(self) -> None:
        """Lock the operator out."""
        self.put(CUT)
        assert not self.reachable

    @property
    def reachable(self) -> bool:
        """Whether the operator reaches the gateway."""
        ping = ("ping", "-c", "1", "-W", "0.3", LAN)
        return self.lab.client.run(*ping, check=False).returncode == 0

    @property
    def outcome(self) -> Outcome | None:
        """How the last window has ended, as the database says."""
        window = self.store.window()
        return window.outcome if window else None

    @property
    def guarded(self) -> bool:
        """Whether some guard lives."""
        return is_locked(str(self.directory / "controller/guard.lock"), "look for the guard")

    def holds(self, *wanted: dict[str, object]) -> bool:
        """Whether these are the rules in the database, and the kernel holds them."""
        kept, _ = self.store.select()
        if [each.rule.name for each in kept] != [each["name"] for each in wanted]:
            return False
        try:
            return not self.drift()
        except KernelError:  # somebody writes while it is read
            return False

    @contextmanager
    def without_database(self) -> Iterator[None]:
        """Take the database away, and put it back."""
        away = self.directory / "away"
        away.mkdir()
        files = [self.directory / f"netlimit.db{end}" for end in ("", "-wal", "-shm")]
        self.store.close()
        for each in files:
            if each.exists():
                each.rename(away / each.name)
        yield
        for each in away.iterdir():
            each.rename(self.directory / each.name)
        away.rmdir()


@pytest.fixture(scope="module")
def place(lab: Lab) -> Iterator[Site]:
    directory = Path(tempfile.mkdtemp(prefix="netlimit-"))
    directory.chmod(0o777)  # the API's user, too, must be able to write here
    place = Site(lab, directory)
    yield place
    place.end()
    place.close()
    place.guard.close()
    shutil.rmtree(directory)


@pytest.fixture
def site(place: Site) -> Site:
    """A gateway on which nothing runs, without rules, with nothing in the kernel."""
    place.end()
    place.erase(*(kept.rule for kept in place.store.select()[0]))
    for step in diff(State(), observe(place.kernel)).steps:
        place.kernel.apply(step)
    place.store.pause(HOST, False)
    return place


@pytest.fixture
def running(place: Site) -> Site:
    """A gateway with one rule, a controller and a guard."""
    if place.dead:
        place.start()
    if place.guard.dead:
        place.start_guard()
    place.clear()
    place.put(HARMLESS)
    return place


def test_who_cuts_himself_off_is_let_in_again(running: Site) -> None:
    running.open()
    running.cut()
    running.wait(lambda: running.reachable, "the operator")
    assert running.outcome is Outcome.EXPIRED
    running.wait_until_applied()
    assert running.holds(HARMLESS)


def test_a_controller_that_was_killed_is_not_needed(running: Site) -> None:
    running.open()
    running.cut()
    running.stop(signal.SIGKILL)
    running.wait(lambda: running.reachable, "the operator")
    running.wait(lambda: running.holds(HARMLESS), "the rules of before")


@pytest.mark.parametrize("controller", ["alive", "killed"])
def test_the_database_is_not_needed(running: Site, controller: str) -> None:
    running.open()
    running.cut()
    if controller == "killed":
        running.stop(signal.SIGKILL)
    with running.without_database():
        assert not running.reachable
        running.wait(lambda: running.reachable, "the operator")
        time.sleep(2.5)  # a controller that runs looks for drift meanwhile
        assert running.reachable
    running.wait(lambda: running.outcome is Outcome.EXPIRED, "the rollback to be recorded")
    assert running.reachable
    running.wait(lambda: running.holds(HARMLESS), "the rules of before")


def test_what_is_confirmed_stays(running: Site) -> None:
    running.open(60)
    running.cut()
    running.guard.tell_to_end()
    assert running.guarded
    assert "Confirmed" in running.do("confirm")
    running.wait(lambda: running.guard.dead, "the guard to end, as it was told while the window was open")
    assert not running.reachable
    assert running.holds(HARMLESS, CUT)
    assert not running.guarded
    assert running.store.guards() == []


def test_a_guard_that_was_killed_is_followed_by_another(running: Site) -> None:
    """The controller, which would do it a little later, does nothing meanwhile."""
    window = running.open()
    running.cut()
    running.guard.stop(signal.SIGKILL)
    with running.frozen():
        running.wait(lambda: window.left(datetime.now(UTC)) == 0, "the window to be over")
        assert not running.reachable
        running.start_guard()
        running.wait(lambda: running.reachable, "the operator")


def test_a_guard_that_hangs_is_not_needed(running: Site) -> None:
    running.open()
    running.cut()
    with running.guard.frozen():
        running.wait(lambda: running.reachable, "the operator")
        assert running.outcome is Outcome.EXPIRED
        running.wait(lambda: running.holds(HARMLESS), "the rules of before")
        revision = running.store.revision()
    time.sleep(1)
    assert running.store.revision() == revision, "the guard that woke up has undone it again"
    assert running.holds(HARMLESS)


def test_apply_starts_a_guard_that_outlives_it(site: Site) -> None:
    """With no controller at all: what was not in the kernel is taken out again."""
    site.write(HARMLESS, CUT)
    printed = site.do("apply", "--confirm", "8s")
    assert "2 rules in force here.\nUnless `netlimit confirm` comes within 8 seconds" in printed
    assert site.guarded
    assert not site.reachable
    site.wait(lambda: not site.guarded, "the guard to end")
    assert site.reachable
    assert site.store.paused(HOST)
    assert not observe(site.kernel).structure.sets
    assert site.store.select()[1] == 2


def test_without_a_controller_what_was_applied_last_comes_back(site: Site) -> None:
    site.write(HARMLESS)
    site.do("apply")
    applied = site.store.revision()
    site.write(CUT)
    site.do("apply", "--confirm", "60s")
    assert not site.reachable
    assert f"Revision {applied} is back, as revision {applied + 2}: the kernel holds it." in site.do("rollback")
    assert site.reachable
    assert site.holds(HARMLESS)
    assert "Say which revision" in site.attempt("rollback").stderr
    site.wait(lambda: not site.guarded, "the guard to end")


@pytest.mark.parametrize("ended", [False, True])
def test_what_a_teardown_or_an_apply_has_left_half_done_is_taken_out(site: Site, ended: bool) -> None:
    """Nobody knows which rules it is: none in the database go for it."""
    site.write(HARMLESS)
    site.do("apply")
    site.store.pause(HOST, True)  # and the teardown is killed
    if ended:
        site.store.pause(HOST, False)  # by an `apply` that is killed, too
    site.write(CUT)
    site.do("apply", "--confirm", "60s")
    assert not site.reachable
    assert "this host is paused by teardown" in site.do("rollback")
    site.wait(lambda: not site.guarded, "the guard to end")
    assert site.reachable
    assert site.store.paused(HOST)
    assert not observe(site.kernel).structure.sets
    assert site.store.select()[1] == 2


def test_killing_all_of_serve_does_not_kill_the_guard(site: Site) -> None:
    serving = site.launch(*COMMAND, "serve", "--api-user", "nobody")
    site.wait(lambda: HOST in site.store.guards(), "a guard")
    site.put(HARMLESS)
    site.open()
    site.cut()
    site.stop(signal.SIGKILL)
    site.wait(lambda: site.reachable, "the operator")
    site.wait(lambda: not site.guarded, "the guard to end")
    assert serving.poll() is not None
    assert site.holds(HARMLESS)


def test_serve_ends_and_leaves_the_guard_to_its_window(site: Site) -> None:
    site.launch(*COMMAND, "serve", "--api-user", "nobody")
    site.wait(lambda: HOST in site.store.guards(), "a guard")
    site.put(HARMLESS)
    window = site.open()
    site.cut()
    site.stop()
    assert site.guarded
    site.wait(lambda: not site.guarded, "the guard to end")
    assert window.left(datetime.now(UTC)) == 0
    assert site.reachable
    assert site.holds(HARMLESS)


STOP_WHILE_WRITING = """
import os, signal, sys, time
from netlimit.kernel.claim import Claim, is_claimed
controller = int(sys.argv[1])
def stopped():
    with open(f"/proc/{controller}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0] == b"T"
while True:
    if is_claimed(Claim.WRITER, "look"):
        os.kill(controller, signal.SIGSTOP)
        while not stopped():
            time.sleep(0.001)
        if is_claimed(Claim.WRITER, "look"):
            break
        os.kill(controller, signal.SIGCONT)
print("stopped", flush=True)
"""


def test_a_controller_that_hangs_while_it_writes_is_ended(site: Site) -> None:
    """Nobody else can write as long as it does: what was not confirmed would never go."""
    controller = site.launch()
    site.wait_until_applied()
    site.put(HARMLESS)
    site.start_guard()
    site.open(30)
    site.cut()
    with site.log.open("a") as log:
        command = (sys.executable, "-c", STOP_WHILE_WRITING, str(controller.pid))
        stopping = site.lab.gateway.popen(*command, stdout=log, stderr=log, cwd=ROOT)
        assert stopping.wait(60) == 0  # it follows connections, if it does nothing else
    site.wait(lambda: site.dead, "the controller that hangs to be ended")
    site.wait(lambda: site.reachable, "the operator")
    assert site.outcome is Outcome.EXPIRED
    site.wait(lambda: site.holds(HARMLESS), "the rules of before")
    site.wait(lambda: any("was stopped for" in each.found for each in site.store.repairs(HOST, 20)), "a note of it")
