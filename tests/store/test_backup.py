from __future__ import annotations

import sqlite3
import stat
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import pytest
from alembic import command
from sqlalchemy import select, text

from netlimit.errors import StoreError
from netlimit.records import Counts, HostStatus, RuleCounters
from netlimit.store import Damaged, InUse, NoBackup, Store, open_replica
from netlimit.store.backup import Label, _seal
from netlimit.store.connection import LONGEST_VALUE
from netlimit.store.engine import Database
from netlimit.store.migrate import alembic_config
from netlimit.store.tables import metadata
from netlimit.tree import SavedRoot
from tests.damage import flip
from tests.endless import ROWS, put_view
from tests.store.examples import NOW, keep, rule

PASSING = {"clock", "tombstones", "requests", "windows", "guards", "clients", "pauses", "audit", "revisions"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "netlimit.backup"


@pytest.fixture
def other(empty_url: str) -> Iterator[Store]:
    """Another database, without tables."""
    store = Store(empty_url)
    yield store
    store.close()


def fill(store: Store) -> None:
    """Put something into every table."""
    keep(store, "10.0.0.1", name="first", labels={"site": "office"}, hosts=["gw1", "gw2"], comment="ä\n")
    keep(store, "10.0.0.2", enabled=False, expires_at="2031-01-01T00:00:00.123456Z")
    store.remove(keep(store, "10.0.0.3").id, "test", NOW)
    store.replace(2, rule("10.0.0.2", rate="5 MB/s"), "test", NOW)
    store.add_token("ci", "hash", "admin", NOW)
    store.report(HostStatus("gw1", "fake", applied_revision=3, capabilities={"a": None}, seen_at=NOW), NOW)
    store.pause("gw2", True)
    store.number("gw1", {("group", "profile"): 7}, [])
    store.save_root("gw1", "wan", SavedRoot(1, "pfifo", "00ff"))
    store.count("gw1", [RuleCounters(1, Counts(1, 2, 3, 4, 5), Counts(6, 7, 8, 9, 10), NOW, NOW)])
    store.repaired("gw1", "chains", "something", 0.5, NOW)
    store.put_limits("auth", "domain: auth", "application/yaml", "test", NOW)


def dump(store: Store) -> dict[str, list[Any]]:
    """Every row of every table that is brought back."""
    with store._database.reading() as connection:
        return {
            name: sorted(map(tuple, connection.execute(select(table))), key=repr)
            for name, table in metadata.tables.items()
            if name not in PASSING
        }


def test_an_empty_database_takes_over_everything(store: Store, other: Store, file: Path) -> None:
    fill(store)
    label = store.back_up(file, NOW)
    assert (label.revision, label.made_at) == (store.revision(), NOW)
    restored = other.restore(file, "ann", NOW)
    assert (restored.revision, restored.rules) == (store.revision() + 1, 2)
    assert dump(other) == dump(store)
    written, *before = other.audit()
    assert (written.actor, written.action, written.revision) == ("ann", "restore", restored.revision)
    assert before == store.audit()
    assert other.rollback(1, "test", NOW) == restored.revision + 1
    assert [kept.rule.id for kept in other.select()[0]] == [1]
    assert keep(other, "10.0.0.9").id == 4
    assert other.add_token("another", "hash", "admin", NOW).id == 2


def test_who_was_paused_then_is_not_brought_back(store: Store, other: Store, file: Path) -> None:
    store.pause("then", True)
    store.back_up(file, NOW)
    other.restore(file, "ann", NOW)
    assert not other.paused("then")
    store.pause("then", False)
    store.pause("now", True)
    store.restore(file, "ann", NOW, force=True)
    assert not store.paused("then")
    assert store.paused("now")


def test_rules_that_are_there_are_not_lost_by_mistake(store: Store, file: Path) -> None:
    keep(store)
    store.back_up(file, NOW)
    keep(store, "10.0.0.2")
    with pytest.raises(InUse, match=r"has 2 rules, .* use --force"):
        store.restore(file, "test", NOW)
    assert store.revision() == 2


def test_an_empty_database_with_an_open_window_takes_over_nothing(store: Store, other: Store, file: Path) -> None:
    """It could not return to what was before: the history of the backup takes the place of its own."""
    keep(store)
    store.back_up(file, NOW)
    other.upgrade()
    window = other.open_window(60, "test", NOW)
    with pytest.raises(InUse, match="A window of confirmation is open"):
        other.restore(file, "test", NOW, force=True)
    assert other.expire(window, "guard", NOW) is not None
    assert other.restore(file, "test", NOW).rules == 1


def test_a_restore_is_a_change_that_can_be_undone(store: Store, file: Path) -> None:
    first, second = keep(store, name="first"), keep(store, "10.0.0.2", name="second")
    store.add_token("ci", "hash", "admin", NOW)
    store.back_up(file, NOW)
    store.remove(second.id, "test", NOW)
    store.replace(first.id, rule("10.0.0.7", name="second"), "test", NOW)
    keep(store, "10.0.0.3")
    store.report(HostStatus("gw1", "fake", applied_revision=store.revision()), datetime.now(UTC))
    before, tokens = store.select()[0], store.tokens()
    token = store.token("ci")
    assert token is not None
    store.revoke_token(token.id, NOW)
    restored = store.restore(file, "test", NOW, force=True)
    assert restored.revision == 6
    assert {kept.rule.name: kept.rule.revision for kept in store.select()[0]} == {"first": 6, "second": 6}
    assert store.changes(5, "gw1") is None
    (revoked,) = store.tokens()
    assert (revoked.id, revoked.revoked_at) == (tokens[0].id, NOW)
    assert keep(store, "10.0.0.9").id == 4
    store.rollback(5, "test", NOW)
    after = {kept.rule.id: replace(kept.rule, revision=0) for kept in store.select()[0]}
    assert after == {kept.rule.id: replace(kept.rule, revision=0) for kept in before}


def test_the_audit_tells_what_became_of_each_rule(store: Store, file: Path) -> None:
    first, second = keep(store), keep(store, "10.0.0.2")
    keep(store, "10.0.0.3")
    store.back_up(file, NOW)
    store.remove(second.id, "test", NOW)
    store.replace(first.id, rule(rate="5 MB/s"), "test", NOW)
    keep(store, "10.0.0.4")
    store.restore(file, "ann", NOW, force=True)
    lines = [each for each in store.audit() if each.actor == "ann"]
    assert [(each.action, each.rule_id) for each in lines] == [
        ("restore", None),
        ("remove", 4),
        ("add", 2),
        ("replace", 1),
    ]
    old, new = lines[-1].before, lines[-1].after
    assert old is not None
    assert new is not None
    assert (old["rate"], new["rate"]) == ("5 MB/s", "100 packets/s")
    assert lines[2].before is None
    assert {each.revision for each in lines} == {store.revision()}


def test_a_database_that_is_far_behind_goes_on_after_the_backup(store: Store, other: Store, file: Path) -> None:
    for number in range(5):
        keep(store, f"10.0.0.{number}")
    store.back_up(file, NOW)
    other.upgrade()
    keep(other, "10.9.9.9")
    assert other.restore(file, "test", NOW, force=True).revision == 6
    assert {kept.rule.revision for kept in other.select()[0]} == {6}
    assert [kept.rule.id for kept in other.select()[0]] == [1, 2, 3, 4, 5]
    assert keep(other, "10.0.0.9").id == 6


def test_a_backup_is_of_one_moment_and_for_its_owner_only(url: str, store: Store, file: Path) -> None:
    """Whoever writes meanwhile writes two rules at a time."""
    end = threading.Event()

    def write() -> None:
        number = 0
        while not end.is_set():
            number += 2
            batch = [rule(f"10.0.{each >> 8}.{each & 255}") for each in (number, number + 1)]
            store.add(batch, "test", NOW)

    writer = threading.Thread(target=write)
    writer.start()
    labels = [store.back_up(Path(f"{file}{number}"), NOW) for number in range(3)]
    end.set()
    writer.join()
    for number, label in enumerate(labels):
        connection = sqlite3.connect(f"{file}{number}")
        rules, newest, lines = connection.execute(
            "SELECT (SELECT count(*) FROM rules), (SELECT max(revision) FROM rules), (SELECT count(*) FROM audit)"
        ).fetchone()
        assert rules == lines == 2 * label.revision
        assert (newest or 0) == label.revision
        connection.close()
    assert stat.S_IMODE(Path(f"{file}0").stat().st_mode) == 0o600
    assert {child.name for child in file.parent.iterdir()} - {"db"} == {f"{file.name}{number}" for number in range(3)}


def test_a_backup_takes_the_place_of_nothing(sqlite_store: Store, file: Path) -> None:
    file.write_text("mine")
    with pytest.raises(FileExistsError):
        sqlite_store.back_up(file, NOW)
    assert file.read_text() == "mine"


def test_a_backup_that_fails_leaves_nothing(tmp_path: Path, file: Path) -> None:
    with pytest.raises(Exception, match="There is no database"):
        Store(f"sqlite:///{tmp_path}/none.db").back_up(file, NOW)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def backup(sqlite_store: Store, file: Path) -> Path:
    fill(sqlite_store)
    sqlite_store.back_up(file, NOW)
    return file


def change(file: Path, statement: str) -> None:
    connection = sqlite3.connect(file)
    connection.execute(statement)
    connection.commit()
    connection.close()


def overwrite(file: Path, start: float, end: float) -> None:
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.seek(int(size * start))
        opened.write(b"\xa5" * int(size * (end - start)))


BAD = {
    "garbage": lambda file: file.write_text("no database " * 1000),
    "empty": lambda file: file.write_bytes(b""),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "overwritten": lambda file: overwrite(file, 0.3, 0.5),
    "another rule": lambda file: change(file, "UPDATE rules SET rate = '9 packets/s' WHERE id = 1"),
    "a rule less": lambda file: change(file, "DELETE FROM rules WHERE id = 2"),
    "no label": lambda file: change(file, "DROP TABLE backup"),
    "a statement of the schema": lambda file: flip(file, b"CREATE TABLE tokens", 10),
    "a name of the schema": lambda file: flip(file, b"CREATE TABLE tokens", 15),
    "a name of a column": lambda file: flip(file, b"made_at TEXT", 2),
    "a label that is no UTF-8": lambda file: flip(file, NOW.isoformat().encode(), 4),
    "a label without a time": lambda file: change(file, "UPDATE backup SET made_at = 'then'"),
    "a label without a zone": lambda file: change(file, "UPDATE backup SET made_at = '2030-05-06T07:08:09'"),
    "a label with bytes": lambda file: change(file, "UPDATE backup SET made_at = x'80', source = x'80'"),
    "a label without a revision": lambda file: change(file, "UPDATE backup SET revision = 'many'"),
    "an empty label": lambda file: change(file, "DELETE FROM backup"),
    "newer": lambda file: change(file, "UPDATE alembic_version SET version_num = '9999'"),
}


@pytest.mark.parametrize("harm", BAD.values(), ids=BAD.keys())
def test_what_is_not_as_it_was_written_is_refused(sqlite_store: Store, backup: Path, harm: Any) -> None:
    harm(backup)
    before = dump(sqlite_store)
    with pytest.raises(NoBackup, match="backup"):
        sqlite_store.restore(backup, "test", NOW, force=True)
    assert dump(sqlite_store) == before


WORKING = {
    "a view": "CREATE VIEW more AS SELECT 1",
    "a column that is worked out": "ALTER TABLE rules ADD COLUMN more GENERATED ALWAYS AS (1) VIRTUAL",
    "a table of a module": "CREATE VIRTUAL TABLE more USING fts4(x)",
}
"""What could work without end, or at anything."""


@pytest.mark.parametrize("harm", WORKING.values(), ids=WORKING.keys())
def test_what_is_worked_out_as_it_is_read_is_refused_however_it_is_sealed(
    sqlite_store: Store, backup: Path, harm: str
) -> None:
    change(backup, "DROP TABLE backup")
    change(backup, harm)
    _seal(backup, Label(NOW, "somebody", 12))
    with pytest.raises(NoBackup, match="more"):
        sqlite_store.restore(backup, "test", NOW, force=True)


def test_what_is_worked_out_as_it_is_read_gets_into_no_backup(sqlite_store: Store, file: Path) -> None:
    """It may fill the disk."""
    assert sqlite_store.path is not None
    put_view(sqlite_store.path, "repairs", ROWS)
    with pytest.raises(StoreError, match=r"what 'repairs' holds is worked out as it is read"):
        sqlite_store.back_up(file, NOW)
    assert not file.exists()


def test_a_value_that_takes_the_memory_of_a_machine_is_not_read(sqlite_store: Store, backup: Path) -> None:
    value = f"CAST(zeroblob({LONGEST_VALUE + 1}) AS TEXT)"
    change(backup, f"UPDATE rules SET comment = {value} WHERE id = 1")  # noqa: S608
    with pytest.raises(NoBackup, match="too big"):
        sqlite_store.restore(backup, "test", NOW, force=True)


def test_triggers_of_a_backup_do_nothing(file: Path, other: Store) -> None:
    old = Database(f"sqlite:///{file}")
    with old.migrating() as connection:
        command.upgrade(alembic_config(connection), "0011")
    old.close()
    change(file, "CREATE TRIGGER t BEFORE UPDATE ON alembic_version BEGIN SELECT RAISE(ABORT, 'worked'); END")
    _seal(file, Label(NOW, "somebody", 12))
    assert other.restore(file, "test", NOW).revision == 13


def test_a_file_that_is_not_there_is_an_error_of_the_file_system(sqlite_store: Store, file: Path) -> None:
    with pytest.raises(FileNotFoundError):
        sqlite_store.restore(file, "test", NOW)


def test_a_backup_of_an_older_netlimit_is_migrated_as_a_copy(tmp_path: Path, file: Path, other: Store) -> None:
    old = Database(f"sqlite:///{file}")
    with old.migrating() as connection:
        command.upgrade(alembic_config(connection), "0002")
        connection.execute(text("UPDATE clock SET revision = 12, last_rule = 3"))
        connection.execute(
            text(
                "INSERT INTO rules (id, revision, target, action, direction, protocol, ports, source_ports, rate, per, "
                "on_failure, enabled, hosts, labels, comment, identity, created_at, updated_at) VALUES (3, 12, "
                "'10.0.0.1/32', 'drop', 'from', 'any', '', '', '5 packets/s', 'host', 'closed', true, '', '', '', 'x', "
                "1, 1)"
            )
        )
    old.close()
    _seal(file, Label(NOW, "an old one", 12))
    sealed = file.read_bytes()
    assert other.restore(file, "test", NOW).revision == 13
    assert [kept.rule.rate.text for kept in other.select()[0] if kept.rule.rate] == ["5 packets/s"]
    assert file.read_bytes() == sealed
    assert keep(other, "10.0.0.2").id == 4


def test_who_looks_while_a_database_is_filled_sees_none(
    empty_url: str, other: Store, backup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty one would lift every limit; so would what is left if it ends half way."""

    def look() -> None:
        with closing(Store(empty_url)) as another, pytest.raises(StoreError, match="no tables yet"):
            another.revision()

    def end(*_: object) -> NoReturn:
        look()
        raise KeyboardInterrupt

    monkeypatch.setattr("netlimit.store.store.restore", end)
    with pytest.raises(KeyboardInterrupt):
        other.restore(backup, "test", NOW)
    look()


def test_a_damaged_database_is_put_aside(tmp_path: Path, sqlite_store: Store, backup: Path) -> None:
    path = tmp_path / "netlimit.db"
    sqlite_store.close()
    path.chmod(0o640)
    overwrite(path, 0.2, 0.9)
    damaged = path.read_bytes()
    with pytest.raises(Damaged, match=r"`netlimit restore FILE`"):
        sqlite_store.restore(backup, "test", NOW)
    restored = sqlite_store.restore(backup, "test", NOW, force=True)
    assert [kept.rule.id for kept in sqlite_store.select()[0]] == [1, 2]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    aside = path.with_name("netlimit.db.damaged-20300506T070809")
    assert aside.read_bytes() == damaged
    assert restored.aside == aside


def test_that_a_rule_was_forced_is_kept_and_comes_back_only_if_somebody_says_so(
    store: Store, other: Store, file: Path, tmp_path: Path
) -> None:
    (kept,) = store.add([replace(rule("10.0.0.7", action="block"), forced_by="alice")], "test", NOW)
    store.change(kept.id, lambda before: replace(before, comment="why"), "test", NOW)
    revision = store.revision()
    store.remove(kept.id, "test", NOW)
    store.open_window(60, "test", NOW, revision)
    store.abandon("test", NOW)
    found = store.find(kept.id)
    assert found is not None
    assert found.rule.forced_by == "alice", "by the undo of a change, of a removal, and by a window"
    copy = open_replica(tmp_path / "copy", "gw1")
    copy.follow(store)
    assert [each.forced_by for each in copy.load("gw1")[1]] == ["alice"]
    copy.close()

    store.back_up(file, NOW)
    with pytest.raises(InUse, match="that alice has forced, and that would hit who is safe; use --force"):
        other.restore(file, "test", NOW)
    with pytest.raises(StoreError, match="no tables yet"):
        other.select()
    other.restore(file, "test", NOW, force=True)
    assert [each.rule.forced_by for each in other.select()[0]] == ["alice"]


def test_a_backup_that_has_seen_more_changes_leaves_the_history_as_it_is(
    store: Store, empty_url: str, file: Path
) -> None:
    for number in range(20):
        store.remove(keep(store, f"10.0.0.{number + 1}").id, "test", NOW)
    store.back_up(file, NOW)
    brief = Store(empty_url, revisions=10)
    brief.upgrade()
    kept = keep(brief, "10.9.0.1")
    brief.restore(file, "test", NOW, force=True)
    brief.rollback(1, "test", NOW)
    assert [each.rule.id for each in brief.select()[0]] == [kept.id]
    brief.close()


def test_what_would_close_a_gateway_here_comes_back_only_if_somebody_says_so(
    store: Store, other: Store, file: Path
) -> None:
    """It closed none where it was made."""
    store.add([rule("10.0.0.0/8", action="block")], "test", NOW)
    store.back_up(file, NOW)
    other.upgrade()
    gateway = HostStatus("gw", "fake", own=("10.1.0.1",), networks={"10.1.0.0/16": ("lan",)}, management=(22,))
    other.report(gateway, other.now())
    with pytest.raises(InUse, match=r"would close gw to every IPv4 network"):
        other.restore(file, "test", NOW)
    assert other.select()[1] == 0
    other.restore(file, "test", NOW, force=True)
    assert other.select()[1] == 1


def test_a_disabled_rule_that_was_forced_comes_back_by_itself(store: Store, other: Store, file: Path) -> None:
    forced = replace(rule("10.0.0.7", action="block"), forced_by="alice", enabled=False)
    store.add([forced], "test", NOW)
    store.back_up(file, NOW)
    other.restore(file, "test", NOW)
    assert [each.rule.forced_by for each in other.select()[0]] == ["alice"]
