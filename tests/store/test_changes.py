from __future__ import annotations

from datetime import timedelta
from itertools import islice

import pytest

from netlimit.records import Changes, Exceptional, HostStatus, State
from netlimit.rules import Rule
from netlimit.store import Store
from tests.store.examples import NOW, keep, rule


def load(store: Store, host: str = "gw1") -> tuple[int, list[Rule]]:
    revision, rules = store.load(host)
    return revision, sorted(rules, key=lambda kept: kept.id)


def test_a_gateway_loads_the_rules_that_concern_it(store: Store) -> None:
    everywhere = keep(store, "10.0.0.1")
    here = keep(store, "10.0.0.2", hosts=["gw1", "gw2"])
    keep(store, "10.0.0.3", hosts=["gw2"])
    keep(store, "10.0.0.4", hosts=["gw11", "GW1"])
    asleep = keep(store, "10.0.0.5", enabled=False)
    expired = keep(store, "10.0.0.6", expires_at=NOW - timedelta(days=1))
    assert load(store) == (6, [everywhere, here, asleep, expired])


def test_nothing_is_kept_and_nothing_loaded(store: Store) -> None:
    assert load(store) == (0, [])
    assert store.changes(0, "gw1") == Changes(0, (), ())


def test_what_is_loaded_is_one_moment(store: Store) -> None:
    """The revision and all rules belong together, whatever happens while the rules are read."""
    first = store.add([rule(f"10.{n >> 8}.{n & 255}.1") for n in range(5000)], "test", NOW)
    revision, rules = store.load("gw1")
    read = list(islice(rules, 10))
    store.remove(first[-1].id, "test", NOW)
    store.replace(first[-2].id, rule("10.200.0.1", rate="1 packets/s"), "test", NOW)
    keep(store, "10.201.0.1")
    read += rules
    assert revision == 1
    assert sorted(read, key=lambda kept: kept.id) == first


def test_a_loading_that_is_given_up_holds_nothing(store: Store) -> None:
    store.add([rule(f"10.0.{n >> 8}.{n & 255}") for n in range(5000)], "test", NOW)
    pool = store._database.engine.pool
    for _ in range(100):
        _, rules = store.load("gw1")
        next(rules)
        del rules
    assert pool.checkedout() == 0  # type: ignore[attr-defined]


def test_changes_after_a_revision(store: Store) -> None:
    one, two, three = (keep(store, f"10.0.0.{n}") for n in (1, 2, 3))
    changed = store.replace(one.id, rule("10.0.0.1", rate="5 packets/s"), "test", NOW).rule
    store.remove(two.id, "test", NOW)
    added = keep(store, "10.0.0.4")
    assert store.changes(3, "gw1") == Changes(6, (changed, added), (two.id,))
    assert store.changes(4, "gw1") == Changes(6, (added,), (two.id,))
    assert store.changes(6, "gw1") == Changes(6, (), ())
    everything = store.changes(0, "gw1")
    assert everything is not None
    assert set(everything.rules) == {changed, three, added}


def test_a_rule_that_moves_to_another_gateway_is_removed_here(store: Store) -> None:
    moving = keep(store, hosts=["gw1"])
    moved = store.replace(moving.id, rule(hosts=["gw2"]), "test", NOW).rule
    assert store.changes(1, "gw1") == Changes(2, (), (moving.id,))
    assert store.changes(1, "gw2") == Changes(2, (moved,), ())


def test_a_revision_of_the_future_is_not_known(store: Store) -> None:
    keep(store)
    assert store.changes(2, "gw1") is None


def remove_three(store: Store) -> None:
    """Revisions 1 to 3 add, 4 to 6 remove."""
    for kept in [keep(store, f"10.0.0.{n}") for n in (1, 2, 3)]:
        store.remove(kept.id, "test", NOW)


def test_tombstones_stay_as_long_as_no_gateway_was_seen(store: Store) -> None:
    remove_three(store)
    assert store.changes(3, "gw1") == Changes(6, (), (1, 2, 3))


def test_tombstones_go_when_every_gateway_has_heard(store: Store) -> None:
    remove_three(store)
    store.report(HostStatus("gw1", "fake", applied_revision=6), NOW)
    store.report(HostStatus("gw2", "fake", applied_revision=4), NOW)
    store.remove(keep(store).id, "test", NOW)
    assert store.changes(3, "gw1") is None
    assert store.changes(4, "gw1") == Changes(8, (), (2, 3, 4))


def test_a_gateway_that_was_not_seen_for_a_day_is_not_waited_for(store: Store) -> None:
    remove_three(store)
    store.report(HostStatus("gw1", "fake", applied_revision=6), NOW)
    store.report(HostStatus("gw2", "fake", applied_revision=1), NOW - timedelta(hours=25))
    store.remove(keep(store).id, "test", NOW)
    assert store.changes(1, "gw2") is None
    assert store.changes(6, "gw1") == Changes(8, (), (4,))


def test_a_gateway_that_has_only_begun_keeps_all_tombstones(store: Store) -> None:
    store.report(HostStatus("gw1", "fake", applied_revision=0), NOW)
    remove_three(store)
    assert store.changes(3, "gw1") == Changes(6, (), (1, 2, 3))


def test_a_paused_gateway_is_not_waited_for(store: Store) -> None:
    """Whoever goes on there reads all rules anew."""
    remove_three(store)
    store.report(HostStatus("gw1", "fake", applied_revision=6), NOW)
    store.report(HostStatus("gw2", "fake", applied_revision=1), NOW)
    store.mark("gw1", [Exceptional(1, State.ERROR, "said before it heard of the removal")], [])
    store.pause("gw2", True)
    store.remove(keep(store).id, "test", NOW)
    assert store.changes(6, "gw1") == Changes(8, (), (4,))
    assert store.changes(1, "gw2") is None
    assert store.marked("gw1") == {}
    store.pause("gw2", False)
    store.remove(keep(store).id, "test", NOW)
    assert store.changes(6, "gw1") == Changes(10, (), (4, 5)), "who has only begun keeps them"


def test_where_all_gateways_are_paused_no_tombstones_gather(store: Store) -> None:
    store.report(HostStatus("gw1", "fake", applied_revision=1), NOW)
    store.pause("gw1", True)
    remove_three(store)
    assert store.changes(5, "gw1") is None
    assert store.changes(6, "gw1") == Changes(6, (), ())


@pytest.mark.parametrize("seen", [True, False])
def test_following_the_changes_gives_the_same_as_loading(store: Store, seen: bool) -> None:
    """A model gateway that lives on changes alone, now and then told to load, never differs from the database."""
    mine: dict[int, Rule] = {}
    at = 0
    for step in range(60):
        act(store, step)
        if step % 3 == 0:
            changes = store.changes(at, "gw1")
            if changes is None:
                at, fresh = load(store)
                mine = {kept.id: kept for kept in fresh}
            else:
                at = changes.revision
                mine |= {kept.id: kept for kept in changes.rules}
                for number in changes.removed:
                    mine.pop(number, None)
            assert (at, sorted(mine.values(), key=lambda kept: kept.id)) == load(store)
            if seen:
                store.report(HostStatus("gw1", "fake", applied_revision=at), NOW)


def act(store: Store, step: int) -> None:
    """One change, decided by the number of the step."""
    kept, _ = store.select(limit=1000)
    if step % 5 == 4 and kept:
        store.remove(kept[step % len(kept)].rule.id, "test", NOW)
    elif step % 5 == 3 and kept:
        hosts = ["gw1"] if step % 2 else ["gw2"]
        store.replace(kept[step % len(kept)].rule.id, rule(f"10.1.0.{step}", hosts=hosts), "test", NOW)
    else:
        keep(store, f"10.0.0.{step}", hosts=[[], ["gw1"], ["gw2"]][step % 3])
