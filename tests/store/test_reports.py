"""What controllers report: status, states of rules, counters, numbers, and the pause that they are told."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from sqlalchemy import func, select, update

from netlimit.records import Counts, Exceptional, HostStatus, Repair, RuleCounters, SafeReason, State
from netlimit.store import Store, repairs
from netlimit.store.tables import hosts, metadata
from netlimit.tree import SavedRoot
from tests.store.examples import NOW, keep, rule

STATUS = HostStatus(
    host="gw1",
    backend="iptables",
    applied_revision=7,
    hz=1000,
    capabilities={"connlimit": None, "nftables": "the module nf_tables is missing"},
    own=("192.0.2.1", "2001:db8::1"),
    local=("192.0.2.255/32", "198.51.100.0/24"),
    safe=("198.51.100.0/24", "203.0.113.7"),
    safe_reasons={"198.51.100.0/24": SafeReason("settings"), "203.0.113.7": SafeReason("SSH session", 1700000000.5)},
    management=(22, 8750),
    notes=("a note",),
    drift=3,
    last_error="The kernel refused it.",
)


def test_a_report_is_kept_with_its_time(store: Store) -> None:
    store.report(STATUS, NOW)
    assert store.hosts() == [replace(STATUS, seen_at=NOW)]


def test_a_report_without_a_time_is_of_now(store: Store) -> None:
    before = datetime.now(UTC)
    store.report(STATUS)
    seen = store.hosts()[0].seen_at
    assert seen is not None
    assert before - timedelta(milliseconds=1) <= seen <= datetime.now(UTC), "SQLite knows no less than that"


def test_a_command_that_reports_in_its_place_is_not_taken_for_the_controller(store: Store) -> None:
    store.report(replace(STATUS, reporter="a run"))
    received = store.report(replace(STATUS, drift=4))
    assert received.before == "a run"
    (status,) = store.hosts()
    assert (status.drift, status.reporter) == (4, "a run")


def test_how_long_ago_a_report_came_is_by_the_clock_of_the_database(store: Store) -> None:
    before = datetime.now(UTC)
    received = store.report(STATUS)
    assert before - timedelta(milliseconds=1) <= received.at <= datetime.now(UTC)
    (status,) = store.hosts()
    assert status.seen_at == received.at
    assert status.silence is not None
    assert timedelta(0) <= status.silence <= datetime.now(UTC) - before
    ahead = datetime.now(UTC) + timedelta(hours=1)
    store.report(STATUS, ahead)
    (status,) = store.hosts()
    assert status.silence is not None
    assert -timedelta(hours=1, seconds=1) < status.silence <= datetime.now(UTC) - ahead


def test_what_the_clock_of_the_database_shows_is_now(store: Store) -> None:
    before = datetime.now(UTC)
    assert before - timedelta(milliseconds=1) <= store.now() <= datetime.now(UTC)


def test_the_next_report_takes_the_place_of_the_last(store: Store) -> None:
    store.report(STATUS, NOW)
    calm = HostStatus(host="gw1", backend="fake", applied_revision=8)
    store.report(calm, NOW + timedelta(seconds=1))
    store.report(HostStatus(host="gw0", backend="fake"), NOW)
    assert [status.host for status in store.hosts()] == ["gw0", "gw1"]
    assert store.hosts()[1] == replace(calm, seen_at=NOW + timedelta(seconds=1))


def test_a_report_ends_no_pause(store: Store) -> None:
    assert not store.paused("gw1")
    store.pause("gw1", True)
    store.pause("gw1", True)
    store.report(replace(STATUS, paused=False), NOW)
    assert store.paused("gw1")
    assert store.hosts()[0].paused
    assert not store.paused("gw2")
    store.pause("gw1", False)
    store.report(replace(STATUS, paused=True), NOW)
    assert not store.paused("gw1")
    assert not store.hosts()[0].paused


def test_what_was_in_force_before_a_teardown_is_not_believed_after_it(store: Store) -> None:
    running = replace(STATUS, desired=3, enforced=2, degraded=1, lifted=1)
    for host in ("gw1", "gw2"):
        store.report(replace(running, host=host), NOW)
    store.pause("gw1", False)  # as every `netlimit apply` does
    assert [in_force(store, host) for host in ("gw1", "gw2")] == [(7, 2, 1, 1)] * 2
    store.pause("gw1", True)
    assert [in_force(store, host) for host in ("gw1", "gw2")] == [(0, 0, 0, 0), (7, 2, 1, 1)]
    store.report(running, NOW)  # who has not heard of it yet
    assert in_force(store, "gw1") == (0, 0, 0, 0)
    say_as_a_former_version(store, "gw1", 7)
    assert in_force(store, "gw1") == (0, 0, 0, 0)
    store.pause("gw1", False)
    assert [in_force(store, host) for host in ("gw1", "gw2")] == [(0, 0, 0, 0), (7, 2, 1, 1)]
    store.report(running, NOW)
    assert in_force(store, "gw1") == (7, 2, 1, 1)


def test_a_window_that_tears_down_again_leaves_nothing_in_force(store: Store) -> None:
    keep(store)
    store.pause("gw1", True)
    store.open_window(60, "root", NOW, paused=["gw1"])
    store.pause("gw1", False)
    store.report(STATUS, NOW)
    store.abandon("root", NOW)
    assert store.paused("gw1")
    store.pause("gw1", False)
    assert in_force(store, "gw1") == (0, 0, 0, 0)


def in_force(store: Store, host: str) -> tuple[int, int, int, int]:
    """What a gateway holds of the rules, as it is told: a revision, and how many."""
    (found,) = (each for each in store.hosts() if each.host == host)
    return found.applied_revision, found.enforced, found.degraded, found.lifted


def say_as_a_former_version(store: Store, host: str, revision: int) -> None:
    """A controller of a version that reports on while it is paused."""
    with store._database.writing() as connection:
        row = {"applied_revision": revision, "enforced": 2, "degraded": 1, "lifted": 1}
        connection.execute(update(hosts).where(hosts.c.host == host).values(row))


def test_states_other_than_applied(store: Store) -> None:
    one, two, three = (keep(store, f"10.0.0.{n}").id for n in (1, 2, 3))
    wrong = Exceptional(one, State.ERROR, "no room")
    slow = Exceptional(one, State.DEGRADED, "1 % off")
    off = Exceptional(two, State.DISABLED, "")
    store.mark("gw1", [wrong, off], [])
    store.mark("gw2", [slow], [])
    assert store.exceptional([one, two, three]) == {one: {"gw1": wrong, "gw2": slow}, two: {"gw1": off}}
    assert store.exceptional([two]) == {two: {"gw1": off}}
    assert store.exceptional([]) == {}
    assert store.exceptional_counts() == {State.ERROR: 1, State.DEGRADED: 1, State.DISABLED: 1}
    assert store.marked("gw1") == {one: wrong, two: off}
    assert store.marked("gw3") == {}


def test_states_change_and_are_cleared_on_their_gateway(store: Store) -> None:
    one = keep(store).id
    store.mark("gw1", [Exceptional(one, State.ERROR, "a")], [])
    store.mark("gw2", [Exceptional(one, State.ERROR, "b")], [])
    store.mark("gw1", [Exceptional(one, State.PENDING, "c")], [])
    assert store.exceptional([one])[one]["gw1"] == Exceptional(one, State.PENDING, "c")
    store.mark("gw1", [], [one, 99])
    assert store.exceptional([one]) == {one: {"gw2": Exceptional(one, State.ERROR, "b")}}


def test_many_states_at_once(store: Store) -> None:
    store.add([rule(f"10.0.{n >> 8}.{n & 255}") for n in range(3000)], "test", NOW)
    everyone = [Exceptional(number, State.ERROR, "x") for number in range(1, 3001)]
    store.mark("gw1", everyone, [])
    assert len(store.exceptional(range(1, 3001))) == 3000
    store.mark("gw1", [], range(1, 3001))
    assert store.exceptional(range(1, 3001)) == {}


def reading(rule_id: int, packets: int) -> RuleCounters:
    total = Counts(packets, packets * 100, packets // 2, packets * 50, packets * 7)
    raw = Counts(1, 2**62, 3, 4, 5)
    return RuleCounters(rule_id, total, raw, NOW, NOW + timedelta(seconds=packets), packets // 3, 2**40)


def test_counters_of_a_rule_by_gateway(store: Store) -> None:
    one, two = (keep(store, f"10.0.0.{n}").id for n in (1, 2))
    store.count("gw1", [reading(one, 10), reading(two, 20)])
    store.count("gw2", [reading(one, 30)])
    store.count("gw1", [reading(one, 11)])
    store.count("gw1", [])
    assert store.counters(one) == {"gw1": reading(one, 11), "gw2": reading(one, 30)}
    assert store.raw_counters("gw1") == {one: reading(one, 11), two: reading(two, 20)}
    assert store.counters(99) == {}
    assert store.counters_of([one, 99]) == {one: {"gw1": reading(one, 11), "gw2": reading(one, 30)}}
    assert store.counters_of([]) == {}
    assert len(store.counters_of(range(2000))) == 2


def test_counters_of_rules_that_have_a_name(store: Store) -> None:
    (one,) = store.add([replace(rule("10.0.0.1"), name="one")], "test", NOW)
    two = keep(store, "10.0.0.2").id
    (three,) = store.add([replace(rule("10.0.0.3"), name="three")], "test", NOW)
    for host in ("gw2", "gw1"):
        store.count(host, [reading(number, 10) for number in (one.id, two, three.id)])
    assert [(name, host) for name, host, _ in store.named_counters(3)] == [
        ("one", "gw1"), ("one", "gw2"), ("three", "gw1"),
    ]  # fmt: skip
    assert store.named_counters(1) == [("one", "gw1", reading(one.id, 10))]


def test_totals_never_shrink_when_rules_go(store: Store) -> None:
    assert store.total_counters() == {}
    one, two, three = (keep(store, f"10.0.0.{n}").id for n in (1, 2, 3))
    store.count("gw1", [reading(one, 10), reading(two, 20), reading(three, 30)])
    store.count("gw2", [reading(one, 5)])
    before = store.total_counters()
    assert before == {"gw1": reading(0, 60).total, "gw2": reading(0, 5).total}
    for number in (one, two):
        store.remove(number, "test", NOW)
        assert store.total_counters() == before
    store.count("gw1", [reading(one, 99)])  # a gateway that has not heard of it yet
    assert store.total_counters() == before
    store.count("gw1", [reading(three, 31)])
    assert store.total_counters()["gw1"].matched_packets == 61
    assert store.raw_counters("gw1").keys() == {three}


def test_a_note_on_a_rule_that_is_applied(store: Store) -> None:
    one, two = (keep(store, f"10.0.0.{n}").id for n in (1, 2))
    store.report(replace(STATUS, applied_revision=store.revision()), NOW)
    note = Exceptional(one, State.APPLIED, "It can leave by two devices.")
    store.mark("gw1", [note], [])
    assert store.marked("gw1") == {one: note}
    found = store.census(NOW, [store.revision()])
    assert sorted((alike.number, sorted(e.state for e in alike.exceptional.values())) for alike in found) == [
        (1, []), (1, [State.APPLIED]),
    ]  # fmt: skip
    assert two not in store.exceptional([one, two])


def test_a_removed_rule_leaves_neither_states_nor_counters(store: Store) -> None:
    one, two = (keep(store, f"10.0.0.{n}").id for n in (1, 2))
    for number in (one, two):
        store.mark("gw1", [Exceptional(number, State.ERROR, "x")], [])
        store.count("gw1", [reading(number, 10)])
    store.remove(one, "test", NOW)
    assert store.exceptional([one, two]) == {two: {"gw1": Exceptional(two, State.ERROR, "x")}}
    assert store.exceptional_counts() == {State.ERROR: 1}
    assert store.counters(one) == {}
    assert list(store.raw_counters("gw1")) == [two]


def test_a_late_word_on_a_removed_rule_counts_nowhere_and_does_not_stay(store: Store) -> None:
    one, two = (keep(store, f"10.0.0.{n}").id for n in (1, 2))
    store.remove(one, "test", NOW)
    store.mark("gw1", [Exceptional(one, State.ERROR, "x")], [])
    store.count("gw1", [reading(one, 10)])
    assert not store.exceptional_counts()
    assert not store.exceptional([one])
    assert not store.raw_counters("gw1")
    assert not store.counters(one)
    assert rows(store, "rule_states") == rows(store, "counters") == 1
    store.report(replace(STATUS, applied_revision=store.revision()), NOW)
    store.remove(two, "test", NOW)
    assert rows(store, "rule_states") == rows(store, "counters") == 0


def rows(store: Store, table: str) -> int:
    with store._database.reading() as connection:
        return connection.execute(select(func.count()).select_from(metadata.tables[table])).scalar_one()


def test_a_changed_rule_keeps_its_counters(store: Store) -> None:
    kept = keep(store)
    store.count("gw1", [reading(kept.id, 10)])
    store.replace(kept.id, replace(kept, comment="new"), "test", NOW)
    assert store.counters(kept.id) == {"gw1": reading(kept.id, 10)}


def test_numbers_stay_with_their_gateway(store: Store) -> None:
    store.number("gw1", {("set-a", "100/s"): 1, ("set-a", "200/s"): 2, ("set-b", "100/s"): 1}, [])
    store.number("gw2", {("set-a", "100/s"): 9}, [])
    store.number("gw1", {("set-a", "300/s"): 1, ("set-b", "100/s"): 5}, [("set-a", "100/s"), ("set-z", "x")])
    assert store.numbering("gw1") == {("set-a", "200/s"): 2, ("set-a", "300/s"): 1, ("set-b", "100/s"): 5}
    assert store.numbering("gw2") == {("set-a", "100/s"): 9}
    assert store.numbering("gw3") == {}


def test_root_qdiscs_are_kept_until_they_are_put_back(store: Store) -> None:
    first, second = SavedRoot(1, "pfifo", "4d000000"), SavedRoot(0x8001, "tbf", "")
    assert store.saved_roots("gw1") == {}
    store.save_root("gw1", "wan", first)
    store.save_root("gw1", "lan", first)
    store.save_root("gw2", "wan", first)
    store.save_root("gw1", "wan", second)
    assert store.saved_roots("gw1") == {"lan": first, "wan": second}
    store.forget_root("gw1", "wan")
    store.forget_root("gw1", "wan")
    assert store.saved_roots("gw1") == {"lan": first}
    assert store.saved_roots("gw2") == {"wan": first}


def test_the_newest_repairs_of_each_gateway_are_kept(store: Store) -> None:
    for number in range(repairs.MOST + 5):
        store.repaired("gw1", "chains", f"number {number}", 0.25, NOW)
    store.repaired("gw2", "queues", "eth0", 1.5, NOW)
    assert store.repairs("gw2", 10) == [Repair("queues", "eth0", 1.5, NOW)]
    last = store.repairs("gw1", 2)
    assert [each.found for each in last] == [f"number {repairs.MOST + 4}", f"number {repairs.MOST + 3}"]
    assert len(store.repairs("gw1", 1000)) == repairs.MOST


def test_meters_are_told_in_kinds_of_those_in_force_that_may_have_many_buckets(store: Store) -> None:
    """By all that tells tables of the kernel apart; nobody is counted whose buckets are few whatever comes."""
    wide = {"rate": "60 packets/h", "per": "host"}
    for target in ("10.1.0.0/16", "10.2.0.0/16", "10.3.0.0/24", "2001:db8::/112", "2001:db8:1::/112"):
        keep(store, target=target, **wide)
    for n, fields in enumerate(({"hosts": ["gw1"]}, {"direction": "to"}, {"rate": "61 packets/h"}, {"burst": 7})):
        keep(store, **{"target": f"10.{n + 10}.0.0/16", **wide, **fields})  # type: ignore[arg-type]
    keep(store, target="10.20.0.1", rate="60 packets/h", per="peer")
    for target, fields in (
        ("10.4.0.0/16", {"enabled": False}),
        ("10.5.0.0/16", {"expires_at": NOW}),
        ("10.6.0.0/16", {"per": "target"}),
        ("10.7.0.1", {}),
        ("2001:db8:2::1", {}),
        ("10.8.0.0/16", {"action": "shape", "rate": "1 Mbit/s"}),
    ):
        keep(store, **{"target": target, **wide, **fields})  # type: ignore[arg-type]
    keep(store, target="10.9.0.0/16", action="block")
    found = sorted((rule.id, number) for rule, number in store.sample_meters(NOW))
    assert found == [(1, 2), (3, 1), (4, 2), (6, 1), (7, 1), (8, 1), (9, 1), (10, 1)]
