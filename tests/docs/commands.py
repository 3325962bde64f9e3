"""The commands of the pages that are not for the shell on the gateway: they set up, and run, everything themselves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.testbed.namespaces import Lab
from scripts.testbed.service import remove_lock
from scripts.testbed.streams import ROOT

_RUN = "! test -d /etc/netlimit || mount -t tmpfs none /etc/netlimit; exec scripts/run"
"""Without the settings of this host; the mount is seen by this process alone."""
START_SECONDS = 180.0
"""The first time, scripts/setup may have to install packages."""


def run_script() -> str:
    """scripts/run in a namespace with a database of its own, until the API answers and the rules are watched."""
    with Lab() as lab, TemporaryDirectory() as directory:
        database = {"NETLIMIT_DATABASE_URL": f"sqlite:///{directory}/netlimit.db"}
        log = Path(directory).with_suffix(".log")
        with log.open("w") as output:
            running = lab.gateway.popen("bash", "-c", _RUN, stdout=output, stderr=output, env=database, cwd=ROOT)
        try:
            deadline = time.monotonic() + START_SECONDS
            while running.poll() is None and time.monotonic() < deadline:
                ask = ("curl", "--silent", "--noproxy", "*", "http://127.0.0.1:8750/healthz")
                if lab.gateway.run(*ask, check=False).stdout == '{"status":"ok"}':
                    break
                time.sleep(0.1)
            assert running.poll() is None, log.read_text()
            time.sleep(0.5)
            running.terminate()
            assert running.wait(60) == 0, log.read_text()
            return log.read_text()
        finally:
            remove_lock(lab.gateway)
            log.unlink()


def check_tests() -> str:
    """scripts/test runs this very test, so it is only read: is it sound, and does it leave no tests out?"""
    script = ROOT / "scripts/test"
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK)
    text = script.read_text()
    runs = [line for line in text.splitlines() if line.startswith(("test_lane ", "start_aside "))]
    ran = {folder for line in runs for folder in re.findall(r"tests/(\w+)(?= |$)", line)}
    by_machines = {"debian", "systemd"}  # of scripts/vm
    assert ran == {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")} - by_machines
    # What is left out in one place is run in another.
    for variable, left_out in re.findall(r"^(\w+)\+?=\(?(tests/\S+?\.py)\)?$", text, re.MULTILINE):
        uses = [line for line in runs if f'"${variable}"' in line or f'"${{{variable}[@]' in line]
        ignored = [f'--ignore "${variable}"' in line or f"${{{variable}[@]/#/--ignore=}}" in line for line in uses]
        assert sorted(ignored) == [False, True], left_out
        for path in _expand(left_out):
            assert (ROOT / path).exists(), path
    return ""


def _expand(pattern: str) -> list[str]:
    """What bash makes of braces."""
    head, brace, rest = pattern.partition("{")
    names, _, tail = rest.partition("}")
    return [f"{head}{name}{tail}" for name in names.split(",")] if brace else [pattern]


def demo_script() -> str:
    """The demo, as short as it can be."""
    return _run("scripts/demo", "--seconds", "4")


def install_script() -> str:
    """An image of a gateway instead of this host, and the environment of these tests."""
    with TemporaryDirectory() as directory:
        done = _in_image("scripts/install", directory, "--venv", sys.prefix)
        assert Path(directory, "etc/systemd/system/netlimit-controller.service").exists()
        return done


def uninstall_script() -> str:
    """Of such an image."""
    with TemporaryDirectory() as directory:
        _in_image("scripts/install", directory, "--venv", sys.prefix)
        return _in_image("scripts/uninstall", directory)


def _in_image(script: str, directory: str, *options: str) -> str:
    return _run(script, "--root", directory, *options)


def _run(*command: str) -> str:
    """What a script prints, which must do its work."""
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=START_SECONDS)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


SPECIAL: dict[str, Callable[[], str]] = {
    "sudo scripts/run": run_script,
    "sudo scripts/test": check_tests,
    "sudo scripts/demo": demo_script,
    "sudo scripts/install": install_script,
    "sudo scripts/uninstall": uninstall_script,
}
