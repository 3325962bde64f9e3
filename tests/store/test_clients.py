from __future__ import annotations

from datetime import timedelta

from netlimit.store import Store, clients
from tests.store.examples import NOW


def test_clients_are_kept_by_gateway_with_when_they_were_seen_last(store: Store) -> None:
    store.saw_client("gw1", "192.0.2.1", NOW)
    store.saw_client("gw1", "2001:db8::1", NOW + timedelta(seconds=1))
    store.saw_client("gw2", "192.0.2.9", NOW)
    assert store.clients("gw1", NOW) == ["2001:db8::1", "192.0.2.1"]
    assert store.clients("gw1", NOW + timedelta(seconds=1)) == ["2001:db8::1"]
    store.saw_client("gw1", "192.0.2.1", NOW + timedelta(seconds=2))
    assert store.clients("gw1", NOW + timedelta(seconds=1)) == ["192.0.2.1", "2001:db8::1"]
    assert store.clients("gw3", NOW) == []


def test_only_the_latest_clients_are_kept(store: Store) -> None:
    for number in range(clients.MOST + 3):
        store.saw_client("gw1", f"10.0.{number >> 8}.{number & 255}", NOW + timedelta(seconds=number))
    kept = store.clients("gw1", NOW)
    assert len(kept) == clients.MOST
    assert (kept[0], kept[-1]) == ("10.0.1.2", "10.0.0.3")
