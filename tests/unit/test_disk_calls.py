"""The threads that make calls of a disk leave to others what others wait for."""

from __future__ import annotations

import _thread
import subprocess
import sys
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
