"""Many shaped hosts: how long until the kernel holds them, and one more."""

from __future__ import annotations

import time
from statistics import median

from scripts.benchmarks.figures import Figure
from scripts.benchmarks.gateway import Gateway
from scripts.benchmarks.shaping.rules import HOSTS, shape, shape_each
from scripts.testbed.namespaces import CLIENT, Lab

FEW, MANY = 1_000, 16_000
FEW_SECONDS, MANY_SECONDS = 0.5, 4.0
ROUNDS, GOAL_MS = 30, 50.0


def measure() -> list[Figure]:
    """A thousand into an empty database; sixteen thousand into another, and then one after the other."""
    with Lab() as lab, Gateway(lab) as gateway:
        figures = [_add(lab, gateway, FEW, FEW_SECONDS)]
    with Lab() as lab, Gateway(lab) as gateway:
        figures.append(_add(lab, gateway, MANY, MANY_SECONDS))
        middle = median(_add_one(gateway, number) for number in range(ROUNDS))
    return [*figures, Figure(f"one host more at {MANY:,}, median", f"{middle:.0f} ms", "50 ms", middle <= GOAL_MS)]


def _add(lab: Lab, gateway: Gateway, hosts: int, goal: float) -> Figure:
    lab.gateway.ip(f"route add {HOSTS} via {CLIENT}")
    taken = gateway.add(shape_each(hosts, direction="to"))
    classes = lab.gateway.run("tc", "class", "show", "dev", "lan").stdout.count("class htb")
    assert classes >= hosts, f"the kernel holds only {classes} classes"
    what = f"{hosts:,} hosts, POST until the kernel holds them"
    return Figure(what, f"{taken:.2f} s", f"{goal:g} s", taken <= goal)


def _add_one(gateway: Gateway, number: int) -> float:
    """Milliseconds; a rest follows that no pass depends on."""
    began = time.perf_counter()
    answer = gateway.request("POST", "/rules", json=shape(f"10.65.0.{number}", "1 Mbit/s", direction="to"))
    taken = (time.perf_counter() - began) * 1000
    assert answer.json()["status"]["state"] == "applied", answer.text
    time.sleep(0.037)
    return taken
