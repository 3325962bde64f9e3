"""The network namespace that a part of `scripts/soak` runs in, and the tools that are called there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_inside(*arguments: str) -> int:
    """Make a namespace, and run a part of `scripts/soak` again inside it: its name, `--inside` and its options. Gives
    the exit status."""
    if os.geteuid() != 0:
        print("scripts/soak: it makes a network namespace, which only root can: run it as root.", file=sys.stderr)
        return 1
    name = f"nl-g-{os.getpid()}-soak"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        again = ["ip", "netns", "exec", name, sys.executable, "-m", "scripts.soaking.main", *arguments]
        return subprocess.run(again, check=False, cwd=ROOT).returncode
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


def do(*argv: str) -> str:
    """Run a command; that it may have nothing to do is no error. Gives what it printed."""
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout
