"""Somebody with the rights of one of our users has put into the database, or into the controller's copy, what never
ends. Limits are kept in force by a controller, and taken out by root, all the same."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.gateway import COMMAND
from tests.e2e.stage import LIB, Stage

DATABASE, COPY = f"{LIB}/netlimit/netlimit.db", f"{LIB}/netlimit-controller/applied.db"
PUT = ("-m", "tests.endless")
SECONDS = 240.0
"""In which all is done however slow the machine is: a command waits for some 10 seconds of processor time."""
HASTY = ("-c", "from netlimit.cli import parts; parts.COPY_SECONDS = 3; from netlimit.cli.main import app; app()")
"""As COMMAND, but for a tenth of the time in which the copy may work, which would be spent to its end."""
ADD = f"""
from datetime import UTC, datetime
from netlimit.rules import parse_rule
from netlimit.store import Store
now = datetime.now(UTC)
store = Store("sqlite:///{DATABASE}")
store.add([parse_rule({{"target": "10.9.0.0/16", "action": "block"}}, now)], "test", now)
store.close()
"""


@pytest.fixture(scope="module")
def kept(root: None) -> Iterator[Stage]:
    """One on which netlimit is installed, with one rule."""
    stage = Stage()
    try:
        environment = Path(sys.prefix)
        done = stage.run("scripts/install", "--no-start", "--venv", environment, "--prefix", str(stage.prefix))
        assert done.returncode == 0, done.stderr
        assert stage.netlimit("prepare").returncode == 0
        assert stage.run(sys.executable, "-c", ADD).returncode == 0
        stage.shell(f"cp -a {LIB}/netlimit {LIB}/kept")
        yield stage
    finally:
        stage.close()


@pytest.fixture
def stage(kept: Stage) -> Stage:
    """The rule is in force, and both files are as they should be."""
    kept.shell(f"rm -rf {LIB}/netlimit/* {LIB}/netlimit-controller/* && cp -a {LIB}/kept/. {LIB}/netlimit")
    done = kept.netlimit("apply")
    assert done.returncode == 0, done.stderr
    assert holds(kept)
    return kept


def holds(stage: Stage) -> bool:
    return "-j NL-" in stage.shell("iptables-legacy-save")


@pytest.mark.parametrize(
    ("put", "file", "table", "ends_with", "said"),
    [
        ("view", DATABASE, "hosts", 0, "Going on"),
        ("triggers", DATABASE, "pauses", 0, "answers too slowly"),
        ("triggers", COPY, "pauses", 3, "the copy of the applied rules does not know of the teardown"),
    ],
)
def test_a_teardown_takes_the_limits_out(
    stage: Stage, put: str, file: str, table: str, ends_with: int, said: str
) -> None:
    assert stage.run(sys.executable, *PUT, put, file, table).returncode == 0
    done = stage.run(sys.executable, *HASTY, "teardown", timeout=SECONDS)
    assert done.returncode == ends_with, done.stderr
    assert said in done.stderr
    assert not holds(stage)


def test_a_controller_keeps_them_in_force_and_ends_when_it_is_told_to(stage: Stage) -> None:
    settings = ("NETLIMIT_HOST=gw", "NETLIMIT_CONFIG=", "NETLIMIT_BACKEND=iptables")
    log = f"{LIB}/log"
    words = ("env", *settings, "sh", "-c", 'exec "$@" 2>"$0"', log, sys.executable, *COMMAND, "controller")
    with stage.running(*words) as process:
        until(lambda: says(stage, log, "Keeping the rules of gw"))
        assert stage.run(sys.executable, *PUT, "triggers", DATABASE, "hosts").returncode == 0
        until(lambda: says(stage, log, "Going on without it"))
        stage.shell("iptables-legacy -w -t raw -F && iptables-legacy -w -t mangle -F")
        until(lambda: holds(stage))
        process.terminate()
        assert process.wait(SECONDS) == 0


def says(stage: Stage, log: str, words: str) -> bool:
    return words in stage.shell(f"touch {log} && cat {log}")


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not done():
        assert time.monotonic() < end
        time.sleep(0.2)
