"""The cases that the documents name from which the limiter was built, from a text with rules to what is admitted."""

from __future__ import annotations

import asyncio

import pytest

from netlimit.l7.document import parse_document
from netlimit.l7.limiter import Limiter
from netlimit.l7.memory.counter import Clock
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.rules import Descriptor, Entry, RuleSet
from tests.l7.counting import SECOND, moment

SITE = """
domain: site
descriptors:
- {key: action, value: write, descriptors: [{key: user, rate_limit: {unit: second, requests_per_unit: 2}}]}
- {key: action, value: sign_up, descriptors: [{key: remote_address, rate_limit: {unit: day, requests_per_unit: 10}}]}
- {key: action, value: reward, descriptors: [{key: device, rate_limit: {unit: week, requests_per_unit: 5}}]}
# A bucket for each user and endpoint
- key: action
  value: post
  descriptors: [{key: user, rate_limit: {unit: day, requests_per_unit: 1, algorithm: token_bucket}}]
- key: action
  value: befriend
  descriptors: [{key: user, rate_limit: {unit: day, requests_per_unit: 150, algorithm: token_bucket}}]
- key: action
  value: like
  descriptors: [{key: user, rate_limit: {unit: day, requests_per_unit: 5, algorithm: token_bucket}}]
# and one that all share
- {key: system, rate_limit: {unit: second, requests_per_unit: 10000, algorithm: token_bucket}}
- {key: api, rate_limit: {unit: minute, requests_per_unit: 100}, mode: soft, overshoot: 10%}
"""


class Site:
    """A limiter with these rules and a clock that stands."""

    def __init__(self) -> None:
        self.now = moment("1:00:00.5")
        rules = RuleSet({"site": parse_document(SITE).root})
        self.limiter = Limiter(lambda: rules, MemoryStore(Clock(lambda: self.now, 0)))

    def count_allowed(self, times: int, *entries: tuple[str, str]) -> int:
        """How many of so many requests are allowed."""
        descriptor = Descriptor(tuple(Entry(*entry) for entry in entries))

        async def ask() -> int:
            return sum([(await self.limiter.decide("site", [descriptor])).allowed for _ in range(times)])

        return asyncio.run(ask())


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.mark.parametrize(
    ("action", "whose", "most", "days"),
    [
        ("write", "user", 2, 1),
        ("sign_up", "remote_address", 10, 1),
        ("reward", "device", 5, 7),
        ("post", "user", 1, 1),
        ("befriend", "user", 150, 1),
        ("like", "user", 5, 1),
    ],
)
def test_everybody_may_so_often(site: Site, action: str, whose: str, most: int, days: int) -> None:
    for who in ("one", "another"):
        assert site.count_allowed(200, ("action", action), (whose, who)) == most
    site.now += days * 86_400 * SECOND
    assert site.count_allowed(200, ("action", action), (whose, "one")) == most


def test_a_third_post_in_the_same_second_is_refused_and_one_in_the_next_is_not(site: Site) -> None:
    who = ("action", "write"), ("user", "one")
    assert site.count_allowed(3, *who) == 2
    site.now += SECOND // 2
    assert site.count_allowed(1, *who) == 1


def test_the_buckets_of_a_user_are_three(site: Site) -> None:
    user = ("user", "one")
    assert [site.count_allowed(200, ("action", each), user) for each in ("post", "befriend", "like")] == [1, 150, 5]


def test_all_share_one_bucket_of_the_system(site: Site) -> None:
    assert site.count_allowed(10_100, ("system", "")) == 10_000


def test_ten_percent_over_a_hundred_are_a_hundred_and_ten(site: Site) -> None:
    assert site.count_allowed(200, ("api", "key")) == 110
