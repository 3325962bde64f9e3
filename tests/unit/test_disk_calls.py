"""The threads that make calls of a disk leave to others what others wait for."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from netlimit import stalls

WAITING = """
import os, signal
from pathlib import Path
from netlimit.stalls import find_disk
find_disk(Path("/")).call(lambda: None)
heard = {signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, heard)
os.kill(os.getpid(), signal.SIGTERM)
print(signal.sigwait(heard).name)
"""


def test_a_signal_goes_to_the_thread_that_waits_for_it() -> None:
    """Else it would end the process."""
    done = subprocess.run([sys.executable, "-c", WAITING], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "SIGTERM\n")


SHORT = """
import resource, sys
from pathlib import Path
from netlimit import stalls
stalls._BEGIN_SECONDS = 0.5
disk, soft, hard = stalls.find_disk(Path("/")), *resource.getrlimit(resource.RLIMIT_AS)
held, size = [], 2**24
resource.setrlimit(resource.RLIMIT_AS, (2**30, hard))
while size >= 2**6:
    try:
        held.append(bytearray(size))
    except MemoryError:
        size //= 2
said = []
for _ in range(20):
    try:
        said.append(disk.call(lambda: 7))
    except MemoryError:
        said.append(None)
held.clear()
resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
print(set(said) <= {7, None}, disk.call(lambda: 8))
"""


def test_a_thread_that_has_no_memory_to_begin_is_not_waited_for() -> None:
    """Nor for ever is anything else, once there is memory again."""
    done = subprocess.run([sys.executable, "-c", SHORT], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "True 8\n"), done.stderr


@pytest.mark.parametrize("begins", ["never", "too late"])
def test_a_thread_that_does_not_begin_is_done_without(monkeypatch: pytest.MonkeyPatch, begins: str) -> None:
    late: list[tuple[Any, Any]] = []
    monkeypatch.setattr(stalls, "_idle", [])
    monkeypatch.setattr(stalls, "_BEGIN_SECONDS", 0.1)
    monkeypatch.setattr(_thread, "start_new_thread", lambda run, given: late.append((run, given)))
    assert stalls.find_disk(Path("/")).call(_thread.get_ident) == _thread.get_ident(), "it is called here"
    monkeypatch.undo()
    if begins == "too late":
        ((run, given),) = late
        run(*given)  # ends
    assert stalls.find_disk(Path("/")).call(_thread.get_ident) != _thread.get_ident()


class Faulty:
    """A bound that fails when it is asked."""

    def __init__(self, ends: threading.Event) -> None:
        self._ends = ends

    def is_passed(self, worked: float) -> bool:
        raise RuntimeError("a fault")

    def spend(self, worked: float) -> None:
        pass

    def end(self) -> None:
        self._ends.set()


def test_a_call_has_ended_before_a_fault_of_what_bounds_it_goes_on(tmp_path: Path) -> None:
    """It works with what others use next."""
    told, ended = threading.Event(), threading.Event()

    def work() -> None:
        told.wait(60)
        time.sleep(0.3)
        ended.set()

    with pytest.raises(RuntimeError, match="a fault"):
        stalls.find_disk(tmp_path).call(work, bound=Faulty(told))
    assert ended.is_set()


def test_a_call_that_a_signal_breaks_off_has_ended_before_the_signal_goes_on(tmp_path: Path) -> None:
    told, ended = threading.Event(), threading.Event()

    class Patient(Faulty):
        def is_passed(self, worked: float) -> bool:
            return False

    def work() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        told.wait(60)
        time.sleep(0.3)
        ended.set()

    def break_off(*_: object) -> None:
        raise TimeoutError("long enough")

    before = signal.signal(signal.SIGUSR1, break_off)
    try:
        with pytest.raises(TimeoutError, match="long enough"):
            stalls.find_disk(tmp_path).call(work, bound=Patient(told))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ended.is_set()


def test_a_call_that_does_not_end_then_is_given_up(tmp_path: Path) -> None:
    told, left = threading.Event(), threading.Event()
    file = tmp_path / "file"
    disk = stalls.find_disk(tmp_path)
    with pytest.raises(stalls.Overworked, match="does not end") as caught:
        disk.call(lambda: left.wait(60), file=file, bound=Faulty(told))
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(stalls.Overworked):
        disk.call(lambda: None, file=file)
    left.set()
    for _ in range(100):
        with contextlib.suppress(stalls.Overworked):
            return disk.call(lambda: None, file=file)
        time.sleep(0.05)
    pytest.fail("it stays given up")
