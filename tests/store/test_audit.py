from __future__ import annotations

import hashlib
import json
from datetime import timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from netlimit.records import Actor
from netlimit.store import AuditEntry, AuditFilter, ManyErrors, Store, audit, homes
from netlimit.store.rows import to_fields
from netlimit.tree import SavedRoot
from tests.store.examples import NOW, keep, rule


def test_every_change_says_who_and_what(store: Store) -> None:
    admin = Actor("admin", "192.0.2.1", "request-7")
    added = store.add([rule(name="a")], admin, NOW)[0]
    changed = store.replace(added.id, rule(name="a", rate="5 packets/s"), "cli", NOW).rule
    store.remove(added.id, "ci", NOW)
    assert store.audit() == [
        AuditEntry(3, NOW, "ci", 3, "remove", 1, to_fields(changed), None, None, None),
        AuditEntry(2, NOW, "cli", 2, "replace", 1, to_fields(added), to_fields(changed), None, None),
        AuditEntry(1, NOW, "admin", 1, "add", 1, None, to_fields(added), "192.0.2.1", "request-7"),
    ]
    assert to_fields(changed)["rate"] == "5 packets/s"


def test_a_refused_change_leaves_no_trace(store: Store) -> None:
    keep(store)
    with pytest.raises(ManyErrors):
        store.add([rule("10.0.0.2"), rule()], "test", NOW)
    assert len(store.audit()) == 1


def test_a_batch_leaves_a_line_for_each_rule_and_a_large_one_a_line_for_all(store: Store) -> None:
    store.add([rule(f"10.0.{n >> 8}.{n & 255}") for n in range(1000)], "test", NOW)
    assert len(store.audit(limit=5000)) == 1000
    store.add([rule(f"10.1.{n >> 8}.{n & 255}") for n in range(1001)], "test", NOW)
    assert len(store.audit(limit=5000)) == 1001
    entry = store.audit(limit=1)[0]
    assert (entry.action, entry.revision, entry.rule_id, entry.before) == ("add", 2, None, None)
    assert entry.after == {"rules": 1001, "first_id": 1001, "last_id": 2001}


def test_of_long_fields_stands_the_digest(store: Store) -> None:
    labels = {f"a{n}": "x" * 200 for n in range(16)}
    keep(store, comment="\N{GRINNING FACE}" * 1000, labels=labels, name="told")
    told = store.audit()[0].after
    assert told
    written = json.dumps("\N{GRINNING FACE}" * 1000).encode()
    assert told["comment"] == {"bytes": len(written), "sha256": hashlib.sha256(written).hexdigest()}
    assert told["labels"]["bytes"] > 3200
    assert told["name"] == "told"
    assert len(json.dumps(dict(told))) < 1000


def test_pages_go_back_in_time(store: Store) -> None:
    for n in range(5):
        keep(store, f"10.0.0.{n}")
    assert [entry.id for entry in store.audit(limit=2)] == [5, 4]
    assert [entry.id for entry in store.audit(limit=2, after=4)] == [3, 2]
    assert [entry.id for entry in store.audit(limit=2, after=2)] == [1]
    assert store.audit(limit=2, after=1) == []


def test_entries_are_found_by_who_what_which_and_when(store: Store) -> None:
    one = keep(store, "10.0.0.1")
    store.add([rule("10.0.0.2")], Actor("ci", request="r-1"), NOW + timedelta(hours=1))
    store.remove(one.id, "ci", NOW + timedelta(hours=2))

    def found(**which: object) -> list[int]:
        return [entry.id for entry in store.audit(which=AuditFilter(**which))]  # type: ignore[arg-type]

    assert found() == [3, 2, 1]
    assert found(actor="ci") == [3, 2]
    assert found(action="add") == [2, 1]
    assert found(rule_id=one.id) == [3, 1]
    assert found(rule_id=10**30) == []
    assert found(request="r-1") == [2]
    assert found(actor="a\0") == found(action="\0") == found(request="\0") == []
    assert found(since=NOW + timedelta(hours=1)) == [3, 2]
    assert found(until=NOW + timedelta(hours=1)) == [1]
    assert found(actor="ci", action="add", since=NOW, until=NOW + timedelta(days=1)) == [2]
    assert [entry.id for entry in store.audit(after=3, which=AuditFilter(actor="ci"))] == [2]


def test_what_is_no_rule_is_in_it_too(store: Store) -> None:
    alice = Actor("alice (sudo)")
    keep(store)
    token = store.add_token("ci", "secret hash", "operator", NOW, NOW + timedelta(days=1), "handle", actor=alice)
    store.revoke_token(token.id, NOW, Actor("admin", "192.0.2.1", "r-2"))
    store.revoke_token(token.id, NOW, alice)
    store.pause("gw1", True, alice, NOW)
    store.pause("gw1", True, alice, NOW)
    store.pause("gw1", False, alice, NOW)
    store.save_root("gw1", "wan", SavedRoot(0x10000, "fq", b""), alice, NOW)
    store.note("apply", alice, NOW, after={"host": "gw1", "steps": 3})
    words = [each.after["pause"] for each in store.audit(which=AuditFilter(action="pause")) if each.after]
    assert len({*words}) == 2
    said = {"token": "ci", "role": "operator", "expires_at": "2030-05-07T07:08:09.123456+00:00"}
    assert [(each.actor, each.action, each.before, each.after) for each in store.audit()][:-1] == [
        ("alice (sudo)", "apply", None, {"host": "gw1", "steps": 3}),
        ("alice (sudo)", "take-over", {"host": "gw1", "device": "wan", "qdisc": "fq"}, None),
        ("alice (sudo)", "resume", None, {"host": "gw1"}),
        ("alice (sudo)", "pause", None, {"host": "gw1", "pause": words[0]}),
        ("alice (sudo)", "pause", None, {"host": "gw1", "pause": words[1]}),
        ("admin", "revoke-token", said, None),
        ("alice (sudo)", "create-token", None, said),
    ]
    assert {entry.revision for entry in store.audit()} == {1}
    assert "hash" not in repr(store.audit())


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE audit SET actor = 'nobody'",
        "DELETE FROM audit",
        "DELETE FROM audit WHERE id = 2",
        "INSERT INTO audit (id, at, actor, revision, action) VALUES (1, 0, 'nobody', 1, 'add') "
        "ON CONFLICT (id) DO UPDATE SET actor = 'nobody'",
    ],
)
def test_the_database_itself_lets_nobody_rewrite_it(store: Store, statement: str) -> None:
    keep(store)
    keep(store, "10.0.0.2")
    before = store.audit()
    with (
        pytest.raises(DBAPIError, match="append-only"),
        store._database.engine.begin() as connection,
        homes.by_name(connection),
    ):
        connection.execute(text(statement))
    assert store.audit() == before


def test_nor_by_the_ways_round_the_triggers(store: Store) -> None:
    keep(store)
    ways = ["TRUNCATE audit"]
    if store._database.is_sqlite:
        ways = ["INSERT OR REPLACE INTO audit (id, at, actor, revision, action) VALUES (1, 0, 'nobody', 1, 'add')"]
    for statement in ways:
        with (
            pytest.raises(DBAPIError, match="append-only"),
            store._database.engine.begin() as connection,
            homes.by_name(connection),
        ):
            connection.execute(text(statement))
    assert [entry.actor for entry in store.audit()] == ["test"]


def test_the_oldest_lines_go_when_there_are_too_many(url: str) -> None:
    store = Store(url, audit_length=20)
    for number in range(22):
        keep(store, f"10.0.0.{number}")
    assert len(store.audit()) == 22
    keep(store, "10.0.1.0")
    assert [entry.id for entry in store.audit()] == list(range(23, 3, -1))
    keep(store, "10.0.1.1")
    assert len(store.audit()) == 21
    store.close()


def test_they_go_too_when_all_together_are_too_large(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at now and then: with the first line after every tenth, here."""
    monkeypatch.setattr(audit, "MOST_BYTES", 20_000)
    monkeypatch.setattr(audit, "_GRAIN", 10)
    for number in range(25):
        store.note("apply", "test", NOW, after={"host": 2000 * "x", "steps": number})
        assert len(store.audit()) <= 20
    newest = [entry.id for entry in store.audit()]
    assert newest == list(range(25, 25 - len(newest), -1))
    assert len(newest) >= 9 + 5
    store.add([rule(f"10.0.0.{number}") for number in range(40)], "test", NOW)
    assert sum(entry.action == "apply" for entry in store.audit()) < 9
    store.note("apply", "test", NOW, after={"host": 30_000 * "x"})
    for number in range(10):
        store.note("apply", "test", NOW, after={"steps": number})
    assert 10 <= len(store.audit()) <= 11


def test_of_many_that_are_too_large_some_go_at_a_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """One change gives up no more than is soon done, and the following ones the rest."""
    for number in range(30):
        store.note("apply", "test", NOW, after={"host": 2000 * "x", "steps": number})
    monkeypatch.setattr(audit, "MOST_BYTES", 10_000)
    monkeypatch.setattr(audit, "_GRAIN", 5)
    monkeypatch.setattr(audit, "_MOST_AT_ONCE", 8)
    kept = []
    for number in range(15):
        store.note("apply", "test", NOW, after={"steps": number})
        kept.append(len(store.audit()))
    assert kept[4] == 35 - 8
    assert kept[9] == 40 - 16
    assert kept[14] == 45 - 24


def test_who_revokes_a_token_gives_up_nothing(url: str) -> None:
    """That takes room, and there may be little left."""
    store = Store(url, audit_length=10)
    tokens = [store.add_token(f"t{number}", f"hash {number}", "viewer", NOW) for number in range(11)]
    assert all(store.revoke_token(token.id, NOW) for token in tokens)
    assert len(store.audit()) == 22
    keep(store)
    assert len(store.audit()) == 10
    store.close()
