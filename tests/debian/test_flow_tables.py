"""What a flow table forwards passes no chain of ours: it is told while it is there, and limits hold once it is gone."""

from __future__ import annotations

from netlimit.records import State
from scripts.testbed import streams
from scripts.testbed.namespaces import SERVER
from tests.e2e.gateway import HOST, Gateway

FLOW_TABLE = """table inet foreign {
    flowtable fast { hook ingress priority 0; devices = { lan, wan }; }
    chain forward { type filter hook forward priority 0; ip protocol udp flow add @fast; }
}
"""
LIMITED, BLOCKED = "10.1.60.1", "10.1.60.2"
SENT, BURST = 60, 10


def deliver(gateway: Gateway, source: str) -> int:
    """Packets of one flow that arrive."""
    with streams.receive(gateway.lab.server) as receiver:
        streams.send(gateway.lab.client, SERVER, rate=20, count=SENT, sources=[source])
        return receiver.stop().by_source.get(source, 0)


def says_so(gateway: Gateway) -> bool:
    return any("flowtable fast" in note for each in gateway.store.hosts() if each.host == HOST for note in each.notes)


def is_degraded(gateway: Gateway) -> bool:
    return [each.state for each in gateway.store.marked(HOST).values()] == [State.DEGRADED] * 2


def test_a_flow_table_is_told_and_what_it_does_is_what_the_page_says(gateway: Gateway) -> None:
    lab = gateway.lab
    lab.add_client_addresses(LIMITED, BLOCKED)
    gateway.start()
    limit = {"target": LIMITED, "rate": "1 packets/min", "burst": BURST}
    lab.gateway.run("nft", "-f", "-", input=FLOW_TABLE)
    gateway.add(limit, {"target": BLOCKED, "action": "block"})
    gateway.wait(lambda: says_so(gateway) and is_degraded(gateway), "a note about the flow table")
    # The first packets are seen, and what is blocked opens no flow.
    assert deliver(gateway, LIMITED) > BURST + 2
    assert deliver(gateway, BLOCKED) == 0
    lab.gateway.run("nft", "delete", "table", "inet", "foreign")
    gateway.wait(lambda: not (says_so(gateway) or is_degraded(gateway)), "the note to go")
    assert deliver(gateway, LIMITED) <= BURST + 2
