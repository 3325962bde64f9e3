"""What of ours somebody else's rules use cannot go: it is told of, keeps nothing else, and goes when it can."""

from __future__ import annotations

from dataclasses import replace

import pytest

from netlimit.compile import Compilation
from netlimit.kernel.base import observe
from netlimit.limits import Facts
from netlimit.plan import diff
from netlimit.rules import parse_rule
from netlimit.state import ChainId, State, Structure, Verdict, chain_rule
from tests.kernel.worker import RemoteKernel
from tests.unit.strategies import NOW


def bring(linux: RemoteKernel, wanted: State) -> None:
    """As the controller does it: what is refused is refused."""
    for step in diff(wanted, observe(linux)).steps:
        linux.apply(step)


def use(linux: RemoteKernel, name: str) -> None:
    """Somebody else's rule speaks of a set."""
    linux.run("iptables-legacy", *f"-t mangle -A OUTPUT -m set --match-set {name} dst -j RETURN".split())


def make_state(*rules: dict[str, object]) -> State:
    compilation = Compilation(Facts())
    for number, fields in enumerate(rules, 1):
        assert compilation.put(replace(parse_rule(fields, NOW), id=number)) is None
    return compilation.state


@pytest.mark.parametrize("name", ["nl-foreign", "nl-swap0", "nl-zzz"])
def test_a_foreign_set_in_use_keeps_nobody(linux: RemoteKernel, name: str) -> None:
    linux.run("ipset", "create", name, "hash:ip")
    linux.run("ipset", "create", "nl-unused", "hash:ip")
    use(linux, name)
    wanted = make_state({"target": "10.1.0.2", "rate": "9 packets/s"})
    bring(linux, wanted)
    assert observe(linux) == wanted
    assert not diff(wanted, observe(linux)), "it is no drift"
    assert linux.run("ipset", "list", "-n").split().count("nl-unused") == 0, "others go"
    assert any(name in said for said in linux.leftovers())

    linux.run("iptables-legacy", "-t", "mangle", "-F", "OUTPUT")
    bring(linux, make_state())
    assert linux.run("ipset", "list", "-n") == "", "nobody uses it any more"
    assert linux.leftovers() == ()


def test_a_set_of_ours_that_somebody_uses_is_empty_when_it_is_needed_again(linux: RemoteKernel) -> None:
    blocked, other = ({"target": "10.1.0.0/24", "action": "block"}, {"target": "10.1.1.0/24", "action": "block"})
    first = make_state(blocked)
    bring(linux, first)
    name = next(name for name in first.structure.sets if name.startswith("nl-b4-"))
    use(linux, name)
    bring(linux, State())
    assert observe(linux) == State()
    assert any(name in said for said in linux.leftovers())
    second = make_state(other)
    assert name in second.structure.sets
    bring(linux, second)
    assert observe(linux) == second
    linux.run("iptables-legacy", "-t", "mangle", "-F", "OUTPUT")


@pytest.mark.parametrize("family", [4, 6])
def test_a_chain_to_which_others_lead_is_emptied(linux: RemoteKernel, family: int) -> None:
    tool = "iptables-legacy" if family == 4 else "ip6tables-legacy"
    left, gone = (ChainId(family, "mangle", name) for name in ("NL-LEFT", "NL-GONE"))
    wanted = State(Structure(chains=dict.fromkeys((left, gone), (chain_rule(Verdict("DROP")),))))
    bring(linux, wanted)
    linux.run(tool, "-t", "mangle", "-N", "FOREIGN")
    linux.run(tool, "-t", "mangle", "-A", "FOREIGN", "-j", "NL-LEFT")
    assert observe(linux) == wanted, "the jump of somebody else is none of our hooks"
    bring(linux, State())
    assert observe(linux) == State()
    printed = linux.run(f"{tool}-save", "-t", "mangle")
    assert "-A FOREIGN -j NL-LEFT" in printed, "the rule of others stays"
    assert "-A NL-LEFT" not in printed
    assert "NL-GONE" not in printed
    assert any("NL-LEFT" in said for said in linux.leftovers())
    (said,) = linux.held()
    assert linux.run("sh", "-c", said.split("`")[1]) == "-A FOREIGN -j NL-LEFT\n"
    bring(linux, wanted)
    assert linux.held() == (), "what it is there for is ours"
    assert observe(linux) == wanted, "it is filled again"
    linux.run(tool, "-t", "mangle", "-F", "FOREIGN")
    bring(linux, State())
    assert "NL-" not in linux.run(f"{tool}-save", "-t", "mangle")
    assert linux.leftovers() == ()
