"""A root shell on the gateway of a lab, where netlimit runs as the pages suppose."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Timer
from typing import NamedTuple

from scripts.testbed.service import Service
from scripts.testbed.streams import ROOT

SECONDS = 30.0
STATE = Path("/var/lib/netlimit")
OWN_STATE = Path("/var/lib/netlimit-controller")
_END = "== end of output =="
_PRELUDE = """
sudo() { "$@"; }
unset ${!NETLIMIT_@} COLUMNS PYTHONDONTWRITEBYTECODE http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY
export NETLIMIT_HOST=gw1
umask 022
"""


class Printed(NamedTuple):
    """What a command printed on both its outputs, and its exit status."""

    text: str
    status: int


class Console:
    """A bash that goes on from command to command. `directory` is where it stands; its `bin` holds `netlimit`."""

    def __init__(self, service: Service, directory: Path) -> None:
        beside = Path(sys.executable).parent
        self._process = service.namespace.popen(
            *("bash", "--noprofile", "--norc"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"PATH": ":".join((f"{directory}/bin", str(beside), os.environ["PATH"], "/usr/sbin:/sbin"))},
            cwd=directory,
        )
        # In the mount namespace of this shell alone: `ip netns exec` has made one.
        hidden = (
            "mkdir -p /etc/netlimit && mount -t tmpfs none /etc/netlimit" if os.path.exists("/etc/netlimit") else ""
        )
        # Where a netlimit is installed, commands take its directory for the controller's: it is the service's then.
        beside = f"mount --bind {STATE}/controller {OWN_STATE}" if OWN_STATE.exists() else ""
        done = self.run(f"{_PRELUDE}{hidden}\nmount --bind {shlex.quote(str(service.directory))} {STATE}\n{beside}")
        assert done.status == 0, done.text

    def run(self, command: str) -> Printed:
        """Run a command to its end. One that takes too long ends the shell, and with it the test."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        timer = Timer(SECONDS, lambda: os.killpg(self._process.pid, signal.SIGKILL))
        timer.start()
        try:
            stdin.write(f"{{ {command}\n}} </dev/null\nprintf '\\n%s %s\\n' '{_END}' $?\n")
            stdin.flush()
            lines = []
            for line in stdout:
                if line.startswith(_END):
                    return Printed("".join(lines), int(line.removeprefix(_END)))
                lines.append(line)
        finally:
            timer.cancel()
        raise AssertionError(f"the shell ended in `{command}`, after\n{''.join(lines)}")

    def run_together(self, commands: Sequence[str]) -> list[Printed]:
        """Run netlimit commands, each as if alone, but in one process."""
        asked = shlex.quote(json.dumps(commands))
        done = self.run(f"echo {asked} | PYTHONPATH={shlex.quote(str(ROOT))} {sys.executable} -m tests.docs.many")
        assert done.status == 0, done.text
        return [Printed(*answer) for answer in json.loads(done.text)]


@contextlib.contextmanager
def mount_point() -> Iterator[None]:
    """The place where pages look for the database; in the shell, that of the service is mounted there."""
    missing = not STATE.exists()
    if missing:
        STATE.mkdir()
    try:
        yield
    finally:
        if missing:
            STATE.rmdir()
