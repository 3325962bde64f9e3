"""Some of what `scripts/soak sequences` does: random changes and faults, each sequence of them comes out as desired."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from scripts.soaking.namespace import ROOT
from tests.size import choose

COUNT = choose(8, 25)


def test_sequences_of_changes_and_faults_come_out_exactly_as_desired(root: None) -> None:
    """With CI set they are the same each time."""
    soak = [sys.executable, "-m", "scripts.soaking.main", "sequences", f"--count={COUNT}", "--steps=10"]
    chosen = ["--seed=4"] if os.environ.get("CI") else []
    done = subprocess.run([*soak, *chosen], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    made = re.search(r"^(\d+) sequences, ", done.stdout, re.MULTILINE)
    assert made is not None
    assert int(made[1]) >= COUNT
