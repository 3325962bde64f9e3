"""The threads that make calls of a disk leave to others what others wait for."""

from __future__ import annotations

import subprocess
import sys

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
