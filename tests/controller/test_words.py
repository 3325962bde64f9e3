"""What a plan says in words, from what the kernel holds."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from netlimit.rules import parse_rule
from netlimit.state import ChainId
from netlimit.tree import Device, Route, Topology
from tests.controller.conftest import Site

ROUTES = Topology(
    {"lan": Device(2, True), "wan": Device(3, True)},
    (Route("10.0.0.0/8", ("lan",), connected=True), Route("0.0.0.0/0", ("wan",))),
)


def words(site: Site) -> list[str]:
    plan, said = site.controller.account()
    assert bool(plan) == bool(said), (str(plan), said)
    return said


def test_a_new_rule_comes_into_force_and_netlimit_takes_its_place(site: Site) -> None:
    site.add(target="10.1.0.0/16", rate="200 packets/s", per="host", name="office")
    said = words(site)
    assert said[0] == (
        "Rule 1 (office) comes into force: at most 200 packets/s from each address of 10.1.0.0/16; what exceeds is "
        "dropped."
    )
    assert "netlimit takes its place in mangle FORWARD, mangle INPUT (IPv4)." in said
    site.controller.sync()
    assert words(site) == []


def test_a_rule_that_changes_says_from_what_to_what(site: Site) -> None:
    rule = site.add(target="10.1.0.0/16", rate="100 packets/s", per="host")
    site.add(target="10.2.0.0/16", rate="100 packets/s", per="host")
    site.controller.sync()
    changed = parse_rule({"target": "10.1.0.0/16", "rate": "200 packets/s", "per": "host"}, site.clock())
    site.store.replace(rule.id, changed, "test", site.clock())
    assert words(site)[0] == (
        "Rule 1 changes from 100 packets/s to 200 packets/s: at most 200 packets/s from each address of 10.1.0.0/16; "
        "what exceeds is dropped."
    )
    other = parse_rule({"target": "10.1.0.0/16", "rate": "50 connections", "per": "host"}, site.clock())
    site.store.replace(rule.id, other, "test", site.clock())
    assert words(site)[0].startswith("Rule 1 changes from 100 packets/s to 50 connections at once: at most 50 ")
    other = parse_rule({"target": "10.1.0.0/24", "rate": "200 packets/s", "per": "host"}, site.clock())
    site.store.replace(rule.id, other, "test", site.clock())
    first = words(site)[0]
    assert first.startswith("Rule 1 changes: at most 200 packets/s from each address of 10.1.0.0/24;")
    assert "Until now: at most 100 packets/s from each address of 10.1.0.0/16;" in first


def test_a_rule_that_was_removed_is_lifted(site: Site) -> None:
    rule = site.add(target="10.1.0.0/16", rate="100 packets/s", per="/24", action="reject", name="guests")
    site.controller.sync()
    site.store.remove(rule.id, "test", site.clock())
    said = words(site)
    assert said[0] == (
        "Rule 1 (guests) is lifted: at most 100 packets/s from each /24 of 10.1.0.0/16; what exceeds is rejected."
    )
    assert any(sentence.startswith("netlimit leaves ") for sentence in said)


def test_a_limit_of_a_rule_that_nobody_knows_is_told_by_what_it_does(site: Site) -> None:
    rule = site.add(target="0.0.0.0/0", rate="100 packets/s", per="/20", protocol="udp", ports=53)
    site.controller.sync()
    site.store.remove(rule.id, "test", site.clock())
    status = site.store.hosts()[0]
    site.store.report(replace(status, applied_revision=0))
    assert words(site)[0] == (
        "A rule of 0.0.0.0/0 is lifted: at most 100 packets/s of UDP to port 53 from each /20 of all of IPv4; what "
        "exceeds is dropped."
    )


def test_what_others_did_is_told_as_what_it_is(site: Site) -> None:
    site.add(target="10.1.0.0/16", rate="100 packets/s", per="host")
    site.add(target="10.2.0.0/16", rate="100 packets/s", per="host")
    site.controller.sync()
    kernel = site.kernel
    limits = next(name for name in kernel.sets if name.startswith("nl-l4"))
    del kernel.hooks[ChainId(4, "mangle", "INPUT")]
    kernel.elements[limits]["192.0.2.77"] = kernel.elements[limits]["10.1.0.0/16"]
    del kernel.elements[limits]["10.2.0.0/16"]
    kernel.elements["nl-safe4"].clear()
    assert words(site) == [
        "Rule 2 comes into force again: at most 100 packets/s from each address of 10.2.0.0/16; what exceeds is "
        "dropped.",
        "1 entry of the set nl-safe4 is put right.",
        f"1 entry of no rule leaves the set {limits}.",
        "The place of netlimit in mangle INPUT (IPv4) is restored.",
    ]


def test_queues_are_told_by_device_and_rule(site: Site) -> None:
    site.kernel.routes = ROUTES
    site.add(target="10.1.0.0/16", direction="to", rate="20 Mbit/s", per="target", action="shape", name="site")
    said = words(site)
    assert said[0] == (
        "Rule 1 (site) comes into force: at most 20 Mbit/s to 10.1.0.0/16 together; what exceeds waits in a queue."
    )
    assert "lan gets a queue tree." in said
    site.controller.sync()
    assert words(site) == []
    changed = {"target": "10.1.0.0/16", "direction": "to", "rate": "30 Mbit/s", "per": "target", "action": "shape"}
    site.store.replace(1, parse_rule(changed, site.clock()), "test", site.clock())
    assert words(site)[0].startswith("Rule 1 changes from 20 Mbit/s to 30 Mbit/s: at most 30 Mbit/s to 10.1.0.0/16")
    site.controller.sync()
    site.store.remove(1, "test", site.clock())
    said = words(site)
    assert said[0].startswith("Rule 1 is lifted: at most 30 Mbit/s to 10.1.0.0/16 together")
    assert "lan loses its queue tree." in said


def test_a_class_that_somebody_changed_is_told_by_its_rule(site: Site) -> None:
    site.kernel.routes = ROUTES
    site.add(target="10.1.0.5", direction="to", rate="20 Mbit/s", action="shape")
    site.controller.sync()
    tree = site.kernel.trees["lan"]
    ((number, leaf),) = [(n, each) for n, each in tree.classes.items() if each.leaf]
    tree.classes[number] = leaf._replace(rate=leaf.rate // 2)  # type: ignore[index]
    assert words(site) == ["What rule 1 is sure of on lan changes from 10 Mbit/s to 20 Mbit/s."]


def test_many_rules_are_counted(site: Site) -> None:
    batch = [
        parse_rule({"target": f"10.0.{i // 256}.{i % 256}", "rate": "5 packets/s"}, site.clock()) for i in range(300)
    ]
    site.store.add(batch, "test", site.clock())
    said = words(site)
    assert said[20] == "… and 280 more rules come into force."
    assert len(said) < 30


def test_verdicts_and_ends(site: Site) -> None:
    site.add(target="10.0.0.1", action="block", expires_at=site.clock() + timedelta(hours=1))
    site.add(target="10.0.0.0/8", action="allow", direction="to", protocol="tcp", ports=[80, 443], interface="wan")
    assert words(site)[:2] == [
        "Rule 1 comes into force: everything from 10.0.0.1 is blocked, until 2030-01-01 01:00:00 UTC.",
        "Rule 2 comes into force: TCP to port 80, 443 to 10.0.0.0/8 that leaves by wan is limited and blocked by "
        "nothing.",
    ]
