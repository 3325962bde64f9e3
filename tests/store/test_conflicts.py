from __future__ import annotations

from datetime import timedelta

import pytest

from netlimit.store import Conflict, ManyErrors, NameTaken, Store
from tests.store.examples import NOW, keep, rule


def test_the_same_traffic_is_not_limited_twice(store: Store) -> None:
    keep(store, name="guest-wifi")
    with pytest.raises(Conflict, match=r"is limited already by rule 1 \(guest-wifi\)") as caught:
        keep(store, rate="5 packets/s")
    assert (caught.value.rule_id, caught.value.name) == (1, "guest-wifi")
    assert not isinstance(caught.value, NameTaken)
    assert store.revision() == 1
    assert store.select()[1] == 1


@pytest.mark.parametrize(
    "other",
    [
        {"direction": "to"},
        {"protocol": "udp"},
        {"interface": "eth0"},
        {"rate": "1 Mbit/s"},
        {"per": "peer"},
        {"action": "observe"},
        {"action": "block"},
        {"enabled": False},
        {"expires_at": NOW},
        {"hosts": ["gw9"]},
        {"target": "10.0.0.0/31", "per": "host"},
    ],
)
def test_another_limit_is_no_conflict(store: Store, other: dict[str, object]) -> None:
    keep(store, hosts=["gw1", "gw2"])
    keep(store, **{"hosts": ["gw1"]} | other)  # type: ignore[arg-type]
    assert store.select()[1] == 2


@pytest.mark.parametrize(
    ("mine", "theirs", "clash"),
    [
        ([], [], True),
        ([], ["gw1"], True),
        (["gw1"], [], True),
        (["gw1", "gw2"], ["gw2", "gw3"], True),
        (["gw1"], ["gw2"], False),
        (["gw1"], ["gw10"], False),
    ],
)
@pytest.mark.parametrize("together", [True, False])
def test_rules_clash_only_on_gateways_that_they_share(
    store: Store, mine: list[str], theirs: list[str], clash: bool, together: bool
) -> None:
    batch = [rule(hosts=mine), rule(hosts=theirs)]
    batches = [batch] if together else [batch[:1], batch[1:]]
    try:
        for part in batches:
            store.add(part, "test", NOW)
        clashed = False
    except (Conflict, ManyErrors):
        clashed = True
    assert clashed is clash


def test_the_clash_that_counts_may_be_behind_one_that_does_not(store: Store) -> None:
    keep(store, hosts=["gw1"], name="one")
    keep(store, hosts=["gw2"], name="two")
    with pytest.raises(Conflict, match=r"rule 2 \(two\)"):
        keep(store, hosts=["gw2", "gw3"])


def test_an_expired_rule_makes_room(store: Store) -> None:
    keep(store, expires_at=NOW + timedelta(seconds=1))
    with pytest.raises(Conflict):
        store.add([rule()], "test", NOW)
    store.add([rule()], "test", NOW + timedelta(seconds=1))


def test_enabling_a_rule_is_asked_for_conflicts_too(store: Store) -> None:
    keep(store, name="first")
    asleep = keep(store, enabled=False)
    with pytest.raises(Conflict, match=r"rule 1 \(first\)"):
        store.replace(asleep.id, rule(), "test", NOW)
    kept = store.find(asleep.id)
    assert kept is not None
    assert kept.rule == asleep


def test_replacing_a_rule_is_no_conflict_with_itself(store: Store) -> None:
    kept = keep(store, name="one")
    assert store.replace(kept.id, rule(name="one", rate="5 packets/s"), "test", NOW).rule.revision == 2


def test_a_name_is_given_once_even_to_disabled_rules(store: Store) -> None:
    keep(store, "10.0.0.1", name="guest", enabled=False)
    with pytest.raises(NameTaken, match="'guest' belongs to rule 1 already") as caught:
        keep(store, "10.0.0.2", name="guest")
    assert caught.value.rule_id == 1
    other = keep(store, "10.0.0.3", name="other")
    with pytest.raises(NameTaken):
        store.replace(other.id, rule("10.0.0.3", name="guest"), "test", NOW)


def test_every_wrong_rule_of_a_batch_is_told(store: Store) -> None:
    store.add([rule("10.0.0.1"), rule("10.0.0.2", name="taken")], "test", NOW)
    batch = [
        rule("10.0.1.1", name="fine"),
        rule("10.0.0.1"),
        rule("10.0.1.2", name="taken"),
        rule("10.0.1.1"),
        rule("10.0.1.3", name="fine"),
        rule("10.0.0.1", name="taken", hosts=["gw1"]),
        rule("10.0.1.1", enabled=False),
    ]
    with pytest.raises(ManyErrors, match="None of the rules was kept") as caught:
        store.add(batch, "test", NOW)
    told = [(index, type(error), error.rule_id, error.index) for index, error in caught.value.errors]  # type: ignore[attr-defined]
    assert told == [
        (1, Conflict, 1, None),
        (2, NameTaken, 2, None),
        (3, Conflict, None, 0),
        (4, NameTaken, None, 0),
        (5, NameTaken, 2, None),
        (5, Conflict, None, 1),
        (5, Conflict, 1, None),
    ]
    assert store.revision() == 1
    assert store.select()[1] == 2
    assert len(store.audit()) == 2


def test_many_equal_rules_cost_no_more_than_many_different_ones(store: Store) -> None:
    with pytest.raises(ManyErrors) as caught:
        store.add([rule()] * 20000, "test", NOW)
    assert [index for index, _ in caught.value.errors] == list(range(1, 20000))


def test_more_names_than_a_statement_has_room_for(sqlite_store: Store) -> None:
    batch = [rule(f"10.0.{n >> 8}.{n & 255}", name=f"n{n}") for n in range(1200)]
    sqlite_store.add(batch, "test", NOW)
    with pytest.raises(ManyErrors) as caught:
        sqlite_store.add([rule(f"10.1.{n >> 8}.{n & 255}", name=f"n{n}") for n in range(1200)], "test", NOW)
    assert len(caught.value.errors) == 1200


def test_what_would_be_refused_is_known_before(store: Store) -> None:
    kept = keep(store, name="guest-wifi", hosts=["gw1"])
    for fields in ({"rate": "5 packets/s"}, {"name": "guest-wifi", "target": "10.9.0.1"}):
        draft = rule(**fields)
        with pytest.raises(Conflict) as checked:
            store.check(draft, NOW)
        with pytest.raises(Conflict) as added:
            store.add([draft], "test", NOW)
        assert type(checked.value) is type(added.value)
        assert str(checked.value) == str(added.value)
    for fields in ({"hosts": ["gw2"]}, {"enabled": False}, {"expires_at": NOW}, {"direction": "to"}):
        store.check(rule(**fields), NOW)
    store.check(kept, NOW)
    assert store.revision() == kept.revision
