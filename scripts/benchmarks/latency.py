"""One more rule, from the request until it is enforced, at ten thousand rules held."""

from __future__ import annotations

import time
from statistics import median, quantiles

from scripts.benchmarks.figures import Figure
from scripts.benchmarks.gateway import Gateway
from scripts.testbed.namespaces import Lab

HELD, ROUNDS = 10_000, 100
GOAL_MS = 150.0


def measure() -> list[Figure]:
    """POST with `Prefer: wait`, again and again, with a rest between that no pass depends on."""
    with Lab() as lab, Gateway(lab) as gateway:
        gateway.add([{"target": f"10.9.{n >> 8}.{n & 255}", "rate": f"{100 + n % 64} packets/s"} for n in range(HELD)])
        taken = [_post(gateway, number) for number in range(ROUNDS)]
    middle, slow = median(taken), quantiles(taken, n=20)[-1]
    return [
        Figure(f"one rule more at {HELD:,}, median", f"{middle:.0f} ms", "150 ms", middle <= GOAL_MS),
        Figure("the slowest in twenty", f"{slow:.0f} ms"),
    ]


def _post(gateway: Gateway, number: int) -> float:
    rule = {"target": f"10.10.0.{number}", "rate": f"{100 + number % 64} packets/s"}
    began = time.perf_counter()
    answer = gateway.request("POST", "/rules", json=rule)
    taken = (time.perf_counter() - began) * 1000
    assert answer.json()["status"]["state"] == "applied", answer.text
    time.sleep(0.037)
    return taken
