"""What is shaped where packets can leave by more ways than one: routing rules, and networks behind one device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from netlimit.records import State
from scripts.testbed import streams
from scripts.testbed.namespaces import CLIENT, SERVER_MAC, Lab
from tests.e2e.gateway import Gateway
from tests.e2e.loads import Passed, megabits, offer, shape

SITE, UPSTREAM = "203.0.113.5", "10.2.0.9"


@pytest.fixture
def policy(lab: Lab) -> Iterator[None]:
    """A site by a device of its own; but the clients are led to a table in which all goes by `wan`."""
    lab.gateway.ip(
        "link add name site type veth peer name far",
        "link set site up",
        "link set far up",
        "addr add 192.0.2.2/24 dev site",
        "route add 203.0.113.0/24 via 192.0.2.1",
        f"neigh replace {UPSTREAM} lladdr {SERVER_MAC} nud permanent dev wan",
        f"route add default via {UPSTREAM} table 100",
        "route add 10.1.0.0/16 dev lan table 100",
        "rule add from 10.1.0.0/16 lookup 100 pref 1000",
    )
    lab.server.ip(f"addr add {SITE}/32 dev eth0")
    yield
    lab.server.ip(f"addr del {SITE}/32 dev eth0")
    lab.gateway.ip("rule del pref 1000", "route flush table 100", "link del site")


def deliver(lab: Lab, destination: str) -> Passed:
    """Megabits a second that pass from the client to the server's address."""
    with streams.receive(lab.server) as receiver, offer(lab.client, destination, CLIENT, megabits=3, seconds=2) as sent:
        sent.report()
    return megabits(receiver.report(), CLIENT, after=0.4, during=1.5)


@pytest.mark.parametrize("rule", [shape("203.0.113.0/24", per="target"), shape(SITE)], ids=["network", "host"])
def test_what_a_routing_rule_leads_elsewhere_is_shaped_there(
    gateway: Gateway, lab: Lab, policy: None, rule: dict[str, object]
) -> None:
    (held,) = gateway.add({**rule, "direction": "to"})
    gateway.wait(lambda: "wan" in gateway.kernel.queues().trees, "the queues of the second way")
    state, sentence = gateway.state(held)
    assert state is State.APPLIED
    assert sentence.startswith("Its traffic can leave by site and wan: the rate holds on each of them by itself.")
    assert deliver(lab, SITE).is_about(1)
    lab.gateway.ip("rule add lookup main pref 999")
    gateway.wait(lambda: gateway.kernel.queues().trees.keys() == {"site"}, "the one way that is left")
    lab.gateway.ip("rule del pref 999")
    gateway.wait(lambda: "wan" in gateway.kernel.queues().trees, "the second way")
