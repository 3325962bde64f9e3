"""The L7 limiter: what decisions cost, beside other libraries and beside doing nothing at all."""

from __future__ import annotations

from scripts.benchmarks.limiter import memory, remote

PARTS = {"memory": memory.measure, "redis": remote.measure}
"""Each is a benchmark of its own: `scripts/bench limiter-memory`; `scripts/bench limiter` runs all of them."""
