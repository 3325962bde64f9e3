"""Who fills the disk of the database, by whatever his role lets him do, keeps nobody from taking that back."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text

from netlimit.errors import StoreError
from netlimit.records import LIMITER, Actor
from netlimit.store import Store
from netlimit.store.replica import Replica
from netlimit.store.room import NoRoom
from netlimit.store.tokens import Token
from tests.store.examples import NOW, keep, rule

DISK = 48
"""MiB; three of them are kept."""
FACE = "\N{GRINNING FACE}"
LARGE = {"comment": 1000 * FACE, "labels": {f"a{n}": 250 * FACE for n in range(16)}}


@pytest.fixture
def small(disk: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{disk}/netlimit.db")
    store.upgrade()
    yield store
    store.close()


def issue(store: Store, role: str) -> tuple[Token, Actor]:
    token = store.add_token(role, f"hash of {role}", role, NOW)
    return token, Actor(role, token=token.id, role=role)


def fill(store: Store, actor: Actor) -> str:
    """Add large rules, and go to and fro between the revisions, until that is refused: how."""
    for number in range(200):
        try:
            store.add([rule(f"10.{number}.0.{n}", **LARGE) for n in range(100)], actor, NOW)
            store.rollback(0, actor, NOW)
            store.rollback(store.revision() - 1, actor, NOW)
        except StoreError as refused:
            return str(refused)
    raise AssertionError("nothing was refused")


def test_a_filled_disk_leaves_room_to_revoke_the_token_and_to_remove_the_rules(small: Store) -> None:
    token, operator = issue(small, "operator")
    _, admin = issue(small, "admin")
    said = fill(small, operator)
    assert "3.0 MiB are kept" in said, said
    assert small.path
    assert str(small.path) in said
    with pytest.raises(StoreError, match="are kept"):
        small.add([rule(f"10.0.1.{n}", **LARGE) for n in range(100)], LIMITER, NOW)
    small.remove(small.select()[0][0].rule.id, admin, NOW)
    assert small.revoke_token(token.id, NOW, admin)
    while kept := small.select(limit=100)[0]:
        for each in kept:
            small.remove(each.rule.id, admin, NOW)
    keep(small)


def test_what_a_refused_change_has_written_is_given_back(small: Store, disk: Path) -> None:
    """To take rules away everything is written once more: where there is no room for that, the log of it had stayed."""
    token, operator = issue(small, "operator")
    small.add([rule(f"10.0.0.{n}", **LARGE) for n in range(100)], operator, NOW)
    left = shutil.disk_usage(disk).free
    (disk / "others").write_bytes(bytes(left - (4 << 20)))
    with pytest.raises(StoreError, match=r"is full|are kept"):
        small.rollback(0, operator, NOW)
    assert shutil.disk_usage(disk).free > 3 << 20
    kept = small.select()[0][0].rule.id
    small.remove(kept, issue(small, "admin")[1], NOW)
    assert small.revoke_token(token.id, NOW)


def test_a_token_is_revoked_where_others_have_left_nothing_of_the_disk(small: Store, disk: Path) -> None:
    """By the room that the log has, though the file has not a page left for the line in the audit."""
    tokens = [small.add_token(f"t{number}", f"hash {number}", "operator", NOW) for number in range(40)]
    small.add([rule(f"10.0.0.{n}", **LARGE) for n in range(80)], "test", NOW)
    (disk / "others").write_bytes(bytes(shutil.disk_usage(disk).free))
    assert shutil.disk_usage(disk).free == 0
    for token in tokens:
        assert small.revoke_token(token.id, NOW)


@pytest.mark.parametrize("others", [0, DISK - 8], ids=["alone", "beside others"])
def test_a_copy_that_has_no_room_takes_none(disk: Path, tmp_path_factory: pytest.TempPathFactory, others: int) -> None:
    """Else its gateway would write it in vain for ever, and fill the disk with what it has begun."""
    source = Store(f"sqlite:///{tmp_path_factory.mktemp('large')}/netlimit.db")
    source.upgrade()
    replica = Replica(disk / "applied.db", "gw1")
    replica.upgrade()
    keep(source, "192.0.2.1")
    assert replica.follow(source)
    for number in range(12):
        source.add([rule(f"10.{number}.0.{n}", **LARGE) for n in range(100)], "test", NOW)
    (disk / "others").write_bytes(bytes(others << 20))
    before = shutil.disk_usage(disk).free
    with pytest.raises(StoreError, match="cannot grow"):
        replica.follow(source)
    assert shutil.disk_usage(disk).free > before - 2**20
    assert len(list(replica.load("gw1")[1])) == 1
    replica.close()
    source.close()


def give_up(store: Store, actor: Actor) -> None:
    store.abandon(actor, NOW)


def let_end(store: Store, _actor: Actor) -> None:
    window = store.window()
    assert window is not None
    assert store.expire(window, "guard of gw", NOW) is not None


def change_in_window(store: Store, how: str, actor: Actor) -> str:
    """Open a window and change so many rules as can be changed: how the next change was refused."""
    kept = [each.rule for each in store.select(limit=1000)[0]]
    for each in kept[:8]:  # room for a window
        store.remove(each.id, actor, NOW)
    store.open_window(600, actor, NOW)
    try:
        for each in kept[8:]:
            if how == "remove":
                store.remove(each.id, actor, NOW)
            else:
                store.replace(each.id, replace(each, comment="", labels=()), actor, NOW)
        for number in range(200 if how == "add" else 0):
            store.add([rule(f"10.200.{number}.{n}", **LARGE) for n in range(4)], actor, NOW)
    except StoreError as refused:
        return str(refused)
    raise AssertionError("nothing was refused")


@pytest.mark.parametrize("end", [give_up, let_end])
@pytest.mark.parametrize("how", ["remove", "change", "add"])
def test_what_an_operator_changes_in_a_window_leaves_room_when_it_is_undone(
    small: Store, disk: Path, how: str, end: Callable[[Store, Actor], None]
) -> None:
    """Whoever ends the window, nobody refuses that for want of room."""
    _, operator = issue(small, "operator")
    _, admin = issue(small, "admin")
    if how != "add":
        fill(small, operator)
    said = change_in_window(small, how, operator)
    assert "Confirm or end the window first" in said, said
    base = small.window().base  # type: ignore[union-attr]
    end(small, operator)
    assert small.difference(base, small.revision()) == []
    assert shutil.disk_usage(disk).free > 3 << 20
    keep(small)
    small.add([rule("10.255.0.1")], admin, NOW)
    small.remove(small.select()[0][0].rule.id, admin, NOW)


def test_a_window_that_keeps_room_is_confirmed_and_keeps_none_then(small: Store) -> None:
    _, operator = issue(small, "operator")
    fill(small, operator)
    assert "Confirm or end the window first" in change_in_window(small, "remove", operator)
    last = small.select()[0][-1].rule.id
    with pytest.raises(NoRoom, match="Confirm or end"):
        small.remove(last, operator, NOW)
    small.confirm(operator, NOW)
    small.remove(last, operator, NOW)


def test_an_admin_is_not_locked_out_by_what_an_operator_has_changed_in_a_window(small: Store) -> None:
    """He has half of what is kept, and ends the window where that is not enough."""
    token, operator = issue(small, "operator")
    _, admin = issue(small, "admin")
    fill(small, operator)
    change_in_window(small, "remove", operator)
    small.add([rule("10.255.0.1")], admin, NOW)
    with suppress(NoRoom):
        while kept := small.select(limit=100)[0]:
            for each in kept:
                small.remove(each.rule.id, admin, NOW)
    small.abandon(admin, NOW)
    assert small.revoke_token(token.id, NOW, admin)
    while kept := small.select(limit=100)[0]:
        for each in kept:
            small.remove(each.rule.id, admin, NOW)


def test_an_admin_who_fills_it_too_keeps_nobody_from_revoking(small: Store) -> None:
    token, admin = issue(small, "admin")
    said = fill(small, admin)
    assert "1.5 MiB are kept" in said, said
    assert small.revoke_token(token.id, NOW)


BUSY = """
import sys
import time
from datetime import UTC, datetime
from netlimit.store import Store
store = Store(sys.argv[1])
for number in range(40):
    store.add_token(f"t{number}", f"hash {number}", "viewer", datetime.now(UTC))
    assert len(store.tokens()) == number + 1
"""


def test_nothing_is_lost_that_others_have_written_while_the_log_is_cut(tmp_path: Path) -> None:
    """Who cuts it keeps others from adding to it, and goes by what it says of itself."""
    url = f"sqlite:///{tmp_path}/netlimit.db"
    store = Store(url)
    store.upgrade()
    busy = subprocess.Popen([sys.executable, "-c", BUSY, url])
    log, cut = tmp_path / "netlimit.db-wal", 0
    while busy.poll() is None:
        with suppress(ZeroDivisionError), store._database.writing() as connection:
            connection.execute(text("CREATE TABLE large AS SELECT zeroblob(12000000) AS x"))
            before = log.stat().st_size
            assert 1 / 0
        cut += log.stat().st_size < before
        time.sleep(0.05)  # others take their turn
    assert (busy.returncode, cut > 3) == (0, True), cut
    assert len(store.tokens()) == 40
    with store._database.reading() as connection:
        assert connection.execute(text("PRAGMA integrity_check")).scalar_one() == "ok"
    store.close()
