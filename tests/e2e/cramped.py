"""A controller whose tables of buckets take no more than a test can fill: `python -m tests.e2e.cramped`."""

from __future__ import annotations

from netlimit import chains
from netlimit.cli.main import app

BUCKETS = 16_384
"""The kernel takes no fewer than a table has slots."""

if __name__ == "__main__":
    chains.TABLE_MAX = BUCKETS
    app(["controller"])
