"""Who connects to a gateway by TCP, and the sshd that answers."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

import pytest

from scripts.testbed.namespaces import Namespace, close_pipes

MOUNT_GROUPS = "mount -t cgroup2 none /sys/fs/cgroup"
SCRIPT = str(Path(__file__).with_name("sshd.py"))


def enter(group: Path | None) -> tuple[str, ...]:
    """What starts a command in a control group; it mounts them where `ip netns exec` has hidden them."""
    script = f'{MOUNT_GROUPS} && echo $$ > /sys/fs/cgroup/{group}/cgroup.procs && exec "$@"'
    return () if group is None else ("sh", "-c", script, "sh")


class Groups:
    """Control groups of one's own, in which the processes of a namespace can be; it skips the test where root may make
    none."""

    def __init__(self) -> None:
        self._mount = Path(tempfile.mkdtemp(prefix="netlimit-"))
        self._place = self._mount / self._mount.name

    def make(self, name: str) -> Path:
        """One of this name; its path below the mount."""
        group = self._place / name
        group.mkdir(parents=True)
        return group.relative_to(self._mount)

    def __enter__(self) -> Self:
        done = subprocess.run(["mount", "-t", "cgroup2", "none", self._mount], capture_output=True, text=True)
        if done.returncode:
            self._mount.rmdir()
            pytest.skip(f"control groups of version 2 cannot be mounted: {done.stderr.strip()}")
        self._place.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        end = time.monotonic() + 60
        (self._place / "cgroup.kill").write_text("1")
        while "populated 1" in (self._place / "cgroup.events").read_text() and time.monotonic() < end:
            time.sleep(0.01)
        for group in sorted(self._place.glob("**/"), key=lambda path: -len(path.parts)):
            group.rmdir()
        subprocess.run(["umount", self._mount], check=True)
        self._mount.rmdir()


class _Process:
    """A process with a pipe at either end, until the block ends."""

    def __init__(self, namespace: Namespace, *words: str, group: Path | None = None) -> None:
        self._process = namespace.popen(
            *enter(group),
            sys.executable,
            SCRIPT,
            *words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.first = self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(60)
        close_pipes(self._process)


class Sshd(_Process):
    """Listens on a port of a namespace, maybe at one address alone, or in a control group; see `sshd.py`."""

    def __init__(self, namespace: Namespace, port: int = 22, address: str = "", group: Path | None = None) -> None:
        super().__init__(namespace, "listen", str(port), *([address] if address else []), group=group)
        assert self.first == "ready"


class Visitor(_Process):
    """A connection to a port, maybe from one of several addresses."""

    def __init__(self, namespace: Namespace, host: str, port: int = 22, source: str = "") -> None:
        super().__init__(namespace, "talk", host, str(port), *([source] if source else []))

    @property
    def connected(self) -> bool:
        """Whether the connection came about."""
        return self.first == "connected"

    @property
    def works(self) -> bool:
        """Whether all that was said has been answered until now."""
        return self.connected and self._process.poll() is None

    def say(self, word: str) -> bool:
        """Send a line; whether it came back."""
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        return self._read() == word
