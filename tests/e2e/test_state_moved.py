"""The controller's directory is moved out of the API's user's reach, and nothing of it is lost."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.gateway import COMMAND
from tests.warm import ROOT

USER = pwd.getpwnam("nobody")
LIB = Path("/var/lib")
MAKE = f"""
import os
from datetime import UTC, datetime
from pathlib import Path
from netlimit.rules import parse_rule
from netlimit.store import Store, open_replica
now = datetime.now(UTC)
store = Store("sqlite:////var/lib/netlimit/netlimit.db")
store.upgrade()
store.add([parse_rule({{"target": "10.9.9.9", "action": "block"}}, now)], "test", now)
state = Path("/var/lib/netlimit/controller")
replica = open_replica(state, "gw")
replica.follow(store)
replica.close()
store.close()
for each in (state, state / "applied.db"):
    os.chown(each, {USER.pw_uid}, {USER.pw_gid})
"""
FORMER = "NETLIMIT_STATE_DIRECTORY=/var/lib/netlimit/controller"
PRESENT = "NETLIMIT_STATE_DIRECTORY=/var/lib/netlimit-controller"


class Machine:
    """Commands in a mount namespace where /var/lib is empty at first."""

    def __init__(self) -> None:
        setup = f"mount -t tmpfs -o mode=755 none {LIB} && mkdir -m 2770 {LIB}/netlimit && "
        setup += f"chown 0:{USER.pw_gid} {LIB}/netlimit && echo made && exec sleep 300"
        self._process = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", setup], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "made\n"

    def run(self, *words: str, settings: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        inside = ("nsenter", f"--target={self._process.pid}", "--mount", f"--wd={ROOT}")
        environment = {"NETLIMIT_BACKEND": "fake", "NETLIMIT_HOST": "gw", "NETLIMIT_CONFIG": ""}
        environment |= dict(each.split("=", 1) for each in settings)
        return subprocess.run(
            [*inside, *words],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def netlimit(self, *words: str, settings: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, *COMMAND, *words, settings=settings)

    def look(self, *names: str) -> str:
        """Owner, mode and inode of each."""
        return self.run("stat", "-c", "%u %a %i", *(f"{LIB}/{name}" for name in names)).stdout

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def machine(root: None) -> Iterator[Machine]:
    machine = Machine()
    yield machine
    machine.close()


@pytest.fixture
def former(machine: Machine) -> Machine:
    """One on which an earlier version has applied a rule."""
    made = machine.run(sys.executable, "-c", MAKE)
    assert made.returncode == 0, made.stderr
    return machine


def tell_last(machine: Machine, *settings: str) -> int | None:
    done = machine.netlimit("apply", "--last", "--json", settings=settings)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)["revision"]
    assert said is None or isinstance(said, int)
    return said


@pytest.mark.parametrize("settings", [(), (FORMER,), (PRESENT,)], ids=["none", "former", "present"])
def test_what_was_applied_last_is_known_before_and_after(former: Machine, settings: tuple[str, ...]) -> None:
    """Whatever the operator's settings say, and to every part."""
    assert tell_last(former, *settings) == 1
    before = former.look("netlimit/controller", "netlimit/controller/applied.db")
    for _ in range(2):
        done = former.netlimit("prepare", "--user", USER.pw_name, settings=settings)
        assert (done.returncode, done.stderr) == (0, "")
    assert former.look("netlimit-controller", "netlimit-controller/applied.db") == before
    left = former.run("ls", "-A", str(LIB), f"{LIB}/netlimit").stdout.split()
    assert left == ["/var/lib:", "netlimit", "netlimit-controller", "/var/lib/netlimit:", "netlimit.db"]
    assert tell_last(former, *settings) == 1


def test_it_is_made_where_none_is(machine: Machine) -> None:
    done = machine.netlimit("prepare", "--user", USER.pw_name)
    assert (done.returncode, done.stderr) == (0, "")
    assert machine.look("netlimit-controller").startswith(f"{USER.pw_uid} 700 ")
    assert machine.look("netlimit/controller") == ""


@pytest.mark.parametrize("kind", ["link", "another's", "FIFO"])
def test_nothing_else_is_moved(machine: Machine, kind: str) -> None:
    """Root's /etc, say, or what the API's user has made."""
    plant = {
        "link": "ln -s /var/lib/others controller",
        "another's": "mkdir controller && chown 65533 controller",
        "FIFO": "mkfifo controller",
    }
    machine.run("sh", "-c", f"mkdir -m 755 {LIB}/others && cd {LIB}/netlimit && {plant[kind]}")
    before = machine.look("others", "netlimit/controller")
    machine.netlimit("prepare", "--user", USER.pw_name, settings=(FORMER,))
    assert machine.look("others", "netlimit/controller") == before
    assert machine.look("others").startswith("0 755 ")


def test_it_stays_while_a_controller_runs_in_it(former: Machine) -> None:
    """As when the guard alone is started again after an upgrade."""
    command = (sys.executable, *COMMAND, "prepare", "--user", USER.pw_name)
    running = ("flock", f"{LIB}/netlimit/controller/controller.lock")
    assert former.run(*running, *command, settings=("NETLIMIT_BACKEND=l7",)).returncode == 0
    assert former.look("netlimit-controller") == ""
    assert former.run(*command, settings=("NETLIMIT_BACKEND=l7",)).returncode == 0
    assert former.look("netlimit-controller").startswith(f"{USER.pw_uid} ")


def test_one_of_another_file_system_stays_and_that_is_told(former: Machine) -> None:
    former.run("sh", "-c", f"mount -t tmpfs none {LIB}/netlimit && chown 0:{USER.pw_gid} {LIB}/netlimit")
    assert former.run(sys.executable, "-c", MAKE).returncode == 0
    done = former.netlimit("prepare", "--user", USER.pw_name)
    assert done.returncode == 0
    assert "/var/lib/netlimit/controller cannot be moved to /var/lib/netlimit-controller: Invalid cross-" in done.stderr
    assert tell_last(former) == 1


def test_scripts_install_moves_it_where_no_systemd_does(former: Machine) -> None:
    before = former.look("netlimit/controller", "netlimit/controller/applied.db")
    words = ("move", "/var/lib/netlimit/controller", "/var/lib/netlimit-controller", USER.pw_name)
    done = former.run(sys.executable, "-m", "netlimit.custody", *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert former.look("netlimit-controller", "netlimit-controller/applied.db") == before
    done = former.run(sys.executable, "-m", "netlimit.custody", *words)
    assert done.returncode == 1
    assert "/var/lib/netlimit/controller cannot be moved to /var/lib/netlimit-controller: No such file" in done.stderr
