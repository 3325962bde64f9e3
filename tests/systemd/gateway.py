"""An installed gateway that systemd has booted, and a client of it, as the tests of this folder use them."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

PATIENCE = 180.0
"""Seconds: an emulated machine takes ten times as long as others."""
CLIENT, OTHER = "10.99.0.2", "10.99.0.3"
PORTS = {"api": (8750,), "limiter": (8751, 8752)}


def run(*words: str, check: bool = True) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert not check or not done.returncode, f"{' '.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout


def ask(unit: str, name: str) -> str:
    """What systemd says of a unit."""
    return run("systemctl", "show", "--property", name, "--value", f"netlimit-{unit}").strip()


def wait(found: str, what: object) -> None:
    """Wait until a command of the shell succeeds."""
    end = time.monotonic() + PATIENCE
    while (done := subprocess.run(("sh", "-c", found), capture_output=True, text=True, check=False)).returncode:
        said = f"{done.stdout}{done.stderr}"
        assert time.monotonic() < end, f"{what}: {said}\n{run('journalctl', '--no-pager', '--lines', '40')}"
        time.sleep(0.5)


def wait_for_ports(unit: str) -> None:
    for port in PORTS[unit]:
        wait(f"exec 3<>/dev/tcp/127.0.0.1/{port}".join(("bash -c '", "'")), f"the {unit} at {port}")


def forget_kernel() -> None:
    """As after a boot: nothing is there."""
    for table in ("raw", "mangle", "filter"):
        for command in ("iptables-legacy", "ip6tables-legacy"):
            run(command, "-w", "-t", table, "-F", check=False)
            run(command, "-w", "-t", table, "-X", check=False)
    run("ipset", "destroy", check=False)


def ping(client: str, source: str, count: int = 5) -> int:
    """How many of so many packets are answered."""
    said = run(
        "ip", "netns", "exec", client,
        "ping", "-q", "-I", source, "-c", str(count), "-i", "0.2", "-W", "2", "10.99.0.1", check=False,
    )  # fmt: skip
    return int(said.split(" received")[0].rpartition(" ")[2])


@dataclass
class Pings:
    """How many packets were sent, and how many answered: known when they have ended."""

    sent: int = 0
    answered: int = 0


@contextmanager
def pinging(client: str, source: str) -> Iterator[Pings]:
    """Packets all the while."""
    words = ("ip", "netns", "exec", client, "ping", "-q", "-I", source, "-i", "0.05", "-W", "1", "10.99.0.1")
    pings = Pings()
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield pings
        finally:
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=30)
    pings.sent = int(said.split(" packets transmitted")[0].rpartition("\n")[2])
    pings.answered = int(said.split(" received")[0].rpartition(" ")[2])
    assert pings.sent > 20
