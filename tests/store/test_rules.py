from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event

from netlimit.errors import RuleError
from netlimit.rules import Rule
from netlimit.store import Kept, NotKept, Stale, Store
from tests.store.examples import NOW, keep, rule

LATER = NOW + timedelta(minutes=5)


def everything() -> Rule:
    return rule(
        "2001:db8::/32",
        action="reject",
        direction="to",
        protocol="udp",
        ports=[53, "8000-8100"],
        source_ports="1024-65535",
        interface="eth0.7",
        rate="20 Mbit/s",
        per="/48",
        on_failure="open",
        expires_at="2031-01-01T00:00:00.000001Z",
        hosts=["gw2", "gw1"],
        name="guest-wifi",
        labels={"customer": 'acme, "ltd" é', "b": ""},
        comment="line one\nline 'two'",
    )


def test_what_is_added_is_found_by_id_and_by_name(store: Store) -> None:
    added = store.add([everything()], "test", NOW)[0]
    assert (added.id, added.revision) == (1, 1)
    assert store.find(1) == store.find("1") == store.find("guest-wifi") == Kept(added, NOW, NOW)
    assert added == Rule(**{f: getattr(everything(), f) for f in Rule.__slots__} | {"id": 1, "revision": 1})


def test_what_is_not_kept_is_not_found(store: Store) -> None:
    assert store.find(1) is None
    assert store.find("guest") is None
    assert store.find(10**30) is None


def test_a_batch_is_one_change(store: Store) -> None:
    assert store.revision() == 0
    kept = store.add([rule(f"10.0.0.{n}") for n in range(10)], "test", NOW)
    assert [r.id for r in kept] == list(range(1, 11))
    assert {r.revision for r in kept} == {store.revision()} == {1}
    assert keep(store, "10.0.1.1").revision == store.revision() == 2


def test_an_empty_batch_is_no_change(store: Store) -> None:
    assert store.add([], "test", NOW) == []
    assert store.revision() == 0


def test_replace_puts_another_rule_in_the_place(store: Store) -> None:
    old = keep(store, name="a", labels={"k": "v"}, hosts=["gw1"])
    new = rule("10.9.0.0/16", per="target", rate="1 Mbit/s", labels={"l": "w"}, hosts=["gw2"])
    kept = store.replace(old.id, new, "test", LATER)
    assert kept == store.find(old.id)
    assert (kept.created_at, kept.updated_at) == (NOW, LATER)
    assert (kept.rule.id, kept.rule.revision) == (1, 2)
    assert kept.rule.target == new.target
    assert store.find("a") is None
    assert store.select(labels={"k": "v"}) == ([], 0)
    assert store.select(labels={"l": "w"}) == ([kept], 1)
    assert [list(store.load(host)[1]) for host in ("gw1", "gw2")] == [[], [kept.rule]]


def test_replacing_a_rule_with_itself_is_no_change(store: Store) -> None:
    kept = store.add([everything()], "test", NOW)[0]
    assert store.replace(kept.id, everything(), "test", LATER) == Kept(kept, NOW, NOW)
    assert store.revision() == 1
    assert len(store.audit()) == 1


def test_a_removed_rule_is_gone_with_its_labels_and_its_id_is_not_used_again(store: Store) -> None:
    kept = keep(store, labels={"k": "v"}, hosts=["gw1"])
    store.remove(kept.id, "test", NOW)
    assert store.find(kept.id) is None
    assert store.select(labels={"k": "v"}) == ([], 0)
    assert store.revision() == 2
    assert keep(store).id == kept.id + 1


@pytest.mark.parametrize("action", ["replace", "remove"])
def test_a_rule_that_is_not_kept_cannot_be_changed(store: Store, action: str) -> None:
    with pytest.raises(NotKept, match="There is no rule 7") as caught:
        change(store, action, 7, None)
    assert caught.value.rule_id == 7
    assert store.revision() == 0


@pytest.mark.parametrize("action", ["replace", "remove"])
def test_a_change_on_what_has_changed_meanwhile_is_refused(store: Store, action: str) -> None:
    kept = keep(store)
    store.replace(kept.id, rule(rate="5 packets/s"), "test", NOW)
    with pytest.raises(Stale, match="is at revision 2, not 1") as caught:
        change(store, action, kept.id, kept.revision)
    assert caught.value.revision == 2
    assert store.revision() == 2
    change(store, action, kept.id, 2)
    assert store.revision() == 3


def change(store: Store, action: str, rule_id: int, expected: int | None) -> None:
    if action == "replace":
        store.replace(rule_id, rule(rate="7 packets/s"), "test", NOW, expected)
    else:
        store.remove(rule_id, "test", NOW, expected)


def test_pages_follow_each_other_by_id(store: Store) -> None:
    store.add([rule(f"10.0.0.{n}") for n in range(7)], "test", NOW)
    seen, after = [], 0
    while True:
        page, total = store.select(after=after, limit=3)
        assert total == 7
        if not page:
            break
        seen += [kept.rule.id for kept in page]
        after = seen[-1]
    assert seen == [1, 2, 3, 4, 5, 6, 7]
    assert store.select(after=10**30) == ([], 7)


def targets(store: Store, **filters: object) -> list[str]:
    page, total = store.select(**filters)  # type: ignore[arg-type]
    assert total == len(page)
    return [str(kept.rule.target) for kept in page]


def test_rules_around_an_address(store: Store) -> None:
    for target in ("0.0.0.0/0", "10.0.0.0/8", "10.1.0.0/16", "10.1.2.3/32", "10.1.2.0/25", "10.1.2.128/25", "::/0"):
        keep(store, target, per="target" if target.endswith("32") is False else "host")
    for target in ("2001:db8::/32", "2001:db8::1/128", "64:ff9b::a01:203/128"):
        keep(store, target, per="target" if target.endswith("32") else "host")
    around = ["0.0.0.0/0", "10.0.0.0/8", "10.1.0.0/16", "10.1.2.3/32", "10.1.2.0/25"]
    assert targets(store, contains="10.1.2.3") == around
    assert targets(store, contains="10.1.2.0/24") == around[:3]
    assert targets(store, contains="11.0.0.0") == ["0.0.0.0/0"]
    assert targets(store, contains="2001:db8::1") == ["::/0", "2001:db8::/32", "2001:db8::1/128"]
    assert targets(store, contains="64:ff9b::10.1.2.3") == ["::/0", "64:ff9b::a01:203/128"]
    with pytest.raises(RuleError, match="is no address"):
        store.select(contains="router")


def test_rules_of_a_target(store: Store) -> None:
    keep(store, "10.0.0.0/8", per="target")
    keep(store, "10.0.0.0/9", per="target")
    keep(store, "2001:db8::", action="block")
    assert targets(store, target="10.0.0.0/8") == ["10.0.0.0/8"]
    assert targets(store, target="2001:0DB8::0/128") == ["2001:db8::/128"]
    with pytest.raises(RuleError, match="host bits"):
        store.select(target="10.0.0.1/8")


def test_rules_with_labels_and_actions(store: Store) -> None:
    keep(store, "10.0.0.1", labels={"a": "1", "b": "2"})
    keep(store, "10.0.0.2", labels={"a": "1"})
    keep(store, "10.0.0.3", labels={"a": "12"}, action="block")
    keep(store, "10.0.0.4", labels={"A": "1", "b": "%"})
    assert targets(store, labels={"a": "1"}) == ["10.0.0.1/32", "10.0.0.2/32"]
    assert targets(store, labels={"a": "1", "b": "2"}) == ["10.0.0.1/32"]
    assert targets(store, labels={"a": "1", "b": "3"}) == []
    assert targets(store, action="block") == ["10.0.0.3/32"]
    assert targets(store, action="block", contains="10.0.0.3", labels={"a": "12"}) == ["10.0.0.3/32"]


def test_no_question_reads_the_whole_table(sqlite_store: Store) -> None:
    statements: list[tuple[str, Any]] = []
    engine = sqlite_store._database.engine

    def note(_connection: object, _cursor: object, statement: str, parameters: Any, *_: object) -> None:
        if statement.startswith("SELECT"):
            statements.append((statement, parameters))

    event.listen(engine, "before_cursor_execute", note)
    sqlite_store.select(contains="2001:db8::1", after=5)
    sqlite_store.select(target="10.0.0.0/8", after=5)
    sqlite_store.select(labels={"k": "v"}, after=5)
    sqlite_store.find("name")
    sqlite_store.changes(0, "gw1")
    keep(sqlite_store)
    event.remove(engine, "before_cursor_execute", note)
    assert len(statements) > 10
    with engine.connect() as connection:
        for statement, parameters in statements:
            plan = connection.exec_driver_sql("EXPLAIN QUERY PLAN " + statement, parameters)
            assert not [line for line in details(plan) if line.startswith("SCAN") and "rules" in line], statement


def details(plan: Iterable[Any]) -> list[str]:
    return [str(row[3]) for row in plan]


def test_rules_are_found_by_ids_and_names_together(store: Store) -> None:
    one, two = store.add([replace(rule("10.0.0.1"), name="one"), rule("10.0.0.2")], "test", NOW)
    found = store.find_some(["2", "one", "1", "002", "nobody", "99", "9" * 18])
    assert {key: kept.rule for key, kept in found.items()} == {"2": two, "one": one, "1": one, "002": two}
    assert list(found) == ["2", "one", "1", "002"]
    assert store.find_some([]) == {}
    assert len(store.find_some([*map(str, range(3000)), "one"])) == 3
