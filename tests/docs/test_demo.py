"""The demo tidies up however it ends, and shows of an answer what matters."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from scripts.testbed.demo import abridge
from scripts.testbed.namespaces import NAMESPACES
from scripts.testbed.service import RUN
from scripts.testbed.streams import ROOT


def test_an_interrupted_demo_leaves_nothing(root: None) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    command = [sys.executable, "-u", "-m", "scripts.testbed.demo"]
    demos = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) for _ in numbers]
    for demo, number in zip(demos, numbers, strict=True):
        with demo:
            assert demo.stdout
            assert any(b"counts what arrives" in line for line in demo.stdout), "it did not start"
            assert _traces(demo.pid)
            demo.send_signal(number)
            assert demo.wait(60) != 0
        assert not _traces(demo.pid)


def test_an_abridged_answer_keeps_what_matters() -> None:
    rate = {"text": "200 packets/s", "amount": 200}
    body = {"id": 1, "name": None, "target": "10.1.0.2", "rate": rate, "effective_rate": rate, "effective_burst": 20}
    body["status"] = {"state": "applied", "enforced_by": "iptables", "message": None}
    assert abridge(body) == (
        '{"id": 1, "target": "10.1.0.2", "rate": {"text": "200 packets/s", …}, "effective_rate": '
        '{"text": "200 packets/s", …}, "effective_burst": 20, '
        '"status": {"state": "applied", "enforced_by": "iptables", …}, …}'
    )


def _traces(owner: int) -> list[Path]:
    """What is there of a demo's namespaces and files."""
    return [*NAMESPACES.glob(f"nl-?-{owner}-*"), *Path(RUN).glob(f"netlimit-{owner}-*")]
