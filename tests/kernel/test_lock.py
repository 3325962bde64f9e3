"""One process at a time, and nothing left behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from netlimit.errors import KernelError
from netlimit.kernel import lock

COUNT = """
import sys
from pathlib import Path
from netlimit.kernel.lock import locked
for _ in range(50):
    with locked(sys.argv[1], "count", keep=False):
        counter = Path(sys.argv[2])
        counter.write_text(str(int(counter.read_text()) + 1))
"""


def test_no_count_is_lost_between_processes_and_no_file_stays(tmp_path: Path) -> None:
    counter, path = tmp_path / "counter", tmp_path / "lock"
    counter.write_text("0")
    command = [sys.executable, "-c", COUNT, str(path), str(counter)]
    processes = [subprocess.Popen(command) for _ in range(4)]
    assert [process.wait(120) for process in processes] == [0] * 4
    assert counter.read_text() == "200"
    assert not path.exists()


def test_who_waits_too_long_is_told_what_for(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    with (
        lock.locked(path, "write"),
        pytest.raises(KernelError, match="another program has held"),
        lock.locked(path, "write to the kernel", patience=0.1),
    ):
        pytest.fail("two hold the same lock")


def test_a_lock_that_cannot_be_opened_is_an_error_of_the_kernel(tmp_path: Path) -> None:
    with (
        pytest.raises(KernelError, match="cannot be opened: No such file"),
        lock.locked(str(tmp_path / "none" / "lock"), "write"),
    ):
        pytest.fail("there is no such lock")


def test_who_exchanges_the_directory_meanwhile_is_an_error_of_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, moved = tmp_path / "run", tmp_path / "moved"
    directory.mkdir()

    def exchange(descriptor: int, how: int) -> None:
        directory.rename(moved)
        directory.write_text("no directory")

    monkeypatch.setattr("netlimit.kernel.lock.fcntl.flock", exchange)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KernelError, match="cannot be opened"), lock.locked(str(directory / "lock"), "try"):
        pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_root_locks_in_the_directory_of_a_controller_belongs_to_that_one(root: None, tmp_path: Path) -> None:
    """Else it could not take a lock that root has left."""
    os.chown(tmp_path, 65534, -1)
    with lock.locked(str(tmp_path / "lock"), "write"):
        assert (tmp_path / "lock").stat().st_uid == 65534
