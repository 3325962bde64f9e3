"""Whatever others do to our objects: it is put right, counted and told; limits hold again, and what is theirs stays."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import NamedTuple

import pytest

from netlimit.plan import drifted
from netlimit.records import Repair, State
from netlimit.state import Entry, Structure
from netlimit.tree import FIRST_CHILD, TOP, Tree, format_classid
from scripts.testbed.namespaces import CLIENT6, Lab
from tests.e2e.gateway import HOST, Gateway
from tests.e2e.loads import FRAME, MEGABIT, offer, shape

PERSISTENT = True
DROPPED, SHAPED = "10.1.120.1", "10.1.120.2"
OFFERED, LIMITED = 300, 40
"""Packets a second of each of three flows, and of two of them that are let through; the third is shaped."""
MOST = 2 * LIMITED + MEGABIT / FRAME + 40
"""Packets a second that may leave while all three are limited: less than if one was not."""
FOREIGN = """*mangle
-A FORWARD -s 192.0.2.1/32 -j DROP
COMMIT
*filter
-A FORWARD -s 192.0.2.2/32 -j DROP
COMMIT
"""
DAMAGES: dict[str, tuple[str, str]] = {
    "a table is flushed": ("chains", "iptables-legacy -t mangle -F"),
    "a table of IPv6 is flushed": ("chains", "ip6tables-legacy -t mangle -F"),
    "a chain is flushed": ("chains", "iptables-legacy -t mangle -F NL-FORWARD"),
    "a hook is deleted": ("chains", "iptables-legacy -t mangle -D FORWARD -j NL-FORWARD"),
    "a rule is put before a hook": ("places", "iptables-legacy -t mangle -I FORWARD -p udp -s 10.1.120.1 -j ACCEPT"),
    "a rule is put into a chain": ("chains", "iptables-legacy -t mangle -I NL-FORWARD -j ACCEPT"),
    "iptables is reloaded": ("chains", "iptables-legacy-restore"),
    "ip6tables is reloaded": ("chains", "ip6tables-legacy-restore"),
    "the sets are flushed": ("entries", "ipset flush"),
    "the sets are destroyed": (
        "sets",
        "for t in raw mangle filter security; do for o in -F -X; do for p in iptables ip6tables; do "
        "$p-legacy -w -t $t $o; done; done; done; ipset destroy",
    ),
    "an entry is deleted": ("entries", "ipset del {dropping} 10.1.120.1"),
    "an entry has another mark": ("entries", "ipset -exist add {dropping} 10.1.120.1 skbmark 0xff000000/0xff000000"),
    "an entry is added": ("entries", "ipset add {dropping} 10.1.120.9 skbmark 0x1000000/0xff000000"),
    "a class is changed": ("queues", "tc class change dev wan classid {class} htb rate 90mbit ceil 90mbit"),
    "a class is deleted": ("queues", "tc class del dev wan classid {class}"),
    "a child is deleted": ("queues", "tc qdisc del dev wan parent {child}"),
    "the root qdisc is deleted": ("queues", "tc qdisc del dev wan root"),
    "the filter on the ingress is deleted": ("ingress", "tc filter del dev lan ingress"),
    "clsact is deleted": ("ingress", "tc qdisc del dev lan clsact"),
    "the device for what ends here is deleted": ("queues", "ip link del nl-in"),
}


class Held(NamedTuple):
    """What the kernel holds of ours."""

    structure: Structure
    entries: Mapping[str, Mapping[str, Entry]]
    programs: Mapping[str, str]
    trees: Mapping[str, Tree]


@pytest.fixture(scope="module")
def limited(controller: Gateway, lab: Lab) -> Iterator[Gateway]:
    """A gateway through which three flows come, each of which is limited, with rules of others beside ours."""
    lab.add_client_addresses(DROPPED, SHAPED)
    for program in ("iptables-legacy-restore", "ip6tables-legacy-restore"):
        text = FOREIGN.replace("192.0.2.", "2001:db8::").replace("/32", "/128") if "6" in program else FOREIGN
        lab.gateway.run(program, "--noflush", input=text)
    lab.gateway.run("ipset", "create", "theirs", "hash:ip")
    rate = f"{LIMITED} packets/s"
    controller.put({"target": DROPPED, "rate": rate}, {"target": CLIENT6, "rate": rate}, shape(SHAPED))
    with ExitStack() as flows:
        for source in (DROPPED, CLIENT6, SHAPED):
            flows.enter_context(offer(lab.client, "", source, megabits=OFFERED * FRAME / MEGABIT, seconds=100))
        controller.wait(lambda: passing(lab) < MOST, "the flows to be limited")
        yield controller


@pytest.mark.parametrize("name", DAMAGES)
def test_what_others_do_is_put_right(limited: Gateway, lab: Lab, name: str) -> None:
    kind, command = DAMAGES[name]
    before, seen, whole = limited.foreign(), status(limited), look(limited)
    with limited.frozen():
        damage(limited, lab, command)
        theirs = limited.foreign()
    repair = wait_for_repair(limited, seen, kind)
    if "restore" not in command and "-F" not in command and "-I FORWARD" not in command:
        assert theirs == before
    assert passing(lab) < MOST
    assert limited.foreign() == theirs, "what is not ours is left as it was found"
    after = look(limited)
    assert after[:3] == whole[:3]
    assert drifted(whole.trees, after.trees) is None
    assert repair.found, "it is told what was found"
    assert 0 < repair.took < 30


def test_rules_of_nftables_are_not_ours(limited: Gateway, lab: Lab) -> None:
    seen = status(limited)
    lab.gateway.run("nft", "add", "table", "inet", "theirs")
    lab.gateway.run("nft", "flush", "ruleset")
    time.sleep(1.2)
    assert status(limited) == seen
    assert passing(lab) < MOST


def test_a_root_qdisc_of_somebody_else_is_told_of(limited: Gateway, lab: Lab) -> None:
    """It is not ours to remove: no limit is lifted in silence, and once it is gone ours is back."""
    (rule,) = (kept.rule for kept in limited.store.select(limit=10)[0] if str(kept.rule.target).startswith(SHAPED))
    lab.gateway.run("tc", "qdisc", "replace", "dev", "wan", "root", "handle", "1:", "pfifo", "limit", "77")
    assert "wan has a qdisc that is not ours (pfifo 1:)" in limited.wait_for_state(rule, State.DEGRADED)
    lab.gateway.run("tc", "qdisc", "del", "dev", "wan", "root")
    limited.wait(lambda: limited.state(rule)[0] is State.APPLIED, "the rule to hold again")
    limited.wait(lambda: not limited.drift(), "the tree to be back")
    assert passing(lab) < MOST


def test_a_device_that_is_renamed_keeps_its_limits(limited: Gateway, lab: Lab) -> None:
    for old, new in (("lan", "lan2"), ("lan2", "lan")):
        lab.gateway.run("ip", "link", "set", old, "name", new)
        limited.wait(lambda new=new: new in limited.kernel.ingress(), f"the program to be known on {new}")  # type: ignore[misc]
        limited.wait(lambda: not limited.drift(), f"everything to be on {new}")
        assert passing(lab) < MOST


def test_a_device_that_is_made_anew_gets_its_tree_back(limited: Gateway, lab: Lab) -> None:
    make = (
        "link add dmz type veth peer name out",
        "link set out up",
        "link set dmz up",
        "addr add 10.3.0.1/16 dev dmz",
    )
    lab.gateway.ip(*make)
    (rule,) = limited.add(shape("10.3.0.5"))
    assert limited.state(rule)[0] is State.APPLIED
    limited.wait(lambda: bool(limited.classes("dmz")) and not limited.drift(), "the whole tree to be there")
    before = limited.classes("dmz")
    lab.gateway.ip("link del dmz", *make)
    limited.wait(lambda: bool(limited.classes("dmz")) and not limited.drift(), "the tree to be back")
    assert limited.classes("dmz") == before
    lab.gateway.ip("link del dmz")


def look(gateway: Gateway) -> Held:
    kernel = gateway.kernel
    structure = kernel.structure()
    readings = kernel.readings(name for name, ipset in structure.sets.items() if not ipset.lives)
    entries = {name: {key: each.entry for key, each in found.items()} for name, found in readings.items()}
    return Held(structure, entries, kernel.ingress(), kernel.queues().trees)


def damage(gateway: Gateway, lab: Lab, command: str) -> None:
    tree = gateway.kernel.queues().trees["wan"]
    shaped = next(n for n in tree.classes if n >> 16 >= FIRST_CHILD and n & 0xFFFF != TOP)
    child = format_classid(min(tree.children.values()))
    parts = {"child": child, "class": format_classid(shaped), "dropping": dropping(lab)}
    for word, value in parts.items():
        command = command.replace(f"{{{word}}}", value)
    if command.endswith("restore"):
        lab.gateway.run(command, input=FOREIGN if command.startswith("iptables") else "*mangle\nCOMMIT\n")
    else:
        lab.gateway.run("sh", "-c", command)


def dropping(lab: Lab) -> str:
    """The set that marks the address whose flow is cut."""
    lines = lab.gateway.run("ipset", "save").stdout.splitlines()
    return next(
        line.split()[1] for line in lines if line.startswith("add nl-") and f" {DROPPED} " in line and "skbmark" in line
    )


def wait_for_repair(gateway: Gateway, seen: tuple[int, dict[str, int]], kind: str) -> Repair:
    """Wait until one more repair of this kind is counted; what was kept of it."""
    gateway.wait(lambda: status(gateway)[1].get(kind, 0) > seen[1].get(kind, 0), f"the {kind} to be repaired")
    assert status(gateway)[0] > seen[0]
    return next(repair for repair in gateway.store.repairs(HOST, 10) if repair.kind == kind)


def status(gateway: Gateway) -> tuple[int, dict[str, int]]:
    """Repairs counted so far, and by kind."""
    (found,) = gateway.store.hosts()
    return found.drift, dict(found.repairs)


def passing(lab: Lab) -> float:
    """Packets a second that reach the server now."""
    begin, before = time.monotonic(), lab.server.received_packets("eth0")
    time.sleep(0.4)
    return (lab.server.received_packets("eth0") - before) / (time.monotonic() - begin)
