"""Who is no admin has only so many rules exchanged at once: nobody else can change anything meanwhile."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_network

import pytest

from netlimit.records import Actor
from netlimit.rules import Action, Rule
from netlimit.store import Store, TokenEnded, TooMuchAtOnce, engine, weight
from tests.databases import DATABASES
from tests.store.examples import NOW, rule

OVER = DATABASES
ADMIN, ROOT = Actor("admin", token=2, role="admin"), Actor("root on gw1")
WORDY = {"labels": {f"a{number}": 240 * "\N{GRINNING FACE}" for number in range(16)}}
SOON = NOW + timedelta(seconds=60)


@pytest.fixture
def operator(store: Store) -> Actor:
    for role in ("operator", "admin"):
        store.add_token(role, f"hash of {role}", role, NOW)
    return Actor("operator", token=1, role="operator")


def plain(number: int, first: int = 0) -> list[Rule]:
    return [Rule(ip_network((0x0A000000 + each, 32)), Action.BLOCK) for each in range(first, first + number)]


def wordy(number: int) -> list[Rule]:
    return [rule(f"10.{each >> 8}.{each & 255}.1", action="block", **WORDY) for each in range(number)]


def count(store: Store) -> int:
    return store.select(limit=1)[1]


def test_ten_thousand_plain_rules_go_and_come_back_as_often_as_an_operator_wants(store: Store, operator: Actor) -> None:
    store.add(plain(10_000), operator, NOW)
    for revision, left in ((0, 0), (1, 10_000), (0, 0)):
        store.rollback(revision, operator, NOW)
        assert count(store) == left


@pytest.mark.parametrize("batch", [plain(2000), wordy(200)], ids=["many rules", "many words"])
def test_more_than_an_operator_may_take_is_an_admins(
    store: Store, operator: Actor, monkeypatch: pytest.MonkeyPatch, batch: Sequence[Rule]
) -> None:
    monkeypatch.setattr(weight, "MOST_SECONDS", 0.1)
    store.add(batch, operator, NOW)
    with pytest.raises(TooMuchAtOnce, match=f"exchanges {len(batch):,} rules.* Have an admin, or root, return there"):
        store.rollback(0, operator, NOW)
    assert (store.revision(), count(store)) == (1, len(batch))
    assert store.rollback(0, ADMIN, NOW) == 2
    with pytest.raises(TooMuchAtOnce):
        store.rollback(1, operator, NOW)
    assert store.rollback(1, ROOT, NOW) == 3
    assert count(store) == len(batch)


def test_what_has_come_and_gone_since_weighs_little(
    store: Store, operator: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight, "MOST_SECONDS", 0.1)
    store.add(plain(10_000), ROOT, NOW)
    store.rollback(0, ROOT, NOW)
    assert store.rollback(0, operator, NOW) == 2
    with pytest.raises(TooMuchAtOnce):
        store.rollback(1, operator, NOW)


def test_a_window_that_an_admin_filled_is_not_given_up_by_an_operator(
    store: Store, operator: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight, "MOST_SECONDS", 0.1)
    store.open_window(60, operator, NOW)
    store.add(plain(2000), ADMIN, NOW)
    assert store.add([rule("192.0.2.1")], operator, NOW)
    with pytest.raises(TooMuchAtOnce):
        store.abandon(operator, NOW)
    assert store.abandon(ADMIN, NOW).revision == 3
    assert count(store) == 0


def add_some(store: Store, actor: Actor) -> None:
    for first in range(0, 2000, 300):
        store.add(plain(300, first + 2**20), actor, NOW)


def remove_some(store: Store, actor: Actor) -> None:
    for number in range(1, 201):
        store.remove(number, actor, NOW)


@pytest.mark.parametrize("change", [add_some, remove_some])
def test_an_operator_fills_no_window_with_more_than_its_end_may_take(
    store: Store, operator: Actor, monkeypatch: pytest.MonkeyPatch, change: Callable[[Store, Actor], None]
) -> None:
    monkeypatch.setattr(weight, "MOST_SECONDS", 0.1)
    store.add(wordy(200), operator, NOW)
    window = store.open_window(60, operator, NOW)
    with pytest.raises(TooMuchAtOnce, match=r"whose end may undo what you have changed .* or await its end first"):
        change(store, operator)
    assert store.revision() > 2
    assert store.add(plain(2000, 2**21), ADMIN, NOW)
    assert store.expire(window, "guard", SOON)
    assert count(store) == 200
    assert store.add(plain(2000, 2**21), operator, NOW)


def test_who_revokes_a_token_waits_for_one_change_of_it_and_not_for_all(
    sqlite_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = sqlite_store
    token = store.add_token("operator", "hash", "operator", NOW)
    operator = Actor("operator", token=token.id, role="operator")
    made: list[int] = []
    threads = [threading.Thread(target=change_slowly, args=(store, operator, n, made)) for n in range(6)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    assert store.revoke_token(token.id, NOW, ROOT)
    assert len(made) <= 2
    for thread in threads:
        thread.join()
    assert len(made) <= 2


def change_slowly(store: Store, actor: Actor, number: int, made: list[int]) -> None:
    def wait(changes: object, standing: object) -> dict[int, Rule]:
        time.sleep(0.4)
        made.append(number)
        return {}

    with suppress(TokenEnded):
        store.add([rule(f"10.0.0.{number}")], actor, NOW, wait)


@pytest.fixture
def taken(sqlite_store: Store) -> Iterator[list[float]]:
    """Threads of this process write all the time, each time for longer than a moment: when each time began."""
    ended = threading.Event()
    begun: list[float] = []

    def write() -> None:
        while not ended.is_set():
            with sqlite_store._database.writing():
                begun.append(time.monotonic())
                time.sleep(engine._LONG + 0.05)

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    yield begun
    ended.set()
    for thread in threads:
        thread.join()


def test_another_process_comes_between_long_changes(sqlite_store: Store, taken: list[float]) -> None:
    assert sqlite_store.path
    waited = 0
    other = sqlite3.connect(sqlite_store.path, timeout=20, isolation_level=None)
    for _ in range(6):
        time.sleep(engine._LONG)
        before = len(taken)
        other.execute("BEGIN IMMEDIATE")
        waited += len(taken) - before
        other.execute("ROLLBACK")
    other.close()
    assert waited <= 6
