"""A rule that nobody had to force, for its address was nobody's, and that closes the gateway that gets the address."""

from __future__ import annotations

import logging

import pytest

from netlimit.kernel.base import Addresses, Door
from netlimit.records import State
from netlimit.rules import Rule, parse_rule
from netlimit.unforced import PREFIX
from tests.controller.conftest import Site

VIP = "10.2.0.50"


def own(site: Site, *addresses: str, port: int = 22) -> None:
    site.kernel.where = Addresses(("10.2.0.1", *addresses), (), (Door(port),))


def stand(site: Site, rule: Rule) -> tuple[State | None, str]:
    """What is said of a rule, once the host was looked at."""
    for _ in range(2):
        site.controller._due = dict.fromkeys(site.controller._due, 0.0)
        site.controller.tick()
    said = site.store.marked("gw").get(rule.id)
    return (said.state, said.message) if said else (None, "")


def notes(site: Site) -> list[str]:
    (status,) = site.store.hosts()
    return [note for note in status.notes if note.startswith(PREFIX)]


def test_it_holds_and_is_told_as_long_as_the_address_is_its_own(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    own(site)
    rule = site.add(target=VIP, direction="to", action="block")
    assert stand(site, rule) == (None, "")
    assert not notes(site)

    own(site, VIP)
    with caplog.at_level(logging.WARNING):
        state, message = stand(site, rule)
        stand(site, rule)
    assert state is State.APPLIED, "it does what it says"
    assert message.startswith(f"{VIP} is an address of this host's own now: nobody but who is safe")
    assert "port 22" in message
    assert f"netlimit rule edit {rule.id} --enable --force" in message
    (note,) = notes(site)
    assert f"port 22 at {VIP} (rule {rule.id})" in note
    assert [each.getMessage() for each in caplog.records].count(note) == 1
    assert site.send("10.1.0.2", VIP) == ["drop"]

    own(site)
    assert stand(site, rule) == (None, "")
    assert not notes(site)


def test_who_forces_it_knows(site: Site) -> None:
    own(site)
    rule = site.add(target=VIP, direction="to", action="block")
    own(site, VIP)
    assert stand(site, rule)[0] is State.APPLIED
    forced = site.add(target=VIP, direction="to", action="block", protocol="tcp", forced_by="root")
    assert stand(site, rule) == stand(site, forced) == (None, ""), "it closes nothing that is not closed on purpose"
    assert not notes(site)


@pytest.mark.parametrize(
    "fields",
    [
        {"rate": "1 packets/day", "per": "host"},
        {"action": "observe", "rate": "1 packets/day", "per": "host"},
        {"action": "allow"},
        {"action": "block", "protocol": "udp"},
        {"action": "block", "protocol": "icmp"},
        {"action": "block", "protocol": "tcp", "ports": "23-80"},
        {"action": "block", "protocol": "tcp", "source_ports": "1024-2000"},
        {"action": "block", "enabled": False},
    ],
)
def test_what_leaves_management_open_is_not_told(site: Site, fields: dict[str, object]) -> None:
    own(site, VIP)
    rule = site.add(target=VIP, direction="to", **fields)
    assert stand(site, rule) == (None, "")
    assert not notes(site)


def test_several_that_close_it_together_are_each_told(site: Site) -> None:
    own(site, VIP)
    first = site.add(target=VIP, direction="to", action="block", protocol="tcp", source_ports="1-30000")
    assert stand(site, first) == (None, "")
    second = site.add(target=VIP, direction="to", action="block", protocol="tcp", source_ports="30001-45000")
    assert stand(site, second)[0] is stand(site, first)[0] is State.APPLIED
    site.store.remove(first.id, "test", site.clock())
    assert stand(site, second) == (None, "")
    assert not notes(site)


def test_a_port_that_comes_to_manage_the_gateway_is_told_too(site: Site) -> None:
    own(site, VIP)
    rule = site.add(target=VIP, action="block", protocol="tcp", source_ports=[2222])
    assert stand(site, rule) == (None, "")
    own(site, VIP, port=2222)
    assert "port 2222" in stand(site, rule)[1], "the answers from it do not leave"


def test_a_rule_for_one_address_becomes_an_ordinary_one_again(site: Site) -> None:
    own(site, VIP)
    rule = site.add(target=VIP, direction="to", action="block")
    assert stand(site, rule)[0] is State.APPLIED
    open_ports = {"target": VIP, "direction": "to", "action": "block", "protocol": "tcp", "ports": [80]}
    site.store.replace(rule.id, parse_rule(open_ports, site.clock()), "test", site.clock())
    assert stand(site, rule) == (None, "")
    assert not notes(site)
