"""A gateway on which python-iptables cannot say what is to be written, as on Debian 13: limits hold all the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from netlimit.kernel.capabilities import LIBRARY, WRITER
from scripts.testbed import streams
from scripts.testbed.namespaces import CLIENT, CLIENT6, SERVER, SERVER6, Lab
from tests.e2e.gateway import Gateway

SECONDS, SIZE = 2.0, 1000


@pytest.fixture(scope="module", autouse=True)
def restoring() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(WRITER, "restore")
        yield


@pytest.mark.parametrize(("client", "server"), [(CLIENT, SERVER), (CLIENT6, SERVER6)])
def test_rates_hold(gateway: Gateway, lab: Lab, client: str, server: str) -> None:
    """In packets and in bytes, whose bucket has another burst."""
    rules = (
        {"target": client, "rate": "200 packets/s", "burst": 20, "protocol": "udp", "ports": "9000-9100"},
        {"target": client, "rate": "800 kbit/s", "protocol": "udp", "ports": 9999},
    )
    gateway.put(*rules)
    for port, most in ((9001, 20 + 200 * SECONDS), (9999, 100_000 * (1 + SECONDS) / SIZE)):
        with streams.receive(lab.server, port) as receiver:
            streams.send(lab.client, server, port, rate=1000, seconds=SECONDS, size=SIZE)
        assert receiver.report().packets == pytest.approx(most, rel=0.15)


def test_what_others_do_is_put_right_and_teardown_leaves_nothing(gateway: Gateway, lab: Lab) -> None:
    (rule,) = gateway.put({"target": CLIENT, "action": "block", "protocol": "udp"})
    (status,) = gateway.store.hosts()
    assert str(status.capabilities[LIBRARY]).startswith("A test asks for")
    lab.gateway.run("iptables-legacy", "-t", "raw", "-A", "PREROUTING", "-s", "192.0.2.1", "-j", "DROP")
    lab.gateway.run("iptables-legacy", "-t", "raw", "-D", "PREROUTING", "-j", "NL-PREROUTING")
    gateway.wait(lambda: gateway.store.hosts()[0].repairs.get("chains", 0) > 0, "the repair")
    with streams.receive(lab.server) as receiver:
        streams.send(lab.client, SERVER, rate=500, count=50)
    assert receiver.report().packets == 0
    gateway.remove(rule)
    gateway.wait_until_applied()
    assert "192.0.2.1/32" in lab.gateway.run("iptables-legacy", "-t", "raw", "-S", "PREROUTING").stdout
