"""Which rule a descriptor finds, and which counter: the order of Envoy's ratelimit."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netlimit.l7.document import parse_document
from netlimit.l7.explain import parse_descriptor
from netlimit.l7.methods import find_heads, take_for_get
from netlimit.l7.patterns import Patterns, make_pattern
from netlimit.l7.rules import Descriptor, Entry, Match, RuleSet

TREE = """\
domain: shop
descriptors:
- key: plan
  value: gold
  descriptors:
  - key: tenant
    rate_limit: {unit: second, requests_per_unit: 5}
  - key: tenant
    value: acme
    rate_limit: {unit: second, requests_per_unit: 10}
- key: address
  rate_limit: {unit: minute, requests_per_unit: 20}
- key: address
  value: 192.0.2.66
  rate_limit: {unit: minute, requests_per_unit: 0}
- key: address
  value: 198.51.100.1
- key: job
  rate_limit: {unlimited: true}
- key: path
  value: /api/*
  rate_limit: {unit: hour, requests_per_unit: 30}
- key: path
  value: /api/v1*
  rate_limit: {unit: hour, requests_per_unit: 31}
- key: path
  value: /api/v1/login
  rate_limit: {unit: hour, requests_per_unit: 3}
- key: path
  rate_limit: {unit: hour, requests_per_unit: 300}
- key: file
  value: a*c*e
  share_threshold: true
  rate_limit: {unit: day, requests_per_unit: 40}
- key: user
  value: staff-*
  share_threshold: true
  descriptors:
  - key: call
    rate_limit: {unit: day, requests_per_unit: 50}
  - key: call
    value: admin*
    rate_limit: {unit: day, requests_per_unit: 51}
"""
RULES = RuleSet({"shop": parse_document(TREE).root})


def find(*texts: str, domain: str = "shop") -> Match | None:
    """What a descriptor of `key=value` finds."""
    return RULES.find(domain, [Entry(*each.partition("=")[::2]) for each in texts])


def amount(*texts: str) -> int | None:
    match = find(*texts)
    return None if match is None or match.rule.limit is None else match.rule.limit.amount


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
        (("plan=gold", "tenant=acme"), 10),
        (("plan=gold", "tenant=other"), 5),
        (("plan=gold", "tenant="), 5),
        (("address=203.0.113.9",), 20),
        (("address=192.0.2.66",), 0),
        (("path=/api/v1/login",), 3),
        (("path=/api/v1/logout",), 30),
        (("path=/api/v2",), 30),
        (("path=/other",), 300),
        (("file=ace",), 40),
        (("file=a-c-c-e",), 40),
        (("user=staff-ann", "call=read"), 50),
        (("user=staff-", "call=administer"), 51),
    ],
)
def test_the_exact_value_comes_before_the_first_wildcard_and_that_before_the_key(
    texts: tuple[str, ...], wanted: int
) -> None:
    assert amount(*texts) == wanted


@pytest.mark.parametrize(
    "texts",
    [
        ("plan=gold",),
        ("plan=silver", "tenant=acme"),
        ("tenant=acme",),
        ("plan=gold", "tenant=acme", "more=x"),
        ("address=203.0.113.9", "more=x"),
        ("address=198.51.100.1",),
        ("file=ae",),
        ("file=aec",),
        ("file=acee!",),
        ("Address=203.0.113.9",),
        ("user=staff-ann",),
        ("unknown=x",),
        (),
    ],
)
def test_shorter_longer_and_unknown_descriptors_find_nothing(texts: tuple[str, ...]) -> None:
    assert find(*texts) is None
    assert find("address=203.0.113.9", domain="other") is None


def test_what_a_rule_leaves_open_has_counters_of_its_own() -> None:
    same = [find("address=192.0.2.1"), find("address=192.0.2.1")]
    other = find("address=192.0.2.2")
    assert same[0] == same[1] != other
    assert same[0] is not None
    assert other is not None
    assert same[0].rule is other.rule
    assert keys(("plan=gold", "tenant=acme"), ("plan=gold", "tenant=b")) == ["", "b"]
    assert keys(("path=/api/x",), ("path=/api/y",)) == ["/api/x", "/api/y"]


def keys(*descriptors: tuple[str, ...]) -> list[str]:
    return [match.key for texts in descriptors if (match := find(*texts))]


def test_a_shared_threshold_is_one_counter_whether_the_rule_is_there_or_below() -> None:
    assert keys(("file=ace",), ("file=abcde",)) == ["a*c*e", "a*c*e"]
    one, other, third = keys(("user=staff-ann", "call=x"), ("user=staff-bob", "call=x"), ("user=staff-bob", "call=y"))
    assert one == other != third
    assert len(set(keys(("user=staff-ann", "call=admin1"), ("user=staff-ann", "call=admin2")))) == 2


def test_values_that_are_joined_are_not_mistaken_for_each_other() -> None:
    document = "domain: d\ndescriptors: [{key: a, descriptors: [{key: b, concurrency: 1}]}]"
    rules = RuleSet({"d": parse_document(document).root})
    values = ["", "|", "||", "x|", "|x", "\\", "\\|", "x", "x\\"]
    pairs = [(first, second) for first in values for second in values]
    found = [rules.find("d", [Entry("a", first), Entry("b", second)]) for first, second in pairs]
    assert len({match.key for match in found if match}) == len(pairs)


@pytest.mark.parametrize(
    ("pattern", "fitting", "others"),
    [
        ("*", ["", "x", "*"], []),
        ("a*", ["a", "ab", "a*"], ["", "ba"]),
        ("*z", ["z", "az"], ["za", ""]),
        ("a*a", ["aa", "aba"], ["a", "ab"]),
        ("/api*v1", ["/apiv1", "/api/x/v1"], ["/api/v1/", "/apv1"]),
        ("svc*ep*rpc", ["svceprpc", "svc-ep-rpc"], ["svcrpc", "svc-rpc-ep", "svceprp"]),
        ("ab*ba", ["abba", "ab-ba"], ["aba"]),
        ("a**b", ["ab", "a-b"], ["a"]),
    ],
)
def test_a_star_stands_for_any_text_also_for_none(pattern: str, fitting: list[str], others: list[str]) -> None:
    made = make_pattern("k", pattern)
    assert all(made.fits(Entry("k", value)) for value in fitting)
    assert not any(made.fits(Entry("k", value)) for value in others)
    assert not any(made.fits(Entry("other", value)) for value in fitting)


def test_many_stars_cost_no_more_than_the_value_is_long() -> None:
    made = make_pattern("k", "*".join(["a"] * 300))
    assert not made.fits(Entry("k", "a" * 299))
    assert made.fits(Entry("k", "a" * 300))


_TEXTS = st.text("ab*", max_size=4)


@given(st.lists(_TEXTS.map(lambda text: f"{text}*"), max_size=30), st.text("ab*", max_size=6), st.booleans())
def test_of_many_patterns_the_first_that_fits_is_found(written: list[str], value: str, turned: bool) -> None:
    patterns = Patterns((make_pattern("k", text[::-1] if turned else text), at) for at, text in enumerate(written))
    entry = Entry("k", value)
    assert patterns.find(entry) == next((each for each in patterns if each[0].fits(entry)), None)
    assert patterns.find(Entry("other", value)) is None


@pytest.mark.parametrize("form", ["/t{}/*", "*/t{}", "/t{}/*/x", "/*/t{}"])
def test_a_document_of_many_patterns_is_not_searched_from_its_beginning(form: str) -> None:
    """A client may write a path that means twenty, and each is looked up."""
    patterns = Patterns((make_pattern("k", form.format(number)), number) for number in range(20_000))
    value = form.format(19_999).replace("*", "y")
    began = time.thread_time()
    for _ in range(100):
        found = patterns.find(Entry("k", value))
        assert found is not None
        assert found[1] == 19_999
        assert patterns.find(Entry("k", f"{value}/z/")) is None or form.endswith("*")
    assert time.thread_time() - began < 0.1


def test_what_is_unlimited_is_found_and_says_so() -> None:
    match = find("job=x")
    assert match is not None
    assert (match.rule.unlimited, match.rule.limit) == (True, None)


def test_rules_replace_others_by_name() -> None:
    text = """\
domain: d
descriptors:
- {key: all, rate_limit: {unit: second, requests_per_unit: 5, name: general}}
- {key: some, rate_limit: {unit: second, requests_per_unit: 9, replaces: [{name: general}, {name: else}]}}
"""
    rules = RuleSet({"d": parse_document(text).root})
    told = [Descriptor((Entry(key, "x"),)) for key in ("all", "some")]
    general, special = rules.find_all("d", told)
    assert rules.find_counting("d", told[:1]) == [general]
    assert rules.find_counting("d", told) == [None, special]
    assert general is not None
    assert general.rule.alias == "general"


@pytest.mark.parametrize(
    ("told", "counting"),
    [
        ([("/a", 0), ("/b", 0)], "b"),
        ([("/a", 0), ("/b", 1)], "a b"),
        ([("/b", 0), ("/a", 1)], "b a"),
        ([("/a", 0), ("/b", ~0)], "a b"),
        ([("/c", 0), ("/a", ~0), ("/b", ~0)], "c b"),
        ([("/a", 0), ("/b", 0), ("/a", 1)], "a b"),
        ([("/a", 0), ("/b", 0), ("/a", 1), ("/b", 1)], "b"),
        ([("", 0), ("/b", 0)], "b"),
        ([("", 0), ("/b", 0), ("/c", 1)], "all b c"),
        ([("", 0), ("/c", 0), ("/b", ~0)], "c b"),
        ([("", 0), ("/b", 0), ("/c", ~0)], "b c"),
        ([("", 0), ("/b", 0), ("/b", 1)], "b"),
        ([("", 0), ("/c", 0), ("/b", ~0), ("/d", 1)], "all c b"),
    ],
)
def test_rules_replace_others_within_what_a_path_means(told: list[tuple[str, int]], counting: str) -> None:
    """What replaces a rule does so only if it is there whatever the path is taken for."""
    text = """\
domain: d
descriptors:
- {key: all, rate_limit: {unit: second, requests_per_unit: 5, name: general}}
- {key: path, value: /a, rate_limit: {unit: second, requests_per_unit: 5, name: general}}
- {key: path, value: /b, rate_limit: {unit: second, requests_per_unit: 9, replaces: [{name: general}]}}
- {key: path, value: /c, rate_limit: {unit: second, requests_per_unit: 9}}
"""
    rules = RuleSet({"d": parse_document(text).root})
    descriptors = [
        Descriptor((Entry("path", path) if path else Entry("all", "x"),), besides=meaning) for path, meaning in told
    ]
    found = [match.rule.name for match in rules.find_counting("d", descriptors) if match is not None]
    assert found == [name if name == "all" else f"path=/{name}" for name in counting.split()]


@pytest.mark.parametrize(
    ("told", "counting"),
    [
        ("path=/a method=GET", "get"),
        ("path=/a method=HEAD", "/a head get"),
        ("path=/c method=HEAD", "/c head get"),
        ("all=x method=HEAD", "all head get"),
        ("path=/d method=HEAD", "/d get"),
        ("all=x path=/d method=POST", "/d"),
        ("all=x path=/b,method=HEAD", "all /b,get"),
        ("all=x path=/e,method=HEAD", "/e,method /e,method"),
    ],
)
def test_rules_replace_others_within_what_a_method_means(told: str, counting: str) -> None:
    """What is there for GET alone takes no limit from HEAD, and what a path has takes those of both."""
    text = """\
domain: d
descriptors:
- {key: all, rate_limit: {unit: second, requests_per_unit: 5, name: general}}
- {key: path, value: /a, rate_limit: {unit: second, requests_per_unit: 5, name: general}}
- {key: path, value: /c, rate_limit: {unit: second, requests_per_unit: 9}}
- {key: path, value: /d, rate_limit: {unit: second, requests_per_unit: 9, replaces: [{name: general}, {name: heads}]}}
- {key: method, value: GET, rate_limit: {unit: second, requests_per_unit: 9, replaces: [{name: general}]}}
- {key: method, value: HEAD, rate_limit: {unit: second, requests_per_unit: 9, name: heads}}
- key: path
  value: /b
  descriptors:
  - {key: method, value: GET, rate_limit: {unit: second, requests_per_unit: 9, replaces: [{name: general}]}}
- key: path
  value: /e
  descriptors:
  - {key: method, rate_limit: {unit: second, requests_per_unit: 9, replaces: [{name: general}]}}
"""
    rules = RuleSet({"d": parse_document(text).root})
    descriptors = [Descriptor(parse_descriptor(each)) for each in told.split()]
    descriptors += [take_for_get(descriptors[place]) for place in find_heads(descriptors)]
    found = [match.rule.name for match in rules.find_counting("d", descriptors) if match is not None]
    assert [name.replace("path=", "").replace("method=", "").lower() for name in found] == counting.split()


def test_metrics_tell_of_the_values_that_are_asked_for() -> None:
    text = """\
domain: d
descriptors:
- key: route
  value: api/*
  value_to_metric: true
  descriptors:
  - key: method
    descriptors:
    - {key: user, value_to_metric: true, concurrency: 1}
    - {key: host, detailed_metric: true, concurrency: 1}
"""
    found = {rule.name: (rule.value_to_metric, rule.detailed_metric) for rule in parse_document(text).root.walk()}
    assert found == {"route=api/*,method,user": ((0, 2), False), "route=api/*,method,host": ((0,), True)}
