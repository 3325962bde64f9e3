"""What a forwarded packet costs with rules in the kernel, against none, in one run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from scripts.benchmarks.figures import Figure
from scripts.benchmarks.gateway import Gateway
from scripts.testbed.namespaces import SERVER, Lab
from scripts.testbed.streams import flood

ROUNDS = 7
SECONDS = 1.0
RULES, LIMITS, PLAIN = 65_536, 64, 10_000
GOAL = 1.6


def measure() -> list[Figure]:
    """Three gateways side by side, asked in turn: one holds nothing, one netlimit's rules, one a rule an address."""
    with Lab() as bare, Lab() as limited, Lab() as plain, Gateway(limited) as gateway, _plain_rules(plain):
        gateway.add(_rules())
        costs: dict[str, list[float]] = {"none": [], "netlimit": [], "plain": []}
        for _ in range(ROUNDS):
            for name, lab in (("none", bare), ("netlimit", limited), ("plain", plain)):
                costs[name].append(_cost(lab))
    base = median(costs["none"])
    ratio = median(mine / none for mine, none in zip(costs["netlimit"], costs["none"], strict=True))
    other = median(costs["plain"]) / base
    return [
        Figure("no rules", f"{base:,.0f} ns a packet"),
        Figure(
            f"{RULES:,} rules of {LIMITS} limits, allow, block",
            f"{ratio:.2f} times ({median(costs['netlimit']):,.0f} ns)",
            f"{GOAL} times",
            ratio <= GOAL,
        ),
        Figure(f"{PLAIN:,} plain hashlimit rules", f"{other:.1f} times ({median(costs['plain']):,.0f} ns)"),
    ]


def _cost(lab: Lab) -> float:
    """Nanoseconds from the client's system call to the server, which has no use for the packet."""
    report, forwarded = flood(lab, seconds=SECONDS, destination=SERVER)
    assert forwarded >= 0.99 * report.packets, f"only {forwarded} of {report.packets} packets were forwarded"
    return report.ns_per_packet


def _rules() -> list[dict[str, object]]:
    """One rule an address of the flood, at rates that it does not reach; allow and block rules beside them."""
    rules: list[dict[str, object]] = [
        {"target": f"10.64.{host >> 8}.{host & 255}", "rate": f"{1000 + host % LIMITS} packets/s"}
        for host in range(RULES)
    ]
    rules += [{"target": f"10.65.{block}.0/24", "action": "block"} for block in range(64)]
    rules += [{"target": f"10.66.0.{host}", "action": "block"} for host in range(64)]
    rules += [{"target": f"10.65.{block}.7", "action": "allow"} for block in range(15)]
    rules += [{"target": "10.67.0.0/16", "action": "allow", "direction": "to"}]
    return rules


@contextmanager
def _plain_rules(lab: Lab) -> Iterator[None]:
    """What an administrator writes by hand: a rule for each address."""
    lines = ["*mangle"]
    for host in range(PLAIN):
        lines.append(
            f"-A PREROUTING -s 10.64.{host >> 8}.{host & 255} -m hashlimit --hashlimit-above 1000/sec "
            f"--hashlimit-burst 100 --hashlimit-mode srcip --hashlimit-name plain{host} "
            "--hashlimit-htable-size 16 --hashlimit-htable-expire 10000 -j DROP"
        )
    lab.gateway.run("iptables-legacy-restore", "-n", input="\n".join([*lines, "COMMIT", ""]), timeout=120)
    try:
        yield
    finally:
        lab.gateway.run("iptables-legacy", "-t", "mangle", "-F", timeout=120)
