"""Sets say which class a packet goes to, and keep whole networks: what is written is read back."""

from __future__ import annotations

import pytest

from netlimit.kernel.base import observe
from netlimit.plan import diff
from netlimit.state import ChainId, Entry, IpSet, MapPriority, State, Structure, chain_rule
from tests.kernel.worker import RemoteKernel

ENTRIES = {
    4: {
        "10.2.0.0/24": Entry(0x1, 0xFF, prio=0x7001FFFE),
        "10.2.1.0/24": Entry(prio=0x6E011000),
        "10.2.2.0/24": Entry(),
    },
    6: {"2001:db8::/64": Entry(0x2, 0xFF, prio=0x7FFF0001), "2001:db8:1::/64": Entry(prio=0x70010000)},
}


@pytest.mark.parametrize("family", [4, 6])
def test_the_class_of_an_entry_and_the_rule_that_hands_it_over(linux: RemoteKernel, family: int) -> None:
    ipset = IpSet("nl-classes", family, marks=True)
    rule = chain_rule(MapPriority(ipset.name, "src"))
    structure = Structure({ipset.name: ipset}, {ChainId(family, "mangle", "NL-CLASSES"): (rule,)})
    wanted = State(structure, {ipset.name: ENTRIES[family]})
    for step in diff(wanted, State()).steps:
        linux.apply(step)
    assert observe(linux) == wanted
    assert not diff(wanted, observe(linux))


def test_an_entry_takes_another_class_and_none(linux: RemoteKernel) -> None:
    structure = Structure({"nl-classes": IpSet("nl-classes", 4, marks=True)})
    for prio in (0x70010001, 0x70010002, 0):
        wanted = State(structure, {"nl-classes": {"10.2.0.1": Entry(prio=prio)}})
        for step in diff(wanted, observe(linux)).steps:
            linux.apply(step)
        assert observe(linux) == wanted


@pytest.mark.parametrize(("family", "netmask", "address", "kept"), [
    (4, 24, "10.2.3.4", "10.2.3.0"),
    (6, 64, "2001:db8::1:2:3", "2001:db8::"),
])  # fmt: skip
def test_a_set_of_networks_of_one_length(
    linux: RemoteKernel, family: int, netmask: int, address: str, kept: str
) -> None:
    ipset = IpSet("nl-networks", family, kind="ip", netmask=netmask, timeout=60)
    wanted = State(Structure({ipset.name: ipset}), {ipset.name: {}})
    for step in diff(wanted, State()).steps:
        linux.apply(step)
    assert linux.structure().sets == {ipset.name: ipset}
    linux.run("ipset", "add", ipset.name, address)
    assert list(linux.readings([ipset.name])[ipset.name]) == [kept]
