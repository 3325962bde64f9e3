"""A limit `per: peer` that has no room for more peers lets new ones pass, and says so before."""

from __future__ import annotations

import pytest

from netlimit.errors import KernelError
from netlimit.records import State
from tests.controller.conftest import Site

ROOM = 64 * 12


def look(site: Site) -> None:
    site.controller._due["heartbeat"] = 0.0
    site.controller.tick()


def talk(site: Site, first: int, count: int) -> set[str]:
    """So many peers send a packet each."""
    peers = (f"198.0.{n >> 8}.{n & 255}" for n in range(first, first + count))
    return {site.send(peer, "10.2.0.80")[0] for peer in peers}


def test_a_crowd_of_peers_is_told_of_and_shuts_nobody_out(site: Site) -> None:
    rule = site.add(target="10.2.0.80", direction="to", rate="1 packets/h", per="peer")
    other = site.add(target="10.2.0.81", direction="to", rate="1 packets/h", per="host")
    look(site)
    assert talk(site, 0, ROOM // 2 - 1) == {"accept"}
    look(site)
    assert site.store.marked("gw") == {}
    assert talk(site, 0, 1000) == {"accept", "drop"}
    look(site)
    assert site.store.marked("gw").keys() == {rule.id}
    assert site.store.marked("gw")[rule.id].state is State.DEGRADED
    assert "more than half are remembered" in site.store.marked("gw")[rule.id].message
    assert site.store.hosts()[0].degraded == 1
    assert site.send("198.9.9.9", "10.2.0.80", times=3) == ["accept"] * 3, "a newcomer for whom there is no room"
    assert site.send("198.0.0.1", "10.2.0.80") == ["drop"], "who is known stays limited"
    assert site.send("198.9.9.9", "10.2.0.81", times=2) == ["accept", "drop"], "another rule is not concerned"
    site.clock.pass_by(hours=2)
    look(site)
    assert site.store.marked("gw") == {}
    assert site.send("198.9.9.9", "10.2.0.80", times=2) == ["accept", "drop"]
    assert other.id not in site.store.marked("gw")


def test_what_cannot_be_counted_is_unknown_and_stops_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(names: object) -> dict[str, int]:
        raise KernelError("ipset list -t", "Operation not permitted")

    site.add(target="10.2.0.80", direction="to", rate="1 packets/h", per="peer")
    monkeypatch.setattr(site.kernel, "counts", refuse)
    look(site)
    look(site)
    (status,) = site.store.hosts()
    assert "How many peers are remembered is unknown: Operation not permitted." in status.notes
    assert site.send("198.9.9.9", "10.2.0.80", times=2) == ["accept", "drop"]
