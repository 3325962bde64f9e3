"""What limiters enforce in the kernel's place, which of them run, and what both layers have counted."""

from __future__ import annotations

from datetime import timedelta

from netlimit.records import Assigned, Counts, Duties, Exceptional, HostStatus, LimiterReport, RuleCounters, State
from netlimit.store import Store
from netlimit.store.tables import metadata
from tests.store.examples import NOW, keep

REPORT = LimiterReport("gw1", "host/7", 5, NOW, NOW)


def later(seconds: float) -> LimiterReport:
    return LimiterReport("gw1", "host/7", 5, NOW, NOW + timedelta(seconds=seconds))


def test_what_is_given_can_be_taken_back(store: Store) -> None:
    one, two = keep(store, "10.0.0.1"), keep(store, "10.0.0.2")
    assert store.assigned("gw1") == Assigned()
    first = store.assign("gw1", {one.id: one.revision, two.id: two.revision}, ())
    other = store.assign("gw2", {one.id: one.revision}, ())
    second = store.assign("gw1", {one.id: 9}, [two.id])
    assert len({first, other, second}) == 3
    assert store.assigned("gw1") == Assigned(second, {one.id: 9})
    assert [store.assigned_serial(host) for host in ("gw1", "gw2", "gw3")] == [second, other, 0]
    assert store.assigned("gw2") == Assigned(other, {one.id: one.revision})


def test_a_limiter_hears_of_its_duties_and_then_of_what_has_changed(store: Store) -> None:
    one, two = keep(store, "10.0.0.1"), keep(store, "10.0.0.2")
    keep(store, "10.0.0.3", hosts=["gw2"])
    assert store.duties("gw1") == Duties(), "nothing is assigned"
    store.report(HostStatus("gw1", "iptables", own=("192.0.2.1",), safe=("203.0.113.0/24",)), NOW)
    serial = store.assign("gw1", {one.id: one.revision}, ())
    duties = store.duties("gw1")
    assert (sorted(rule.id for rule in duties.rules), duties.removed) == ([one.id, two.id], None)
    assert (duties.own, duties.safe) == (("192.0.2.1",), ("203.0.113.0/24",))
    assert duties.assigned == Assigned(serial, {one.id: one.revision})
    assert duties.revision == store.revision()
    store.remove(two.id, "test", NOW)
    four = keep(store, "10.0.0.4")
    news = store.duties("gw1", duties.revision, serial)
    assert (news.assigned, news.rules, news.removed) == (None, (four,), (two.id,))
    assert store.duties("gw1", news.revision, serial).rules == ()
    store.assign("gw1", {}, [one.id])
    assert store.duties("gw1", news.revision, serial) == Duties(store.assigned("gw1"))


def test_a_gateway_that_is_paused_has_no_duties(store: Store) -> None:
    one = keep(store)
    serial = store.assign("gw1", {one.id: one.revision}, ())
    store.pause("gw1", True)
    assert store.duties("gw1", store.revision(), serial) == Duties()
    store.pause("gw1", False)
    assert store.duties("gw1").assigned == Assigned(serial, {one.id: one.revision})


def test_who_runs_says_so_and_who_was_killed_is_forgotten_in_time(store: Store) -> None:
    store.limiter_runs(REPORT, news=True)
    store.limiter_runs(later(2))
    assert store.limiters("gw1") == [later(2)]
    assert store.limiters("gw2") == []
    other = LimiterReport("gw1", "host/8", 5, NOW, NOW + timedelta(hours=2))
    store.limiter_runs(other)
    assert store.limiters("gw1") == [other]
    store.limiter_ended("gw1", "host/8")
    store.limiter_ended("gw1", "host/8")
    assert store.limiters("gw1") == []


def test_a_limiter_whose_clock_is_ahead_forgets_none_of_other_gateways(store: Store) -> None:
    store.limiter_runs(REPORT)
    store.limiter_runs(LimiterReport("gw2", "host/8", 5, NOW, NOW + timedelta(hours=2)))
    assert store.limiters("gw1") == [REPORT]


def test_who_enforces_a_rule_is_kept_with_its_state(store: Store) -> None:
    one = keep(store)
    said = Exceptional(one.id, State.APPLIED, "The limiter enforces it.", "l7")
    store.mark("gw1", [said], ())
    assert store.marked("gw1") == {one.id: said}
    assert store.exceptional([one.id]) == {one.id: {"gw1": said}}


def test_a_rule_has_counted_what_both_layers_have(store: Store) -> None:
    one, two = keep(store, "10.0.0.1", name="one"), keep(store, "10.0.0.2")
    in_kernel = RuleCounters(one.id, Counts(100, 6000, 10, 600), Counts(1, 2, 3, 4), NOW, NOW + timedelta(seconds=5))
    store.count("gw1", [in_kernel])
    first, last = NOW + timedelta(seconds=1), NOW + timedelta(seconds=9)
    store.count_requests("gw1", {one.id: Counts(5, 50, 2, 20), two.id: Counts(1)}, first)
    store.count_requests("gw1", {one.id: Counts(5, 50, 2, 20)}, last)
    total = Counts(110, 6100, 14, 640)
    both = RuleCounters(one.id, total, in_kernel.raw, NOW, last)
    assert store.counters(one.id) == {"gw1": both}
    requests_only = RuleCounters(two.id, Counts(1), Counts(), first, first)
    assert store.counters_of([one.id, two.id]) == {one.id: {"gw1": both}, two.id: {"gw1": requests_only}}
    assert store.named_counters(10) == [("one", "gw1", both)]
    assert store.raw_counters("gw1") == {one.id: in_kernel}, "the controller adds to what the kernel has counted"
    assert store.total_counters() == {"gw1": total + Counts(1)}


def test_what_a_rule_that_is_gone_has_counted_stays_in_the_totals(store: Store) -> None:
    one = keep(store)
    store.count("gw1", [RuleCounters(one.id, Counts(10, 100, 1, 10), Counts(), NOW, NOW)])
    store.count_requests("gw1", {one.id: Counts(5, 50, 2, 20)}, NOW)
    before = store.total_counters()
    assert before == {"gw1": Counts(15, 150, 3, 30)}
    store.assign("gw1", {one.id: one.revision}, ())
    store.report(HostStatus("gw1", "fake", applied_revision=store.revision()), NOW)
    store.remove(one.id, "test", NOW)
    store.count_requests("gw1", {one.id: Counts(5)}, NOW)  # a limiter that has not heard of it yet
    assert store.total_counters() == before
    assert store.counters(one.id) == {}
    another = keep(store, "10.0.0.9")
    store.report(HostStatus("gw1", "fake", applied_revision=store.revision()), NOW)
    store.remove(another.id, "test", NOW)
    with store._database.reading() as connection:
        left = {
            name: list(connection.execute(metadata.tables[name].select()))
            for name in ("assignments", "request_counters")
        }
    assert (len(left["assignments"]), left["request_counters"]) == (1, []), "the serial alone"
