"""The limiter's unit at Unix sockets, as docs/limiter.md has it."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.testbed.streams import ROOT
from tests.systemd.gateway import ask, run, wait, wait_for_ports

SETTINGS = Path("/etc/netlimit/netlimit.toml")
DIRECTORY = Path("/etc/tmpfiles.d/netlimit-limiter.conf")
SOCKETS = [Path("/run/netlimit-limiter/http.sock"), Path("/run/netlimit-limiter/grpc.sock")]
CONNECT = """
import socket, sys
for path in sys.argv[1:]:
    with socket.socket(socket.AF_UNIX) as made:
        try: made.connect(path)
        except OSError as error: print(type(error).__name__)
        else: print("connected")
"""


@pytest.fixture
def told() -> Iterator[None]:
    """What the page says is done, on a gateway whose limiter was at ports before."""
    page = (ROOT / "docs/limiter.md").read_text("utf-8").partition("## Unix sockets")[2]
    fences = dict(re.findall(r"^```(toml|text)\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    before = SETTINGS.read_text()
    run("systemctl", "start", "netlimit-limiter")
    wait_for_ports("limiter")
    SETTINGS.write_text(before + fences["toml"])
    DIRECTORY.write_text(fences["text"])
    run("systemd-tmpfiles", "--create")
    run("systemctl", "restart", "netlimit-limiter")
    yield
    SETTINGS.write_text(before)
    DIRECTORY.unlink()
    run("systemctl", "restart", "netlimit-limiter")
    wait_for_ports("limiter")
    run("systemctl", "stop", "netlimit-limiter")


def connect_as(user: str) -> list[str]:
    words = ("setpriv", "--reuid", user, "--regid", "nogroup" if user == "nobody" else user, "--clear-groups")
    return run(*words, sys.executable, "-S", "-c", CONNECT, *map(str, SOCKETS)).split()


def wait_for_sockets(but: str = "") -> None:
    """Until they are those of another process."""
    wait(f"test $(systemctl show -p MainPID --value netlimit-limiter) != '{but}'", "another process")
    for path in SOCKETS:
        wait(f"{sys.executable} -S -c '{CONNECT}' {path} | grep -q connected", path)


@pytest.mark.usefixtures("told")
def test_whom_the_page_lets_in_may_ask_and_nobody_else() -> None:
    wait_for_sockets()
    assert ask("limiter", "NFileDescriptorStore") == "0"
    assert [connect_as(user) for user in ("www-data", "nobody")] == [["connected"] * 2, ["PermissionError"] * 2]
    for how in ("restart", "kill"):
        before = ask("limiter", "MainPID")
        if how == "restart":
            run("systemctl", "restart", "netlimit-limiter")
        else:
            os.kill(int(before), signal.SIGKILL)
        wait_for_sockets(before)
        assert connect_as("www-data") == ["connected"] * 2
    run("systemctl", "stop", "netlimit-limiter")
    assert [path for path in SOCKETS if path.exists()] == []
