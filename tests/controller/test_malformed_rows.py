"""Rows that somebody has written by hand, or another version: that rule is in error, with what is wrong; all others
hold, and nothing ends."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Integer, create_engine, text
from sqlalchemy.engine import Engine

from api.representation import write_kept
from api.standing import judge
from netlimit.errors import NetlimitError
from netlimit.malformed import Malformed
from netlimit.records import Counts as CountsOf
from netlimit.records import RuleCounters, State
from netlimit.store.replica import Replica, take_snapshot
from netlimit.store.tables import Id, metadata
from netlimit.tree import SavedRoot
from tests.controller.conftest import Site

WRONG = {
    "target": ["garbage", "10.0.0.1/8", "10.0.0.1/99", ""],
    "action": ["garbage", "shape", "block"],
    "direction": ["sideways"],
    "protocol": ["garbage"],
    "ports": ["1-x", "99999", "9-1", "80"],
    "source_ports": ["x"],
    "interface": ["eth0 -j ACCEPT", ""],
    "rate": ["garbage", "0 packets/s", None],
    "burst": [-1, 0],
    "per": ["garbage", "/99", None],
    "ceil": ["garbage"],
    "on_failure": ["never"],
    "expires_at": [2**62],
    "labels": ["{", '{"a": 1}', "[[1]]"],
}
UNTYPED = {
    "burst": "garbage",
    "revision": "x",
    "enabled": "garbage",
    "expires_at": "x",
    "comment": b"\xff",
    "name": b"x",
}
"""What SQLite keeps too, for it asks nobody what a column is for."""


def write(engine: Engine, statement: str, **values: object) -> None:
    with engine.begin() as connection:
        connection.execute(text(statement), values)


@pytest.fixture
def engine(site: Site) -> Iterator[Engine]:
    engine = create_engine(site.store._database.url)
    yield engine
    engine.dispose()


def cases() -> list[tuple[str, object]]:
    return [(name, value) for name, values in WRONG.items() for value in values]


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
@pytest.mark.parametrize(("column", "value"), cases())
def test_a_rule_that_cannot_be_read_is_in_error_and_all_others_hold(
    site: Site, engine: Engine, column: str, value: object
) -> None:
    spoil(site, engine, column, value)


@pytest.mark.parametrize("column", UNTYPED)
def test_nor_does_what_only_sqlite_keeps(site: Site, engine: Engine, column: str) -> None:
    spoil(site, engine, column, UNTYPED[column])


def spoil(site: Site, engine: Engine, column: str, value: object) -> None:
    site.add(target="10.0.0.1", rate="3 packets/s")
    bad = site.add(target="10.0.0.2", rate="5 packets/s", name="bad")
    write(engine, f"UPDATE rules SET {column} = :value WHERE id = {bad.id}", value=value)  # noqa: S608  our own names
    site.restart().sync()
    assert site.send("10.0.0.1", times=20).count("accept") == 3
    state = site.store.marked("gw")[bad.id]
    assert state.state is State.ERROR
    assert f"Replace rule {bad.id}, or delete it" in state.message
    kept = site.store.find(bad.id)
    assert kept is not None
    assert isinstance(kept.rule, Malformed)
    standing = judge(kept.rule, site.store.hosts(), {}, site.clock())
    assert write_kept(kept, standing)["status"]["state"] == "error"  # type: ignore[index]
    assert site.store.select()[1] == 2
    site.add(target="10.0.0.3", rate="4 packets/s")
    site.controller.sync()
    assert site.send("10.0.0.3", times=20).count("accept") == 4
    site.controller.plan()
    site.controller.account()
    site.store.remove(bad.id, "test", site.clock())
    site.controller.sync()
    assert site.store.marked("gw") == {}
    site.store.rollback(3, "test", site.clock())  # it comes back as it was
    site.controller.sync()
    if column in WRONG:
        assert site.store.marked("gw")[bad.id].state is State.ERROR
    site.store.replace(bad.id, bad, "test", site.clock())
    site.controller.sync()
    assert site.store.marked("gw") == {}
    assert site.send("10.0.0.2", times=20).count("accept") == 5


def test_the_copy_and_the_snapshot_of_a_gateway_hold_it_too(site: Site, engine: Engine, tmp_path: Path) -> None:
    site.add(target="10.0.0.1", rate="3 packets/s")
    bad = site.add(target="10.0.0.2", rate="5 packets/s")
    write(engine, f"UPDATE rules SET target = 'garbage' WHERE id = {bad.id}")  # noqa: S608
    replica = Replica(tmp_path / "applied.db", "gw")
    replica.upgrade()
    assert replica.follow(site.store)
    held = {rule.id: rule for rule in replica.load("gw")[1]}
    assert isinstance(held[bad.id], Malformed)
    assert held[bad.id].fields["target"] == "garbage"
    assert len(take_snapshot(site.store, "gw", site.store.revision(), False).rules) == 2
    replica.close()


def fill(site: Site) -> None:
    """A row in every table."""
    store, now = site.store, site.clock()
    first = site.add(target="10.0.0.1", rate="3 packets/s", name="one", labels={"a": "b"}, hosts=["gw"])
    store.replace(first.id, first, "test", now)
    store.remove(site.add(target="10.0.0.9", rate="9 packets/s").id, "test", now)
    site.controller.sync()
    store.pause("other", True)
    store.count("gw", [RuleCounters(first.id, CountsOf(), CountsOf(), now, now)])
    store.count_requests("gw", {first.id: CountsOf(1, 1)}, now)
    store.assign("gw", {first.id: 1}, ())
    store.number("gw", {("g", "p"): 3}, ())
    store.save_root("gw", "eth0", SavedRoot(1, "htb", "00"))
    store.ask("gw", "counters", {"rules": []})
    store.add_token("t", "hash", "operator", now)
    store.open_window(600, "test", now)
    store.guarded("gw")
    store.repaired("gw", "chains", "found", 0.1, now)
    store.saw_client("gw", "192.0.2.7", now)
    store.put_limits("d", "{}", "application/json", "test", now)


def use(site: Site) -> None:
    """Everything that reads rows. What raises says so as netlimit does."""
    store = site.store
    asks = (
        lambda: store.hosts(),
        lambda: store.window(),
        lambda: store.audit(),
        lambda: store.revisions(),
        lambda: store.rules_at(1),
        lambda: store.difference(1, 2),
        lambda: store.tokens(),
        lambda: store.marked("gw"),
        lambda: store.exceptional_counts(),
        lambda: store.total_counters(),
        lambda: store.named_counters(10),
        lambda: store.questions("gw"),
        lambda: store.limits(),
        lambda: store.repairs("gw", 10),
        lambda: store.guards(),
        lambda: store.limiters("gw"),
        lambda: store.select(),
    )
    for ask in asks:
        try:
            ask()
        except NetlimitError:
            pass
        except AttributeError as error:
            if "'Store'" not in str(error):
                raise


def columns() -> list[tuple[str, str]]:
    return [
        (table.name, column.name)
        for table in metadata.sorted_tables
        for column in table.columns
        if table.name not in ("rules", "clock", "rule_hosts") and column.type is not Id and not column.foreign_keys
        and not (column.primary_key and isinstance(column.type, Integer))
    ]  # fmt: skip


def test_no_other_row_ends_a_controller_or_a_reader(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """One column after the other, in every table, with bytes, words and numbers."""
    fill(site)
    path = site.store._database.path
    assert path is not None
    spoiled = 0
    with closing(sqlite3.connect(path)) as live, closing(sqlite3.connect(":memory:")) as pristine:
        live.backup(pristine)
        for number, (table, column) in enumerate(columns()):
            for value in ((b"\xff\x00", "[1]"), ("garbage", -1))[number % 2]:
                try:
                    live.execute(f"UPDATE {table} SET {column} = ?", (value,))  # noqa: S608
                    live.commit()
                except sqlite3.Error:  # a unique key, or a trigger of the audit
                    live.rollback()
                    continue
                spoiled += 1
                look(site, monkeypatch, (table, column, value))
                pristine.backup(live)
    assert spoiled > 100


def look(site: Site, monkeypatch: pytest.MonkeyPatch, what: object) -> None:
    controller = site.restart()
    left = iter(range(1))
    monkeypatch.setattr(controller, "_back_off", lambda retry, stopped: retry)
    monkeypatch.setattr(controller, "_wait", lambda: None)
    controller.run(lambda: next(left, None) is None)
    assert controller._mishaps.count == 0, what
    site.clock.pass_by(seconds=60)
    assert site.send("10.0.0.1", times=20).count("accept") <= 3, what
    use(site)
