"""netlimit itself, running in a namespace of a lab with a database of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, Any, ClassVar, NamedTuple, Self

from scripts.testbed.errors import LabError
from scripts.testbed.namespaces import NAMESPACES, Namespace
from scripts.testbed.streams import ROOT

MODULE = "netlimit.cli.main"
URL = "http://127.0.0.1:8750"
RUN = "/run"  # every user may pass here, which a TMPDIR need not allow
START_SECONDS, STOP_SECONDS = 60.0, 30.0


Launch = Callable[[Namespace, Sequence[str], Mapping[str, str], IO[str]], subprocess.Popen[str]]


class Answer(NamedTuple):
    """What the API answered; `body` is None where there is none."""

    status: str
    body: Any


def _launch(namespace: Namespace, argv: Sequence[str], env: Mapping[str, str], log: IO[str]) -> subprocess.Popen[str]:
    return namespace.popen(sys.executable, "-m", MODULE, *argv, stdout=log, stderr=log, env=env, cwd=ROOT)


class Service:
    """`netlimit serve` in a namespace, on its loopback: a context manager, which ends it and removes its files.

    The API runs as `user`, who must exist, and is asked at `url`. Commands in the same namespace reach it with `env`;
    `settings` are others than those of the testbed.
    """

    launch: ClassVar[Launch] = staticmethod(_launch)
    """Starts the command. Whoever starts many may have a way that takes less time."""

    def __init__(
        self,
        namespace: Namespace,
        user: str = "nobody",
        settings: Mapping[str, str] = MappingProxyType({}),
        url: str = URL,
    ) -> None:
        self.namespace = namespace
        self.url = url
        self.directory = Path(tempfile.mkdtemp(prefix=f"netlimit-{os.getpid()}-", dir=RUN))
        self.log = self.directory.with_suffix(".log")
        self.env = {
            "NETLIMIT_DATABASE_URL": f"sqlite:///{self.directory}/netlimit.db",
            "NETLIMIT_HOST": "gw1",
            "NETLIMIT_LISTEN": URL.removeprefix("http://"),
            "NETLIMIT_URL": URL,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin",
            **settings,
        }
        self._user = user
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        try:
            with self.log.open("w") as log:
                self._process = type(self).launch(self.namespace, self._arguments(), self.env, log)
            self._await_controller()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    @cached_property
    def token(self) -> str:
        """The admin's, which the first start has made if none was set. Raises LabError when it has not yet."""
        if "NETLIMIT_BOOTSTRAP_TOKEN" in self.env:
            return self.env["NETLIMIT_BOOTSTRAP_TOKEN"]
        try:
            return (self.directory / "admin.token").read_text().strip()
        except FileNotFoundError:
            raise LabError("there is no token yet.") from None

    def request(self, method: str, path: str, body: Mapping[str, object] | None = None, *headers: str) -> Answer:
        """Asks the API by curl and returns what it answered. Raises LabError when there is no answer."""
        sent = [f"Authorization: Bearer {self.token}", *headers]
        if body is not None:
            sent.append("Content-Type: application/json")
        options = [word for header in sent for word in ("--header", header)]
        if body is not None:
            options += ["--data", json.dumps(body)]
        done = self.namespace.run(
            *("curl", "--silent", "--show-error", "--include", "--noproxy", "*", "--max-time", "90"),
            *("--request", method, *options, self.url + path),
        )
        head, _, text = done.stdout.replace("\r", "").partition("\n\n")
        return Answer(head.partition("\n")[0], json.loads(text) if text else None)

    def remove(self) -> None:
        """Ends it and removes its files; once removed, does nothing."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        remove_lock(self.namespace)
        shutil.rmtree(self.directory, ignore_errors=True)
        self.log.unlink(missing_ok=True)

    def _arguments(self) -> tuple[str, ...]:
        # An empty settings file, so that those of this host have no say.
        return "--config", "/dev/null", "serve", "--api-user", self._user

    def _await_controller(self) -> None:
        """Until the API answers and the controller has reported."""
        deadline = time.monotonic() + START_SECONDS
        said = ""
        while time.monotonic() < deadline and self._process is not None and self._process.poll() is None:
            try:
                if self.request("GET", "/api/v1/status").body.get("hosts"):
                    return
            except LabError as error:
                said = str(error)
            time.sleep(0.05)
        raise LabError(f"`netlimit serve` did not start: {self.log.read_text().strip()[-2000:]}\n{said}")


def remove_lock(namespace: Namespace) -> None:
    """Removes the lock files of a netlimit that was killed in a namespace; they are named for it, and mean nothing
    without it."""
    with contextlib.suppress(FileNotFoundError):
        number = (NAMESPACES / namespace.name).stat().st_ino
        for path in Path(RUN, "netlimit").glob(f"{number}.*"):
            path.unlink(missing_ok=True)
