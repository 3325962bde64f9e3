"""The tunnels of a host are read while there are any, and a reading that fails is told."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from netlimit.controller import Setup
from netlimit.errors import KernelError
from netlimit.kernel.base import Addresses, Connection, Door
from netlimit.kernel.fake import FakeKernel
from netlimit.premises import Premises
from netlimit.tree import Device, Topology
from netlimit.tunnels import MOST_NEAR, End, Hop, Tunnel, Tunnels, find_near

NOW = 1_800_000_000.0
INNER, OUTER = "10.8.0.2", "192.0.2.1"


@dataclass
class Host(FakeKernel):
    """A host whose tunnels may be unreadable."""

    broken: Exception | None = None
    asked: int = 0

    def tunnels(self) -> Tunnels:
        self.asked += 1
        if self.broken is not None:
            raise self.broken
        return super().tunnels()


@pytest.fixture
def host() -> Host:
    return Host(
        where=Addresses(("192.0.2.9",), (INNER,)),
        routes=Topology({"wg0": Device(5, True, "wireguard")}),
        ended=Tunnels({5: Tunnel("wg0", (End(OUTER),))}),
        ways={INNER: (Hop(5, INNER),)},
    )


def enter(host: Host) -> Premises:
    premises = Premises(host, Setup("gw1"))
    premises.probe(())
    premises.look({})
    premises.find_safe({}, NOW)
    return premises


def find_safe(premises: Premises) -> set[str]:
    return {str(network.network_address) for network in premises.facts.safe}


def test_the_far_end_is_safe_with_who_is_reached_by_it(host: Host) -> None:
    premises = enter(host)
    assert find_safe(premises) == {INNER, OUTER}
    assert premises.notes == ()


def test_it_is_needed_but_not_trusted_unless_somebody_comes_from_it(host: Host) -> None:
    premises = enter(host)
    assert [str(network) for network in premises.facts.needed] == [f"{OUTER}/32"]
    assert premises.find_safe({}, NOW + 5) is None
    assert premises.find_safe({OUTER: 0.0}, NOW + 10), "rules are to be looked at"
    assert premises.facts.needed == frozenset()
    assert find_safe(premises) == {INNER, OUTER}


def test_without_a_tunnel_nothing_is_read(host: Host) -> None:
    host.routes = Topology({"lan": Device(5, True, "veth")})
    assert find_safe(enter(host)) == {INNER}
    assert host.asked == 0


def test_the_way_back_to_who_is_logged_in_may_go_by_the_address_he_talks_with(host: Host) -> None:
    """As routing rules have it (`ip rule from`): other ways from there make nobody else safe."""
    host.where = Addresses(("192.0.2.9", "10.8.0.1"), ("203.0.113.5", "203.0.113.6"), (Door(22),))
    host.ways = {}
    host.ways_from = {("10.8.0.1", "203.0.113.5"): (Hop(5, "203.0.113.5"),)}
    logged_in = Connection(4, "203.0.113.5", 50_000, "10.8.0.1", 22, 0)
    host.opened = (logged_in._replace(far="203.0.113.7", near="192.0.2.9"), logged_in)
    assert find_safe(enter(host)) == {"203.0.113.5", "203.0.113.6", OUTER}
    host.opened = (logged_in._replace(far="203.0.113.7"),)
    assert find_safe(enter(host)) == {"203.0.113.5", "203.0.113.6"}


def test_few_of_the_addresses_count_with_which_somebody_talks() -> None:
    talks = [Connection(4, INNER, port, f"192.0.2.{port % 50}", 22) for port in range(200)]
    assert len(find_near(talks, {INNER})[INNER]) == MOST_NEAR
    assert find_near(talks, {OUTER}) == {}


@pytest.mark.parametrize("error", [KernelError("read tunnels", "no"), ValueError("odd bytes")])
def test_where_they_cannot_be_read_that_is_told_and_who_was_safe_stays(host: Host, error: Exception) -> None:
    premises = enter(host)
    host.broken = error
    for beat in range(1, 1000):
        premises.find_safe({}, NOW + 5 * beat)
    assert find_safe(premises) == {INNER, OUTER}
    (note,) = premises.notes
    assert note.startswith("The outer addresses of the far ends of some tunnels are not known")
    assert "NETLIMIT_SAFE" in note
    host.broken = None
    premises.find_safe({}, NOW + 5000)
    assert premises.notes == ()


def test_what_is_known_of_the_others_counts_where_one_cannot_be_read(host: Host) -> None:
    found = {5: Tunnel("wg0", (End(OUTER),)), 6: Tunnel("wg1", (End(None),))}
    host.ended = Tunnels(found, ("of wg1: not permitted",))
    premises = enter(host)
    assert find_safe(premises) == {INNER, OUTER}
    assert "(of wg1: not permitted)" in premises.notes[0]


def test_what_is_not_known_of_ssh_is_told_while_it_is_so(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    told = "sshd runs, but on which port it listens here is not known."
    host.where = host.where._replace(notes=(told,))
    premises = enter(host)
    premises.find_safe({}, NOW)
    assert premises.notes == (told,)
    assert [record.message for record in caplog.records].count(told) == 1
    host.where = host.where._replace(notes=())
    premises.find_safe({}, NOW)
    assert premises.notes == ()
