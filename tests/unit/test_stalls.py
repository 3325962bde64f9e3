"""What a machine keeps from everybody is known, and no excuse for more than it took."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from scripts.testbed.stalls import Stall, share
from tests.e2e.loads import Passed

WATCH = """
import json, sys
from scripts.testbed.stalls import Watch
with Watch() as watch:
    print(flush=True)
    sys.stdin.readline()
print(json.dumps(watch.found))
"""


@pytest.mark.parametrize(
    ("stalls", "expected"),
    [
        ([], 0),
        ([(1.0, 1.5)], 0.5),
        ([(0.0, 1.25), (1.75, 9.0)], 0.5),
        ([(1.2, 1.4), (1.1, 1.3), (1.3, 1.35)], 0.3),
        ([(0.0, 0.9), (2.1, 3.0)], 0),
        ([(0.0, 3.0), (1.2, 1.4)], 1),
    ],
)
def test_stalls_of_cores_that_overlap_count_once(stalls: list[Stall], expected: float) -> None:
    assert share(stalls, 1, 2) == pytest.approx(expected)


def test_a_process_that_is_not_let_run_tells_when() -> None:
    with subprocess.Popen(
        (sys.executable, "-c", WATCH), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        begin = time.time()
        time.sleep(0.3)
        end = time.time()
        process.send_signal(signal.SIGCONT)
        said, _ = process.communicate("\n", timeout=30)
    assert share(json.loads(said), begin, end) > 0.9


@pytest.mark.parametrize(
    ("megabits", "stalled", "expected"),
    [
        (1, 0, True),
        (0.94, 0, False),
        (1.06, 0, False),
        (0.94, 0.1, True),
        (0.85, 0.1, False),
        (1.06, 0.4, False),
    ],
)
def test_a_stall_excuses_what_it_took_and_never_an_excess(megabits: float, stalled: float, expected: bool) -> None:
    assert Passed(megabits, stalled).is_about(1) is expected


def test_most_of_a_time_that_is_lost_proves_nothing() -> None:
    with pytest.raises(AssertionError, match="stood still"):
        Passed(1, 0.6).is_about(1)
