"""What a forwarded packet costs when its class is one of many, against none, in one run."""

from __future__ import annotations

import json
from statistics import median

from scripts.benchmarks.figures import Figure
from scripts.benchmarks.forwarding import compare, cost
from scripts.benchmarks.gateway import Gateway
from scripts.benchmarks.shaping.rules import HOSTS, shape_each
from scripts.testbed.namespaces import CLIENT, Lab

SHAPED, SOURCES = 16_384, "10.64.0.0/18"
ROUNDS = 15
GOAL = 1.8


def measure() -> list[Figure]:
    """Three gateways in turn: one holds nothing, one a class for each source of the flood where it leaves, and one a
    second for what it would send to the gateway itself, for which a program looks at all that comes in."""
    with Lab() as bare, Lab() as shaped, Lab() as both, Gateway(shaped) as leaving, Gateway(both) as either:
        labs = {"bare": bare, "shaped": shaped, "both": both}
        for lab in labs.values():
            lab.gateway.ip(f"route add {HOSTS} via {CLIENT}")
        leaving.add(shape_each(SHAPED, interface="wan"))
        either.add(shape_each(SHAPED))
        costs: dict[str, list[float]] = {name: [] for name in labs}
        for _ in range(ROUNDS):
            for name, lab in labs.items():
                costs[name].append(cost(lab, SOURCES))
        _check_classes(shaped)
        _check_classes(both)
    return [
        Figure("no rules", f"{median(costs['bare']):,.0f} ns a packet"),
        compare(f"{SHAPED:,} hosts shaped where they leave", costs["shaped"], costs["bare"], GOAL),
        compare("and where they end on the gateway", costs["both"], costs["bare"]),
    ]


def _check_classes(lab: Lab) -> None:
    """What finds no class goes by HTB at less cost: a flood of such would prove nothing."""
    queues = json.loads(lab.gateway.run("tc", "-s", "-j", "qdisc", "show", "dev", "wan").stdout)
    packets = sum(queue["packets"] for queue in queues if queue.get("root"))
    missed = sum(queue["options"]["direct_packets_stat"] for queue in queues if queue["kind"] == "htb")
    assert missed <= 0.01 * packets, f"{missed} of {packets} packets found no class"
