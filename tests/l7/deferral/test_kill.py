"""Nothing is lost by kill -9, neither by who accepts nor by who replays, and the order of each key is kept."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.fixture(params=["sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite://{tmp_path}/deferred.db"
    server = request.getfixturevalue("server")
    for name in server.client.scan_iter("nl:{deferred*"):
        server.client.delete(name)
    return str(server.url)


def start(url: str, served: Path, role: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.l7.deferral.mortal", url, str(served), role]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def kill(process: subprocess.Popen[str]) -> list[str]:
    """kill -9; what it had still said."""
    process.kill()
    said, _ = process.communicate(timeout=60)
    return said.splitlines()


def test_what_was_accepted_is_served_whoever_is_killed(url: str, tmp_path: Path) -> None:
    served = tmp_path / "served"
    served.touch()
    acceptor = start(url, served, "accept")
    assert acceptor.stdout is not None
    said = list(itertools.islice(acceptor.stdout, 60))
    said += kill(acceptor)
    accepted = [line.rsplit(" ", 1)[0] for line in said if line.endswith((" 202", " 202\n"))]
    assert len(accepted) >= 50  # in the midst of a hundred
    deadline = time.monotonic() + 120
    for share in (10, 25):  # two are killed in the midst of it
        worker = start(url, served, "replay")
        while len(served.read_text().splitlines()) < share:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        kill(worker)
    worker = start(url, served, "replay")
    while not {*accepted} <= {*served.read_text().splitlines()}:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    kill(worker)
    lines = served.read_text().splitlines()
    for user in ("alice", "bob"):
        order = [line for line in lines if line.startswith(user)]
        once = [line for line, _ in itertools.groupby(order)]  # what a worker had in hand comes again, right behind
        assert once == [f"{user} {number}" for number in range(len(once))]
        assert len(order) - len(once) <= 2
