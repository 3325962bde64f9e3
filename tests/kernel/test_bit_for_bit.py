"""What python-iptables writes is what iptables writes, to the last bit: some of them are never printed.

For IPv6 it compared one bit of each letter of an interface (`lan` was taken for `lo`), and `! -p tcp` matched TCP.
"""

from __future__ import annotations

import pytest

from netlimit.plan import SwitchTable
from netlimit.rules import Direction
from netlimit.state import Above, ChainRule, Enters, Is, Leaves, Verdict, chain_rule
from tests.kernel.test_conformance import FACTS, RULES, compiled, enforce, in_six
from tests.kernel.worker import RemoteKernel

PROGRAMS = {4: "iptables-legacy", 6: "ip6tables-legacy"}
INTERFACES = [
    {"target": "10.1.0.2", "interface": name, "rate": "7 packets/s", "direction": direction}
    for name in ("lo", "lan", "a-name-of-15-ch")
    for direction in Direction
]


def check(kernel: RemoteKernel, family: int, table: str, chain: str, rule: ChainRule) -> None:
    """Ask iptables whether there is a rule with the very bits that it would write itself."""
    assert rule.effect is not None
    words = [
        w for match in rule.matches for w in (match.args(shown=False) if isinstance(match, Above) else match.args())
    ]
    kernel.run(PROGRAMS[family], "-t", table, "-C", chain, *words, *rule.effect.args())


@pytest.mark.parametrize("family", PROGRAMS)
def test_parts_of_a_rule(linux: RemoteKernel, family: int) -> None:
    icmp = "icmp" if family == 4 else "ipv6-icmp"
    for match in (
        *(Enters("lo"), Leaves("eth0"), Enters("a-name-of-15-ch")),
        *(Is("tcp"), Is("udp"), Is(icmp), Is("tcp", inverted=True), Is(icmp, inverted=True)),
    ):
        rule = chain_rule(Verdict("RETURN"), match)
        linux.apply(SwitchTable(family, "mangle", {"NL-T": (rule,)}, (), {}))
        check(linux, family, "mangle", "NL-T", rule)


@pytest.mark.parametrize("family", PROGRAMS)
def test_whole_states(linux: RemoteKernel, family: int) -> None:
    """Every rule, some hundreds of them, once each."""
    wanted = [*RULES.values(), *INTERFACES]
    compilation = compiled(*(wanted if family == 4 else map(in_six, wanted)), facts=FACTS)
    enforce(linux, compilation)
    seen = set()
    for where, rules in (*compilation.structure.chains.items(), *compilation.structure.hooks.items()):
        for rule in rules:
            if rule.text not in seen:
                seen.add(rule.text)
                check(linux, where.family, where.table, where.name, rule)
    assert len(seen) > 100
