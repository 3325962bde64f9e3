"""What is accepted as a rule the kernel can be told, at the ends of every range, too: one line that iptables refuses
keeps it from taking all others."""

from __future__ import annotations

import random
from dataclasses import replace

from netlimit.compile import Compilation
from netlimit.errors import RuleError
from netlimit.kernel.base import observe
from netlimit.limits import Facts
from netlimit.plan import diff
from netlimit.rules import parse_rule
from tests.kernel.worker import RemoteKernel
from tests.unit.strategies import NOW

SEED = 20261127
TRIED, HELD = 500, 60
SIZES = [1, 999, 10**6, 2**24, 2**32 - 1]
TARGETS = [
    *("10.1.0.2", "10.1.0.0/16", "0.0.0.0/0", "10.0.0.0/31", "::/0", "fd00::1", "fd00::/64", "2001:db8::/127"),
]
DEVICES = ["lan", "abcdefghijklmno", "a.b", "a:b", "-j", "a'b", "\N{LATIN SMALL LETTER A WITH DIAERESIS}"]
PORTS: list[object] = [0, 1, 65535, "0-65535", "65534-65535", [1, "3-4"], list(range(1, 30, 2))]


def make_odd(randomness: random.Random) -> dict[str, object]:
    """The fields of a rule, most of them at an end of their range, or beyond."""
    choice, chance = randomness.choice, randomness.random
    fields: dict[str, object] = {"target": choice(TARGETS), "direction": choice(["from", "to"])}
    fields["action"] = choice(["drop", "reject", "observe", "block"])
    if fields["action"] != "block":
        unit = choice(["packets", "connections", "kbit", "B"])
        period = choice(["/s", "/s", "/day", ""])
        fields |= {
            "rate": f"{choice(SIZES)} {unit}{period}",
            "per": choice(["host", "target", "target", "peer"]),
        }
        fields |= {"burst": choice(SIZES)} if chance() < 0.5 else {}
    if chance() < 0.5:
        fields["protocol"] = choice(["tcp", "udp", "udp", "icmp"])
        fields |= {"ports": choice(PORTS)} if chance() < 0.7 else {}
        fields |= {"source_ports": choice(PORTS)} if chance() < 0.3 else {}
    return fields | ({"interface": choice(DEVICES)} if chance() < 0.3 else {})


def test_the_kernel_takes_whatever_is_accepted(linux: RemoteKernel) -> None:
    randomness, held = random.Random(SEED), 0
    for _ in range(TRIED):
        fields = make_odd(randomness)
        try:
            rule = parse_rule(fields, NOW)
        except RuleError:
            continue
        compilation = Compilation(Facts(mark_mask=0xFFFF0000))
        if compilation.put(replace(rule, id=1)) is not None:
            continue
        print(fields)
        for step in diff(compilation.state, observe(linux)).steps:
            linux.apply(step)
        assert observe(linux) == compilation.state
        held += 1
    assert held >= HELD
