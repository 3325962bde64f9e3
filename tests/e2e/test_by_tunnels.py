"""Who manages a gateway through a tunnel that ends on it is not cut off by a rule for the outer address."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

from netlimit.tunnels import FAR_END
from scripts.testbed import streams
from scripts.testbed.namespaces import CLIENT, LAN, SERVER, WAN, Lab, Namespace
from tests.e2e.gateway import Gateway
from tests.e2e.visitors import Sshd, Visitor

INNER, NEAR = "10.8.0.2", "10.8.0.1"
STRANGER = "10.1.66.6"
ROOT_TOKEN = "nlt_0123456789abcdef_0123456789abcdef0123456789abcdef"
ASK = """
import http.client, sys
host, token, method, path, body = sys.argv[1:]
asked = http.client.HTTPConnection(host, 8750, timeout=60)
asked.request(method, path, body or None, {"Authorization": f"Bearer {token}", "Content-Type": "application/json"})
answer = asked.getresponse()
print(answer.status)
print(answer.read().decode())
"""


def join(lab: Lab, far: Namespace, device: str, number: int, ends: tuple[str, str], inner: tuple[str, str]) -> None:
    """A VXLAN of the gateway's and of another's."""
    for space, (near, remote), address in (
        (lab.gateway, ends, inner[0]),
        (far, ends[::-1], inner[1]),
    ):
        space.ip(
            f"link add {device} type vxlan id {number} local {near} remote {remote} dstport 4789",
            f"link set {device} up",
            f"addr add {address}/24 dev {device}",
        )


@pytest.fixture(scope="module", autouse=True)
def surroundings(lab: Lab) -> Iterator[None]:
    """The tunnel of who manages the gateway ends at the client, that of a customer at the server."""
    lab.add_client_addresses(STRANGER)
    join(lab, lab.client, "admins", 7, (LAN, CLIENT), (NEAR, INNER))
    join(lab, lab.server, "customers", 8, (WAN, SERVER), ("10.9.0.1", "10.9.0.2"))
    with Sshd(lab.gateway):
        yield


@pytest.fixture
def managed(gateway: Gateway, lab: Lab) -> Iterator[Gateway]:
    """Somebody has logged in through his tunnel; the outer address of its far end is known as such."""
    with Visitor(lab.client, NEAR, source=INNER) as visitor:
        visitor.say("login")
        gateway.wait(lambda: CLIENT in reasons(gateway), f"{CLIENT} to be safe")
        yield gateway


def reasons(gateway: Gateway) -> dict[str, str]:
    (status,) = gateway.store.hosts()
    return {address: why.text for address, why in status.safe_reasons.items()}


def test_the_far_end_of_his_tunnel_is_safe_and_says_why_and_that_of_a_customer_is_not(managed: Gateway) -> None:
    found = reasons(managed)
    assert found[INNER] == "SSH session"
    assert found[CLIENT] == f"{FAR_END}admins, by which {INNER} is reached"
    assert SERVER not in found


def ask(space: Namespace, token: str, method: str, path: str, body: object = None) -> tuple[int, str]:
    """Speak to the API through the tunnel."""
    words = (NEAR, token, method, f"/api/v1/{path}", json.dumps(body) if body else "")
    status, _, answer = space.run(sys.executable, "-c", ASK, *words, timeout=120).stdout.partition("\n")
    return int(status), answer


def test_an_operators_rule_for_the_outer_address_is_refused(managed: Gateway, lab: Lab) -> None:
    with managed.serving("0.0.0.0:8750", ROOT_TOKEN):
        made, answer = ask(lab.client, ROOT_TOKEN, "POST", "tokens", {"name": "op", "role": "operator"})
        assert made == 201, answer
        operator = json.loads(answer)["token"]
        # Tokens are read once a second.
        managed.wait(lambda: ask(lab.client, operator, "GET", "status")[0] == 200, "the token to be known")
        for rule in (
            {"action": "block"},
            {"rate": "1 packets/min", "burst": 1},
            {"action": "block", "direction": "to"},
        ):
            status, answer = ask(lab.client, operator, "POST", "rules", {"target": CLIENT, **rule})
            assert status == 409, answer
            assert f"{CLIENT}, which is {FAR_END}admins, by which {INNER} is reached from " in answer
        status, answer = ask(lab.client, operator, "POST", "rules", {"target": "10.1.0.0/16", "action": "block"})
        assert status == 201, answer
        assert f"It leaves alone who is safe: {CLIENT}" in answer
        assert ask(lab.client, operator, "GET", "status")[0] == 200


@pytest.mark.parametrize("direction", ["from", "to"])
def test_a_block_of_the_outer_network_spares_it(managed: Gateway, lab: Lab, direction: str) -> None:
    assert streams.ping(lab.client, SERVER, count=2, source=STRANGER) == 2
    managed.put({"target": "10.1.0.0/16", "direction": direction, "action": "block"})
    assert streams.ping(lab.client, SERVER, count=2, source=STRANGER) == 0
    assert streams.ping(lab.client, NEAR, count=2) == 2
    with Visitor(lab.client, NEAR, source=INNER) as late:
        assert late.connected


def test_doctor_warns_of_a_tunnel_whose_far_end_is_not_known(managed: Gateway, lab: Lab) -> None:
    said = managed.attempt("doctor").stdout
    assert "NETLIMIT_SAFE, if it is not there yet" not in said
    lab.gateway.run("ip", "tuntap", "add", "dev", "vpn0", "mode", "tun")
    try:
        lab.gateway.ip("link set vpn0 up", f"route add {INNER}/32 dev vpn0")
        said = " ".join(managed.attempt("doctor").stdout.split())
    finally:
        lab.gateway.ip("link del vpn0")
    assert "WARNING: tunnel." in said
    assert "By vpn0, a tunnel of which the outer address of the far end is not known, comes who is safe" in said
    assert f"({INNER})" in said
    assert "Put the outer address into NETLIMIT_SAFE" in said


ADMIN, ENTRY, FAR_ENTRY = "203.0.113.50", "10.7.0.1", "10.7.0.2"
BY_RULE = {
    "10.1.66.7": (("from", ENTRY, "lookup", "100"), ()),
    "10.1.66.8": (("from", ENTRY, "fwmark", "0x7", "lookup", "100"), ("-s", ENTRY, "-j", "MARK", "--set-mark", "0x7")),
}
"""Outer addresses of a tunnel, with the routing rule that leads into it what has the gateway's address there, and what
marks it for that."""


@pytest.fixture(params=BY_RULE)
def outer(lab: Lab, request: pytest.FixtureRequest) -> Iterator[str]:
    """The outer address of a tunnel by which routing rules alone lead to who comes through it."""
    address: str = request.param
    rule, marking = BY_RULE[address]
    lab.add_client_addresses(address)
    join(lab, lab.client, "policed", 9, (LAN, address), (ENTRY, FAR_ENTRY))
    lab.client.ip(f"addr add {ADMIN}/32 dev lo")
    lab.gateway.ip(f"route add default via {SERVER}", "route add default dev policed table 100")
    lab.gateway.run("ip", "rule", "add", *rule)
    if marking:
        lab.gateway.run("iptables-legacy", "-t", "mangle", "-A", "OUTPUT", *marking)
    yield address
    if marking:
        lab.gateway.run("iptables-legacy", "-t", "mangle", "-D", "OUTPUT", *marking)
    lab.gateway.run("ip", "rule", "del", *rule)
    lab.gateway.ip("route del default", "link del policed")
    lab.client.ip(f"addr del {ADMIN}/32 dev lo", "link del policed")


def test_the_far_end_is_safe_where_routing_rules_lead_back_to_him(gateway: Gateway, lab: Lab, outer: str) -> None:
    with Visitor(lab.client, ENTRY, source=ADMIN) as visitor:
        assert visitor.say("login")
        gateway.wait(lambda: outer in reasons(gateway), f"{outer} to be safe")
        assert reasons(gateway)[outer] == f"{FAR_END}policed, by which {ADMIN} is reached"
        gateway.put({"target": "10.1.0.0/16", "action": "block"})
        assert visitor.say("again")
    with Visitor(lab.client, ENTRY, source=ADMIN) as late:
        assert late.connected
