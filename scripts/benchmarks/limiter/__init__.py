"""The L7 limiter: what decisions cost, beside other libraries and beside nothing at all, and how true they are."""

from __future__ import annotations

from scripts.benchmarks.limiter import accuracy, memory, merging, middleware, remote, service

PARTS = {
    "memory": memory.measure,
    "redis": remote.measure,
    "merging": merging.measure,
    "service": service.measure,
    "middleware": middleware.measure,
    "accuracy": accuracy.measure,
}
"""Each is a benchmark of its own: `scripts/bench limiter-memory`; `scripts/bench limiter` runs all of them."""
