"""A hundred thousand rules in one request: how long until the kernel holds them, and in how much memory."""

from __future__ import annotations

from scripts.benchmarks.figures import Figure
from scripts.benchmarks.gateway import Gateway
from scripts.testbed.namespaces import Lab

RULES, LIMITS = 100_000, 64
SECONDS, MEGABYTES = 10.0, 400.0


def measure() -> list[Figure]:
    """POST them once, into an empty database."""
    with Lab() as lab, Gateway(lab) as gateway:
        taken = gateway.add([_rule(number) for number in range(RULES)], wait=60)
        held = _entries(lab)
        assert held >= RULES, f"the kernel holds only {held} entries"
        figures = [
            Figure(f"{RULES:,} rules, POST until the kernel holds them", f"{taken:.1f} s", "10 s", taken <= SECONDS)
        ]
        for name, megabytes in sorted(gateway.memory().items()):
            figures.append(
                Figure(f"memory of {name}, at most", f"{megabytes:.0f} MB", "400 MB", megabytes <= MEGABYTES)
            )
        return figures


def _rule(number: int) -> dict[str, object]:
    target = f"10.{64 + (number >> 16)}.{number >> 8 & 255}.{number & 255}"
    return {"target": target, "rate": f"{100 + number % LIMITS} packets/s"}


def _entries(lab: Lab) -> int:
    """Entries in the largest set of marks."""
    listed = lab.gateway.run("ipset", "list", "-t").stdout
    return max(int(line.split(": ")[1]) for line in listed.splitlines() if line.startswith("Number of entries"))
