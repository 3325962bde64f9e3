"""Devices whose names mean something else to tools: nothing is written for them, it is told, and all else goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from netlimit.records import State
from scripts.testbed.namespaces import CLIENT, SERVER, Lab
from tests.e2e.gateway import HOST, Gateway

NAMES = "+", "wan+", "twelve-letter+", "-tun0"


@contextmanager
def device(lab: Lab, name: str, address: str = "10.77.0.1/24") -> Iterator[None]:
    """A device of this name in the gateway, up, with a route."""
    lab.gateway.run("ip", "link", "add", "name", name, "type", "veth", "peer", "name", "peer0")
    try:
        for end in (name, "peer0"):
            lab.gateway.run("ip", "link", "set", "dev", end, "up")
        lab.gateway.run("ip", "addr", "add", address, "dev", name)
        yield
    finally:
        lab.gateway.run("ip", "link", "del", "dev", name)


def shape(target: str) -> dict[str, object]:
    return {"target": target, "rate": "5 Mbit/s", "ceil": "10 Mbit/s", "per": "host", "action": "shape"}


def find_ways(lab: Lab) -> set[str]:
    """What rules of the mangle table name as devices."""
    words = [line.split() for line in lab.gateway.run("iptables-legacy", "-t", "mangle", "-S").stdout.splitlines()]
    return {line[at + 1] for line in words for at, word in enumerate(line[:-1]) if word in ("-i", "-o")}


@pytest.mark.parametrize("name", NAMES)
def test_a_device_that_is_no_name_to_tools_stops_nothing(gateway: Gateway, lab: Lab, name: str) -> None:
    with device(lab, name):
        (rule,) = gateway.add(shape("10.1.0.0/16"))
        assert name in gateway.wait_for_state(rule, State.DEGRADED)
        (block,) = gateway.add({"target": "198.51.100.7", "action": "block"})
        gateway.wait_for_state(block, State.APPLIED)
        assert "198.51.100.7" in lab.gateway.run("ipset", "save").stdout
        lab.gateway.run("iptables-legacy", "-t", "mangle", "-F", "NL-FORWARD")
        gateway.wait(lambda: "NL-FORWARD" in _rules_in(lab, "NL-FORWARD"), "the chain to be put back")
        assert find_ways(lab) <= {"lo", "lan", "wan"}
        said = gateway.attempt("doctor").stdout.replace("\n", " ")
        assert f"means them alone: {name} " in said
    gateway.wait_for_state(rule, State.APPLIED)
    assert name not in gateway.state(rule)[1]


def test_the_status_tells_of_such_a_device(gateway: Gateway, lab: Lab) -> None:
    with device(lab, "wan+"):
        gateway.stop()
        gateway.launch()  # it looks round at once
        gateway.wait(lambda: _is_told(gateway, "wan+"), "a note of the device")


def test_a_rule_all_of_whose_traffic_leaves_by_such_a_device_is_in_error(gateway: Gateway, lab: Lab) -> None:
    with device(lab, "wan+"):
        (rule,) = gateway.add({**shape("10.77.0.0/24"), "direction": "to"})
        assert "wan+" in gateway.wait_for_state(rule, State.ERROR)
        (other,) = gateway.add({**shape(CLIENT), "direction": "to"})
        gateway.wait_for_state(other, State.APPLIED)
        assert "wan+" not in gateway.state(other)[1], "nothing of it leaves there"


def test_a_device_with_fifteen_letters_is_one_as_any_other(gateway: Gateway, lab: Lab) -> None:
    with device(lab, "a+b-c~d=e^f,g@h"):
        (rule,) = gateway.add({**shape("10.77.0.0/24"), "direction": "to"})
        gateway.wait_for_state(rule, State.APPLIED)
        assert "a+b-c~d=e^f,g@h" in find_ways(lab)
        (server,) = gateway.add({**shape(SERVER), "direction": "to"})
        gateway.wait_for_state(server, State.APPLIED)


def _rules_in(lab: Lab, chain: str) -> str:
    lines = lab.gateway.run("iptables-legacy", "-t", "mangle", "-S", chain).stdout.splitlines()
    return "".join(line for line in lines if line.startswith("-A"))


def _is_told(gateway: Gateway, name: str) -> bool:
    (status,) = (each for each in gateway.store.hosts() if each.host == HOST)
    return any(f"means them alone: {name} " in note for note in status.notes)
