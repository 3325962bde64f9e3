"""What `base.Kernel` promises, asked of the kernel in memory and of the real one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from netlimit.compile import Compilation
from netlimit.errors import KernelError
from netlimit.kernel.base import Kernel, observe
from netlimit.limits import Facts
from netlimit.plan import SwitchTable, WriteSets, diff
from netlimit.rules import Rule, parse_rule
from netlimit.state import (
    ChainId,
    Entry,
    InSet,
    IpSet,
    Jump,
    MapMark,
    Reject,
    State,
    Structure,
    Verdict,
    chain_rule,
)
from tests.kernel.conftest import HERE, THERE

RULES: dict[str, dict[str, object]] = {
    "packets": {"target": "10.1.0.2", "rate": "200 packets/s"},
    "a rate that is not exact": {"target": "10.1.0.2", "rate": "7777 packets/s"},
    "packets a day": {"target": "10.1.0.2", "rate": "1 packets/day"},
    "the fastest": {"target": "10.1.0.2", "rate": "1000000 packets/s"},
    "a burst": {"target": "10.1.0.2", "rate": "200 packets/s", "burst": 1000},
    "bytes": {"target": "10.1.0.0/16", "per": "host", "rate": "20 Mbit/s"},
    "the slowest bytes": {"target": "10.1.0.2", "rate": "12 kbit/s"},
    "the fastest bytes": {"target": "10.1.0.2", "rate": "20 Gbit/s"},
    "bytes to a target": {"target": "10.1.0.0/16", "direction": "to", "per": "target", "rate": "5 MB/s"},
    "everything": {"target": "0.0.0.0/0", "per": "/16", "rate": "20 Mbit/s"},
    "each block": {"target": "10.1.0.0/16", "per": "/24", "rate": "200 packets/s"},
    "peers": {"target": "10.1.0.0/16", "direction": "to", "per": "peer", "rate": "200 packets/s"},
    "new connections": {"target": "10.1.0.2", "rate": "10 connections/min"},
    "new connections by TCP": {"target": "10.1.0.2", "protocol": "tcp", "ports": 80, "rate": "10 connections/s"},
    "concurrent connections": {"target": "10.1.0.0/16", "per": "host", "rate": "50 connections"},
    "concurrent connections rejected": {"target": "10.1.0.2", "rate": "50 connections", "action": "reject"},
    "concurrent connections of peers": {
        "target": "10.1.0.2",
        "per": "peer",
        "direction": "to",
        "rate": "5 connections",
    },
    "concurrent connections of blocks": {"target": "10.1.0.0/16", "per": "/24", "rate": "5 connections"},
    "ports": {"target": "10.1.0.2", "protocol": "tcp", "ports": [80, "8000-8100"], "rate": "200 packets/s"},
    "source ports": {"target": "10.1.0.2", "protocol": "udp", "source_ports": 53, "rate": "200 packets/s"},
    "both ports": {
        "target": "10.1.0.2",
        "protocol": "udp",
        "ports": "1-65535",
        "source_ports": [53, 123],
        "rate": "200 packets/s",
    },
    "fifteen ports": {
        "target": "10.1.0.2",
        "protocol": "tcp",
        "ports": list(range(1, 30, 2)),
        "rate": "200 packets/s",
    },
    "an interface": {"target": "10.1.0.2", "interface": "lan", "rate": "200 packets/s"},
    "an interface that it leaves by": {
        "target": "10.1.0.2",
        "direction": "to",
        "interface": "lan.5",
        "action": "block",
    },
    "icmp": {"target": "10.1.0.2", "protocol": "icmp", "rate": "5 packets/s"},
    "reject": {"target": "10.1.0.2", "rate": "200 packets/s", "action": "reject"},
    "observe": {"target": "10.1.0.2", "rate": "200 packets/s", "action": "observe"},
    "observe connections": {"target": "10.1.0.2", "rate": "20 connections", "action": "observe"},
    "allow": {"target": "10.1.0.0/24", "action": "allow"},
    "block": {"target": "10.1.0.0/24", "action": "block"},
    "block everything": {"target": "0.0.0.0/0", "action": "block", "protocol": "udp", "ports": 53},
    "block to": {"target": "10.1.0.2", "direction": "to", "action": "block"},
    "own address": {"target": HERE, "direction": "to", "rate": "5 packets/s"},
    "own address from": {"target": HERE, "rate": "5 packets/s"},
}
SIX = {"10.1.0.2": "fd00:1::2", "10.1.0.0/16": "fd00:1::/112", "0.0.0.0/0": "::/0", "10.1.0.0/24": "fd00:1::/120"}
LENGTHS = {"/24": "/124", "/16": "/20"}
FACTS = Facts(own=frozenset({HERE}), management=(22, 8750))


def number(*wanted: dict[str, object]) -> list[Rule]:
    now = datetime.now(UTC)
    return [replace(parse_rule(fields, now), id=n) for n, fields in enumerate(wanted, start=1)]


def in_six(fields: dict[str, object]) -> dict[str, object]:
    """The same of IPv6."""
    target = SIX.get(str(fields["target"]), "fd00:1::1")
    return {
        **fields,
        "target": target,
        **({"per": LENGTHS[str(fields["per"])]} if fields.get("per") in LENGTHS else {}),
    }


def compiled(*wanted: dict[str, object], facts: Facts = FACTS) -> Compilation:
    compilation = Compilation(facts)
    for rule in number(*wanted):
        assert compilation.put(rule) is None
    return compilation


def enforce(kernel: Kernel, compilation: Compilation) -> None:
    found = observe(kernel)
    for step in diff(compilation.state, found, compilation.transition(found.structure)).steps:
        kernel.apply(step)
    compilation.settle()


@pytest.mark.parametrize("name", RULES)
def test_what_is_applied_is_observed(kernel: Kernel, name: str) -> None:
    compilation = compiled(RULES[name], in_six(RULES[name]))
    enforce(kernel, compilation)
    assert observe(kernel) == compilation.state
    assert str(observe(kernel)) == str(compilation.state)


def test_all_of_them_side_by_side_and_one_after_the_other(kernel: Kernel) -> None:
    rules = {rule.identity: rule for rule in number(*RULES.values(), *map(in_six, RULES.values()))}
    compilation = Compilation(FACTS)
    for rule in rules.values():
        assert compilation.put(rule) is None
    enforce(kernel, compilation)
    assert observe(kernel) == compilation.state
    for rule in list(rules.values())[::5]:
        compilation.drop(rule.id)
        enforce(kernel, compilation)
        assert observe(kernel) == compilation.state


def test_doing_what_is_done_already_is_no_error(kernel: Kernel) -> None:
    compilation = compiled(*RULES.values())
    plan = diff(compilation.state, State(), compilation.transition(Structure()))
    for step in (*plan.steps, *plan.steps):
        kernel.apply(step)
    assert observe(kernel) == compilation.state


def test_removing_what_is_not_there_is_no_error(kernel: Kernel) -> None:
    kernel.apply(WriteSets(create=(IpSet("nl-x", 4),)))
    kernel.apply(WriteSets(remove={"nl-x": ("10.0.0.1",), "nl-y": ("10.0.0.1",)}, destroy=("nl-y",)))
    kernel.apply(SwitchTable(4, "mangle", {}, ("NL-NOTHING",), {"FORWARD": ()}))
    assert observe(kernel).structure.sets == {"nl-x": IpSet("nl-x", 4)}


def test_teardown_leaves_nothing(kernel: Kernel) -> None:
    enforce(kernel, compiled(*RULES.values(), *map(in_six, RULES.values())))
    for step in diff(State(), observe(kernel)).steps:
        kernel.apply(step)
    assert observe(kernel) == State()


def refused(kernel: Kernel, step: WriteSets | SwitchTable) -> str:
    before = kernel.structure()
    with pytest.raises(KernelError) as error:
        kernel.apply(step)
    if isinstance(step, SwitchTable):
        assert kernel.structure() == before, "a table is switched all or nothing"
    return str(error.value)


def test_a_set_that_is_not_there(kernel: Kernel) -> None:
    rules = (chain_rule(Verdict("DROP"), InSet("nl-missing", "src")),)
    assert "nl-missing" in refused(kernel, SwitchTable(4, "mangle", {"NL-T": rules}, (), {}))
    assert "exist" in refused(kernel, WriteSets(add={"nl-missing": {"10.0.0.1": Entry()}}))


def test_a_chain_that_is_not_there(kernel: Kernel) -> None:
    hook = (chain_rule(Jump("NL-MISSING")),)
    assert "NL-MISSING" in refused(kernel, SwitchTable(4, "mangle", {}, (), {"FORWARD": hook}))


def test_a_target_that_the_table_does_not_take(kernel: Kernel) -> None:
    kernel.apply(WriteSets(create=(IpSet("nl-m", 4, marks=True),)))
    refused(kernel, SwitchTable(4, "filter", {"NL-T": (chain_rule(MapMark("nl-m", "src")),)}, (), {}))
    refused(kernel, SwitchTable(4, "mangle", {"NL-T": (chain_rule(Reject("icmp-port-unreachable")),)}, (), {}))


def test_a_set_in_use_stays(kernel: Kernel) -> None:
    kernel.apply(WriteSets(create=(IpSet("nl-x", 4),)))
    kernel.apply(SwitchTable(4, "mangle", {"NL-T": (chain_rule(Verdict("DROP"), InSet("nl-x", "src")),)}, (), {}))
    assert "in use" in refused(kernel, WriteSets(destroy=("nl-x",)))
    assert "nl-x" in kernel.structure().sets


def test_a_full_set_takes_no_more_but_keeps_what_came_before(kernel: Kernel) -> None:
    kernel.apply(WriteSets(create=(IpSet("nl-x", 4, size=3),)))
    entries = {f"10.0.0.{n}": Entry() for n in range(1, 6)}
    assert "full" in refused(kernel, WriteSets(add={"nl-x": entries})).lower()
    assert set(kernel.readings(["nl-x"])["nl-x"]) == {"10.0.0.1", "10.0.0.2", "10.0.0.3"}
    kernel.apply(WriteSets(add={"nl-x": {"10.0.0.1": Entry()}}))


def test_entries_end_by_themselves(kernel: Kernel) -> None:
    ends = int(time.time()) + 4
    kernel.apply(WriteSets(create=(IpSet("nl-x", 4),)))
    kernel.apply(WriteSets(add={"nl-x": {"10.0.0.1": Entry(expires=ends), "10.0.0.2": Entry()}}))
    found = kernel.readings(["nl-x"])["nl-x"]
    assert abs(found["10.0.0.1"].entry.expires - ends) <= 1
    assert found["10.0.0.2"].entry.expires == 0
    while time.time() < ends + 1.2:
        time.sleep(0.1)
    assert set(kernel.readings(["nl-x"])["nl-x"]) == {"10.0.0.2"}


def test_an_end_in_the_past_is_no_entry(kernel: Kernel) -> None:
    kernel.apply(WriteSets(create=(IpSet("nl-x", 4),)))
    kernel.apply(WriteSets(add={"nl-x": {"10.0.0.1": Entry(expires=int(time.time()) - 5)}}))
    assert kernel.readings(["nl-x"]) == {"nl-x": {}}


def test_an_entry_takes_a_new_value(kernel: Kernel) -> None:
    ends = int((datetime.now(UTC) + timedelta(hours=1)).timestamp())
    kernel.apply(WriteSets(create=(IpSet("nl-x", 6, marks=True),)))
    for entry in (Entry(0x1000000, 0xFF000000), Entry(0x2000000, 0xFF000000, ends), Entry(0x2000000, 0xFF000000)):
        kernel.apply(WriteSets(add={"nl-x": {"fd00::1": entry, "fd00::/64": entry}}))
        found = kernel.readings(["nl-x"])["nl-x"]
        assert set(found) == {"fd00::1", "fd00::/64"}
        for reading in found.values():
            assert reading.entry[:2] == entry[:2]
            assert abs(reading.entry.expires - entry.expires) <= 1


def test_sets_that_do_not_exist_are_left_out(kernel: Kernel) -> None:
    kernel.apply(WriteSets(create=(IpSet("nl-x", 4),)))
    assert kernel.readings(["nl-x", "nl-y"]) == {"nl-x": {}}


def test_many_sets_are_read_as_each_by_itself(kernel: Kernel) -> None:
    sets = [IpSet(f"nl-{n}", (4, 6)[n % 2], marks=n % 3 == 0) for n in range(9)]
    held = {each.name: {("10.0.0.0/8", "fd00::1")[each.family == 6]: Entry()} for each in sets[:-1]}
    large = {f"10.{n >> 8}.{n & 255}.1": Entry() for n in range(5000)}
    kernel.apply(WriteSets(create=(*sets, IpSet("nl-x", 4)), add={**held, "nl-x": large}))
    names = [*(each.name for each in sets), "nl-x"]
    found = kernel.readings([*names, "nl-y"])
    assert found == {name: kernel.readings([name])[name] for name in names}
    assert [len(found[name]) for name in names] == [1] * 8 + [0, 5000]


def test_a_set_of_another_kind_under_our_name_is_replaced_with_its_entries(kernel: Kernel) -> None:
    """Also while a chain names it."""
    compilation = compiled(RULES["packets"], {"target": "10.1.0.0/24", "action": "block"})
    enforce(kernel, compilation)
    wanted = compilation.structure.sets
    name = compilation.sets_of(2)[0]
    kernel.apply(WriteSets(create=(replace(wanted[name], size=4096),), add={name: {"10.9.9.9": Entry()}}))
    assert kernel.structure() != compilation.structure
    enforce(kernel, compilation)
    assert observe(kernel) == compilation.state


def test_a_thousand_limits_can_be_read_back(kernel: Kernel) -> None:
    facts = Facts(mark_mask=0xFFFF0000)
    wanted: list[dict[str, object]] = [
        {"target": f"10.1.{n >> 8}.{n & 255}", "rate": f"{n} packets/min"} for n in range(1, 1001)
    ]
    compilation = compiled(*wanted, facts=facts)
    enforce(kernel, compilation)
    begin = time.monotonic()
    assert observe(kernel) == compilation.state
    assert time.monotonic() - begin < 30
    leaves = [r for rules in kernel.structure().chains.values() for r in rules if "hashlimit" in r.text]
    assert len(leaves) == 1000


def test_counters_are_read_by_entry(kernel: Kernel, emit: Callable[[int, int], None]) -> None:
    compilation = compiled(
        {"target": THERE, "direction": "to", "rate": "1 packets/h", "burst": 4},
        {"target": "10.1.0.0/16", "direction": "to", "rate": "20 Gbit/s", "per": "target", "action": "observe"},
    )
    enforce(kernel, compilation)
    emit(10, 100)
    host, host_dropped = compilation.sets_of(1)
    subnet, subnet_dropped = compilation.sets_of(2)
    readings = kernel.readings([host, host_dropped, subnet, subnet_dropped])
    assert readings[host][THERE][1:] == (10, 1000)
    assert readings[host_dropped][THERE][1:] == (6, 600)
    assert readings[subnet]["10.1.0.0/16"][1:] == (10, 1000)
    assert readings[subnet_dropped]["10.1.0.0/16"][1:] == (0, 0)
    offenders = kernel.readings(["nl-off4"])["nl-off4"]
    assert set(offenders) == {THERE}


def test_writing_another_entry_leaves_counters_alone(kernel: Kernel, emit: Callable[[int, int], None]) -> None:
    compilation = compiled({"target": THERE, "direction": "to", "rate": "1000 packets/s"})
    enforce(kernel, compilation)
    emit(3, 100)
    for rule in number(
        {"target": THERE, "action": "allow"}, {"target": "10.1.0.9", "direction": "to", "rate": "1000 packets/s"}
    )[1:]:
        compilation.put(rule)
    enforce(kernel, compilation)
    emit(2, 100)
    name = compilation.sets_of(1)[0]
    assert kernel.readings([name])[name][THERE][1:] == (5, 500)


def test_an_entry_that_is_written_again_counts_from_nothing(kernel: Kernel, emit: Callable[[int, int], None]) -> None:
    compilation = compiled({"target": THERE, "direction": "to", "rate": "1000 packets/s"})
    enforce(kernel, compilation)
    emit(3, 100)
    name = compilation.sets_of(1)[0]
    kernel.apply(WriteSets(add={name: {THERE: compilation.entries[name][THERE]}}))
    emit(2, 100)
    assert kernel.readings([name])[name][THERE][1:] == (2, 200)


def test_what_is_told_to_fail_fails_once() -> None:
    from netlimit.kernel.fake import FakeKernel

    kernel = FakeKernel()
    kernel.fail_at(1)
    kernel.apply(WriteSets(create=(IpSet("nl-x", 4),)))
    with pytest.raises(KernelError, match="told to fail"):
        kernel.apply(WriteSets(create=(IpSet("nl-y", 4),)))
    kernel.apply(WriteSets(create=(IpSet("nl-y", 4),)))
    assert set(kernel.structure().sets) == {"nl-x", "nl-y"}


def test_chains_of_ours_that_nobody_wants_are_seen(kernel: Kernel) -> None:
    kernel.apply(SwitchTable(4, "mangle", {"NL-OLD": (chain_rule(Verdict("RETURN")),)}, (), {}))
    assert ChainId(4, "mangle", "NL-OLD") in kernel.structure().chains
    enforce(kernel, compiled())
    assert observe(kernel) == State()


def many_selectors(host: str) -> list[dict[str, object]]:
    """So many that trees lead to them: ports on either side, ranges that overlap, and devices."""
    to: dict[str, object] = {"target": host, "direction": "to", "rate": "1000 packets/s"}
    return [
        *({**to, "protocol": "udp", "ports": port} for port in range(1, 40)),
        *({**to, "protocol": "udp", "ports": f"{port}-{port + 30_000}", "per": "target"} for port in range(1, 20)),
        *({**to, "protocol": "tcp", "source_ports": port, "action": "reject"} for port in range(1, 40)),
        *({**to, "interface": name} for name in ("near", *(f"nea{n}" for n in range(20)), *"abcdefghij")),
        *({**to, "protocol": "udp", "ports": 9, "interface": f"n{n}"} for n in range(20)),
    ]


def test_trees_lead_to_the_selector_of_a_packet_and_to_no_other(
    kernel: Kernel, emit: Callable[[int, int], None]
) -> None:
    rules = many_selectors(THERE)
    compilation = compiled(*rules, *many_selectors("fd00:1::2"))
    enforce(kernel, compilation)
    assert observe(kernel) == compilation.state
    emit(3, 100)
    counted = {}
    for number in range(1, len(rules) + 1):
        name = compilation.sets_of(number)[0]
        counted[number] = kernel.readings([name])[name][THERE].packets
    speaking = {"9", *(f"{port}-{port + 30_000}" for port in range(1, 10))}
    speaks = {
        number
        for number, fields in enumerate(rules, 1)
        if fields.get("interface", "near") == "near" and str(fields.get("ports", "9")) in speaking
        if "source_ports" not in fields
    }
    assert counted == {number: 3 if number in speaks else 0 for number in counted}
    assert len(speaks) == 11
