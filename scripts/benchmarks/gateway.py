"""netlimit itself, running in a lab's gateway, and a client of its API there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import pyroute2

from scripts.testbed.namespaces import Lab

TOKEN = "bench-token-that-opens-nothing-else"  # noqa: S105  it opens a database that lives as long as the benchmark
START_SECONDS = 20
ROOT = Path(__file__).resolve().parents[2]


class Gateway:
    """`netlimit serve` in the gateway namespace, over a database of its own. A context manager. `program` is what
    Python runs; another `checkout` than this one has been set up by its own scripts/setup."""

    def __init__(self, lab: Lab, program: tuple[str, ...] = ("-m", "netlimit.cli.main"), checkout: Path = ROOT) -> None:
        self._lab = lab
        self._checkout = checkout
        self._program = program
        self._directory = tempfile.TemporaryDirectory()
        path = Path(self._directory.name)
        path.chmod(0o755)
        self.environment = {
            **os.environ,
            "NETLIMIT_DATABASE_URL": f"sqlite:///{path}/db/netlimit.db",
            "NETLIMIT_BOOTSTRAP_TOKEN": TOKEN,
            "NETLIMIT_HOST": "gateway",
            "PYTHONPATH": str(checkout),
        }
        self._log = (path / "log").open("w")
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        python = sys.executable if self._checkout == ROOT else str(self._checkout / ".venv/bin/python")
        command = [python, *self._program, "serve", "--api-user", "nobody"]
        self._process = self._lab.gateway.popen(
            *command, env=self.environment, stdout=self._log, stderr=subprocess.STDOUT, cwd=self._checkout
        )
        self.client = httpx.Client(
            base_url="http://127.0.0.1:8750/api/v1", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=120
        )
        self._wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self.client.close()
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(20)
        self._log.close()
        if error is not None:
            sys.stderr.write((Path(self._directory.name) / "log").read_text()[-20_000:])
        self._directory.cleanup()

    def request(self, method: str, path: str, *, wait: int = 5, json: object = None) -> httpx.Response:
        """Ask the API, and that it answers once the kernel holds the change. Raises httpx.HTTPStatusError."""
        with inside(self._lab):  # a connection that was closed meanwhile is opened anew
            answer = self.client.request(method, path, json=json, headers={"Prefer": f"wait={wait}"})
        return answer.raise_for_status()

    def add(self, rules: list[dict[str, Any]], wait: int = 60) -> float:
        """POST rules in bulk; the seconds until the kernel holds them."""
        began = time.perf_counter()
        revision = self.request("POST", "/rules/bulk", wait=wait, json=rules).json()["revision"]
        while self.status()["applied_revision"] < revision:
            time.sleep(0.02)
        return time.perf_counter() - began

    def status(self) -> dict[str, Any]:
        """What `GET /status` answers."""
        answer: dict[str, Any] = self.request("GET", "/status").json()
        return answer

    def children(self) -> list[int]:
        """The processes of the parts."""
        assert self._process is not None
        return list(map(int, Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()))

    def memory(self) -> dict[str, float]:
        """The most memory (MB) that each part has had so far, by its name."""
        found = {}
        for child in self.children():
            status = Path(f"/proc/{child}/status").read_text()
            peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
            user = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Uid"))
            found["controller" if user == 0 else "api"] = peak / 1000
        return found

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                if self.status().get("hosts"):
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise TimeoutError("netlimit did not come up in the gateway")


@contextmanager
def inside(lab: Lab) -> Iterator[None]:
    """Sockets that are made meanwhile belong to the gateway."""
    pyroute2.netns.pushns(lab.gateway.name)
    try:
        yield
    finally:
        pyroute2.netns.popns()
