"""What child HTBs are guaranteed where more is promised than there is: by who sends in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from netlimit.demand import SHORTEST_LOOK, Crowd, Demand, part
from netlimit.numbers import Numbers
from netlimit.rules import Rule
from netlimit.tree import FIRST_BUDGET, FIRST_CHILD, LAST_BUDGET, REST, QueueClass, Usage, classid
from tests.unit.shapes import Gateway, is_host, shape

MEGABIT = 125_000
EVERY = 15.0
"""Seconds between two looks."""
CAP = shape(1, "0.0.0.0/0", "20 Mbit/s", interface="lan", per="target")
EACH = shape(2, "10.1.0.0/16", "1 Mbit/s", ceil="20 Mbit/s", per="host")
ROOM = 20 * MEGABIT * 39 // 40 * 99 // 100
"""Less a fortieth for this host's services, and a hundredth for what no rule names."""


class Line:
    """A gateway, and what the classes of its device have counted."""

    def __init__(self, *rules: Rule) -> None:
        self.made = Gateway()
        for rule in rules:
            self.made.put(rule)
        self.made.sync()
        self.bytes: dict[int, int] = {}
        self.at = 0.0

    def see(self, count: int, begin: int = 0) -> None:
        for first in range(begin, begin + count, 1000):
            addresses = range(first, min(first + 1000, begin + count))
            self.made.see(f"10.1.{32 + each // 250}.{each % 250}" for each in addresses)
            self.made.sync()
        self.made.check()

    def look(self, sending: Iterable[int] = (), rate: int = MEGABIT, waiting: Iterable[int] = ()) -> set[int]:
        """Some hosts have sent at a rate since the last look, and some have packets waiting; which classes change."""
        for number in sending:
            self.bytes[number] = self.bytes.get(number, 0) + int(rate * EVERY)
        self.at += EVERY
        waits, numbers = set(waiting), filter(is_host, self.classes)
        usages = {each: usage(self.bytes.get(each, 0), 9 * (each in waits)) for each in numbers}
        self.made.compilation.shaping.look("lan", usages, self.at)
        before = dict(self.classes)
        self.made.sync()
        self.made.check()
        return {number for number, each in self.classes.items() if before.get(number) != each}

    @property
    def classes(self) -> Mapping[int, QueueClass]:
        return self.made.kernel.trees["lan"].classes

    def hosts(self, handle: int) -> list[int]:
        return sorted(number for number in self.classes if is_host(number) and number >> 16 == handle)

    def shard(self, handle: int) -> QueueClass:
        """The class that a child HTB hangs on."""
        return self.classes[self.made.kernel.trees["lan"].children[handle]]


FULL, SPARSE = FIRST_CHILD, FIRST_CHILD + 1


@pytest.fixture
def line() -> Line:
    """1,001 hosts: the last lies alone in its child HTB."""
    made = Line(CAP, EACH)
    made.see(1001)
    assert [len(made.hosts(each)) for each in (FULL, SPARSE)] == [1000, 1]
    return made


def test_who_lies_alone_is_guaranteed_what_it_is_promised_before_anybody_has_looked(line: Line) -> None:
    assert line.shard(SPARSE).rate == MEGABIT
    assert line.shard(SPARSE).quantum == line.shard(FULL).quantum


@pytest.mark.parametrize("sending", [1, 5, 12])
def test_what_is_promised_to_those_who_send_is_guaranteed_where_it_fits(line: Line, sending: int) -> None:
    line.look()
    line.look(line.hosts(FULL)[:sending] + line.hosts(SPARSE))
    assert sending * MEGABIT <= line.shard(FULL).rate <= 1.25 * sending * MEGABIT
    assert line.shard(SPARSE).rate == MEGABIT
    assert line.shard(FULL).quantum / line.shard(SPARSE).quantum == pytest.approx(sending, rel=0.25)


def test_who_lies_alone_has_its_rate_though_all_the_others_send(line: Line) -> None:
    line.look()
    line.look(line.hosts(FULL))
    assert line.shard(SPARSE).rate == pytest.approx(MEGABIT, rel=0.02)
    assert line.shard(FULL).rate + line.shard(SPARSE).rate <= ROOM


def test_many_who_send_have_as_much_each_wherever_they_are() -> None:
    line = Line(CAP, EACH)
    line.see(1030)
    line.look()
    line.look(line.hosts(FULL)[:30] + line.hosts(SPARSE))
    assert line.shard(FULL).rate == pytest.approx(line.shard(SPARSE).rate, rel=0.15)
    assert line.shard(FULL).quantum == pytest.approx(line.shard(SPARSE).quantum, rel=0.25)


def test_a_packet_now_and_then_takes_nothing(line: Line) -> None:
    """Somebody may send one to every address, again and again."""
    line.look()
    assert line.look(line.hosts(FULL), rate=60) == set()


def test_who_has_packets_waiting_wants_all_it_is_promised(line: Line) -> None:
    line.look()
    line.look(waiting=line.hosts(FULL)[:10])
    assert line.shard(FULL).rate >= 10 * MEGABIT


def test_what_is_wanted_goes_when_it_has_halved_and_costs_one_or_two_classes(line: Line) -> None:
    line.look()
    senders = line.hosts(FULL)[:10]
    changed = line.look(senders)
    assert not any(map(is_host, changed))
    assert len(changed) <= 2
    before = line.shard(FULL)
    assert line.look(senders[:7]) == set(), "at the edge of a step nothing changes"
    line.look(senders[:4])
    assert line.shard(FULL).rate < before.rate // 2
    line.look()
    assert line.shard(FULL).rate == MEGABIT


def test_what_no_rule_names_borrows_as_one_host_does(line: Line) -> None:
    rest = line.classes[classid(line.made.kernel.trees["lan"].handle, REST)]
    line.look()
    line.look(line.hosts(FULL)[:1], rate=20 * MEGABIT)
    assert line.shard(FULL).rate == MEGABIT
    assert line.shard(FULL).quantum <= rest.quantum


def test_newcomers_have_what_one_is_promised_however_many_send(line: Line) -> None:
    handle = line.made.kernel.trees["lan"].handle
    line.look()
    line.look(line.hosts(FULL))
    (newcomers,) = [
        each
        for number, each in line.classes.items()
        if number >> 16 == handle and FIRST_BUDGET <= number & 0xFFFF < LAST_BUDGET
    ]
    assert newcomers.rate == pytest.approx(MEGABIT, rel=0.02)


def test_what_fits_is_guaranteed_whoever_sends() -> None:
    line = Line(CAP, EACH)
    line.see(10)
    line.look()
    line.look(line.hosts(FULL)[:1])
    assert line.shard(FULL).rate == 10 * MEGABIT


def test_hosts_of_a_budget_that_is_promised_too_often_are_parted_alike() -> None:
    line = Line(shape(3, "10.1.0.0/16", "20 Mbit/s", per="target"), EACH)
    line.see(1001)
    line.look()
    line.look(line.hosts(FULL)[:10])
    assert line.shard(SPARSE).rate == MEGABIT
    assert line.shard(FULL).rate >= 10 * MEGABIT


def test_a_host_with_a_rule_of_its_own_has_it_beside_many_who_are_idle(line: Line) -> None:
    line.made.put(shape(7, "10.1.9.1", "9 Mbit/s", ceil="20 Mbit/s"))
    line.made.sync()
    line.look()
    line.look(line.hosts(FULL)[:10])
    assert line.shard(SPARSE).rate == pytest.approx(9 * MEGABIT, rel=0.05)


def test_those_of_ipv6_have_what_they_are_promised() -> None:
    line = Line(CAP, EACH, shape(3, "fd00:1::/64", "1 Mbit/s", ceil="20 Mbit/s", per="host"))
    line.see(100)
    line.made.see(["fd00:1::66"])
    line.made.sync()
    handles = {number >> 16 for number in line.classes if is_host(number)}
    assert sorted(line.shard(each).rate for each in handles) == [MEGABIT, MEGABIT]


def test_a_restart_finds_all_as_it_shall_be_and_goes_on(line: Line) -> None:
    line.look()
    line.look(line.hosts(FULL)[:10])
    before = line.shard(FULL)
    line.made.restart()
    assert str(line.made.plan_all()) == "Nothing to do."
    line.made.sync()
    line.look()
    assert line.shard(FULL) == before, "what was counted before the first look says nothing"
    line.look()
    assert line.shard(FULL).rate == MEGABIT


def test_no_number_is_kept_once_nobody_sends_or_all_have_gone(line: Line) -> None:
    def kept() -> list[str]:
        return [group for group, _ in line.made.compilation.numbers.kept if group.startswith("tc demand")]

    line.look()
    line.look(line.hosts(FULL)[:10])
    assert len(kept()) == 1
    line.look()
    assert kept() == []
    line.look(line.hosts(FULL)[:10])
    line.made.drop(2)
    line.made.sync()
    assert kept() == []


# -- a look ---------------------------------------------------------------------------------------------------------


def usage(sent: int, waiting: int = 0) -> Usage:
    return Usage(sent // 1000, sent, 0, 0, waiting, waiting * 1000)


def test_a_number_that_nobody_could_have_kept_counts_for_nothing() -> None:
    numbers = Numbers({("tc demand 1", ""): -3, ("tc demand 2", ""): 2**60})
    demand = Demand(numbers)
    for number in (1, 2):
        demand.recall(number)
        assert demand.find(number) == 0


def test_counters_that_begin_anew_count_from_nothing() -> None:
    demand, number = Demand(Numbers()), classid(FIRST_CHILD, 0x10)
    crowd = [Crowd(1, FIRST_CHILD, dict.fromkeys((0x10, 0x20), 10**6))]
    demand.look(crowd, {number: usage(10**9)}, 0.0)
    assert demand.look(crowd, {number: usage(1000)}, 10.0) == []


def test_a_look_right_after_another_counts_for_nothing() -> None:
    demand = Demand(Numbers())
    crowd = [Crowd(1, FIRST_CHILD, dict.fromkeys((0x10, 0x20), 1000))]
    sent = {classid(FIRST_CHILD, minor): usage(10**6) for minor in (0x10, 0x20)}
    assert demand.look(crowd, {}, 5.0) == []
    assert demand.look(crowd, sent, 5.0 + SHORTEST_LOOK / 2) == []
    assert demand.look(crowd, sent, 20.0) == [1]
    assert demand.find(1) == 2048


def test_the_first_look_knows_only_who_waits() -> None:
    crowd = [Crowd(1, FIRST_CHILD, dict.fromkeys((0x10, 0x20), 1000))]
    for waiting, wanted in ((0, 0), (3, 2048)):
        demand = Demand(Numbers())
        demand.look(crowd, {classid(FIRST_CHILD, minor): usage(10**6, waiting) for minor in (0x10, 0x20)}, 5.0)
        assert demand.find(1) == wanted


# -- parting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wants", "least", "room", "given"),
    [
        ([10, 20], [1, 2], 30, [10, 20]),
        ([1000, 10], [10, 10], 100, [90, 10]),
        ([1000, 1000], [10, 10], 100, [50, 50]),
        ([40, 40, 40], [40, 40, 40], 60, [20, 20, 20]),
        ([], [], 100, []),
        ([100, 300], [0, 0], 100, [25, 75]),
    ],
)
def test_each_gets_its_least_and_then_by_what_it_wants(
    wants: list[int], least: list[int], room: int, given: list[int]
) -> None:
    shares = part(dict(enumerate(wants)), dict(enumerate(least)), room)
    assert list(shares.values()) == pytest.approx(given, abs=1)
    assert sum(shares.values()) <= room


def test_many_sparse_ones_leave_half_to_those_that_many_send_in() -> None:
    wants = dict.fromkeys(range(100), 10) | {100: 1000}
    shares = part(wants, dict.fromkeys(range(101), 10), 100)
    assert shares[100] > 20
