"""Rules `from` an address that NAT gives on the way out say so, and whom to name instead."""

from __future__ import annotations

from dataclasses import replace

import pytest

from netlimit.compile import Compilation
from netlimit.conflicts import HostReport, find_conflicts, read_given, read_publications
from netlimit.limits import Facts, own_addresses
from netlimit.rules import parse_rule
from netlimit.shaping import Note
from tests.unit.shapes import HOME
from tests.unit.strategies import NOW

OWN = ("10.1.0.1", "198.51.100.1")
SAVED = "-A POSTROUTING"
NETMAP = f"{SAVED} -s 10.1.0.0/24 -o wan -j NETMAP --to 203.0.113.0/24"
SNAT = f"{SAVED} -s 10.1.0.9/32 -o wan -j SNAT --to-source 203.0.113.9"
BACK = "-A PREROUTING -d 203.0.113.7/32 -j DNAT --to-destination 10.1.0.7"
FORWARD = "-A PREROUTING -d 203.0.113.0/24 -p tcp -m tcp --dport 53 -j DNAT --to-destination 10.1.0.7:53"
GIVEN: list[tuple[str, str, str | None]] = [
    (NETMAP, "203.0.113.2", "10.1.0.2"),
    (NETMAP, "203.0.113.0/29", "10.1.0.0-10.1.0.255"),
    (NETMAP, "203.0.0.0/16", None),
    (NETMAP, "10.1.0.2", None),
    (NETMAP, "0.0.0.0/0", None),
    (NETMAP, "fd00::1", None),
    (SNAT, "203.0.113.9", "10.1.0.9"),
    (SNAT, "203.0.113.8", None),
    (f"{SAVED} -o wan -j SNAT --to-source 203.0.113.9:1024-65535", "203.0.113.9", ""),
    (f"{SAVED} ! -s 10.1.0.9/32 -j SNAT --to-source 203.0.113.9", "203.0.113.9", ""),
    (f"{SAVED} -s 10.1.0.0/16 -j SNAT --to-source 198.51.100.1", "198.51.100.1", "10.1.0.0-10.1.255.255"),
    (f"{SAVED} -s 10.1.0.0/16 -j SNAT --to-source what", "203.0.113.9", None),
    (f"{SAVED} -s 10.1.0.0/16 -j MASQUERADE", "198.51.100.1", None),
    (f"{SAVED} -p tcp -j SNAT --to-source :1024-2048", "203.0.113.9", None),
    ("-A INPUT -s 10.1.0.9/32 -j SNAT --to-source 203.0.113.9", "203.0.113.9", None),
    (BACK, "203.0.113.7", "10.1.0.7"),
    (BACK, "10.1.0.7", None),
    (BACK.replace("203.0.113.7", "198.51.100.1"), "198.51.100.1", None),
    (FORWARD, "203.0.113.2", None),
    (FORWARD.replace("/24", "/32").replace(".0/", ".2/"), "203.0.113.2", "10.1.0.7"),
    ("-A PREROUTING -d 203.0.113.0/24 -j NETMAP --to 10.1.0.0/24", "203.0.113.2", "10.1.0.2"),
    ("ip saddr 10.1.0.9 snat to 203.0.113.9", "203.0.113.9", "10.1.0.9"),
    ("snat ip to ip saddr map { 10.1.0.9 : 203.0.113.9, 10.1.0.8 : 203.0.113.8 }", "203.0.113.9", "10.1.0.9"),
    ("snat ip prefix to ip saddr map { 10.1.0.0/24 : 203.0.113.0/24 }", "203.0.113.2", "10.1.0.2"),
    ("snat to ip saddr map @inner", "203.0.113.2", None),
    ('log prefix "snat to 203.0.113.9"', "203.0.113.9", None),
    ("masquerade", "198.51.100.1", None),
]


def judge(rule: str, fields: dict[str, object]) -> Note | None:
    listed = f"table ip t {{\n\tchain p {{\n\t\ttype nat hook postrouting priority srcnat;\n\t\t{rule}\n\t}}\n}}\n"
    saved = rule.startswith("-A")
    report = HostReport(nat=((rule,),) if saved else (), nftables="" if saved else listed, own=frozenset(OWN))
    compilation = Compilation(Facts(own=own_addresses(OWN), topology=HOME))
    assert compilation.put(replace(parse_rule(fields, NOW), id=1)) is None
    published = read_publications(report)
    return compilation.find_published(published, read_given(report, published)).get(1)


@pytest.mark.parametrize(("rule", "target", "inner"), GIVEN)
def test_a_rule_from_what_is_given_on_the_way_out_says_whom_to_name(rule: str, target: str, inner: str | None) -> None:
    note = judge(rule, {"target": target, "action": "block"})
    if inner is None:
        assert note is None
    else:
        assert note is not None
        assert not note.degraded
        assert f"(`{rule[:120]}`)" in note.text
        assert note.text.endswith(f" Name that one in a rule `from` ({inner})." if inner else " in a rule `from`.")


@pytest.mark.parametrize("fields", [{"action": "allow"}, {"action": "block", "direction": "to"}])
def test_what_makes_exceptions_or_is_to_it_is_not_told_so(fields: dict[str, object]) -> None:
    assert judge(NETMAP, {"target": "203.0.113.2"} | fields) is None


def test_more_rules_than_are_looked_through_are_told() -> None:
    rules = tuple(
        f"-A POSTROUTING -s 10.{n >> 16}.{n >> 8 & 255}.{n & 255}/32 -p tcp -j SNAT --to-source 203.0.113.9:{n}-{n}"
        for n in range(50_001)
    )
    for many, told in ((rules, True), (rules[1:], False)):
        report = HostReport(nat=(many,))
        assert len(read_given(report, read_publications(report)).found) == 50_000
        assert ("given addresses" in {each.name for each in find_conflicts(report)}) == told
