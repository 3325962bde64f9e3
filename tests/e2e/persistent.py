"""A controller that repairs again and again what is broken again and again, and looks more often than others, at the
entries of all sets within two seconds: `python -m tests.e2e.persistent`."""

from __future__ import annotations

from netlimit import controller, drift
from netlimit.cli.main import app

if __name__ == "__main__":
    drift.MOST_REPAIRS = 10**9
    controller.STRUCTURE_SECONDS, controller.SWEEP_SECONDS = 0.3, 2.0
    app(["controller"])
