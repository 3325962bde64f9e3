"""That one client or network, however many counters it makes, takes no room of others in memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count

import pytest

from netlimit.l7.limit import Algorithm, Limit, Refill
from netlimit.l7.memory.counter import Clock, Counter
from netlimit.l7.memory.log import _FEW_ENTRIES
from netlimit.l7.memory.shares import find_level, find_network, find_shares
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.rules import Rule, make_key
from netlimit.l7.store import Ask
from tests.l7.counting import SECOND, moment

LIMITS = [
    *(Limit(4, 3600, algorithm) for algorithm in Algorithm),
    Limit(4, 3600, Algorithm.TOKEN_BUCKET, refill=Refill.INTERVAL),
]
every = pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: f"{limit.algorithm}-{limit.refill}")
KEYS = 2048
GREEDY = "203.0.113.5"


class Asked:
    """A store whose rule tells of the client and of the path."""

    def __init__(self, limit: Limit, keys: int = KEYS, memory: int = 2**30, name: str = "remote_address,path") -> None:
        self.now = moment("1:00:00")
        self.limit, self.name = limit, name
        self.store = MemoryStore(Clock(lambda: self.now, 0), keys, memory)
        self._leases = count()
        self._rules: dict[str, Rule] = {}

    def make_ask(self, client: str, path: str, name: str = "") -> Ask:
        flying = self.limit.algorithm is Algorithm.CONCURRENCY
        name = name or self.name
        rule = self._rules.setdefault(
            name, Rule("test", name, None if flying else self.limit, self.limit if flying else None)
        )
        return Ask(rule, self.limit, make_key([client, path]), lease=f"{next(self._leases)}" * flying)

    def hit(self, client: str, path: str = "/login", name: str = "") -> bool:
        return self.store.decide_now([self.make_ask(client, path, name)])[0].admitted

    def hits(self, number: int, client: str, path: str = "/login") -> int:
        """How many are admitted."""
        return sum(self.hit(client, path) for _ in range(number))

    def flood(self, client: str, paths: int, times: int = 4, name: str = "") -> None:
        for path in range(paths):
            for _ in range(times):
                self.hit(client, f"/{path}", name)

    @property
    def counter(self) -> Counter:
        (counter,) = self.store._counters.values()
        return counter


def others(number: int) -> list[str]:
    return [f"198.51.{each}.1" for each in range(number)]


class TestOneClient:
    def test_hundreds_of_thousands_of_keys_keep_out_nobody(self) -> None:
        asked = Asked(Limit(1, 86_400), keys=2**18)
        asked.flood(GREEDY, 300_000, times=1)
        assert [asked.hit(other) for other in others(30)] == [True] * 30
        assert not any(asked.hit(other) for other in others(30))
        assert not asked.hit(GREEDY, "/7")
        assert not asked.hit(GREEDY, "/299999")

    @every
    @pytest.mark.parametrize("times", [1, 4])
    def test_others_have_counters_of_their_own(self, limit: Limit, times: int) -> None:
        asked = Asked(limit)
        assert [asked.hits(3, other) for other in others(30)] == [3] * 30
        asked.flood(GREEDY, 3 * KEYS, times)
        assert [asked.hits(3, other) for other in others(30)] == [1] * 30
        assert [asked.hits(5, other, "/") for other in others(30)] == [4] * 30
        assert len(asked.counter) <= KEYS + 1

    @every
    @pytest.mark.parametrize("before", [0, KEYS // 4, KEYS // 2 - 1], ids=["oldest", "middle", "newest"])
    def test_what_it_has_used_of_a_key_stays_used(self, limit: Limit, before: int) -> None:
        asked = Asked(limit)
        asked.flood(GREEDY, before, times=1)
        assert asked.hits(3, GREEDY) == 3
        asked.flood(GREEDY, 3 * KEYS, times=1)
        assert asked.hits(5, GREEDY) <= 1

    @every
    def test_nor_where_it_asks_for_more_than_is_left(self, limit: Limit) -> None:
        """As what is counted together is forgotten no sooner for that."""
        asked = Asked(limit)
        asked.flood(GREEDY, KEYS // 2 - 1, times=1)
        assert asked.hits(3, GREEDY) == 3
        heavy = [asked.make_ask(GREEDY, "/login")._replace(hits=2) for _ in range(300)]
        assert not asked.store.decide_now([heavy.pop()])[0].admitted
        asked.flood(GREEDY, 2 * KEYS, times=1)
        for network in range(4 * KEYS):
            asked.hit(f"10.{network // 250}.{network % 250}.1")
            if not network % 50:
                assert not asked.store.decide_now([heavy.pop()])[0].admitted

    @every
    def test_nobody_waits_while_what_it_has_is_counted_together(self, limit: Limit) -> None:
        """Where it takes the room alone, that is never done: its further keys share a counter before there is need."""
        asked = Asked(limit)
        asked.flood(GREEDY, 4, times=1)
        merged: list[int] = []
        asked.counter._merge = lambda keys, crowd: merged.append(len(keys))  # type: ignore[method-assign]
        asked.flood(GREEDY, 3 * KEYS, times=1)
        for other in others(KEYS // 4):
            assert asked.hit(other)
        assert merged == []
        assert KEYS // 2 <= len(asked.counter) <= KEYS

    @every
    def test_its_further_keys_share_one_counter(self, limit: Limit) -> None:
        asked = Asked(limit)
        asked.flood(GREEDY, 2 * KEYS)
        assert sum(asked.hit(GREEDY, f"/new/{path}") for path in range(50)) <= 4

    @every
    def test_it_has_its_share_for_itself(self, limit: Limit) -> None:
        asked = Asked(limit)
        asked.flood(GREEDY, 2 * KEYS, times=2)
        assert [asked.hits(4, GREEDY, f"/{path}") for path in range(KEYS // 3)] == [2] * (KEYS // 3)

    @pytest.mark.parametrize(
        ("limit", "seconds"),
        [
            (Limit(1, 1, Algorithm.TOKEN_BUCKET, burst=100), 11),
            (Limit(10, 60, Algorithm.TOKEN_BUCKET, burst=100), 61),
            (Limit(10, 60, Algorithm.GCRA, burst=100), 61),
            (Limit(10, 60, Algorithm.TOKEN_BUCKET, burst=100, refill=Refill.INTERVAL), 61),
            (Limit(100, 3600, Algorithm.GCRA), 75),
            (Limit(1000, 86_400, Algorithm.TOKEN_BUCKET), 174),
            (Limit(100, 60, Algorithm.SLIDING_WINDOW_COUNTER), 61),
        ],
        ids=str,
    )
    def test_what_was_used_up_fills_no_faster_for_that(self, limit: Limit, seconds: int) -> None:
        """Though others' keys are gone by then, and a unit may be over."""
        asked = self.use_up(limit)
        asked.now += seconds * SECOND
        for path in range(20):
            asked.hit("198.51.100.1", f"/{path}")
        assert asked.hits(100, GREEDY) <= max(1, limit.amount * seconds // limit.seconds)

    @pytest.mark.parametrize("algorithm", [Algorithm.FIXED_WINDOW, Algorithm.GCRA, Algorithm.SLIDING_WINDOW_LOG])
    def test_nor_by_a_change_of_the_amount(self, algorithm: Algorithm) -> None:
        asked = self.use_up(Limit(10, 86_400, algorithm))
        asked.limit = replace(asked.limit, amount=11)
        asked._rules.clear()
        assert asked.hits(50, GREEDY) <= 1

    def test_nor_where_the_others_in_flight_have_ended(self) -> None:
        asked = Asked(Limit(4, 60, Algorithm.CONCURRENCY))
        junk = [asked.make_ask(GREEDY, f"/{path}") for path in range(KEYS // 2)]
        mine = [asked.make_ask(GREEDY, "/login") for _ in range(4)]
        more = [asked.make_ask(GREEDY, f"/more/{path}") for path in range(KEYS)]
        assert all(each.admitted for each in asked.store.decide_now(junk + mine))
        asked.store.decide_now(more)
        asyncio.run(asked.store.release(junk + more))
        for _ in range(4):
            asked.now += 20 * SECOND
            assert asyncio.run(asked.store.renew(mine))
        assert not asked.hit(GREEDY)

    def test_how_long_to_wait_for_very_many_in_flight_is_told_without_counting_them(self) -> None:
        asked = Asked(Limit(20_000, 60, Algorithm.CONCURRENCY))
        for each in range(20):
            asked.now += SECOND
            assert asked.hits(1000, GREEDY) == 1000, each
        waits = {}
        for amount in (19_000, 4):
            asked.limit = replace(asked.limit, amount=amount)
            asked._rules.clear()
            waits[amount] = asked.store.decide_now([asked.make_ask(GREEDY, "/login")])[0].retry_after
        assert waits == {19_000: 42.0, 4: 60.0}

    def use_up(self, limit: Limit) -> Asked:
        """The store in which a key that it has used up is counted together with others."""
        asked = Asked(limit)
        asked.flood(GREEDY, KEYS * 3 // 4, times=1)
        asked.hits(limit.capacity, GREEDY)
        asked.flood(GREEDY, 2 * KEYS, times=1)
        assert not asked.hit(GREEDY)
        return asked

    @every
    def test_each_of_its_keys_counts_for_itself_again_later(self, limit: Limit) -> None:
        asked = Asked(limit)
        asked.flood(GREEDY, 2 * KEYS)
        assert not asked.hit(GREEDY)
        asked.now += 7200 * SECOND
        assert all(asked.hit(GREEDY, f"/new/{path}") for path in range(KEYS // 3))

    @every
    def test_who_shares_its_network_does_not_share_its_counter(self, limit: Limit) -> None:
        asked = Asked(limit)
        asked.flood(GREEDY, 2 * KEYS)
        assert asked.hits(5, "203.0.113.6") == 4

    @every
    @pytest.mark.parametrize("greedy", [3, 20])
    def test_several_such_keep_out_nobody(self, limit: Limit, greedy: int) -> None:
        asked = Asked(limit)
        for each in range(greedy):
            asked.flood(f"203.0.{each}.5", 4 * KEYS // greedy)
        assert [asked.hits(5, other) for other in others(30)] == [4] * 30

    @pytest.mark.parametrize("name", ["remote_address=203.0.*,path=/*", "remote_address,method=GET,header"])
    def test_the_rule_may_tell_more(self, name: str) -> None:
        asked = Asked(LIMITS[0], name=name)
        asked.flood(GREEDY, 2 * KEYS)
        assert [asked.hits(5, other) for other in others(30)] == [4] * 30

    def test_a_long_path_hides_nobody(self) -> None:
        asked = Asked(LIMITS[0])
        for path in range(2 * KEYS):
            asked.hits(4, GREEDY, f"/{path:0500}")
        assert [asked.hits(5, other, "/" * 500) for other in others(30)] == [4] * 30

    def test_what_another_counter_needs_is_taken_of_it(self) -> None:
        asked = Asked(LIMITS[0], 2**18, memory=2**20)
        second = "remote_address,path,second"
        for other in others(30):
            asked.hits(3, other)
        asked.flood(GREEDY, 3000, times=1)
        asked.flood(GREEDY, 3000, times=1, name=second)
        assert [asked.hits(3, other) for other in others(30)] == [1] * 30
        assert all(asked.hit(other, name=second) for other in others(30))


class TestNetworks:
    @every
    def test_an_ipv6_network_is_as_one_client(self, limit: Limit) -> None:
        asked = Asked(limit)
        for block in range(2 * KEYS):
            asked.hits(4, f"2001:db8:1:{block:x}::/64", "/a")
        assert [asked.hits(5, f"2001:db8:{other:x}:1::/64") for other in range(2, 30)] == [4] * 28
        assert len(asked.counter) <= KEYS + 1

    @every
    def test_many_clients_that_have_a_key_or_two_are_held_to_nothing(self, limit: Limit) -> None:
        """As ever, those that are over their limit stay and newcomers share a counter; see test_memory.py."""
        asked = Asked(limit)
        clients = [f"10.{each // 250}.{each % 250}.1" for each in range(KEYS)]
        for client in clients:
            assert asked.hits(5, client) == 4 or client == clients[-1]
        assert sum(asked.hit(other) for other in others(100)) <= 4
        assert not any(asked.hit(client) for client in clients[: KEYS // 2])

    @pytest.mark.parametrize(
        ("client", "network"),
        [
            ("192.0.2.7", "192.0.2"),
            ("2001:db8:1:2::/64", "2001:db8:1"),
            ("2001:db8:1::/64", "2001:db8:1"),
            ("64:ff9b::c000:207", "64:ff9b::c000:207"),  # IPv4 hosts of anybody's
            ("unix", "unix"),
        ],
    )
    def test_networks(self, client: str, network: str) -> None:
        assert find_network(client) == network

    @pytest.mark.parametrize(
        ("sizes", "level"),
        [([100], 60), ([50, 20], 40), ([30, 30, 30], 20), ([1, 1, 1, 100], 57), ([20, 40], 40), ([], 0)],
    )
    def test_what_one_does_not_need_others_share(self, sizes: list[int], level: int) -> None:
        assert find_level(sizes, 60) == level


class TestKeys:
    @pytest.mark.parametrize(
        ("rule", "values", "client"),
        [
            ("remote_address,path", ["192.0.2.1", "/a"], "192.0.2.1"),
            ("path,remote_address", ["/a|192.0.2.9", "192.0.2.1"], "192.0.2.1"),
            ("path,remote_address", ["/a\\", "192.0.2.1"], "192.0.2.1"),
            ("path=/x\\,y,user,remote_address", ["me", "192.0.2.1"], "192.0.2.1"),
            ("path=/x*,remote_address=192.0.*", ["/xy", "192.0.2.1"], "192.0.2.1"),
            ("remote_address,path", ["2001:db8:1111:2222::/64", "/" * 1000], "2001:db8:1111"),
            ("override:4/minute:path,remote_address", ["/a", "192.0.2.1"], "192.0.2.1"),
        ],
    )
    def test_whose_a_key_is(self, rule: str, values: list[str], client: str) -> None:
        shares = find_shares(rule)
        assert shares is not None
        assert shares.name_crowd(make_key(values)) == f"\0crowd of {client}"

    @pytest.mark.parametrize("rule", ["remote_address", "path,user", "remote_address=192.0.2.1,path", "user", "x"])
    def test_where_no_client_has_several_keys_there_are_no_shares(self, rule: str) -> None:
        assert find_shares(rule) is None

    def test_different_long_values_have_different_keys(self) -> None:
        values = [[start + "x" * length, "y" * 150 + end] for start in "ab" for length in (1, 43, 300) for end in "cd"]
        keys = {make_key(each) for each in values}
        assert len(keys) == len(values)
        assert all(len(key) <= 200 for key in keys)


def test_the_times_of_a_log_are_shared_too() -> None:
    asked = Asked(Limit(500, 3600, Algorithm.SLIDING_WINDOW_LOG), 2**18, memory=2**21)
    for other in others(30):
        assert asked.hits(499, other) == 499
    asked.flood(GREEDY, 2 * _FEW_ENTRIES // 500, times=499)
    assert [asked.hits(2, other) for other in others(30)] == [1] * 30
    assert [asked.hits(2, other, "/") for other in others(10)] == [2] * 10


def test_requests_in_flight_that_are_counted_together_end_as_others() -> None:
    asked = Asked(LIMITS[list(Algorithm).index(Algorithm.CONCURRENCY)])
    asks = [asked.make_ask(GREEDY, f"/{path}") for path in range(2 * KEYS)]
    held = [ask for ask in asks if asked.store.decide_now([ask])[0].admitted]
    assert not asked.hit(GREEDY)
    assert asked.store.renew_now(held)
    asked.store.release_now(held)
    assert asked.hits(5, GREEDY) == 4
    assert len(asked.counter) == 1
