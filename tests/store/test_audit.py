from __future__ import annotations

import pytest

from netlimit.records import Actor
from netlimit.store import AuditEntry, ManyErrors, Store
from netlimit.store.rows import to_fields
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


def test_pages_go_back_in_time(store: Store) -> None:
    for n in range(5):
        keep(store, f"10.0.0.{n}")
    assert [entry.id for entry in store.audit(limit=2)] == [5, 4]
    assert [entry.id for entry in store.audit(limit=2, after=4)] == [3, 2]
    assert [entry.id for entry in store.audit(limit=2, after=2)] == [1]
    assert store.audit(limit=2, after=1) == []
