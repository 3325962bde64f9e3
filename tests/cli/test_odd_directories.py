"""Commands that root runs in a directory of somebody else run nothing that lies there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from netlimit.rules import parse_rule
from netlimit.store import Store
from scripts.testbed.namespaces import Namespace

NETLIMIT = Path(sys.executable).with_name("netlimit")
TRAP = "open({owned!r}, 'a').write(f'{{__name__}}\\n')\nraise ImportError('of somebody else')\n"
NAMES = ("json", "pickle", "socket", "signal", "logging", "typing", "ipaddress", "alembic", "pyroute2", "typer")


@pytest.fixture
def gateway(root: None) -> Iterator[Namespace]:
    namespace = Namespace(f"nl-g-{os.getpid()}-odd", "gateway")
    subprocess.run(["ip", "netns", "add", namespace.name], check=True)
    namespace.ip("link set lo up")
    yield namespace
    namespace.end_processes()
    subprocess.run(["ip", "netns", "del", namespace.name], check=True)


def test_nothing_in_the_working_directory_is_run(gateway: Namespace, tmp_path: Path) -> None:
    trapped, owned = tmp_path / "trapped", tmp_path / "owned"
    (trapped / "netlimit" / "kernel").mkdir(parents=True)
    for name in (*NAMES, "netlimit/__init__", "netlimit/kernel/__init__", "netlimit/kernel/marks"):
        (trapped / f"{name}.py").write_text(TRAP.format(owned=str(owned)))
    settings = {
        "NETLIMIT_DATABASE_URL": f"sqlite:///{tmp_path}/netlimit.db",
        "NETLIMIT_STATE_DIRECTORY": str(tmp_path / "state"),
        "NETLIMIT_HOST": "odd",
    }

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        enter = ["ip", "netns", "exec", gateway.name]
        return subprocess.run(
            [*enter, str(NETLIMIT), *words],
            cwd=trapped,
            env=os.environ | settings,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    assert run("db", "upgrade").returncode == 0
    store, now = Store(settings["NETLIMIT_DATABASE_URL"]), datetime.now(UTC)
    store.add([parse_rule({"target": "10.1.0.9", "rate": "10 packets/s"}, now)], "test", now)
    store.close()
    for words in (["doctor"], ["plan"], ["apply", "--confirm", "30s"], ["confirm"], ["apply"]):
        done = run(*words)
        assert not owned.exists(), (words, owned.read_text())
        assert done.returncode == 0 or words == ["doctor"], (words, done.stdout, done.stderr)
