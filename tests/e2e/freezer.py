"""A file system of its own that can be frozen, as the backup of a machine freezes it: no call that writes returns, and
none fails. What a disk that dies does, too."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LONGEST_SECONDS = 120
"""After so long it is thawed whatever has become of the test: nobody could end the processes that hang."""
_SIZE = "64M"


class Freezer:
    """The file system, mounted at a directory that it makes."""

    def __init__(self, directory: Path) -> None:
        self.place = directory / "disk"
        self._image = directory / "image"

    @contextmanager
    def mounted(self) -> Iterator[Path]:
        """Make it and mount it; it is thawed and gone afterwards. It needs the loop devices of the kernel."""
        self.place.mkdir()
        _run("truncate", "--size", _SIZE, str(self._image))
        _run("mkfs.ext4", "-q", "-F", str(self._image))
        _run("mount", "-o", "loop", str(self._image), str(self.place))
        try:
            self.place.chmod(0o777)
            yield self.place
        finally:
            self._thaw()
            _run("umount", "--lazy", str(self.place))
            self._image.unlink()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Nothing is written to it meanwhile."""
        thaw = f"sleep {LONGEST_SECONDS}; exec fsfreeze --unfreeze '{self.place}'"
        watchdog = subprocess.Popen(["sh", "-c", thaw], cwd="/", start_new_session=True)
        try:
            _run("fsfreeze", "--freeze", str(self.place))
            yield
            assert watchdog.poll() is None, "it was thawed meanwhile"
        finally:
            self._thaw()
            with suppress(ProcessLookupError):
                os.killpg(watchdog.pid, signal.SIGKILL)
            watchdog.wait()

    def _thaw(self) -> None:
        subprocess.run(["fsfreeze", "--unfreeze", str(self.place)], check=False, capture_output=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
