"""Who speaks to the API and is safe by it: those that were permitted what they asked, and few by one token."""

from __future__ import annotations

import logging
from ipaddress import ip_network

import pytest

from api import visitors
from api.visitors import Visitors
from netlimit.clientele import MOST, MOST_OF_BLOCK, MOST_OF_TOKEN, MOST_OF_VIEWER
from netlimit.roles import Role
from netlimit.safety import REMEMBERED_SECONDS
from netlimit.settings import Settings
from netlimit.store import Store
from tests.api.server import connect, serve, until

RULE = {"target": "10.1.2.3", "rate": "200 packets/s"}


class Time:
    """A clock that stands until it is told to go on."""

    def __init__(self) -> None:
        self.seconds = 1e6

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr(visitors, "time", clock)
    return clock


def list_kept(store: Store, known: Visitors) -> list[str]:
    """Who is kept, once all is written."""
    known._writer.submit(int).result()
    return [*store.clients("gw1")]


def test_who_is_refused_is_not_safe_by_it(settings: Settings, store: Store) -> None:
    proxied = settings.model_copy(update={"trusted_proxies": (ip_network("127.0.0.0/8"),)})
    with serve(proxied, store) as url, connect(url, "viewer") as viewer:
        for request in ("DELETE", "/confirmation"), ("POST", "/rules"):
            answer = viewer.request(*request, headers={"X-Forwarded-For": "192.0.2.7"})
            assert answer.status_code == 403
        assert viewer.get("/rules", headers={"X-Forwarded-For": "192.0.2.8"}).status_code == 200
        until(lambda: [*store.clients("gw1")] != [])
        assert [*store.clients("gw1")] == ["192.0.2.8"]


@pytest.mark.parametrize("address", ["127.0.0.2", "::1", "0.0.0.0", "::", "255.255.255.255", "224.0.0.18"])  # noqa: S104
def test_where_nobody_can_come_from_nobody_is_safe(store: Store, clock: Time, address: str) -> None:
    """A proxy may pass on whatever a header says."""
    known = Visitors(store, "gw1")
    known.see(address, "alice", Role.ADMIN)
    known.see("192.0.2.1", "alice", Role.ADMIN)
    assert list_kept(store, known) == ["192.0.2.1"]


def test_one_token_makes_few_safe_from_however_many_addresses_it_comes(
    store: Store, clock: Time, caplog: pytest.LogCaptureFixture
) -> None:
    known = Visitors(store, "gw1")
    known.see("192.0.2.1", "alice", Role.ADMIN)
    with caplog.at_level(logging.WARNING, "api.visitors"):
        for number in range(500):
            known.see(f"2001:db8:{number:x}::1", "watcher", Role.VIEWER)
    assert len([line for line in caplog.messages if "'watcher'" in line]) == 1
    assert sum(known.knows(f"2001:db8:{number:x}::1") for number in range(500)) == MOST_OF_VIEWER
    kept = list_kept(store, known)
    assert kept[0] == "192.0.2.1"
    assert len(kept) == 1 + MOST_OF_VIEWER
    for number in range(500):
        known.see(f"10.0.{number >> 8}.{number & 255}", "ci", Role.OPERATOR)
        known.see(f"2001:db8:0:1::{number:x}", "deploy", Role.OPERATOR)
    assert len(list_kept(store, known)) == 1 + MOST_OF_VIEWER + MOST_OF_TOKEN + MOST_OF_BLOCK[64]


def test_many_viewers_push_out_nobody_who_may_change_rules(store: Store, clock: Time) -> None:
    known = Visitors(store, "gw1")
    for number in range(2 * MOST):
        known.see(f"10.0.{number >> 8}.{number & 255}", f"viewer-{number}", Role.VIEWER)
    known.see("192.0.2.1", "alice", Role.ADMIN)
    kept = list_kept(store, known)
    assert len(kept) == MOST
    assert kept[0] == "192.0.2.1"
    assert known.knows("192.0.2.1")
    assert len(known._seen) == len(known._kept_at) == MOST


def test_those_that_are_not_seen_any_more_make_room(store: Store, clock: Time) -> None:
    known = Visitors(store, "gw1")
    for number in range(MOST_OF_VIEWER + 1):
        known.see(f"10.0.0.{number}", "watcher", Role.VIEWER)
    assert not known.knows(f"10.0.0.{MOST_OF_VIEWER}")
    clock.seconds += REMEMBERED_SECONDS / 2
    known.see("10.0.0.0", "watcher", Role.VIEWER)
    clock.seconds += REMEMBERED_SECONDS / 2
    known.see(f"10.0.0.{MOST_OF_VIEWER}", "watcher", Role.VIEWER)
    assert known.knows("10.0.0.0")
    assert known.knows(f"10.0.0.{MOST_OF_VIEWER}")
    assert not known.knows("10.0.0.1")


def test_an_address_counts_by_the_token_that_may_more(store: Store, clock: Time) -> None:
    known = Visitors(store, "gw1")
    known.see("192.0.2.1", "watcher", Role.VIEWER)
    known.see("192.0.2.1", "alice", Role.ADMIN)
    for number in range(MOST_OF_VIEWER):
        known.see(f"10.0.0.{number}", "watcher", Role.VIEWER)
    assert len(list_kept(store, known)) == 1 + MOST_OF_VIEWER
