"""The modules of Envoy's protocol."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_modules_are_those_of_our_protocol_files() -> None:
    done = subprocess.run(["scripts/protocol", "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"run scripts/protocol:\n{done.stdout}{done.stderr}"
