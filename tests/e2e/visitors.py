"""Who connects to a gateway by TCP, and the sshd that answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Self

from scripts.testbed.namespaces import Namespace, close_pipes

SCRIPT = str(Path(__file__).with_name("sshd.py"))


class _Process:
    """A process with a pipe at either end, until the block ends."""

    def __init__(self, namespace: Namespace, *words: str) -> None:
        self._process = namespace.popen(
            sys.executable, SCRIPT, *words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
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
    """Listens on a port of a namespace, maybe at one address alone; see `sshd.py`."""

    def __init__(self, namespace: Namespace, port: int = 22, address: str = "") -> None:
        super().__init__(namespace, "listen", str(port), *([address] if address else []))
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
