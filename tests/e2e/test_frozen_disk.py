"""A disk that hangs: no write returns, and none fails. What enforces, undoes and takes limits out goes on without it;
who asks for something that must be written is told within seconds."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from netlimit.kernel.base import observe
from netlimit.records import Actor, Outcome
from scripts.testbed.namespaces import Lab
from tests.e2e.freezer import Freezer
from tests.e2e.gateway import HOST
from tests.e2e.test_confirmation import CUT, HARMLESS, Site
from tests.ports import free_port

SOON = 20.0
"""Seconds within which all is to be done: a hang is known after three, and machines are slow at times."""
TOKEN = "nlt_0123456789abcdef_0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="netlimit-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def disk(directory: Path, root: None) -> Iterator[Freezer]:
    disk = Freezer(directory)
    with disk.mounted():
        yield disk


@pytest.fixture(scope="module")
def place(lab: Lab, disk: Freezer, directory: Path) -> Iterator[Site]:
    """Database and copy are on the disk, and the log is not."""
    place = Site(lab, disk.place)
    place.log = place.guard.log = directory / "log"
    yield place
    place.end()
    place.close()
    place.guard.close()


@pytest.fixture
def running(place: Site) -> Site:
    """A gateway with one rule, a controller and a guard."""
    if place.dead:
        place.start()
    if place.guard.dead:
        place.start_guard()
    place.store.pause(HOST, False, Actor("test"))
    place.clear()
    place.put(HARMLESS)
    place.wait(lambda: place.holds(HARMLESS), "the rule")
    return place


@pytest.mark.parametrize("controller", ["alive", "killed"])
def test_what_nobody_confirms_is_undone(running: Site, disk: Freezer, controller: str) -> None:
    window = running.open()
    running.cut()
    if controller == "killed":
        running.stop(signal.SIGKILL)
    with disk.frozen():
        running.wait(lambda: window.left(datetime.now(UTC)) == 0, "the window to be over")
        over = time.monotonic()
        running.wait(lambda: running.reachable, "the operator")
        assert time.monotonic() - over < SOON
        if controller == "alive":
            time.sleep(6)  # guard and controller undo it both, and the latter takes the copy of the rules for true then
        assert running.reachable
    running.wait(lambda: running.outcome is Outcome.EXPIRED, "the rollback to be recorded")
    running.wait(lambda: running.holds(HARMLESS), "the rules of before")
    assert running.reachable


def test_what_others_change_is_repaired_again_and_again(running: Site, disk: Freezer) -> None:
    with disk.frozen():
        for _ in range(3):
            running.lab.gateway.run("iptables-legacy", "-t", "mangle", "-F")
            began = time.monotonic()
            running.wait(lambda: not running.drift(), "the limits")
            assert time.monotonic() - began < SOON
            time.sleep(2)
    running.put(CUT)
    running.wait(lambda: running.holds(HARMLESS, CUT), "the controller to follow the database again")


def test_a_teardown_takes_limits_out_for_good(running: Site, disk: Freezer) -> None:
    with disk.frozen():
        began = time.monotonic()
        done = running.attempt("teardown")
        assert done.returncode == 0, done
        assert time.monotonic() - began < SOON
        assert "has let a write hang" in done.stderr
        time.sleep(5)  # the controller looks for drift meanwhile
        assert not observe(running.kernel).structure.sets
    running.wait(lambda: running.store.paused(HOST), "the database to hear of the pause")
    assert not observe(running.kernel).structure.sets
    running.do("apply")
    running.wait(lambda: running.holds(HARMLESS), "the limits that were asked for again")


@pytest.mark.parametrize("command", [("apply",), ("rollback", "0", "--force"), ("confirm",), ("token", "list")])
def test_a_command_that_must_write_says_why_it_cannot(running: Site, disk: Freezer, command: tuple[str, ...]) -> None:
    with disk.frozen():
        began = time.monotonic()
        done = running.attempt(*command)
        assert time.monotonic() - began < SOON
    assert done.returncode == 1, done
    assert "has let a write hang for 3 seconds" in done.stderr
    assert running.holds(HARMLESS)


def test_the_api_says_within_seconds_that_it_cannot(running: Site, disk: Freezer) -> None:
    port = free_port()

    def ask(method: str, path: str, *more: str) -> tuple[int, float]:
        began = time.monotonic()
        done = running.lab.gateway.run(
            *("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "-m", "60", "-X", method),
            *("-H", f"Authorization: Bearer {TOKEN}", "-H", "Content-Type: application/json", *more),
            *(f"http://127.0.0.1:{port}/api/v1/{path}",),
            check=False,
        )
        return int(done.stdout), time.monotonic() - began

    def add(name: str) -> tuple[int, float]:
        body = f'{{"name":"{name}","target":"10.1.60.0/24","rate":"100 packets/s","per":"host"}}'
        return ask("POST", "rules", "--data", body)

    with running.serving(f"127.0.0.1:{port}", TOKEN):
        running.wait(lambda: ask("GET", "rules")[0] == 200, "the API to answer")
        with disk.frozen():
            first, *later = [add("frozen") for _ in range(20)]
            assert (first[0], {code for code, _ in later}) == (503, {503})
            assert first[1] < SOON
            assert sum(took for _, took in later) < SOON  # they do not wait for what is known by then
            for path in ("rules", "status", "revisions"):
                code, took = ask("GET", path)
                assert (code in (200, 503), took < SOON) == (True, True)
        running.wait(lambda: add("thawed")[0] == 201, "the API to take a rule again")
    assert [each.rule.name for each in running.store.select()[0]] == [HARMLESS["name"], "thawed"]
