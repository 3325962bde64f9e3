"""The command as it is used: as a program, and as a server whose processes can be found by their parent."""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from netlimit.cli.database import share
from tests import warm
from tests.ports import free_port

MODULE = "netlimit.cli.main"
PROGRAM = (sys.executable, "-W", "error", "-m", MODULE)
Process = subprocess.Popen[bytes] | warm.Started
SECONDS = 120.0
"""How long anything may take here; a busy machine is no failure."""


@dataclass(frozen=True)
class Netlimit:
    """A place to run `netlimit` in: its settings, its network namespace if it has one, and whatever the command line is
    led in by (`setpriv …`). What goes on has its imports done already, unless its start is what is tried: `cold`."""

    environment: Mapping[str, str]
    namespace: str = ""
    before: Sequence[str] = field(default=())
    cold: bool = False
    started: list[Server] = field(default_factory=list, compare=False)

    def run(self, *arguments: str, given: str = "", **settings: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; one that nothing leads in has its imports done already."""
        environment = {**self.environment, **settings}
        if not self.before:
            return warm.run(
                MODULE, *arguments, env=environment, namespace=self.namespace, given=given, timeout=2 * SECONDS
            )
        return subprocess.run(
            self.within(*PROGRAM, *arguments),
            input=given,
            capture_output=True,
            text=True,
            timeout=2 * SECONDS,
            cwd=warm.ROOT,
            env=environment,
            check=False,
        )

    def do(self, *arguments: str, given: str = "") -> str:
        """Run a command that must do its work; what it prints."""
        done = self.run(*arguments, given=given)
        assert (done.returncode, done.stderr) == (0, ""), done
        return done.stdout

    def ask(self, *arguments: str, given: str = "") -> Any:
        """What a command prints as JSON."""
        return json.loads(self.do(*arguments, "--json", given=given))

    def refuse(self, *arguments: str, given: str = "", **settings: str) -> str:
        """Run a command that must fail, in words; what it says."""
        done = self.run(*arguments, given=given, **settings)
        assert (done.returncode, done.stdout) == (1, ""), done
        assert "Traceback" not in done.stderr
        return done.stderr

    def within(self, *command: str) -> list[str]:
        """The command line by which a program runs here."""
        return [*(("ip", "netns", "exec", self.namespace) if self.namespace else ()), *self.before, *command]

    def start(self, *arguments: str, stderr: int | None = None, program: Sequence[str] = PROGRAM) -> Server:
        """Start a command that goes on. Its log is a file, unless `stderr` is given."""
        log = Path(self.environment["LOG"])
        with log.open("ab") if stderr is None else open(stderr, "wb", closefd=False) as errors:
            if self.cold or self.before or program is not PROGRAM:
                process: Process = subprocess.Popen(
                    self.within(*program, *arguments), stderr=errors, cwd=warm.ROOT, env=dict(self.environment)
                )
            else:
                process = self._start_warm(*arguments, errors=errors)
        self.started.append(Server(process, log))
        return self.started[-1]

    def _start_warm(self, *arguments: str, errors: BinaryIO) -> warm.Started:
        with open(0, "rb", closefd=False) as stdin, open(1, "wb", closefd=False) as stdout:
            return warm.start(
                *(MODULE, *arguments),
                env=self.environment,
                namespace=self.namespace,
                stdin=stdin,
                stdout=stdout,
                stderr=errors,
                imported=warm.API,
            )

    def end_all(self) -> None:
        """End what a test that failed has left running: nothing of it is to be told in another."""
        for server in self.started:
            if not server.ended:
                server.end()

    def make_database(self, user: str = "nobody") -> None:
        """Make the database, which this user may read and write."""
        self.do("db", "upgrade")
        if os.geteuid() == 0:
            share(Path(self.environment["NETLIMIT_DATABASE_URL"].removeprefix("sqlite:///")), pwd.getpwnam(user))

    def serve(self, stderr: int | None = None) -> Server:
        """Start `netlimit serve`; it answers when this returns. Root lets the API be nobody's."""
        log = Path(self.environment["LOG"])
        before = len(log.read_text()) if log.exists() else 0

        def answers() -> bool:
            """A command takes processor time from what it waits for: none is run before the log says so."""
            begun = stderr is not None or "Answering at" in server.said()[before:]
            return begun and not self.run("status").returncode

        server = self.start("serve", *(("--api-user", "nobody") if os.geteuid() == 0 else ()), stderr=stderr)
        until(lambda: server.ended or answers(), server.said)
        assert not server.ended, server.said()
        return server


@dataclass(frozen=True)
class Server:
    """A command that goes on, and what it logs."""

    process: Process
    log: Path

    @property
    def ended(self) -> bool:
        """Whether it has come to its end."""
        return self.process.poll() is not None

    @property
    def children(self) -> dict[int, int]:
        """The processes that it has started, by id, with the user whose they are."""
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return {int(child): Path(f"/proc/{child}").stat().st_uid for child in listed}

    def said(self) -> str:
        """What it has logged."""
        return self.log.read_text()

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, and wait for the end; the exit status."""
        self.process.send_signal(number)
        return self.process.wait(SECONDS)


def settings_in(directory: Path, **others: str) -> dict[str, str]:
    """Settings for an API and a database of its own, in memory rather than in the kernel."""
    place = f"127.0.0.1:{free_port()}"
    return {
        "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin",
        "HOME": str(directory),
        "LOG": str(directory / "log"),
        "NETLIMIT_BACKEND": "fake",
        "NETLIMIT_DATABASE_URL": f"sqlite:///{directory}/database/netlimit.db",
        "NETLIMIT_HOST": "gw1",
        "NETLIMIT_LISTEN": place,
        "NETLIMIT_URL": f"http://{place}",
        **others,
    }


def until(come: Callable[[], object], say: Callable[[], str] = str) -> None:
    """Wait until something has come true."""
    end = time.monotonic() + SECONDS
    while not come():
        assert time.monotonic() < end, say()
        time.sleep(0.05)


def alive(process: int) -> bool:
    """Whether there is such a process, other than as a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
