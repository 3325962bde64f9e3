"""Revisions: what was there, what has changed since, and going back."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select

from netlimit.errors import NetlimitError
from netlimit.records import LIMITER, Actor, Changes, Counts, Exceptional, HostStatus, Revision, RuleCounters, State
from netlimit.rules import Rule
from netlimit.store import Kept, NoRoom, NoSuchRevision, Store, history
from netlimit.store.tables import undo
from tests.store.examples import NOW, keep, rule

LATER = NOW + timedelta(hours=1)
RICH: dict[str, object] = {
    "target": "2001:db8::/48",
    "name": "rich",
    "direction": "to",
    "protocol": "tcp",
    "ports": [80, "8000-8100"],
    "source_ports": [53],
    "interface": "eth0",
    "rate": "20 connections/s",
    "burst": 40,
    "per": "/64",
    "action": "reject",
    "on_failure": "open",
    "enabled": False,
    "expires_at": "2031-01-02T03:04:05.678901Z",
    "hosts": ["gw1", "gw2"],
    "labels": {"site": "office", "owner": "ä \\ö"},
    "comment": 'A "comment" \\n',
}


def every(store: Store) -> list[Kept]:
    return store.select(limit=1000)[0]


def told(kept: list[Kept]) -> list[tuple[Rule, object]]:
    """The rules, whatever the revision that they bear."""
    return [(replace(each.rule, revision=0), each.created_at) for each in kept]


def test_every_field_of_a_rule_comes_back(store: Store) -> None:
    (added,) = store.add([rule(**RICH)], "test", NOW)
    store.replace(added.id, rule("10.0.0.9", name="poor"), "test", LATER)
    store.remove(added.id, "test", LATER)
    assert store.rules_at(1) == [Kept(added, NOW, NOW)]
    assert store.rollback(1, "test", LATER) == 4
    assert every(store) == [Kept(replace(added, revision=4), NOW, LATER)]
    assert store.select(labels={"site": "office"})[1] == 1
    assert [each.id for each in store.load("gw2")[1]] == [added.id]
    assert list(store.load("gw3")[1]) == []
    assert store.find("rich") is not None
    assert store.find("poor") is None


def test_rules_that_exchanged_their_names_get_them_back(store: Store) -> None:
    one, two = keep(store, "10.0.0.1", name="one"), keep(store, "10.0.0.2", name="two")
    for rule_id, target, name in ((1, "10.0.0.1", "free"), (2, "10.0.0.2", "one"), (1, "10.0.0.1", "two")):
        store.replace(rule_id, rule(target, name=name), "test", NOW)
    store.rollback(2, "test", NOW)
    assert told(every(store)) == told([Kept(one, NOW, NOW), Kept(two, NOW, NOW)])


def test_a_rollback_can_be_undone_and_done_again(store: Store) -> None:
    store.add([rule(f"10.0.0.{n}") for n in range(1, 6)], "test", NOW)
    store.remove(3, "test", NOW)
    before = told(every(store))
    assert store.rollback(0, "test", NOW) == 3
    assert every(store) == []
    assert store.rollback(2, "test", NOW) == 4
    assert told(every(store)) == before
    assert store.rollback(1, "test", NOW) == 5
    assert [each.rule.id for each in every(store)] == [1, 2, 3, 4, 5]
    store.remove(3, "test", NOW)
    assert told(every(store)) == before
    assert store.add([rule("10.0.0.9")], "test", NOW)[0].id == 6


def test_a_return_to_what_is_there_changes_nothing(store: Store) -> None:
    kept = keep(store)
    assert store.rollback(1, "test", NOW) == 1
    store.replace(1, rule(rate="5 packets/s"), "test", NOW)
    store.replace(1, replace(kept, id=None, revision=None), "test", NOW)
    assert store.rollback(1, "test", NOW) == 3
    assert (store.revision(), len(store.audit())) == (3, 3)


def test_controllers_hear_what_comes_back_and_what_goes(store: Store) -> None:
    one, two, three = (keep(store, f"10.0.0.{n}") for n in (1, 2, 3))
    store.remove(one.id, "test", NOW)
    store.replace(two.id, rule("10.0.0.2", rate="5 packets/s"), "test", NOW)
    seen = store.revision()
    store.rollback(2, "test", NOW)
    restored = tuple(replace(each, revision=6) for each in (one, two))
    changes = store.changes(seen, "gw1")
    assert changes is not None
    assert changes == Changes(6, tuple(sorted(changes.rules, key=lambda each: each.id or 0)), (three.id,))
    assert {each.id: each for each in changes.rules} == {each.id: each for each in restored}


def test_what_gateways_said_of_a_rule_goes_with_it(store: Store) -> None:
    keep(store)
    store.mark("gw1", [Exceptional(1, State.ERROR, "no")], [])
    store.count("gw1", [RuleCounters(1, Counts(1), Counts(1), NOW, NOW)])
    store.rollback(0, "test", NOW)
    store.rollback(1, "test", NOW)
    assert (store.marked("gw1"), store.counters(1)) == ({}, {})


@pytest.mark.parametrize(("revision", "sentence"), [(3, "no revision 3 yet; the newest is 2"), (-1, "oldest .* is 0")])
def test_a_revision_that_is_not_known_is_refused(store: Store, revision: int, sentence: str) -> None:
    keep(store)
    keep(store, "10.0.0.2")
    for ask in (
        lambda: store.rollback(revision, "test", NOW),
        lambda: store.rules_at(revision),
        lambda: store.difference(revision, 1),
        lambda: store.difference(1, revision),
        lambda: store.find_revision(revision),
    ):
        with pytest.raises(NoSuchRevision, match=sentence):
            ask()


def test_a_revision_tells_who_made_it(store: Store) -> None:
    actor = Actor("admin", "192.0.2.1", "request-7")
    store.add([rule(f"10.0.0.{n}") for n in (1, 2)], actor, NOW)
    store.replace(1, rule(rate="5 packets/s"), "cli", NOW)
    store.remove(2, "cli", NOW)
    store.rollback(1, "cli", LATER)
    wanted = [
        Revision(4, LATER, "cli", None, None, "rollback", 2, 1),
        Revision(3, NOW, "cli", None, None, "remove", 1, None),
        Revision(2, NOW, "cli", None, None, "replace", 1, None),
        Revision(1, NOW, "admin", "192.0.2.1", "request-7", "add", 2, None),
    ]
    assert store.revisions() == wanted
    assert store.revisions(limit=2, before=4) == wanted[1:3]
    assert store.find_revision(4) == wanted[0]
    actions = [(entry.action, entry.rule_id) for entry in reversed(store.audit(limit=3))]
    assert actions == [("rollback", None), ("replace", 1), ("add", 2)]
    assert store.audit()[2].after == {"revision": 1, "rules": 2}


def test_only_the_newest_are_kept(url: str, store: Store) -> None:
    short = Store(url, revisions=3)
    for n in range(1, 7):
        keep(short, f"10.0.0.{n}")
    short.close()
    assert [each.revision for each in store.revisions()] == [6, 5, 4]
    with pytest.raises(NoSuchRevision, match=r"Revision 2 is not known any more; the oldest .* is 3"):
        store.rollback(2, "test", NOW)
    with pytest.raises(NoSuchRevision, match="Who made revision 3 is not known"):
        store.find_revision(3)
    store.rollback(3, "test", NOW)
    assert [each.rule.id for each in every(store)] == [1, 2, 3]


def test_what_is_kept_is_bounded_by_its_size_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Revision 1 takes nothing, for nothing was there; each of the others what a rule of 1,500 bytes does."""
    keep(store, comment="x" * 1000)
    with monkeypatch.context() as patched:
        patched.setattr(history, "MOST_BYTES", 4000)
        for _ in range(4):
            kept = store.select()[0][0].rule
            store.replace(kept.id, replace(kept, enabled=not kept.enabled), "test", NOW)
        assert [each.revision for each in store.revisions()] == [5, 4]
        with pytest.raises(NoSuchRevision, match=r"the oldest that can be returned to is 3"):
            store.rollback(2, "test", NOW)
        store.rollback(4, "test", NOW)
        patched.setattr(history, "MOST_BYTES", 100)
        store.rollback(5, "test", NOW)
    assert [each.revision for each in store.revisions()] == [7]
    store.rollback(6, "test", NOW)
    assert not every(store)[0].rule.enabled


def test_what_an_open_window_keeps_is_bounded_but_for_admins(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    token = store.add_token("ci", "digest", "operator", NOW)
    operator, admin = Actor("ci", token=token.id, role="operator"), Actor("root")
    keep(store, comment="x" * 1000)
    monkeypatch.setattr(history, "MOST_BYTES", 4000)
    store.open_window(600, operator, NOW)
    for n in range(5):
        store.replace(1, rule(comment=f"{n}" * 1000), operator, NOW)
    with pytest.raises(NoRoom, match="Confirm or end the window first"):
        store.rollback(1, operator, NOW)
    kept = every(store)
    with pytest.raises(NoRoom):
        store.replace(1, rule(comment="y" * 1000), operator, NOW)
    assert every(store) == kept
    store.replace(1, rule(comment="z" * 1000), admin, NOW)
    store.add([rule("10.0.0.10", action="block")], LIMITER, NOW)
    store.confirm(operator, NOW)
    store.add([rule("10.0.0.9")], operator, NOW)
    assert len(store.revisions()) <= 5, "what is too much has been forgotten"


def test_an_open_window_keeps_what_it_needs(url: str) -> None:
    short = Store(url, revisions=2)
    keep(short)
    window = short.open_window(60, "test", NOW)
    for n in range(2, 8):
        keep(short, f"10.0.0.{n}")
    assert short.expire(window, "guard", NOW) is not None
    assert [each.rule.id for each in every(short)] == [1]
    keep(short, "10.0.0.9")
    assert [each.revision for each in short.revisions()] == [9, 8]
    short.close()


def test_a_large_batch_is_one_row_and_comes_back_whole(store: Store) -> None:
    store.add([rule(f"10.{n >> 8}.{n & 255}.1", name=f"r{n}") for n in range(3000)], "test", NOW)
    before = told(store.rules_at(1))
    store.rollback(0, "test", NOW)
    assert store.revision() == 2
    assert store.rollback(1, "test", NOW) == 3
    assert told(store.rules_at(3)) == before
    assert len(before) == 3000
    assert store.difference(1, 3) == []
    assert {each.kind for each in store.difference(3, 2)} == {"removed"}


def test_tombstones_go_when_all_have_heard(store: Store) -> None:
    keep(store)
    store.report(HostStatus("gw1", "iptables", applied_revision=1), NOW)
    store.rollback(0, "test", NOW)
    assert store.changes(1, "gw1") == Changes(2, (), (1,))
    store.rollback(1, "test", NOW)
    store.remove(1, "test", NOW)
    assert store.changes(3, "gw1") == Changes(4, (), (1,))


Histories = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "bulk", "replace", "replace", "remove", "rollback"]),
        st.integers(0, 7),
        st.sampled_from(["1 packets/s", "2 packets/s"]),
        st.sampled_from([None, None, "a", "b"]),
        st.sampled_from([[], ["gw1"]]),
    ),
    max_size=12,
)


@pytest.fixture
def fresh(url: str, store: Store) -> Callable[[], Store]:
    """Empties the database: making one for every example would take too long."""

    def empty() -> Store:
        for kept in every(store):
            store.remove(kept.rule.id or 0, "test", NOW)
        return store

    return empty


@settings(max_examples=60, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=Histories, data=st.data())
def test_any_revision_comes_back_exactly(
    fresh: Callable[[], Store], history: list[tuple[object, ...]], data: st.DataObject
) -> None:
    store = fresh()
    models = {store.revision(): told(every(store))}
    for step in history:
        act(store, step, min(models))
        models[store.revision()] = told(every(store))
    known = sorted(models)
    for revision in known:
        assert told(store.rules_at(revision)) == models[revision]
    one, other = data.draw(st.sampled_from(known)), data.draw(st.sampled_from(known))
    assert patched(models[one], store, one, other) == models[other]
    store.rollback(one, "test", NOW)
    assert told(every(store)) == models[one]
    assert (
        told(sorted((Kept(each, NOW, NOW) for each in store.load("gw1")[1]), key=lambda kept: kept.rule.id or 0))
        == (models[one])
    )


def act(store: Store, step: tuple[object, ...], oldest: int) -> None:
    """One change of a random history; those that the store refuses are no change."""
    kind, number, rate, name, hosts = step
    assert isinstance(number, int)
    kept = every(store)
    wanted = rule(f"10.0.0.{number}", rate=rate, name=name, hosts=hosts)
    try:
        if kind == "add":
            store.add([wanted], "test", NOW)
        elif kind == "bulk":
            store.add([rule(f"10.0.1.{number + n}") for n in range(3)], "test", NOW)
        elif kind == "rollback":
            store.rollback(max(oldest, store.revision() - number), "test", NOW)
        elif kept:
            chosen = kept[number % len(kept)].rule.id or 0
            store.replace(chosen, wanted, "test", NOW) if kind == "replace" else store.remove(chosen, "test", NOW)
    except NetlimitError:
        pass


def patched(rules: list[tuple[Rule, object]], store: Store, one: int, other: int) -> list[tuple[Rule, object]]:
    """The rules of one revision, with its difference to the other put in."""
    found = {each.id: (each, created) for each, created in rules}
    for difference in store.difference(one, other):
        before = found.pop(difference.rule_id, None)
        assert (before and before[0]) == (difference.before and replace(difference.before, revision=0))
        if difference.after:
            found[difference.rule_id] = (replace(difference.after, revision=0), NOW)
    return [found[rule_id] for rule_id in sorted(found, key=lambda each: each or 0)]


def test_a_comparison_comes_in_pages_and_tells_of_all(store: Store) -> None:
    keep(store)
    store.add([rule(f"10.0.1.{n}") for n in range(7)], "test", NOW)
    for n in (3, 5):
        store.remove(n, "test", NOW)
    store.replace(4, rule("10.0.1.2", name="other"), "test", NOW)
    newest = store.revision()
    for one, other in ((1, newest), (newest, 1), (2, newest), (newest, 2), (0, newest), (newest, newest)):
        found = store.difference(one, other)
        pages = [store.compare(one, other, 2)]
        while pages[-1].more:
            pages.append(store.compare(one, other, 2, pages[-1].page[-1].rule_id))
        assert [each for page in pages for each in page.page] == found
        assert {len(page.page) for page in pages[:-1]} <= {2}
        for page in pages:
            assert {kind: getattr(page, kind) for kind in ("added", "removed", "changed")} == {
                kind: sum(each.kind == kind for each in found) for kind in ("added", "removed", "changed")
            }
    with pytest.raises(NoSuchRevision):
        store.compare(1, newest + 1, 2)


def test_a_page_of_a_comparison_takes_what_a_page_takes(sqlite_store: Store) -> None:
    for start in range(0, 10_000, 1000):
        sqlite_store.add([rule(f"10.0.{n >> 8}.{n & 255}", comment="x" * 500) for n in range(start, start + 1000)],
                         "test", NOW)  # fmt: skip
    sqlite_store.rollback(0, "test", NOW)
    tracemalloc.start()
    try:
        assert sqlite_store.compare(0, 10, 5).added == 10_000
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert taken < 10 * 2**20  # ten thousand rules with all that is said of them take thirty


STEPS = ("keep", "drop", "rollback", "block", "block", "prolong", "unblock")
BLOCKED: dict[str, object] = {
    "action": "block",
    "rate": None,
    "labels": {"blocked-by": "limiter"},
    "expires_at": LATER.isoformat(),
}


def block(store: Store, number: int) -> int:
    """The limiter blocks somebody for an hour."""
    (kept,) = store.add([rule(f"198.51.{number >> 8}.{number & 255}", **BLOCKED)], LIMITER, NOW)
    assert kept.id is not None
    return kept.id


def unblock(store: Store, rule_id: int) -> None:
    """The limiter removes a block that is over."""
    store.remove(rule_id, LIMITER, LATER)


def prolong(store: Store, rule_id: int) -> None:
    store.change(
        rule_id, lambda before: replace(before, expires_at=before.expires_at + timedelta(hours=1)), LIMITER, NOW
    )


def count_undone(store: Store) -> int:
    with store._database.reading() as connection:
        return connection.execute(select(func.count()).select_from(undo)).scalar_one()


def test_what_the_limiter_blocks_pushes_no_operator_out(url: str) -> None:
    store = Store(url, revisions=3)
    keep(store, "10.0.0.1")
    keep(store, "10.0.0.2")
    operators = [1, 2]
    for number in range(20):
        unblock(store, block(store, number))
    assert [each.revision for each in store.revisions() if each.actor != "limiter"] == operators[::-1]
    assert len(store.revisions()) == 2 + 3, "of its own it has as many"
    assert [each.rule.id for each in store.rules_at(1)] == [1]
    store.rollback(1, "test", NOW)
    assert [each.rule.id for each in every(store)] == [1]
    store.close()


def test_of_blocks_that_are_over_and_forgotten_nothing_stays(url: str) -> None:
    store = Store(url, revisions=3)
    keep(store, "10.0.0.1")
    standing = [block(store, 1000 + number) for number in range(5)]
    for number in range(30):
        rule_id = block(store, number)
        prolong(store, rule_id)
        prolong(store, standing[number % 5])
        unblock(store, rule_id)
    assert count_undone(store) <= 1 + len(standing) + 2 * 3, "those that stand, and the last ones"
    assert [each.rule.id for each in store.rules_at(1)] == [1], "whoever goes back takes away what stands"
    assert [each.rule.id for each in store.rules_at(0)] == []
    store.rollback(1, "test", NOW)
    assert [each.rule.id for each in every(store)] == [1]
    store.close()


def test_operators_push_each_other_out_whatever_the_limiter_does(url: str) -> None:
    store = Store(url, revisions=3)
    for number in range(1, 7):
        keep(store, f"10.0.0.{number}")
        block(store, number)
    kept = [each.revision for each in store.revisions() if each.actor != "limiter"]
    assert kept == [11, 9, 7]
    with pytest.raises(NoSuchRevision, match=r"the oldest .* is 5"):
        store.rollback(4, "test", NOW)
    store.rollback(5, "test", NOW)
    assert [each.rule.target.network_address.exploded for each in every(store)][::2] == [
        "10.0.0.1", "10.0.0.2", "10.0.0.3"
    ]  # fmt: skip
    store.close()


def test_a_block_that_an_operator_has_made_his_own_comes_back_as_it_was(url: str) -> None:
    store = Store(url, revisions=2)
    rule_id = block(store, 0)
    store.change(rule_id, lambda before: replace(before, expires_at=None, name="kept"), "test", NOW)
    owned = store.revision()
    for number in range(1, 10):
        unblock(store, block(store, number))
    store.remove(rule_id, "test", NOW)
    for number in range(10, 20):
        unblock(store, block(store, number))
    assert [each.rule.name for each in store.rules_at(owned)] == ["kept"]
    assert [each.rule.id for each in store.rules_at(owned - 1)] == [rule_id]
    store.close()


def test_an_open_window_keeps_what_the_limiter_has_changed_since(url: str) -> None:
    store = Store(url, revisions=2)
    keep(store)
    over = block(store, 0)
    window = store.open_window(60, "test", NOW)
    unblock(store, over)
    for number in range(1, 8):
        block(store, number)
    assert store.expire(window, "guard", NOW) is not None
    assert [each.rule.id for each in every(store)] == [1, over]
    store.close()


@settings(max_examples=12, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["keep", "drop", "rollback", "block", "block", "prolong", "unblock"]), st.integers(0, 9)
        ),
        max_size=20,
    )
)
def test_whatever_the_limiter_does_operators_rules_come_back_exactly(
    brief: Callable[[], Store], steps: list[tuple[str, int]]
) -> None:
    """Of the limiter's blocks, those that stand in between and afterwards, too."""
    store = brief()
    models, over = {store.revision(): (told(every(store)), ids(store))}, set()
    for step, number in steps:
        known = [each.revision for each in store.revisions() if each.actor != "limiter"]
        over.add(act_beside(store, step, number, known))
        models[store.revision()] = (told(every(store)), ids(store))
    known = [each.revision for each in store.revisions() if each.actor != "limiter"]
    for revision in filter(models.__contains__, known):
        wanted, there = models[revision]
        found = store.rules_at(revision)
        assert [each for each in told(found) if not is_block(each)] == [each for each in wanted if not is_block(each)]
        assert {each.rule.id for each in found} <= there, "nothing is there that was not"
        assert (there & ids(store)) - over <= {each.rule.id for each in found}, "nor is what stands yet forgotten"


def ids(store: Store) -> set[int | None]:
    return {each.rule.id for each in every(store)}


def is_block(told: object) -> bool:
    return "blocked-by" in str(told)


def act_beside(store: Store, step: str, number: int, known: list[int]) -> int:
    """The block that is over by that, or 0."""
    kept = every(store)
    blocks = [each.rule.id or 0 for each in kept if is_block(each.rule.labels)]
    others = [each.rule.id or 0 for each in kept if not is_block(each.rule.labels)]
    if step == "keep":
        keep(store, f"10.0.{store.revision() >> 8}.{store.revision() & 255}")
    elif step == "drop" and others:
        store.remove(others[number % len(others)], "test", NOW)
    elif step == "rollback" and known:
        store.rollback(known[number % len(known)], "test", NOW)
    elif step == "block":
        block(store, store.revision())
    elif step == "prolong" and blocks:
        prolong(store, blocks[number % len(blocks)])
    elif step == "unblock" and blocks:
        unblock(store, blocks[number % len(blocks)])
        return blocks[number % len(blocks)]
    return 0


@pytest.fixture
def brief(url: str) -> Iterator[Callable[[], Store]]:
    store = Store(url, revisions=4)

    def empty() -> Store:
        for kept in every(store):
            store.remove(kept.rule.id or 0, "test", NOW)
        return store

    yield empty
    store.close()
