"""What others break of ours at ten thousand rules: how long until it is repaired, and what looking for it costs."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from netlimit.kernel.linux import LinuxKernel
from netlimit.plan import drifted
from netlimit.state import ChainId, Structure
from netlimit.tree import FIRST_CHILD, Queues, format_classid
from scripts.benchmarks.figures import Figure
from scripts.benchmarks.gateway import Gateway, inside
from scripts.testbed.namespaces import Lab

BREAKS, IDLE_SECONDS = 120, 30.0
SETTLE_SECONDS = 5.0
GOAL_SECONDS, GOAL_SHARE = 2.0, 3.0
PATIENCE = 60.0
PERSISTENT = "from netlimit import drift; drift.MOST_REPAIRS = 10**9; from netlimit.cli.main import app; app()"
"""netlimit, but it never takes what happens here for a fight, from which it would back off."""
Command = tuple[str, ...]


def measure() -> list[Figure]:
    """Idle first; then one break after the other, at moments that nothing depends on."""
    with Lab() as lab, Gateway(lab, ("-c", PERSISTENT)) as gateway:
        for rules in make_rules():
            gateway.add(rules)
        held = gateway.status()["rules"]["total"]
        time.sleep(SETTLE_SECONDS)
        share = _measure_idle(gateway)
        repairs = sorted(_break_and_wait(lab))
    taken = [seconds for seconds, _ in repairs]
    slow = quantiles(taken, n=100)[98]
    return [
        Figure(f"controller, idle at {held:,} rules", f"{share:.1f} % of a core", "3 %", share <= GOAL_SHARE),
        Figure(f"repaired after {len(taken)} breaks, median", f"{median(taken):.2f} s"),
        Figure("p99", f"{slow:.2f} s", "2 s", slow <= GOAL_SECONDS),
        Figure(f"the slowest ({repairs[-1][1]})", f"{taken[-1]:.2f} s"),
    ]


def make_rules() -> Iterator[list[dict[str, Any]]]:
    """Of every kind some: rates for an address, for each host of a subnet, connections, blocks, and what is shaped."""
    yield [{"target": f"10.64.{n >> 8}.{n & 255}", "rate": f"{100 + n % 64} packets/s"} for n in range(7000)]
    yield [
        {"target": f"10.81.{n}.0/24", "rate": f"{10 + n % 8} Mbit/s", "per": "host", "direction": "to"}
        for n in range(250)
    ]
    yield [{"target": f"10.83.{n >> 8}.{n & 255}", "rate": f"{10 + n % 8} connections"} for n in range(750)]
    yield [{"target": f"10.80.{n >> 8}.{n & 255}", "action": "block"} for n in range(1000)]
    shaped = ({"target": f"10.84.{n >> 8}.{n & 255}", "rate": f"{1 + n % 8} Mbit/s"} for n in range(1000))
    yield [{**each, "action": "shape", "interface": "wan"} for each in shaped]


def _measure_idle(gateway: Gateway) -> float:
    """The percentage of one core that the controller and what it starts take while nothing happens."""
    process = max(gateway.children(), key=_cpu_seconds)
    before, began = _cpu_seconds(process), time.monotonic()
    time.sleep(IDLE_SECONDS)
    return 100 * (_cpu_seconds(process) - before) / (time.monotonic() - began)


def _cpu_seconds(process: int) -> float:
    """What a process and the children that it has waited for have used (proc(5), stat: utime to cstime)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _break_and_wait(lab: Lab) -> Iterator[tuple[float, str]]:
    """How long each repair took, and after what."""
    kernel, chance = LinuxKernel(), random.Random()
    with inside(lab):
        whole = _look(kernel)
        for _ in range(BREAKS):
            time.sleep(chance.uniform(0.5, 2))
            commands = chance.choice(list(_damages(chance, *whole)))
            for command in commands:
                lab.gateway.run(*command, check=False)  # what is repaired meanwhile cannot be destroyed
            yield _wait(kernel, whole, commands), " ".join(commands[-1])


def _damages(chance: random.Random, structure: Structure, queues: Queues) -> Iterator[list[Command]]:
    """What may be done, each as commands."""
    tables = [("iptables-legacy" if chain.family == 4 else "ip6tables-legacy", chain) for chain in structure.chains]
    program, chain = chance.choice([(program, chain) for program, chain in tables if structure.chains[chain]])
    yield [(program, "-t", chain.table, "-F", chain.name)]
    yield [(program, "-t", chain.table, "-F")]
    hook = chance.choice(list(structure.hooks))
    yield [_delete_hook(hook, structure.hooks[hook][0].text)]
    families = {program for program, _ in tables}
    both = [(each, "-t", table) for each in families for table in ("raw", "mangle", "filter", "security")]
    yield [(*each, option) for option in ("-F", "-X") for each in both] + [("ipset", "destroy")]
    yield [("tc", "qdisc", "del", "dev", "wan", "root")]
    classes = [number for number in queues.trees["wan"].classes if number >> 16 >= FIRST_CHILD and number & 0xF000 == 0]
    yield [("tc", "class", "del", "dev", "wan", "classid", format_classid(chance.choice(classes)))]


def _delete_hook(hook: ChainId, rule: str) -> Command:
    return (
        "iptables-legacy" if hook.family == 4 else "ip6tables-legacy",
        "-t",
        hook.table,
        "-D",
        hook.name,
        *rule.split(),
    )


def _wait(kernel: LinuxKernel, whole: tuple[Structure, Queues], commands: list[Command]) -> float:
    """Seconds until everything is as it was."""
    began = time.monotonic()
    while True:
        structure, queues = _look(kernel)
        if structure == whole[0] and drifted(whole[1].trees, queues.trees) is None:
            return time.monotonic() - began
        assert time.monotonic() - began < PATIENCE, f"{commands} was not repaired"
        time.sleep(0.02)


def _look(kernel: LinuxKernel) -> tuple[Structure, Queues]:
    return kernel.structure(), kernel.queues()
