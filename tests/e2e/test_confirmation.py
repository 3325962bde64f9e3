"""What nobody confirms comes back by itself: the rules, and the packets that they cut off."""

from __future__ import annotations

import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from netlimit.errors import KernelError
from netlimit.kernel.base import observe
from netlimit.kernel.lock import is_locked
from netlimit.plan import diff
from netlimit.records import Outcome, Window
from netlimit.rules import parse_rule
from netlimit.state import State
from netlimit.store import Store
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

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Let the database be again, in the end, as it was in the beginning."""
        older = self.directory / "older.db"
        with (
            closing(sqlite3.connect(self.directory / "netlimit.db")) as source,
            closing(sqlite3.connect(older)) as copy,
        ):
            source.backup(copy)
        yield
        self.store.close()
        older.rename(self.directory / "netlimit.db")
        for end in ("-wal", "-shm"):
            (self.directory / f"netlimit.db{end}").unlink(missing_ok=True)


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


def test_what_a_teardown_has_left_half_done_is_taken_out(site: Site) -> None:
    """Nobody knows which rules it is: none in the database go for it."""
    site.write(HARMLESS)
    site.do("apply")
    site.store.pause(HOST, True)  # and the teardown is killed
    site.write(CUT)
    site.do("apply", "--confirm", "60s")
    assert not site.reachable
    assert "this host is paused by teardown" in site.do("rollback")
    site.wait(lambda: not site.guarded, "the guard to end")
    assert site.reachable
    assert site.store.paused(HOST)
    assert not observe(site.kernel).structure.sets
    assert site.store.select()[1] == 2


def test_no_window_is_opened_where_nobody_knows_what_the_kernel_holds(site: Site) -> None:
    """An `apply` after a teardown was killed, say: what is there stays there."""
    site.write(HARMLESS)
    site.do("apply")
    site.store.pause(HOST, True)
    site.store.pause(HOST, False)
    site.write(CUT)
    before = site.store.window()
    said = site.attempt("apply", "--confirm", "60s")
    assert said.returncode == 1
    assert "is not known" in said.stderr
    assert site.store.window() == before
    assert not site.store.paused(HOST)
    assert site.reachable
    assert observe(site.kernel).structure.sets


BE_WRITER = """
import sys, time
from netlimit.kernel.linux import LinuxKernel
with LinuxKernel().exclusive():
    print("writes", flush=True)
    time.sleep(float(sys.argv[1]))
"""


@contextmanager
def writer(site: Site, seconds: float) -> Iterator[None]:
    """Somebody writes to the kernel for so long."""
    command = (sys.executable, "-c", BE_WRITER, str(seconds))
    process = site.lab.gateway.popen(*command, stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline() == "writes\n"
    try:
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_window_that_fails_before_it_writes_undoes_nothing_that_was_there(site: Site) -> None:
    """What was changed while this gateway had no controller is none of it; what is changed in it, is."""
    site.write(HARMLESS)
    site.do("apply")
    applied = site.store.revision()
    site.write(CUT)
    with writer(site, 60):
        done = site.attempt("apply", "--confirm", "60s")
    assert (done.returncode, done.stdout) == (1, "")
    assert "Nothing was written to the kernel" in done.stderr
    assert site.outcome is Outcome.ABANDONED
    assert (site.store.revision(), site.store.select()[1]) == (applied + 1, 2)
    site.wait(lambda: not site.guarded, "the guard to end")
    assert site.reachable, "the guard has put in what was to be tried in a window"


def test_a_window_that_fails_before_it_writes_says_that_an_empty_kernel_stays_so(site: Site) -> None:
    """As after a boot: nobody puts in what was to be tried in a window, until it is asked for."""
    site.write(CUT)
    with writer(site, 60):
        done = site.attempt("apply", "--confirm", "60s")
    assert done.returncode == 1
    assert "paused until `netlimit apply`" in done.stderr.replace("\n", " ")
    assert site.store.paused(HOST)
    site.wait(lambda: not site.guarded, "the guard to end")
    assert not observe(site.kernel).structure.sets


def test_no_window_is_opened_that_would_undo_what_others_have(site: Site) -> None:
    site.write(HARMLESS)
    site.do("apply")
    site.write({"name": "there", "target": "10.1.60.0/24", "action": "block", "hosts": ["gw-other"]})
    revision = site.store.revision()
    before = site.store.window()
    said = site.attempt("apply", "--confirm", "60s")
    assert said.returncode == 1
    assert "gw-other" in said.stderr
    assert "Run `netlimit apply` without --confirm" in said.stderr.replace("\n", " ")
    assert site.store.revision() == revision
    assert site.store.window() == before


def test_no_window_is_opened_where_what_the_kernel_holds_is_not_kept_any_more(site: Site) -> None:
    site.write(HARMLESS)
    site.do("apply")
    with closing(Store(site.url, revisions=1)) as forgetful:
        for number in range(3):
            wanted = {"target": f"10.1.70.{number}", "action": "block"}
            forgetful.add([parse_rule(wanted, datetime.now(UTC))], "test", datetime.now(UTC))
    before = site.store.window()
    said = site.attempt("apply", "--confirm", "60s")
    assert said.returncode == 1
    assert "is not known any more" in said.stderr
    assert site.store.window() == before


@pytest.mark.parametrize("torn_down", [False, True])
def test_who_takes_longer_than_his_window_puts_nothing_in(site: Site, torn_down: bool) -> None:
    site.write(HARMLESS)
    site.do("apply")
    if torn_down:
        site.do("teardown")
    site.write(CUT)
    with writer(site, 7):
        done = site.attempt("apply", "--confirm", "3s")
    assert (done.returncode, done.stdout) == (1, "")
    assert "window of confirmation" in done.stderr
    assert site.outcome is Outcome.EXPIRED
    site.wait(lambda: not site.guarded, "the guard to end")
    assert site.reachable
    assert site.store.paused(HOST) == torn_down
    assert bool(observe(site.kernel).structure.sets) != torn_down


def test_a_guard_does_what_the_one_before_did_not(site: Site) -> None:
    """The window has ended in the database; the guard is killed before it has put the kernel right."""
    site.write(HARMLESS)
    site.do("apply")
    site.write(CUT)
    site.start_guard()
    site.do("apply", "--confirm", "4s")
    assert not site.reachable
    site.wait(lambda: site.outcome is Outcome.EXPIRED, "the end in the database")
    site.guard.stop(signal.SIGKILL)
    assert not site.reachable
    site.start_guard()
    site.wait(lambda: site.reachable, "the operator")
    site.wait(lambda: site.holds(HARMLESS), "the rules of before")


def test_a_guard_takes_out_what_another_gateways_has_undone(site: Site) -> None:
    """This gateway had nothing in its kernel when the window was opened; its guard was away when it ended."""
    site.write(CUT)
    site.start_guard()
    site.do("apply", "--confirm", "60s")
    assert not site.reachable
    site.guard.stop(signal.SIGKILL)
    window = site.store.window()
    assert window is not None
    site.store.expire(window, "guard of another", site.store.now())
    site.start_guard()
    site.wait(lambda: site.reachable, "the operator")
    assert not observe(site.kernel).structure.sets


@pytest.mark.parametrize("earlier", [False, True])
def test_a_database_that_is_as_it_was_before_the_window_confirms_nothing(site: Site, earlier: bool) -> None:
    """A standby that lagged has taken its place, or somebody has put back an older copy; no controller runs."""
    site.write(HARMLESS)
    site.do("apply")
    if earlier:
        site.do("apply", "--confirm", "60s")
        site.do("confirm")
        site.wait(lambda: not site.guarded, "the guard to end")
    with site.put_back():
        site.write(CUT)
        site.do("apply", "--confirm", "30s")
    assert not site.reachable
    site.wait(lambda: not site.guarded, "the guard to end")
    assert site.reachable
    assert site.holds(HARMLESS)


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


SEE = """
import sys
from datetime import UTC, datetime
from netlimit.cli.parts import make_controller
from netlimit.cli.undo import see_window
from netlimit.errors import NetlimitError
from netlimit.kernel.linux import LinuxKernel
from netlimit.settings import load_settings
from netlimit.store import Store
settings = load_settings()
store, kernel = Store(settings.database_url), LinuxKernel()
controller, window = make_controller(settings, store, kernel), store.window()
print("sees", flush=True)
try:
    see_window(settings, store, kernel, controller, window)
except NetlimitError as error:
    print(error, flush=True)
"""


@pytest.mark.parametrize("applied", [True, False], ids=["applied meanwhile", "left paused"])
def test_who_finds_its_window_ended_undoes_nobody_elses_apply(site: Site, applied: bool) -> None:
    """It waits until another has written, who has ended the pause that the window's end has brought back."""
    site.write(HARMLESS)
    site.do("apply")
    now = datetime.now(UTC)
    site.store.open_window(60, "test", now, paused=(HOST,), forces=True)
    site.store.abandon("test", now)
    assert site.store.paused(HOST)
    with writer(site, 60):
        place = {"stdout": subprocess.PIPE, "cwd": ROOT, "env": site._environment}
        seeing = site.lab.gateway.popen(sys.executable, "-c", SEE, **place)
        assert seeing.stdout is not None
        assert seeing.stdout.readline() == "sees\n"
        time.sleep(3)  # by now it waits
        site.store.pause(HOST, not applied)
    said, _ = seeing.communicate(timeout=60)
    assert "has ended before this was done" in said
    assert bool(observe(site.kernel).structure.sets) is applied
