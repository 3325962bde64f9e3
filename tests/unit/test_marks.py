"""Which bits of the packet mark are left for us."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from netlimit.compile import Compilation
from netlimit.kernel import iptables_marks, nft_marks
from netlimit.kernel.marks import split_tables
from netlimit.limits import Facts
from netlimit.marks import EVERY, UNKNOWN, USUAL, Bits, MarkUse, Read, Use, Write, choose
from netlimit.rules import parse_rule
from netlimit.state import Jump

bits = st.integers(0, EVERY)
between = st.sampled_from((frozenset[str](), frozenset({"FORWARD"})))
values = st.builds(Bits, bits, bits, bits)
writes = st.builds(Write, st.just("X"), values, st.booleans(), late=st.booleans(), between=between, claims=bits)
reads = st.builds(Read, st.just("X"), bits, st.booleans(), claims=bits)


def test_the_usual_bits_where_nobody_uses_any() -> None:
    assert choose(MarkUse(), None).mask == USUAL


def test_what_is_kept_stays_while_nobody_takes_it() -> None:
    claimed = MarkUse((Write("X", Bits(0x100, packet=0xFFFF00FF), claims=0xFF00),))
    assert choose(claimed, None, 0xFF00).mask & 0x100 == 0, "0x100 is taken"
    assert choose(claimed, None, 0xFE00).mask == 0xFE00
    assert choose(claimed, None, None).mask == USUAL


def test_a_mask_of_others_is_left_to_them_where_there_is_a_choice() -> None:
    found = MarkUse((Read("X", 0x40000000, claims=0xFFFF0000),))
    assert choose(found, None).mask == 0xFF00


def test_what_cannot_be_understood_is_avoided_if_it_can_be_and_never_stops_us() -> None:
    assert choose(MarkUse((Write("X", Bits(0xFF00FFFF, sure=False)),)), None).mask == 0xFF0000
    choice = choose(MarkUse((Write("X", UNKNOWN),), ("nft is missing",)), None)
    assert (choice.mask, choice.problem) == (USUAL, None)
    assert any("X may use" in note for note in choice.notes)
    assert any("nft is missing" in note for note in choice.notes)


def overwrite(wiped: int) -> Write:
    return Write("X", Bits(packet=EVERY & ~wiped), between=frozenset({"FORWARD", "INPUT6"}))


@pytest.mark.parametrize(
    ("wiped", "kept", "mask"),
    [
        ([0x1000000], None, 0xFF0000),
        ([0x1000000], USUAL, 0xFF0000),
        ([0x1000000], 0xFF00, 0xFF00),
        ([0x1000000, EVERY], USUAL, 0xFF0000),
        ([EVERY], USUAL, USUAL),
        ([EVERY], 0xFF00, 0xFF00),
        ([0xFFFF0000, 0xFFFF], 0xFF00, 0xFF00),
        ([0x11111111], 0xFF00, 0xFF00),
        ([0x11111111], None, USUAL),
    ],
)
def test_bits_are_as_many_as_there_are_and_such_as_nobody_overwrites(
    wiped: list[int], kept: int | None, mask: int
) -> None:
    choice = choose(MarkUse(tuple(map(overwrite, wiped))), None, kept)
    assert choice.mask == mask
    assert sorted(choice.reject) == (["FORWARD", "INPUT6"] if any(each & mask for each in wiped) else [])


SAVE = Write("X", Bits(packet=EVERY), connection=True, between=frozenset({"FORWARD"}))
BRING_BACK = Write("Y", Bits(connection=EVERY))


@pytest.mark.parametrize("asked", [BRING_BACK, Read("Y", 2, connection=True)])
def test_whoever_saves_the_marks_of_what_is_rejected_for_all_else_of_the_connection_is_told(asked: Use) -> None:
    assert not choose(MarkUse((SAVE,)), None).reject
    assert not choose(MarkUse((replace(SAVE, between=frozenset()), asked)), None).reject
    told = choose(MarkUse((SAVE, asked)), None).reject
    assert [*told] == ["FORWARD"]
    assert told["FORWARD"].startswith(f"X saves the bits {USUAL:#x} of the packet mark between mangle and filter")
    some = replace(SAVE, value=Bits(packet=USUAL))
    choice = choose(MarkUse((some, asked)), None)
    assert (choice.mask & USUAL, choice.reject) == (0, {})


@pytest.mark.parametrize(
    ("fields", "passes"),
    [
        ({"target": "10.1.0.2"}, {"FORWARD", "INPUT"}),
        ({"target": "10.1.0.2", "direction": "to"}, {"FORWARD", "OUTPUT"}),
        ({"target": "10.9.9.9"}, {"FORWARD", "INPUT", "OUTPUT"}),
        ({"target": "10.9.9.9", "direction": "to"}, {"FORWARD", "INPUT", "OUTPUT"}),
        ({"target": "2001:db8::1"}, {"FORWARD6", "INPUT6"}),
        ({"target": "10.1.0.2", "action": "drop"}, set()),
    ],
)
def test_a_limit_that_rejects_lacks_what_is_overwritten_where_it_stands(
    fields: dict[str, object], passes: set[str]
) -> None:
    """And in no other hook, nor of another address family."""
    fields = {"rate": "5 packets/s", "action": "reject", **fields}
    rule = replace(parse_rule(fields, datetime(2030, 1, 1, tzinfo=UTC)), id=1)
    for hook in ("FORWARD", "INPUT", "OUTPUT", "FORWARD6", "INPUT6", "OUTPUT6"):
        facts = Facts(own=frozenset({"10.9.9.9"}), capabilities={f"reject marks {hook}": "It is overwritten."})
        assert (Compilation(facts).put(rule) is not None) == (hook in passes), hook


def test_narrow_gaps_and_none_at_all() -> None:
    assert choose(MarkUse((Read("X", 0xFFFFFF8F),)), None).mask == 0x70
    nothing = choose(MarkUse((Read("X", EVERY),)), None)
    assert nothing.problem is not None
    assert "Free" in nothing.problem


@given(st.lists(writes | reads, max_size=6), st.none() | st.sampled_from((USUAL, 0xFF, 0x3C0)))
def test_who_is_chosen_for_is_in_nobody_s_way(uses: list[Write | Read], kept: int | None) -> None:
    choice = choose(MarkUse(tuple(uses)), None, kept)
    asked = choose(MarkUse(tuple(uses)), choice.mask)
    assert (choice.problem is None) == (asked.problem is None)
    assert choice.reject == asked.reject
    assert choose(MarkUse(tuple(uses)), None, choice.mask) == choice, "and stays"
    run = choice.mask // (choice.mask & -choice.mask)
    assert run & (run + 1) == 0
    assert run > 1


WORDS = [
    "nftables",
    "rule",
    "chain",
    "map",
    "set",
    "table",
    "family",
    "name",
    "expr",
    "mangle",
    "match",
    "key",
    "meta",
    "ct",
    "left",
    "right",
    "value",
    "data",
    "&",
    "|",
    "<<",
    "vmap",
    "concat",
    "elem",
    "hook",
    "prio",
    "jump",
    "target",
    "xt",
    "numgen",
    "mod",
    "jhash",
    "range",
    "prefix",
    "flags",
]
json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.sampled_from(["@m", "m", "mark", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=20,
)


@given(json)
def test_whatever_nft_prints_is_read(inside: Any) -> None:
    rule = {"family": "inet", "table": "t", "chain": "c", "expr": [inside, {"mangle": inside}, {"match": inside}]}
    write = {"mangle": {"key": {"meta": {"key": "mark"}}, "value": inside}}
    asked = {"match": {"op": "==", "left": {"meta": {"key": "mark"}}, "right": inside}}
    rules = [{"rule": rule}, {"rule": {**rule, "expr": [write, asked]}}, {"map": {**rule, "name": "m", "elem": inside}}]
    uses, _ = nft_marks.read_marks({"nftables": rules})
    choose(MarkUse(tuple(uses)), None)


@given(st.text() | st.from_regex(r"(0x)?[0-9a-f]{1,30}(/[0-9]+)?", fullmatch=True))
@example("01")
@example("9" * 5000)
@example("0x" + "f" * 5000 + "/08")
@example("\u0663")
def test_whatever_iptables_prints_is_read(words: str) -> None:
    lines = [f"mangle -A X {words}", f"mangle -A X -m mark --mark 0x1 -j MARK --set-xmark {words}"]
    choose(MarkUse(tuple(iptables_marks.read_marks(lines, {}, "iptables"))), None)


def test_a_huge_ruleset_is_read_in_time_that_grows_with_it_and_no_faster() -> None:
    """Nothing is looked through once a rule: that took hours."""
    write = {"mangle": {"key": {"meta": {"key": "mark"}}, "value": {"map": {"key": 1, "data": "@m"}}}}
    asked = {"match": {"op": "==", "left": {"meta": {"key": "mark"}}, "right": "@m"}}
    jump = {"vmap": {"key": 1, "data": "@v"}}
    where = {"family": "inet", "table": "t"}
    many = 10_000
    objects: list[dict[str, Any]] = [
        {"map": {**where, "name": "m", "elem": [[number, number % 100] for number in range(many)]}},
        {"map": {**where, "name": "v", "elem": [[n, {"jump": {"target": f"c{n}"}}] for n in range(many)]}},
        {"chain": {**where, "name": "c0", "hook": "postrouting", "prio": 0}},
        *({"rule": {**where, "chain": f"c{number}", "expr": [asked, write]}} for number in range(many)),
        {"rule": {**where, "chain": "c0", "expr": [jump]}},
    ]
    began = time.process_time()
    uses, _ = nft_marks.read_marks({"nftables": objects})
    assert len(uses) == 2 * many
    assert time.process_time() - began < 20
    assert choose(MarkUse(tuple(uses)), None).mask == USUAL
    assert all(use.late for use in uses if isinstance(use, Write))


@pytest.mark.parametrize("fields", [{}, {"per": "host"}, {"direction": "to"}, {"action": "reject"}])
@pytest.mark.parametrize("target", ["10.1.0.0/16", "10.1.0.2", "2001:db8::/112"])
def test_no_chain_asks_whom_a_mark_names_before_it_has_cleared_it(target: str, fields: dict[str, object]) -> None:
    """Also that of forwarded packets which PREROUTING has spared: others may have marked them in between."""
    rule = {"target": target, "rate": "5 packets/s", "per": "target", **fields}
    compilation = Compilation(Facts())
    assert compilation.put(replace(parse_rule(rule, datetime(2030, 1, 1, tzinfo=UTC)), id=1)) is None
    hooked = {c: rules for c, rules in compilation.structure.chains.items() if c.name.removeprefix("NL-") in _HOOKS}
    assert hooked
    for chain, rules in hooked.items():
        if chain.table == "mangle":
            led = chain._replace(name="NL-FORWARD-AGAIN")
            near = compilation.structure.chains.get(led, rules) if chain.name == "NL-FORWARD" else rules
            assert near[0].text == "-j MARK --set-xmark 0x0/0xff000000", chain
            assert rules is near or all(rule.effect == Jump(led.name, goto=True) for rule in rules), chain


_HOOKS = {"PREROUTING", "INPUT", "FORWARD", "OUTPUT"}


SAVED = "# Generated\n*mangle\n:INPUT ACCEPT [0:0]\n:OTHER - [0:0]\n{}COMMIT\n# Completed\n"
MARKING = "-A INPUT -j MARK --set-xmark 0xffffffff/0xffffffff"


def test_as_many_rules_are_read_as_there_are() -> None:
    saved = SAVED.format("-A INPUT -i lan -j ACCEPT\n-A OTHER -j DROP\n")
    expected = ["mangle -A INPUT -i lan -j ACCEPT", "mangle -A OTHER -j DROP"]
    assert split_tables(saved, {"mangle": 2}) == expected
    assert (
        split_tables(saved + SAVED.replace("mangle", "raw").format(""), {"mangle": 2, "raw": 0, "other": 7}) == expected
    )
    assert split_tables("", {}) == []


@pytest.mark.parametrize(
    "printed",
    [
        f"-A INPUT -i x\n{MARKING}\n-A OTHER -j DROP\n",
        f"-A INPUT -j DROP\n-A INPUT -i x\nCOMMIT\n*raw\n{MARKING} -j ACCEPT\n",
        f"-A INPUT -j DROP\n-A INPUT -i x\nCOMMIT\n# {MARKING} -j ACCEPT\n",
        "-A INPUT -j DROP\n-A INPUT -i x\nCOMMIT\n*raw\n:x -j ACCEPT\n",
        "-A INPUT -j DROP\n",
    ],
)
def test_what_has_other_lines_is_not_believed(printed: str) -> None:
    with pytest.raises(ValueError, match="ends of lines"):
        split_tables(SAVED.format(printed), {"mangle": 2, "nat": 0})
