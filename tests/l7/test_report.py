"""What is said of limits, from what has become of the requests under them."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from netlimit.l7 import usage as usage_module
from netlimit.l7.counters import open_counters
from netlimit.l7.decision import Decision
from netlimit.l7.detail import OTHERS, Detail, Space
from netlimit.l7.distinct import Distinct
from netlimit.l7.limit import Algorithm, Limit
from netlimit.l7.limiter import Limiter, Verdict
from netlimit.l7.memory.counter import Clock
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.report import Finding, Fit, describe_report, make_report
from netlimit.l7.rules import Descriptor, Entry, Mode, Node, OnLimit, Rule, RuleSet
from netlimit.l7.usage import Usage
from tests.ports import free_port

DAY = 86_400


class Site:
    """Rules by the keys of their descriptors, and a clock that the test sets."""

    def __init__(self, **rules: Rule) -> None:
        self.now = 1_000_000.0
        self.rules = rules
        self.usage = Usage(lambda: self.now)
        store = MemoryStore(Clock(lambda: int(self.now * 10**9), 0))
        self.limiter = Limiter(self._make_rules, store, usage=self.usage)

    def _make_rules(self) -> RuleSet:
        return RuleSet({"site": Node(default={key: Node(rule) for key, rule in self.rules.items()})})

    def ask(self, rule: str, key: str = "", times: int = 1, hits: int = 1) -> list[Verdict]:
        return [self._decide(Descriptor((Entry(rule, key),)), hits) for _ in range(times)]

    def _decide(self, descriptor: Descriptor, hits: int = 1) -> Verdict:
        return asyncio.run(self.limiter.decide("site", [descriptor], hits))

    def report(self, after: float = 0) -> list[Finding]:
        self.now += after
        return make_report(self._make_rules(), self.usage, self.now)


def rule(amount: int, seconds: int = 60, **fields: Any) -> Rule:
    return Rule("site", fields.pop("name", "user"), Limit(amount, seconds), **fields)


def find(site: Site, after: float = 0) -> Finding:
    (finding,) = site.report(after)
    return finding


def as_of(keys: int, sentence: str) -> str:
    """The sentence with an N for each number that is about so many."""
    likely = range(keys - 3, keys + 4)
    return re.sub(r"\b\d+(?= keys| of about)", lambda found: "N" if int(found[0]) in likely else found[0], sentence)


class TestFit:
    def test_nobody_asks(self) -> None:
        finding = find(Site(user=rule(10)), after=DAY)
        assert (finding.fit, finding.because) == (Fit.UNUSED, "Nothing has asked for it.")

    def test_many_keys_are_refused(self) -> None:
        site = Site(user=rule(8))
        for key in range(20):
            site.ask("user", f"key{key}", times=10)
        finding = find(site)
        assert finding.fit is Fit.TIGHT
        assert as_of(20, finding.because) == (
            "It refuses 20 % of 200 hits, from N of about N keys: not a few that ask too much, but many."
        )
        assert (finding.admitted, finding.refused, finding.near, finding.peak) == (160, 40, 40, 1.0)

    def test_most_is_refused_but_of_one_key(self) -> None:
        site = Site(user=rule(10))
        for key in range(20):
            site.ask("user", f"key{key}")
        site.ask("user", "greedy", times=200)
        finding = find(site)
        assert finding.fit is Fit.WELL
        assert as_of(21, finding.because) == (
            "It refuses 86 % of 220 hits, from 1 of about N keys: a few that ask too much."
        )

    def test_many_keys_are_refused_but_seldom(self) -> None:
        site = Site(user=rule(99))
        for key in range(4):
            site.ask("user", f"key{key}", times=100)
        finding = find(site)
        assert finding.fit is Fit.WELL
        assert as_of(4, finding.because) == "It refuses 1.00 % of 400 hits, from N of about N keys: seldom."

    def test_nobody_comes_near(self) -> None:
        site = Site(user=rule(1000, 3600))
        for key in range(10):
            site.ask("user", f"key{key}", times=12)
        early = find(site, after=10 * 3600 - 1)
        assert early.fit is Fit.EARLY
        assert "watched for 35999 s only" in early.because
        finding = find(site, after=1)
        assert finding.fit is Fit.LOOSE
        assert as_of(10, finding.because) == "It refuses nothing: of about N keys none has used more than 1.20 % of it."

    def test_somebody_comes_near(self) -> None:
        site = Site(user=rule(100))
        site.ask("user", "key", times=99)
        site.ask("user", "other")
        finding = find(site, after=DAY)
        assert (finding.fit, finding.peak, finding.near) == (Fit.WELL, 0.99, 19)

    @pytest.mark.parametrize(("seconds", "watched"), [(60, 600), (3600, 36_000), (DAY, DAY), (30 * DAY, 30 * DAY)])
    def test_it_takes_ten_units_or_a_day_to_call_it_loose(self, seconds: int, watched: int) -> None:
        site = Site(user=rule(10_000, seconds))
        site.ask("user", times=100)
        assert find(site, after=watched - 1).fit is Fit.EARLY
        assert find(site, after=1).fit is Fit.LOOSE

    def test_a_few_hits_say_nothing(self) -> None:
        site = Site(user=rule(1))
        site.ask("user", times=99)
        assert find(site).fit is Fit.EARLY
        site.ask("user")
        assert find(site).fit is Fit.TIGHT

    def test_what_is_to_refuse_everything_does(self) -> None:
        site = Site(user=rule(0))
        site.ask("user", times=5)
        assert find(site).because == "It is to refuse everything: 5 hits."
        assert find(site).fit is Fit.WELL

    def test_who_only_observes_would_refuse(self) -> None:
        site = Site(user=rule(1, mode=Mode.OBSERVE))
        site.ask("user", times=100)
        finding = find(site)
        assert (finding.fit, finding.refused, finding.observed) == (Fit.TIGHT, 0, 99)
        assert finding.because.startswith("It would refuse 99 %")

    def test_the_worst_comes_first(self) -> None:
        site = Site(
            idle=rule(5, name="idle"), loose=rule(1000, name="loose"), tight=rule(1, name="tight"),
            well=rule(200, name="well"), free=Rule("site", "free", unlimited=True),
        )  # fmt: skip
        for name in ("loose", "tight", "well"):
            site.ask(name, times=100)
        assert [finding.rule for finding in site.report(after=600)] == ["tight", "loose", "idle", "well"]


class TestCounting:
    def test_each_limit_of_a_rule_has_counts_of_its_own(self) -> None:
        both = replace(rule(100), concurrency=Limit(2, 30, Algorithm.CONCURRENCY))
        site = Site(user=both)
        site.ask("user", times=5)
        told = {finding.kind: (finding.limit, finding.admitted, finding.refused) for finding in site.report()}
        assert told == {"rate": ("100/minute", 5, 0), "concurrency": ("2 in flight", 2, 3)}

    def test_another_limit_begins_anew_and_the_same_read_again_goes_on(self) -> None:
        site = Site(user=rule(5))
        site.ask("user", times=3)
        site.rules["user"] = rule(5, mode=Mode.SOFT, overshoot=10)
        site.ask("user")
        assert find(site).admitted == 4
        site.rules["user"] = rule(6)
        assert find(site).fit is Fit.UNUSED
        site.ask("user")
        finding = find(site, after=7)
        assert (finding.admitted, finding.seconds) == (1, 7)

    def test_a_refused_request_may_be_kept(self) -> None:
        site = Site(user=rule(1, on_limit=OnLimit.DEFER))
        for verdict in site.ask("user", times=3):
            site.limiter.count_deferred(verdict)  # the first was not refused
        finding = find(site)
        assert (finding.refused, finding.deferred) == (2, 2)

    def test_a_leaky_bucket_queues(self) -> None:
        site = Site(user=Rule("site", "user", Limit(10, 60, Algorithm.LEAKY_BUCKET)))
        site.ask("user", times=4)
        assert find(site).queued == 3

    def test_what_is_tolerated_is_told(self) -> None:
        site = Site(user=rule(10, mode=Mode.SOFT, overshoot=20))
        site.ask("user", times=15)
        finding = find(site)
        assert (finding.admitted, finding.over, finding.refused) == (12, 2, 3)

    def test_weights_count_as_so_many(self) -> None:
        site = Site(user=rule(10))
        site.ask("user", times=3, hits=4)
        finding = find(site)
        assert (finding.admitted, finding.refused, finding.keys, finding.limited_keys) == (8, 4, 1, 1)

    def test_requests_that_bring_limits_take_no_room_without_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(usage_module, "MOST_BROUGHT", 20)
        site = Site(user=rule(10))
        for amount in range(1, 51):
            site._decide(Descriptor((Entry("user", "key"),), limit=Limit(amount, 60)))
        assert len(list(site.usage)) == 20
        assert site.usage.others.admitted == 30
        site.ask("user")
        assert find(site).admitted == 1, "rules have room of their own"
        assert next(counts.rule.name for _, counts in site.usage) == "user", "and are told first"

    def test_it_is_all_json(self) -> None:
        site = Site(user=rule(2))
        site.ask("user", "key", times=3)
        (told,) = json.loads(json.dumps(describe_report(site.report())))
        assert told["fit"] == "too early"
        assert (told["domain"], told["rule"], told["kind"], told["limit"]) == ("site", "user", "rate", "2/minute")
        assert (told["admitted"], told["refused"], told["keys"], told["limited_keys"]) == (2, 1, 1, 1)
        assert "key" not in told.values()


class TestDistinct:
    @pytest.mark.parametrize("number", [0, 1, 10, 100, 1000, 100_000])
    def test_about_so_many(self, number: int) -> None:
        some = Distinct()
        for each in range(number):
            some.add(f"192.0.2.{each}")
            some.add(f"192.0.2.{each}")
        assert some.estimate() == pytest.approx(number, rel=0.35, abs=2)  # five times the standard error

    def test_together(self) -> None:
        evens, threes = Distinct(), Distinct()
        for each in range(0, 6000, 2):
            evens.add(str(each))
        for each in range(0, 6000, 3):
            threes.add(str(each))
        assert evens.merge(threes).estimate() == pytest.approx(4000, rel=0.35)
        assert evens.estimate() == pytest.approx(3000, rel=0.35)

    def test_it_is_of_one_size(self) -> None:
        some = Distinct()
        for each in range(5000):
            some.add(str(each))
        assert len(some._ranks) == 256


def test_a_look_is_no_use() -> None:
    counts = Usage(lambda: 0.0).find_counts(rule(5), Limit(5, 60))
    counts.record("key", 0, Decision(True, 5, 0.0, 0.0))
    counts.record("key", 0, Decision(False, 0, 1.0, 1.0))
    assert (counts.seen, counts.near) == (0, 0)


class TestDetail:
    def test_values_that_a_rule_leaves_open_are_counted(self) -> None:
        site = Site(user=rule(2, detailed_metric=True))
        site.ask("user", "alice", times=3)
        site.ask("user", "bob")
        counts = site.usage.find_counts(site.rules["user"], Limit(2, 60))
        assert counts.detail is not None
        assert counts.detail.counts == {"alice": [2, 1], "bob": [1, 0]}

    def test_only_those_of_the_entries_that_are_named(self) -> None:
        name = r"host=a\,b\=c,path=/v*,user,plan"
        detail = Detail(Rule("site", name, value_to_metric=(0, 1, 3)), Space())
        detail.record(r"/v1|alice|free", 1, True)
        detail.record(r"/v1|bob|free", 2, False)
        detail.record(r"/v\|2|bob|free", 1, True)
        assert detail.counts == {"/v1|free": [1, 2], r"/v\|2|free": [1, 0]}

    def test_a_hundred_are_told_apart(self) -> None:
        detail = Detail(rule(2, detailed_metric=True), Space())
        for number in range(150):
            detail.record(f"user {number}", 1, True)
        detail.record("user 5", 1, False)
        assert len(detail.counts) == 101
        assert detail.counts[OTHERS] == [50, 0]
        assert detail.counts["user 5"] == [1, 1]

    def test_so_many_of_all_rules_are_told_apart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def tell(name: str) -> dict[str, list[int]]:
            counts = site.usage.get(site.rules[name])
            assert counts is not None
            assert counts.detail is not None
            return counts.detail.counts

        monkeypatch.setattr(usage_module, "Space", lambda: Space(3))
        site = Site(user=rule(2, detailed_metric=True), other=rule(2, name="other", detailed_metric=True))
        for who in ("alice", "bob"):
            site.ask("user", who)
            assert not site.usage.troubles
            site.ask("other", who)
        site.ask("other", "carol")
        assert (tell("user"), tell("other")) == (
            {"alice": [1, 0], "bob": [1, 0]},
            {"alice": [1, 0], OTHERS: [2, 0]},
        )
        (told,) = site.usage.troubles
        assert "10,000 values of all rules" in told
        site.rules["user"] = rule(3, detailed_metric=True)  # begins anew, and so there is room
        site.ask("user", "dave")
        site.ask("other", "carol")
        assert (tell("user"), tell("other")["carol"]) == ({"dave": [1, 0]}, [1, 0])
        del site.rules["user"]
        site.rules["third"] = rule(2, name="third", detailed_metric=True)
        site.ask("third", "frank")
        site.ask("third", "grace")
        assert tell("third") == {"frank": [1, 0], OTHERS: [1, 0]}


def test_counters_that_are_away_are_told() -> None:
    port = free_port()
    rules = RuleSet({"site": Node(default={"user": Node(rule(5))})})

    async def ask() -> tuple[bool, bool, bool]:
        store = open_counters(f"redis://127.0.0.1:{port}")
        limiter = Limiter(lambda: rules, store)
        before = limiter.counts_well
        verdict = await limiter.decide("site", [Descriptor((Entry("user", "key"),))])
        after = limiter.counts_well
        await store.aclose()
        return before, verdict.allowed, after

    assert asyncio.run(ask()) == (True, True, False)
