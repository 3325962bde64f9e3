"""Somebody else on the host who listens where the API should."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.cli.running import Netlimit

NAMELESS = 61234
"""A user whom nobody has given a name."""
_PROGRAM = Path(__file__).with_name("stranger.py")


@dataclass(frozen=True)
class Stranger:
    """One who listens: what he says of it, and what he has heard."""

    says: IO[str]
    file: Path

    def heard(self) -> bytes:
        return self.file.read_bytes()


@contextmanager
def stranger(netlimit: Netlimit, host: str, user: int = NAMELESS, once: bool = False) -> Iterator[Stranger]:
    """Somebody who listens at the API's port."""
    file = Path(netlimit.environment["HOME"], "heard")
    port = netlimit.environment["NETLIMIT_LISTEN"].rpartition(":")[2]
    command = [sys.executable, str(_PROGRAM), str(user), host, port, str(file), *(["once"] if once else [])]
    with subprocess.Popen(netlimit.within(*command), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "listens\n"
            yield Stranger(process.stdout, file)
        finally:
            process.kill()
