"""What child HTBs are guaranteed where more is promised than there is: by who sends in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from ipaddress import ip_network

import pytest

from netlimit.demand import SHORTEST_LOOK, Claim, Crowd, Demand, part
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
        waits, numbers = set(waiting), {*filter(is_host, self.classes), *self.bytes}
        usages = {each: usage(self.bytes.get(each, 0), 9 * (each in waits)) for each in numbers}
        self.made.compilation.shaping.look("lan", usages, self.at)
        before = dict(self.classes)
        self.made.sync()
        self.made.check()
        return {number for number, each in self.classes.items() if before.get(number) != each}

    @property
    def classes(self) -> Mapping[int, QueueClass]:
        return self.made.kernel.trees["lan"].classes

    @property
    def kept(self) -> list[str]:
        """The numbers that are kept of what is wanted."""
        return [group for group, _ in self.made.compilation.numbers.kept if group.startswith("tc demand")]

    def find_shared(self, target: str) -> int:
        """The class that those of a target share who have none of their own."""
        (traffic,) = (each for each in self.made.traffics if ip_network(target) in each.places)
        return traffic.places[ip_network(target)].number

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


def test_where_all_fit_nobody_is_followed_and_nothing_is_kept() -> None:
    line = Line(CAP, EACH, shape(3, "10.1.6.0/24", "3 Mbit/s", per="target"), shape(4, "10.1.6.3", "1 Mbit/s"))
    line.see(10)
    line.look()
    for sending in (1, 10, 3, 10):
        assert line.look(line.hosts(FULL)[:sending]) == set()
        assert line.kept == []


def test_what_was_seen_counts_as_soon_as_more_is_promised_than_there_is() -> None:
    line = Line(CAP, EACH)
    line.see(10)
    line.look()
    line.look(line.hosts(FULL)[:8])
    assert line.kept == []
    line.see(20, begin=10)
    assert line.shard(FULL).rate >= 8 * MEGABIT
    assert line.kept != []
    line.made.restart()
    assert str(line.made.plan_all()) == "Nothing to do."


def test_a_budget_that_is_promised_too_often_concerns_those_in_it_alone() -> None:
    line = Line(CAP, wide(2, 6), shape(3, "10.1.6.0/24", "3 Mbit/s", per="target"), wide(5, 7))
    line.made.see([*SMALL, "10.1.7.1", "10.1.7.2"])
    line.made.sync()
    line.look()
    inside, outside = (line.hosts(line.find_shared(each) >> 16) for each in (SMALL[0], "10.1.7.1"))
    changed = line.look([*inside[:5], *outside[:1]])
    assert len(line.kept) == 1
    assert line.made.kernel.trees["lan"].children[inside[0] >> 16] in changed
    assert line.made.kernel.trees["lan"].children[outside[0] >> 16] not in changed


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


BIG = ("10.1.101.1", "10.1.101.2")
SMALL = [f"10.1.6.{number}" for number in range(1, 11)]
ALL_SENDING = (
    CAP,
    *(shape(10 + number, address, "8 Mbit/s", ceil="20 Mbit/s") for number, address in enumerate(BIG)),
    shape(20, "10.1.6.0/24", "3 Mbit/s", ceil="20 Mbit/s", per="target"),
    *(shape(30 + number, address, "300 kbit/s", ceil="20 Mbit/s") for number, address in enumerate(SMALL)),
)
"""They come to 19 of 19.3 Mbit/s."""


def wide(rule_id: int, network: int, rate: str = "1 Mbit/s") -> Rule:
    """A rule for each host of a network, of which nobody is there."""
    return shape(rule_id, f"10.1.{network}.0/24", rate, ceil="20 Mbit/s", per="host")


@pytest.mark.parametrize(
    "idle",
    [
        [],
        [wide(100 + number, 20 + number) for number in range(60)],
        [shape(100 + number, f"10.1.{20 + number}.0/24", "20 Mbit/s", per="target") for number in range(5)]
        + [wide(200 + number, 20 + number) for number in range(5)],
    ],
    ids=["nobody", "wide rules", "budgets"],
)
def test_rules_that_nobody_uses_take_nothing_from_those_who_all_fit(idle: list[Rule]) -> None:
    line = Line(*ALL_SENDING, *idle)
    hosts = [number for number in line.classes if is_host(number)]
    line.look()
    line.look(hosts, rate=9 * MEGABIT, waiting=hosts)
    big, small = (line.shard(number >> 16) for number in map(line.find_shared, (BIG[0], SMALL[0])))
    assert big.rate == pytest.approx(16 * MEGABIT, rel=0.03)
    assert small.rate == pytest.approx(3 * MEGABIT, rel=0.03)


def test_what_no_rule_in_a_budget_names_has_what_it_sends() -> None:
    """The budget is promised 8 Mbit/s, and its only rule 1."""
    budget = shape(4, "10.1.6.0/24", "8 Mbit/s", ceil="20 Mbit/s", per="target")
    others = (wide(7, 7, "9 Mbit/s"), wide(8, 8, "9 Mbit/s"))
    line = Line(CAP, budget, shape(5, "10.1.6.9", "1 Mbit/s", ceil="20 Mbit/s"), *others)
    rest = line.find_shared("10.1.6.0/24")
    inner = line.classes[rest].parent
    line.look()
    assert line.classes[inner].rate < 4 * MEGABIT
    line.look([rest], rate=9 * MEGABIT)
    assert line.classes[inner].rate >= 7 * MEGABIT
    assert line.classes[rest].rate >= 6.5 * MEGABIT


def test_newcomers_who_send_have_what_they_are_promised() -> None:
    line = Line(CAP, EACH, wide(6, 7, "9 Mbit/s"), *(wide(10 + number, 10 + number) for number in range(20)))
    line.see(10)
    line.look()
    newcomers = line.find_shared("10.1.7.0/24")
    line.look([newcomers, *line.hosts(FULL)], rate=9 * MEGABIT)
    assert line.classes[newcomers].rate == pytest.approx(9 * MEGABIT, rel=0.02)
    line.made.restart()
    assert str(line.made.plan_all()) == "Nothing to do."


@pytest.mark.parametrize(("once", "now"), [(12, 7), (14, 8), (18, 10), (18, 12)])
def test_those_who_sent_more_take_nothing_from_others_who_fit(once: int, now: int) -> None:
    line = Line(CAP, EACH)
    line.see(1030)
    full, sparse = line.hosts(FULL), line.hosts(SPARSE)
    line.look()
    line.look(full[:once])
    sending = full[:now] + sparse[: 18 - now]
    for _ in range(2):
        line.look(sending, waiting=sending)
    assert line.shard(FULL).rate == pytest.approx(now * MEGABIT, rel=0.05)
    assert line.shard(SPARSE).rate == pytest.approx((18 - now) * MEGABIT, rel=0.05)
    assert line.look(sending, waiting=sending) == set()
    before = dict(line.classes)
    line.made.restart()
    assert str(line.made.plan_all()) == "Nothing to do."
    assert line.classes == before


def test_classes_that_nobody_uses_keep_their_size_while_what_others_send_goes_up_and_down() -> None:
    rule = shape(2, "10.1.32.0/19", "1 Mbit/s", ceil="20 Mbit/s", per="host")
    line = Line(CAP, rule, *(wide(100 + number, 100 + number) for number in range(60)))
    line.see(20)
    line.look()
    line.look(line.hosts(FULL)[:5])
    for megabits in (0.48, 0.5, 0.48, 0.5):
        assert len(line.look(line.hosts(FULL)[:5], rate=int(megabits * MEGABIT))) <= 1


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
    line.look()
    line.look(line.hosts(FULL)[:10])
    assert len(line.kept) == 1
    line.look()
    assert line.kept == []
    line.look(line.hosts(FULL)[:10])
    line.made.drop(2)
    line.made.sync()
    assert line.kept == []


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
    claims = (Claim(*each) for each in zip(wants, least, wants, strict=True))
    shares = part(dict(enumerate(claims)), room)
    assert list(shares.values()) == pytest.approx(given, abs=1)
    assert sum(shares.values()) <= room


@pytest.mark.parametrize(
    ("wants", "least", "hopes", "room", "given"),
    [
        ([60, 0], [10, 40], [60, 40], 100, [60, 40]),
        ([80, 0], [10, 40], [80, 40], 100, [80, 20]),
        ([100, 0], [10, 40], [100, 40], 100, [100, 0]),
        ([101, 0], [10, 40], [101, 40], 100, [99, 1]),
        ([900, 0], [10, 40], [900, 40], 100, [60, 40]),
        ([0, 0], [10, 40], [10, 90], 60, [10, 50]),
    ],
)
def test_who_sends_comes_first_and_then_who_may_begin(
    wants: list[int], least: list[int], hopes: list[int], room: int, given: list[int]
) -> None:
    claims = (Claim(*(1000 * value for value in each)) for each in zip(wants, least, hopes, strict=True))
    shares = part(dict(enumerate(claims)), 1000 * room)
    assert list(shares.values()) == pytest.approx([1000 * each for each in given], abs=1000)
    assert sum(shares.values()) <= 1000 * room


def test_many_sparse_ones_leave_half_to_those_that_many_send_in() -> None:
    shares = part(dict.fromkeys(range(100), Claim(10, 10, 10)) | {100: Claim(1000, 10, 1000)}, 100)
    assert shares[100] > 20
