"""What a forwarded packet costs with rules in the kernel, against none, in one run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from scripts.benchmarks.figures import Figure
from scripts.benchmarks.gateway import Gateway
from scripts.testbed.namespaces import SERVER, Lab
from scripts.testbed.streams import flood

ROUNDS = 15
SECONDS = 0.5
RULES, LIMITS, PLAIN = 65_536, 64, 10_000
SOURCES = "10.64.0.0/16"
GOAL = 1.6
SELECTORS, SELECTORS_GOAL = 3_000, 2.0


def measure() -> list[Figure]:
    """Gateways side by side, asked in turn: one holds nothing, two netlimit's rules, one a rule an address."""
    with (
        Lab() as bare,
        Lab() as limited,
        Lab() as crowded,
        Lab() as plain,
        Lab() as ported,
        Gateway(limited) as few,
        Gateway(crowded) as many,
        Gateway(ported) as kinds,
        _plain_rules(plain),
    ):
        few.add([*make_limits(), *make_verdicts(8)])
        many.add([*make_limits(), *make_verdicts(128)])
        kinds.add(_make_selectors())
        labs = {"none": bare, "few": limited, "many": crowded, "plain": plain, "kinds": ported}
        costs: dict[str, list[float]] = {name: [] for name in labs}
        for _ in range(ROUNDS):
            for name, lab in labs.items():
                costs[name].append(cost(lab))
    what = f"{RULES:,} rules of {LIMITS} limits"
    return [
        Figure("no rules", f"{median(costs['none']):,.0f} ns a packet"),
        compare(f"{what}, 8 allowed, 8 blocked", costs["few"], costs["none"], GOAL),
        compare(f"{what}, 128 allowed, 128 blocked", costs["many"], costs["none"]),
        compare(
            f"{SELECTORS:,} rules for one port each, of somebody else", costs["kinds"], costs["none"], SELECTORS_GOAL
        ),
        compare(f"{PLAIN:,} plain hashlimit rules", costs["plain"], costs["none"]),
    ]


def compare(what: str, costs: list[float], base: list[float], goal: float | None = None) -> Figure:
    """The median of the ratios within each round: what disturbs one flood mostly disturbs its neighbour too."""
    ratio = median(mine / none for mine, none in zip(costs, base, strict=True))
    value = f"{ratio:.2f} times ({median(costs):,.0f} ns)"
    return Figure(what, value) if goal is None else Figure(what, value, f"{goal} times", ratio <= goal)


def cost(lab: Lab, sources: str = SOURCES) -> float:
    """Nanoseconds from the client's system call to the server, which has no use for the packet."""
    report, forwarded = flood(lab, seconds=SECONDS, sources=sources, destination=SERVER)
    assert forwarded >= 0.99 * report.packets, f"only {forwarded} of {report.packets} packets were forwarded"
    return report.ns_per_packet


def make_limits() -> list[dict[str, object]]:
    """One rule an address of the flood, at rates that it does not reach."""
    return [
        {"target": f"10.64.{host >> 8}.{host & 255}", "rate": f"{1000 + host % LIMITS} packets/s"}
        for host in range(RULES)
    ]


def _make_selectors() -> list[dict[str, object]]:
    """Rules for one port each, of an address that sends nothing."""
    fields = {"target": "10.66.0.1", "rate": "100 packets/s", "protocol": "udp"}
    return [{**fields, "ports": 1000 + number} for number in range(SELECTORS)]


def make_verdicts(number: int) -> list[dict[str, object]]:
    """Subnets that are blocked, with exceptions, and one that anybody may reach."""
    rules: list[dict[str, object]] = [{"target": f"10.65.{block}.0/24", "action": "block"} for block in range(number)]
    rules += [{"target": f"10.65.{block}.7", "action": "allow"} for block in range(number - 1)]
    return [*rules, {"target": "10.67.0.0/16", "action": "allow", "direction": "to"}]


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
