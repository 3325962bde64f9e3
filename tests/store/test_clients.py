from __future__ import annotations

from collections import Counter
from datetime import timedelta

from netlimit.clientele import MOST, MOST_OF_BLOCK, MOST_OF_TOKEN, MOST_OF_VIEWER
from netlimit.records import HostStatus
from netlimit.roles import Role
from netlimit.safety import REMEMBERED_SECONDS
from netlimit.store import Store
from tests.store.examples import NOW

LATER = NOW + timedelta(seconds=REMEMBERED_SECONDS)
"""Until when who was seen at NOW counts."""


def test_clients_are_kept_by_gateway_with_when_they_were_seen_last(store: Store) -> None:
    store.saw_client("gw1", "192.0.2.1", NOW)
    store.saw_client("gw1", "2001:db8::1", NOW + timedelta(seconds=1))
    store.saw_client("gw2", "192.0.2.9", NOW, "ops", Role.OPERATOR)
    assert [*store.clients("gw1", LATER)] == ["192.0.2.1", "2001:db8::1"]
    assert [*store.clients("gw1", LATER + timedelta(seconds=1))] == ["2001:db8::1"]
    store.saw_client("gw1", "192.0.2.1", NOW + timedelta(seconds=2))
    assert [*store.clients("gw1", LATER + timedelta(seconds=1))] == ["192.0.2.1", "2001:db8::1"]
    assert [*store.clients("gw3", LATER)] == []


def test_of_each_client_it_is_known_how_long_ago_it_was_seen(store: Store) -> None:
    store.saw_client("gw1", "192.0.2.1", NOW)
    store.saw_client("gw2", "192.0.2.2", NOW + timedelta(seconds=60), "alice", Role.ADMIN)
    assert store.clients("gw1", NOW + timedelta(seconds=90)) == {"192.0.2.1": 90.0, "192.0.2.2": 30.0}
    assert store.clients("gw2", NOW + timedelta(seconds=59))["192.0.2.2"] == 0.0, "a clock is behind"


def test_administrators_are_known_at_every_gateway(store: Store) -> None:
    """The address by which they come may move to another."""
    store.saw_client("gw1", "192.0.2.1", NOW, "alice", Role.ADMIN)
    store.saw_client("gw2", "192.0.2.1", NOW + timedelta(seconds=60), "alice", Role.ADMIN)
    store.saw_client("gw1", "192.0.2.2", NOW, "ci", Role.OPERATOR)
    assert [*store.clients("gw2", LATER)] == ["192.0.2.1"]
    assert [*store.clients("gw3", LATER)] == ["192.0.2.1"]
    assert [*store.clients("gw1", LATER)] == ["192.0.2.1", "192.0.2.2"]
    store.report(HostStatus("gw1", "fake", own=("192.0.2.7",)))
    store.saw_client("gw1", "192.0.2.7", NOW, "alice", Role.ADMIN)
    assert [*store.clients("gw2", LATER)] == ["192.0.2.1"], "whoever is behind it would be safe"


def test_who_came_first_stays_as_long_as_it_is_seen(store: Store) -> None:
    for number in range(MOST + 3):
        store.saw_client("gw1", f"10.0.{number >> 8}.{number & 255}", NOW + timedelta(seconds=number))
    kept = [*store.clients("gw1", LATER)]
    assert len(kept) == MOST
    assert (kept[0], kept[-1]) == ("10.0.0.0", "10.0.0.255")
    store.saw_client("gw1", "192.0.2.1", LATER)
    assert "192.0.2.1" in store.clients("gw1", LATER)
    assert "10.0.0.0" not in store.clients("gw1", LATER), "it has not been seen for half an hour"


def test_those_of_tokens_that_may_do_more_come_before_others(store: Store) -> None:
    for number in range(MOST):
        store.saw_client("gw1", f"10.0.0.{number}", NOW, f"viewer-{number // 8}", Role.VIEWER)
    store.saw_client("gw1", "192.0.2.1", NOW + timedelta(seconds=1), "ci", Role.OPERATOR)
    store.saw_client("gw1", "192.0.2.2", NOW + timedelta(seconds=2), "alice", Role.ADMIN)
    kept = [*store.clients("gw1", LATER)]
    assert kept[:2] == ["192.0.2.2", "192.0.2.1"]
    assert len(kept) == MOST


def test_one_token_brings_in_few(store: Store) -> None:
    for number in range(MOST_OF_TOKEN + 1):
        store.saw_client("gw1", f"10.0.0.{number}", NOW, "viewer", Role.VIEWER)
        store.saw_client("gw1", f"10.0.1.{number}", NOW, "ci", Role.OPERATOR)
    kept = Counter(address.rsplit(".", 1)[0] for address in store.clients("gw1", LATER))
    assert kept == {"10.0.0": MOST_OF_VIEWER, "10.0.1": MOST_OF_TOKEN}


def test_one_network_of_ipv6_brings_in_few(store: Store) -> None:
    for number in range(100):
        store.saw_client("gw1", f"2001:db8:1:1::{number:x}", NOW, f"token-{number}", Role.OPERATOR)
        store.saw_client("gw1", f"2001:db8:2:{number:x}::1", NOW, f"token-{number}", Role.OPERATOR)
    kept = Counter(address.split(":")[2] for address in store.clients("gw1", LATER))
    assert kept == {"1": MOST_OF_BLOCK[64], "2": MOST_OF_BLOCK[48]}
    store.saw_client("gw1", "2001:db8:1:1::ffff", NOW + timedelta(seconds=1), "alice", Role.ADMIN)
    assert "2001:db8:1:1::ffff" in store.clients("gw1", LATER), "an administrator in the same network"


def test_an_address_is_whose_it_was_with_the_token_that_may_more(store: Store) -> None:
    store.saw_client("gw1", "192.0.2.9", NOW, "alice", Role.ADMIN)
    store.saw_client("gw1", "192.0.2.9", NOW + timedelta(seconds=60), "viewer", Role.VIEWER)
    for number in range(MOST):
        store.saw_client("gw1", f"10.0.0.{number}", NOW, f"ci-{number // 32}", Role.OPERATOR)
    assert next(iter(store.clients("gw1", LATER))) == "192.0.2.9"


def test_when_a_client_was_seen_goes_by_the_clock_of_the_database(store: Store) -> None:
    """That of the gateway that tells, or of the one that asks, may be another."""
    store.saw_client("gw1", "192.0.2.1", token="alice", role=Role.ADMIN)
    assert [*store.clients("gw2")] == ["192.0.2.1"]
    store.saw_client("gw1", "192.0.2.1", store.now() - timedelta(seconds=REMEMBERED_SECONDS + 60), "alice", Role.ADMIN)
    assert [*store.clients("gw2")] == []


def test_who_was_seen_at_a_time_that_is_yet_to_come_is_nobody_until_he_is_seen_again(store: Store) -> None:
    """A clock that was ahead has written it. The token may be revoked since."""
    for ahead in (timedelta(minutes=10), timedelta(days=30)):
        store.saw_client("gw1", "192.0.2.1", store.now() + ahead, "alice", Role.ADMIN)
        assert [*store.clients("gw1")] == []
        assert [*store.clients("gw2")] == []
    store.saw_client("gw1", "192.0.2.1", token="alice", role=Role.ADMIN)
    assert [*store.clients("gw1")] == ["192.0.2.1"]
