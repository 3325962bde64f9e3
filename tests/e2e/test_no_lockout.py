"""Nobody is locked out: open connections to SSH go on, who is safe gets in, and the servers stay in reach."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from netlimit.records import State
from netlimit.unforced import PREFIX
from scripts.testbed import streams
from scripts.testbed.namespaces import CLIENT, CLIENT6, LAN, LAN6, SERVER, SERVER6, Lab
from tests.e2e.gateway import HOST, Gateway
from tests.e2e.visitors import Sshd, Visitor

OPERATOR, GUEST = "10.1.77.1", "10.1.77.2"
EVERYTHING = [
    {"target": everything, "direction": direction, "action": "block"}
    for everything in ("0.0.0.0/0", "::/0")
    for direction in ("from", "to")
]


@pytest.fixture(scope="module", autouse=True)
def surroundings(lab: Lab) -> Iterator[None]:
    """An sshd, a default gateway, and a counter store by IPv6; before the controller begins."""
    lab.gateway.ip(f"route add default via {SERVER}")
    lab.add_client_addresses(OPERATOR, GUEST)
    with pytest.MonkeyPatch.context() as patch, Sshd(lab.gateway):
        patch.setenv("NETLIMIT_COUNTERS_URL", f"redis://:secret@[{SERVER6}]:6379/0")
        yield


def wait_for(gateway: Gateway, address: str, reason: str) -> None:
    """Wait until an address is safe for a reason."""

    def found() -> bool:
        (status,) = gateway.store.hosts()
        return address in status.safe_reasons and status.safe_reasons[address].text == reason

    gateway.wait(found, f"{address} to be safe ({reason})")


@pytest.mark.parametrize(
    "rules",
    [
        EVERYTHING,
        [{"target": net, "direction": way, "rate": "1 packets/h", "per": "host", "action": "reject"}
         for net in ("10.1.0.0/16", "fd00:1::/112") for way in ("from", "to")],
        [{"target": own, "direction": way, "action": "block"} for own in (LAN, LAN6) for way in ("from", "to")],
        [{"target": who, "action": "block"} for who in (CLIENT, CLIENT6)],
    ],
    ids=["everything blocked", "nothing left of a rate", "the gateway's address blocked", "the very address blocked"],
)  # fmt: skip
def test_an_open_connection_goes_on_and_nothing_else_passes(
    gateway: Gateway, lab: Lab, rules: list[dict[str, object]]
) -> None:
    """Of somebody who has not logged in, and so is not safe."""
    with Visitor(lab.client, LAN) as visitor, Visitor(lab.client, LAN6) as visitor6:
        assert visitor.say("hello")
        gateway.put(*rules)
        streams.ping(lab.client, LAN, count=5)  # uses up what a burst lets pass
        streams.ping(lab.client, LAN6, count=5)
        for word in ("one", "two"):
            assert visitor.say(word)
            assert visitor6.say(word)
        assert streams.ping(lab.client, LAN, count=2) == 0
        assert streams.ping(lab.client, LAN6, count=2) == 0
        with Visitor(lab.client, LAN) as late:
            assert not late.connected


def test_a_block_that_comes_to_close_the_gateway_for_its_address_has_come_holds_and_is_told(
    gateway: Gateway, lab: Lab
) -> None:
    coming = "10.1.0.99"  # as by DHCP, or VRRP
    (rule,) = gateway.put({"target": coming, "direction": "to", "action": "block"})
    assert gateway.state(rule) == (State.APPLIED, "")
    lab.gateway.ip(f"addr add {coming}/16 dev lan")
    try:
        gateway.wait(lambda: "port 22" in gateway.state(rule)[1], "it to be told of the rule")
        with Visitor(lab.client, coming) as visitor, Visitor(lab.client, LAN) as other:
            assert (visitor.connected, other.connected) == (False, True)
        told = " ".join(gateway.attempt("doctor").stdout.split())
        assert f"{PREFIX} what this host is managed by to all who are not safe: port 22 at {coming}" in told
    finally:
        lab.gateway.ip(f"addr del {coming}/16 dev lan")
    gateway.wait(lambda: gateway.state(rule) == (State.APPLIED, ""), "that to be over")


def test_who_has_logged_in_gets_in_again_also_by_a_controller_that_has_not_seen_it(gateway: Gateway, lab: Lab) -> None:
    with Visitor(lab.client, LAN, source=OPERATOR) as operator:
        operator.say("login")
        wait_for(gateway, OPERATOR, "SSH session")
    gateway.put(*EVERYTHING)
    gateway.stop()
    gateway.start()
    with Visitor(lab.client, LAN, source=OPERATOR) as operator, Visitor(lab.client, LAN, source=GUEST) as guest:
        assert operator.connected
        assert not guest.connected


def test_who_speaks_to_the_api_is_safe_and_so_are_gateways_and_servers(gateway: Gateway, lab: Lab) -> None:
    gateway.store.saw_client(HOST, GUEST)
    wait_for(gateway, GUEST, "API client")
    wait_for(gateway, SERVER, "default gateway")
    wait_for(gateway, SERVER6, "counter store (Redis) host")
    gateway.put(*EVERYTHING)
    assert streams.ping(lab.client, LAN, count=2) == 0
    with Visitor(lab.client, LAN, source=GUEST) as guest:
        assert guest.connected
    assert streams.ping(lab.gateway, SERVER, count=2) == 2
    assert streams.ping(lab.gateway, SERVER6, count=2) == 2


def test_a_rule_that_was_forced_hits_who_is_safe(gateway: Gateway, lab: Lab) -> None:
    """But for the connection that is open."""
    with Visitor(lab.client, LAN, source=OPERATOR) as operator:
        operator.say("login")
        wait_for(gateway, OPERATOR, "SSH session")
        gateway.put({"target": OPERATOR, "action": "block", "forced_by": "root"})
        assert operator.say("still here")
        with Visitor(lab.client, LAN, source=OPERATOR) as late:
            assert not late.connected
