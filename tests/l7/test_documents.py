"""Documents of limits: what is understood, and what is said of what is not."""

from __future__ import annotations

import json
import re
import string
from textwrap import dedent
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netlimit.errors import DocumentError, LimitError
from netlimit.l7 import markup
from netlimit.l7.document import Document, parse_document, write_yaml
from netlimit.l7.fields import MOST_PLACES
from netlimit.l7.identity import PLAIN, read_address
from netlimit.l7.limit import Algorithm, Limit, Refill
from netlimit.l7.patterns import make_pattern
from netlimit.l7.rules import Entry, Escalation, Mode, OnFailure, OnLimit, Rule
from netlimit.l7.targets import read_paths

MARKETING = """\
domain: messaging
descriptors:
 - key: message_type
   Value: marketing
   rate_limit:
       unit: day
       requests_per_unit: 5
"""
LOGIN = """\
domain: auth
descriptors:
 - key: auth_type
   Value: login
   rate_limit:
       unit: minute
       requests_per_unit: 5
"""
TABS = """\
domain: auth
desciptors: 
	- key: auth_type
		Value: login
		rate_limit: 
			unit: minute
			requests_per_minute: 5
"""  # noqa: W291  # just as it was found


def rules(text: str) -> dict[str, Rule]:
    """The rules of a document, by name."""
    return {rule.name: rule for rule in parse_document(dedent(text)).root.walk()}


def only(descriptor: str) -> Rule:
    """The one rule of a descriptor, in the flow style, without its key."""
    (rule,) = parse_document(f"domain: d\ndescriptors: [{{key: k, {descriptor}}}]").root.walk()
    return rule


def places(text: str, is_json: bool = False) -> dict[str, tuple[int | None, str]]:
    """What is wrong with a document, by path."""
    with pytest.raises(DocumentError) as caught:
        parse_document(dedent(text), is_json)
    return {place.field: (place.line, place.sentence) for place in caught.value.places}


def refusal(descriptor: str) -> tuple[str, str]:
    """The one thing that is wrong with a descriptor in the flow style, without its key."""
    ((path, (line, sentence)),) = places(f"domain: d\ndescriptors: [{{key: k, {descriptor}}}]").items()
    assert line == 2
    return path.removeprefix("descriptors[0]").removeprefix("."), sentence


@pytest.mark.parametrize(("text", "limit"), [(MARKETING, Limit(5, 86_400)), (LOGIN, Limit(5, 60))])
def test_a_key_with_a_capital_is_understood_with_a_warning(text: str, limit: Limit) -> None:
    document = parse_document(text)
    (rule,) = document.root.walk()
    assert (rule.domain, rule.limit) == (document.domain, limit)
    (warning,) = document.warnings
    assert str(warning) == "line 4, descriptors[0].Value: `Value` is taken for `value`; write that, others are strict."
    assert rule.name in ("message_type=marketing", "auth_type=login")


def test_slips_are_all_named_at_once_though_tabs_are_no_yaml() -> None:
    assert places(TABS) == {
        "desciptors": (2, "`desciptors` is not known in a document; did you mean `descriptors`?"),
        "": (3, "It is indented with tabs, which YAML does not allow; use spaces. So are 4 more lines."),
        "descriptors[0].rate_limit.requests_per_minute": (
            7,
            "`requests_per_minute` is not known in `rate_limit`; did you mean `requests_per_unit`?",
        ),
    }


def test_the_error_reads_as_lines_and_is_an_error_of_limits() -> None:
    with pytest.raises(LimitError) as caught:
        parse_document("descriptors:\n- {key: a, valeu: b}\n- {}\ndomain: ''\n")
    assert str(caught.value).splitlines() == [
        "line 2, descriptors[0].valeu: `valeu` is not known in a descriptor; did you mean `value`?",
        "line 3, descriptors[1].key: It is missing: what is told of a request, such as `key: remote_address`.",
        "domain: It is missing; a document begins with it: `domain: auth`.",
    ]
    assert caught.value.field == "descriptors[0].valeu"


@pytest.mark.parametrize(
    ("unit", "seconds"),
    [
        ("second", 1),
        ("MINUTE", 60),
        ("Hour", 3600),
        ("day", 86_400),
        ("week", 7 * 86_400),
        ("month", 30 * 86_400),
        ("year", 365 * 86_400),
    ],
)
def test_units_are_windows_of_equal_length(unit: str, seconds: int) -> None:
    assert only(f"rate_limit: {{unit: {unit}, requests_per_unit: 7}}").limit == Limit(7, seconds)
    several = only(f"rate_limit: {{unit: {unit}, unit_multiplier: 5, requests_per_unit: 7}}")
    assert several.limit == Limit(7, 5 * seconds)


def test_everything_that_a_rule_can_say() -> None:
    rule = only(
        "value: v, rate_limit: {unit: minute, requests_per_unit: 100, algorithm: token_bucket, burst: 20, "
        "refill: interval, name: mine, replaces: [{name: theirs}, {name: others}]}, concurrency: {limit: 8, "
        "lease: 2m}, mode: soft, overshoot: 10%, on_limit: queue, max_wait: 500ms, on_failure: open, "
        "emergency: 10/second, quota_mode: true, "
        "detailed_metric: true, value_to_metric: true"
    )
    assert rule == Rule(
        "d",
        "k=v",
        Limit(100, 60, Algorithm.TOKEN_BUCKET, 20, Refill.INTERVAL),
        Limit(8, 120, Algorithm.CONCURRENCY),
        mode=Mode.SOFT,
        overshoot=10,
        on_limit=OnLimit.QUEUE,
        max_wait=0.5,
        on_failure=OnFailure.OPEN,
        emergency=Limit(10, 1),
        alias="mine",
        replaces=("theirs", "others"),
        quota=True,
        detailed_metric=True,
        value_to_metric=(0,),
    )


def test_an_escalation_is_read_where_it_has_somebody_to_block() -> None:
    escalate = "concurrency: 1, escalate: {after: 100, within: 1m, block: 10m}"
    rules = parse_document(
        f"domain: web\ndescriptors:\n- {{key: remote_address, {escalate}}}\n- {{key: api_key, {escalate}}}\n"
    ).root.walk()
    assert [rule.escalate for rule in rules] == [Escalation(100, 60, 600), None]


def test_our_own_keys_stand_in_a_descriptor_or_in_its_rate_limit() -> None:
    counting = "algorithm: token_bucket, burst: 20, refill: interval"
    acting = "concurrency: 8, mode: soft, overshoot: 10%, on_limit: queue, max_wait: 5, on_failure: open"
    rate = "unit: minute, requests_per_unit: 100"
    inside = only(f"rate_limit: {{{rate}, {counting}, {acting}}}")
    assert only(f"rate_limit: {{{rate}}}, {counting}, {acting}") == inside
    assert only(f"rate_limit: {{{rate}, {counting}}}, {acting}") == inside
    assert (inside.mode, inside.max_wait) == (Mode.SOFT, 5)
    assert inside.limit == Limit(100, 60, Algorithm.TOKEN_BUCKET, 20, Refill.INTERVAL)
    assert inside.concurrency == Limit(8, 60, Algorithm.CONCURRENCY)


def test_what_is_not_said_has_the_defaults_of_a_rule() -> None:
    assert only("rate_limit: {unit: second, requests_per_unit: 0}") == Rule("d", "k", Limit(0, 1))
    assert only("rate_limit: {unlimited: true}") == Rule("d", "k", unlimited=True)
    assert only("concurrency: 20") == Rule("d", "k", concurrency=Limit(20, 60, Algorithm.CONCURRENCY))
    log = only("rate_limit: {unit: hour, requests_per_unit: 1, algorithm: sliding_window_log, count_refused: no}")
    assert log.limit == Limit(1, 3600, Algorithm.SLIDING_WINDOW_LOG, count_refused=False)


@pytest.mark.parametrize(
    ("said", "mode"),
    [
        ("shadow_mode: true", Mode.OBSERVE),
        ("shadow_mode: false", Mode.HARD),
        ("mode: observe, shadow_mode: true", Mode.OBSERVE),
        ("mode: elastic, priority: 20", Mode.ELASTIC),
    ],
)
def test_shadow_mode_observes(said: str, mode: Mode) -> None:
    assert only(f"rate_limit: {{unit: second, requests_per_unit: 1}}, {said}").mode is mode


def test_a_descriptor_that_limits_nothing_is_a_place_without_a_rule() -> None:
    document = parse_document("domain: d\ndescriptors: [{key: trusted, shadow_mode: true}, {key: k, descriptors: }]")
    assert list(document.root.walk()) == []
    assert set(document.root.default) == {"trusted", "k"}
    assert parse_document("domain: d").root.default == {}


@pytest.mark.parametrize(
    ("written", "value"),
    [("on", "on"), ("08", "08"), ("1_0", "1_0"), ("1.50", "1.50"), ("2001-01-01", "2001-01-01"), ("'~'", "~")],
)
def test_plain_words_are_texts_as_they_are_written(written: str, value: str) -> None:
    rule = only(f"value: {written}, rate_limit: {{unlimited: yes}}")
    assert rule.name == f"k={value}"


def test_names_are_paths_that_cannot_be_mistaken_and_stay_when_others_come() -> None:
    text = """\
        domain: d
        descriptors:
        - key: a
          value: b,c
          descriptors:
          - {key: d, rate_limit: {unlimited: true}}
          - {key: d, value: x*, rate_limit: {unlimited: true}}
        - key: a
          value: b
          descriptors: [{key: 'c,d', rate_limit: {unlimited: true}}, {key: c, value: 'd=\\', concurrency: 1}]
        """
    names = {r"a=b\,c,d", r"a=b\,c,d=x*", r"a=b,c\,d", r"a=b,c=d\=\\"}
    assert set(rules(text)) == names
    assert set(rules(dedent(text) + "- {key: a, concurrency: 1}\n")) == names | {"a"}


REFUSED = {
    "rate_limit: {unit: second, unlimited: true}": (
        "rate_limit.unit",
        "What is unlimited has no unit; leave one of them out.",
    ),
    "rate_limit: {unit: fortnight, requests_per_unit: 1}": (
        "rate_limit.unit",
        "fortnight is none of second, minute, hour, day, week, month, year.",
    ),
    "rate_limit: {requests_per_unit: 1}": ("rate_limit.unit", "It is missing; write for example `unit: minute`."),
    "rate_limit: {unit: day}": (
        "rate_limit.requests_per_unit",
        "It is missing; write for example `requests_per_unit: 5`.",
    ),
    "rate_limit: {unit: day, requests_per_unit: '5'}": (
        "rate_limit.requests_per_unit",
        "'5' is no whole number from 0 to 4294967295.",
    ),
    "rate_limit: {unit: day, requests_per_unit: 4294967296}": (
        "rate_limit.requests_per_unit",
        "4294967296 is no whole number from 0 to 4294967295.",
    ),
    "rate_limit: {unit: day, requests_per_unit: 010}": (
        "rate_limit.requests_per_unit",
        "010 is no whole number from 0 to 4294967295.",
    ),
    "rate_limit: {unit: year, unit_multiplier: 101, requests_per_unit: 1}": (
        "rate_limit.unit",
        "3185136000 s is not between a second and a hundred years.",
    ),
    "rate_limit: {unit: day, requests_per_unit: 5, burst: 3}": (
        "rate_limit.burst",
        "fixed_window has no burst; only token_bucket, leaky_bucket, gcra have one.",
    ),
    "rate_limit: {unit: day, requests_per_unit: 5, algorithm: concurrency}": (
        "rate_limit.algorithm",
        "concurrency is none of fixed_window, sliding_window_log, sliding_window_counter, token_bucket, leaky_bucket, "
        "gcra.",
    ),
    "rate_limit: {unlimited: true, name: a, replaces: [{name: a}]}": (
        "rate_limit.replaces[0].name",
        "'a' is the name of this very `rate_limit`, which cannot replace itself.",
    ),
    "rate_limit: {unlimited: true, replaces: [{}]}": (
        "rate_limit.replaces[0].name",
        "It is missing: the `name` of the `rate_limit` that is replaced.",
    ),
    "rate_limit: {unlimited: true, replaces: [a]}": (
        "rate_limit.replaces[0]",
        "A map is wanted here: an entry of `replaces`, with `name: …` and so on.",
    ),
    "algorithm: gcra": ("algorithm", "It needs a `rate_limit` beside it."),
    "burst: 2, rate_limit: {unit: day, requests_per_unit: 5, algorithm: gcra, burst: 3}": (
        "burst",
        "`burst` is there twice, here and in `rate_limit`.",
    ),
    "mode: observe, rate_limit: {unit: day, requests_per_unit: 5, mode: hard}": (
        "mode",
        "`mode` is there twice, here and in `rate_limit`.",
    ),
    "rate_limit: {unit: day, requests_per_unit: 5, shadow_mode: true}": (
        "rate_limit.shadow_mode",
        "`shadow_mode` is not known in `rate_limit`; it belongs into a descriptor.",
    ),
    "ratelimit: {unlimited: true}": (
        "ratelimit",
        "`ratelimit` is not known in a descriptor; did you mean `rate_limit`?",
    ),
    "colour: red": ("colour", "`colour` is not known in a descriptor; docs/limits.md lists what is."),
    "value: [a]": ("value", "One value is wanted here, and not a list."),
    'value: "a\\0b"': ("value", "It has the character '\\x00', which no key or value may have."),
    "descriptors: {key: a}": ("descriptors", "A list is wanted here, of which each item is a descriptor."),
    "value: v, share_threshold: true, concurrency: 1": (
        "share_threshold",
        "Only a value with a `*` in it has a threshold to share.",
    ),
    "on_limit: queue": ("on_limit", "It needs a limit beside it: `rate_limit`, or `concurrency`."),
    "concurrency: 1, max_wait: 5": (
        "max_wait",
        "Nothing waits here; with `on_limit: queue` requests do.",
    ),
    "concurrency: 1, on_limit: queue, max_wait: soon": (
        "max_wait",
        '\'soon\' is no length of time; write seconds, or "500ms", "90s", "10m", "2h", "7d".',
    ),
    "concurrency: {lease: 5s}": ("concurrency.limit", "It is missing; write for example `limit: 20`."),
    "concurrency: 1, mode: soft": (
        "overshoot",
        "It is missing: how many percent over its limit a soft one goes.",
    ),
    "concurrency: 1, overshoot: 5": (
        "overshoot",
        "A limit that is hard goes over by no percentage; soft and elastic ones do.",
    ),
    "concurrency: 1, priority: 5": ("priority", "A limit that is hard knows no priorities; elastic ones do."),
    "concurrency: 1, mode: elastic, priority: 101": ("priority", "101 is no whole number from 0 to 100."),
    "concurrency: 1, mode: elastic, shadow_mode: true": (
        "shadow_mode",
        "It means `mode: observe`, but `mode` is elastic; leave one of them out.",
    ),
    "concurrency: 1, shadow_mode: maybe": ("shadow_mode", "maybe is neither true nor false."),
    "concurrency: 1, on_failure: closed, emergency: 5/s": (
        "emergency",
        "There is no emergency limit with `on_failure: closed`; leave one of them out.",
    ),
    "concurrency: 1, emergency: often": (
        "emergency",
        '\'often\' is no limit; write for example "100/minute", "5 per 10 minutes" or "1000/day".',
    ),
    "concurrency: 1, escalate: {after: 100, within: 1m}": (
        "escalate.block",
        "It is missing; write `escalate: {after: 100, within: 1m, block: 10m}`.",
    ),
    "concurrency: 1, concurrency: 2": ("concurrency", "`concurrency` is there twice."),
    "? [a] : b": ("", "A map or a list is no key here; keys are words."),
}


@pytest.mark.parametrize(("descriptor", "said"), REFUSED.items(), ids=REFUSED)
def test_what_means_nothing_is_refused_by_its_place(descriptor: str, said: tuple[str, str]) -> None:
    assert refusal(descriptor) == said


def test_every_wrong_place_is_named_with_its_line() -> None:
    found = places(
        """\
        domain: d
        descriptors:
        - key: a
          rate_limit:
            unit: minutes
            requests_per_unit: many
            refill: never
        - key: b
          descriptors:
          - value: nothing
          - {key: c, concurrency: -1}
        - {key: a, rate_limit: {unit: day, requests_per_unit: 1, burst: 2, refill: interval, count_refused: false}}
        """
    )
    assert {path: line for path, (line, _) in found.items()} == {
        "descriptors[0].rate_limit.unit": 5,
        "descriptors[0].rate_limit.requests_per_unit": 6,
        "descriptors[0].rate_limit.refill": 7,
        "descriptors[1].descriptors[0].key": 10,
        "descriptors[1].descriptors[1].concurrency": 11,
        "descriptors[2].key": 12,
    }
    assert found["descriptors[2].key"][1] == "descriptors[0] has the same key and value; make one of them."
    assert set(places("domain: d\ndescriptors: [{key: a, rate_limit: {unit: day, requests_per_unit: 1, burst: 2, "
                      "refill: interval, count_refused: false}}]")) == {
        "descriptors[0].rate_limit.burst",
        "descriptors[0].rate_limit.refill",
        "descriptors[0].rate_limit.count_refused",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value", "plain"),
    [("path", "//login", "/login"), ("path", "/login?x=1", "/login"), ("path", "/caf%C3%A9", "/caf\u00e9"),
     ("host", "Host.Example.:80", "host.example")],
)  # fmt: skip
def test_what_no_path_or_host_is_ever_compared_with_is_warned_of(key: str, value: str, plain: str) -> None:
    text = "domain: web\ndescriptors:\n- {key: %s, value: '%s', rate_limit: {unit: day, requests_per_unit: 1}}\n"
    (warning,) = parse_document(text % (key, value)).warnings
    assert repr(plain) in str(warning)
    for other in (plain, plain + "*", "*" + plain):
        assert not parse_document(text % (key, other)).warnings
    assert not parse_document(text % ("user", value)).warnings


@pytest.mark.parametrize("value", ["10.0.0.0/8", "192.0.2.7/32", "2001:db8::/32", "2001:db8::1/128"])
def test_a_network_that_no_client_is_told_by_is_warned_of(value: str) -> None:
    text = "domain: web\ndescriptors:\n- {key: %s, value: '%s', rate_limit: {unit: day, requests_per_unit: 1}}\n"
    (warning,) = parse_document(text % ("remote_address", value)).warnings
    assert "descriptors[0].value: No client is told by a network such as this" in str(warning)
    for other in ("192.0.2.7", "10.*", "2001:db8::/64"):
        assert not parse_document(text % ("remote_address", other)).warnings
    (warning,) = parse_document(text % ("remote_address", "2001:db8::7/64")).warnings
    assert "in its plain form, '2001:db8::/64'" in str(warning)
    assert not parse_document(text % ("network", value)).warnings
    (warning,) = parse_document(text % ("remote_address", "fe80::/64")).warnings
    assert "A link-local client is told by its address" in str(warning)
    for other in ("fe80::1", "fe80:*"):
        assert not parse_document(text % ("remote_address", other)).warnings


def warn_of(key: str, value: str) -> list[str]:
    """What is said of a descriptor."""
    fields = {"key": key, "value": value, "rate_limit": {"unit": "day", "requests_per_unit": 1}}
    document = parse_document(json.dumps({"domain": "web", "descriptors": [fields]}), is_json=True)
    return [place.sentence for place in document.warnings]


@pytest.mark.parametrize(
    ("key", "value", "works"),
    [
        ("path", "//api/*", "/api/*"),
        ("path", "/api/./*", "/api/*"),
        ("path", "/%6Cogin*", "/login*"),
        ("path", "login*", "/login*"),
        ("path", "*//login", "*/login"),
        ("path", "/login?*", "/login"),
        ("path", "http://host.example/login*", "/login*"),
        ("host", "*.Example.com", "*.example.com"),
        ("host", "host.example:*", "host.example"),
        ("host", "*.example.com.", "*.example.com"),
        ("host", "[2001:0DB8:*", "[2001:db8:*"),
        ("method", "get", "GET"),
        ("method", "p*", "P*"),
        ("remote_address", "10.01.*", "10.1.*"),
        ("remote_address", "2001:DB8:*", "2001:db8:*"),
        ("remote_address", "2001:0db8:*::/64", "2001:db8:*::/64"),
    ],
)
def test_a_pattern_that_nothing_fits_is_warned_of_with_one_that_works(key: str, value: str, works: str) -> None:
    (said,) = warn_of(key, value)
    assert f"{works!r}; write that." in said
    assert warn_of(key, works) == []


@pytest.mark.parametrize(
    "value",
    ["10.01.2.3", "10.1.2", "192.0.2.7:80", "300.*", "10.1.2.3.*", "10.1.*/16", "2001:db8:*/48", "2001:db8:0:0:*",
     "2001:db8:1:2:3:*", "2001:db8::1*", "2001:db8:12345:*"],
)  # fmt: skip
def test_what_is_as_no_clients_address_is_warned_of(value: str) -> None:
    (said,) = warn_of("remote_address", value)
    assert "No client's address is" in said
    assert "`2001:db8:*`" in said


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("path", ["*", "/*", "*/../*", "/a/*/../b", "*.php", "/api/*/users", "/*/", "/.*", "/a:b*"]),
        ("host", ["*", "*.example.com", "example.*", "[2001:db8:*", "192.0.2.*", "*example*"]),
        ("method", ["GET", "*", "P*", "M-SEARCH"]),
        ("remote_address", ["*", "1*", "10.*", "10.1*", "10.*.3.*", "*.7", "10.*.*.*.*", "192.0.2.7"]),
        ("remote_address", ["2001:db8:*", "2001:db8:0:1:*", "2001:db8:1*", "2001:db8:1:2*", "2001:db8::*", "::*"]),
        ("remote_address", ["*::/64", "2001:db8:*::/64", "2001:db8:*/64", "64:ff9b::*", "64:ff9b::c000:2*"]),
        ("remote_address", ["unix", "testclient", "a*"]),
        ("user", ["//X%6C", "10.01.*"]),
    ],
)
def test_what_something_fits_is_not_warned_of(key: str, values: list[str]) -> None:
    assert {value: warned for value in values if (warned := warn_of(key, value))} == {}


@pytest.mark.parametrize(
    ("key", "told"),
    [("Path", "path"), ("Remote_Address", "remote_address"), ("header:X-Tenant", "x-tenant"), ("X-Tenant", "x-tenant")],
)
def test_a_key_that_is_told_otherwise_is_warned_of(key: str, told: str) -> None:
    (said,) = warn_of(key, "1")
    assert f"{told!r}; write that" in said
    assert warn_of(told, "192.0.2.7" if told == "remote_address" else "/1") == []


@given(
    st.sampled_from(["path", "host", "remote_address"]),
    st.text("aB01/.:[]", max_size=12) | st.ip_addresses().map(str),
    st.integers(0, 12),
    st.integers(0, 12),
)
def test_what_fits_something_that_is_told_is_not_warned_of(key: str, told: str, start: int, end: int) -> None:
    readings = read_paths(told.encode()) if key == "path" else [PLAIN[key](told.encode())]
    for plain in [each for each in readings if key != "path" or not re.search(r"//|/\.(/|$)", each)]:
        pattern = f"{plain[:start]}*{plain[max(start, end) :]}"
        assert make_pattern(key, pattern).fits(Entry(key, plain))
        is_name = key == "host" and not {*"[]"} & {*plain}
        if key == "path" or read_address(plain.strip("[]").partition("/")[0]) or is_name:
            assert warn_of(key, pattern) == []


@pytest.mark.parametrize(
    ("acting", "said"),
    [
        ("on_limit: queue", "With `on_limit: queue` nobody is blocked"),
        ("on_limit: defer", "With `on_limit: defer` nobody is blocked"),
        ("on_limit: observe", "With `on_limit: observe` nobody is blocked"),
        ("mode: observe", "With `mode: observe` nobody is blocked"),
        ("shadow_mode: true", "With `mode: observe` nobody is blocked"),
    ],
)
def test_an_escalation_without_refusals_is_warned_of(acting: str, said: str) -> None:
    escalate = "escalate: {after: 9, within: 1m, block: 1h}"
    text = f"domain: web\ndescriptors:\n- {{key: remote_address, concurrency: 1, {acting}, {escalate}}}\n"
    (warning,) = parse_document(text).warnings
    assert f"descriptors[0].escalate: It has no effect. {said}" in str(warning)


@pytest.mark.parametrize(
    ("pattern", "escalates"),
    [
        ('value: "10.*"', True),
        ('value: "10.*", share_threshold: true', False),
        ('value: "*", share_threshold: true', False),
    ],
)
@pytest.mark.parametrize("deep", [False, True])
def test_a_limit_that_all_of_a_pattern_share_blocks_nobody_and_that_is_warned_of(
    pattern: str, escalates: bool, deep: bool
) -> None:
    limit = "concurrency: 1, escalate: {after: 9, within: 1m, block: 1h}"
    below = f"descriptors: [{{key: path, {limit}}}]" if deep else limit
    document = parse_document(f"domain: web\ndescriptors:\n- {{key: remote_address, {pattern}, {below}}}\n")
    (rule,) = document.root.walk()
    assert (rule.escalate is not None) is escalates
    assert [place.field for place in document.warnings] == (
        [] if escalates else [f"descriptors[0].{'descriptors[0].' * deep}escalate"]
    )
    if not escalates:
        assert "all clients that `remote_address: " in str(document.warnings[0])
        assert "share one counter" in str(document.warnings[0])


def test_what_clients_share_of_other_keys_blocks_them_still() -> None:
    document = parse_document(
        "domain: web\ndescriptors:\n- {key: path, value: '/shop/*', share_threshold: true, descriptors: ["
        "{key: remote_address, concurrency: 1, escalate: {after: 9, within: 1m, block: 1h}}]}\n"
    )
    (rule,) = document.root.walk()
    assert (rule.escalate is not None, document.warnings) == (True, ())


@pytest.mark.parametrize("rate", ["", "rate_limit: {unlimited: true}, "])
def test_an_emergency_limit_without_a_rate_is_warned_of(rate: str) -> None:
    text = "domain: web\ndescriptors:\n- {key: user, %sconcurrency: 5, emergency: 2/minute}\n"
    (warning,) = parse_document(text % rate).warnings
    assert "descriptors[0].emergency: It has no effect" in str(warning)
    assert not parse_document(text % "rate_limit: {unit: day, requests_per_unit: 9}, ").warnings


def test_slips_without_consequence_are_warned_of() -> None:
    document = parse_document(
        "domain: d\ndescriptors:\n"
        "- {key: a*, rate_limit: {unlimited: true, requests_per_unit: 5, replaces: [{name: gone}]}, on_limit: queue}\n"
        "- {key: b, metadata: {service: {name: x, weights: [1, ~, true, 'on']}}}\n"
        "- {key: api_key, concurrency: 1, escalate: {after: 9, within: 1m, block: 1h}}\n"
        "- {key: remote_address, concurrency: 1, escalate: {after: 9, within: 1m, block: 1h}}\n"
    )
    assert {place.field: place.line for place in document.warnings} == {
        "descriptors[0].key": 3,
        "descriptors[0].rate_limit.requests_per_unit": 3,
        "descriptors[0].on_limit": 3,
        "descriptors[2].escalate": 5,
        "": None,
    }
    assert document.fields["descriptors"][1]["metadata"] == {"service": {"name": "x", "weights": [1, None, True, "on"]}}


def test_anchors_and_merged_maps_are_read() -> None:
    text = """\
        domain: d
        descriptors:
        - {key: a, rate_limit: &ten {unit: minute, requests_per_unit: 10}}
        - {key: b, rate_limit: *ten}
        - {key: c, rate_limit: {<<: *ten, unit: hour}}
        """
    found = rules(text)
    assert {name: rule.limit for name, rule in found.items()} == {
        "a": Limit(10, 60),
        "b": Limit(10, 60),
        "c": Limit(10, 3600),
    }


BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 12)
)
MERGES = "a0: &a0 {k: 1}\n" + "".join(
    f"a{level}: &a{level} {{<<: [{','.join([f'*a{level - 1}'] * 10)}]}}\n" for level in range(1, 12)
)
TOWER = f"a0: &a0 {'[' * 40}{']' * 40}\na1: {'[' * 40}*a0{']' * 40}\n"
HOSTILE = {
    "lists without end": "[" * 100_000,
    "maps without end": "{a: " * 100_000,
    "blocks without end": "- " * 100_000,
    "keys without end": "? " * 100_000,
    "aliases of aliases": BOMB,
    "merges of merges": MERGES,
    "aliases that make it deep": TOWER,
    "an alias of itself": "&a [*a]",
    "an alias of nothing": "domain: *a",
    "a tag that builds": "!!python/object/apply:os.system [ls]",
    "a binary tag": "domain: !!binary aGFsbG8=",
    "two documents": "domain: a\n---\ndomain: b\n",
    "a null character": "domain: a\0b",
    "half a pair": "domain: '\ud800'",
    "a word": "domain",
    "nothing": "",
    "values without end": "[" + "a," * markup.MOST_VALUES + "a]",
    "a merge of a number": "<<: 5",
    "a name without end": f"domain: {'x' * 1_000_000}",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_texts_are_refused(text: str) -> None:
    with pytest.raises(DocumentError) as caught:
        parse_document(text)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"domain":' * 100_000, "[NaN]", '{"domain": "\\ud800"}',
     '{"domain": "a\\u0000"}', "[[]," * 300_000,
     '{"domain": "a", "domain": "b"}', '{"domain": 1', "", '{"domain": "a", "descriptors": null, "x": Infinity}'],
)  # fmt: skip
def test_hostile_json_is_refused(text: str) -> None:
    with pytest.raises(DocumentError):
        parse_document(text, is_json=True)


def test_bytes_are_utf_8_and_not_too_many() -> None:
    assert markup.decode(b"\xef\xbb\xbfdomain: \xc3\xa4") == "domain: ä"
    with pytest.raises(LimitError, match=r"Byte 10 is not UTF-8"):
        markup.decode(b"domain: a\n\xc3\xff")
    with pytest.raises(LimitError, match=r"2097153 bytes; 2097152 are the most"):
        markup.decode(b"x" * (markup.LARGEST + 1))


def test_so_many_wrong_places_are_enough() -> None:
    with pytest.raises(DocumentError) as caught:
        parse_document("domain: d\ndescriptors:\n" + "- {kez: a, colour: red}\n" * 1000)
    assert len(caught.value.places) == MOST_PLACES + 1


def test_paths_that_are_too_long_do_not_fill_the_memory() -> None:
    level = f"{{key: {'k' * 900}, descriptors: ["
    found = places("domain: d\ndescriptors: [" + level * 3 + "]}" * 3 + "]")
    assert found == {
        "descriptors[0].descriptors[0].key": (
            2,
            "The keys and values on the way here have more than 1000 letters.",
        )
    }


def test_json_says_the_same_as_yaml() -> None:
    document = parse_document(LOGIN)
    assert document.fields == {
        "domain": "auth",
        "descriptors": [
            {"key": "auth_type", "value": "login", "rate_limit": {"unit": "minute", "requests_per_unit": 5}},
        ],
    }
    again = parse_document(json.dumps(document.fields), is_json=True)
    assert (again.domain, again.root, again.fields) == (document.domain, document.root, document.fields)
    assert places('{"domain": "a", "descriptors": [{"key": "b", "rate_limit": {"unit": 5}}]}', is_json=True) == {
        "descriptors[0].rate_limit.unit": (None, "5 is none of second, minute, hour, day, week, month, year."),
        "descriptors[0].rate_limit.requests_per_unit": (
            None,
            "It is missing; write for example `requests_per_unit: 5`.",
        ),
    }


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=12)
RATES = st.fixed_dictionaries(
    {"unit": st.sampled_from(["second", "day", "year"]), "requests_per_unit": st.integers(0, 2**32 - 1)},
    optional={"name": WORDS, "unit_multiplier": st.integers(1, 100)},
)
ENTRIES = st.fixed_dictionaries(
    {"key": WORDS},
    optional={
        "value": WORDS,
        "rate_limit": RATES,
        "shadow_mode": st.booleans(),
        "concurrency": st.integers(0, 100) | st.fixed_dictionaries({"limit": st.integers(0, 9)}),
    },
)


def nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, max_size=3, unique_by=lambda each: (each["key"], each.get("value")))
    return st.builds(lambda entry, below: {**entry, "descriptors": below}, ENTRIES, several)


@settings(max_examples=40, deadline=None)
@given(domain=WORDS, descriptor=st.recursive(ENTRIES, nest, max_leaves=6))
def test_a_document_survives_being_written(domain: str, descriptor: dict[str, Any]) -> None:
    document = parse_document(json.dumps({"domain": domain, "descriptors": [descriptor]}), is_json=True)
    again = parse_document(write_yaml(document))
    assert (again.domain, again.root, again.fields) == (document.domain, document.root, document.fields)
    assert len({rule.name for rule in document.root.walk()}) == len(list(document.root.walk()))


PIECES = [
    "domain: d\n", "descriptors:\n", "- ", "  ", "\t", "key: ", "value: ", "rate_limit: ", "{", "}", "[", "]",
    ",", "unit: second", "requests_per_unit: 5", "&a ", "*a", "<<: ", "*", "'", "\"", ">\n", "# x\n", "? ", ": ",
    "!!str ", "concurrency: 5", "\n", "~", "---\n", "unlimited: true", "replaces: ", "name: x", "\u0085",
    "\ufeff",
]  # fmt: skip


def understand(text: str, is_json: bool) -> Document | DocumentError:
    try:
        return parse_document(text, is_json)
    except DocumentError as error:
        return error


@pytest.mark.parametrize("is_json", [False, True])
@settings(max_examples=150, deadline=None)
@given(text=st.lists(st.sampled_from(PIECES), max_size=30).map("".join) | st.text(string.printable, max_size=80))
def test_whatever_goes_in_a_document_or_sentences_come_out(text: str, is_json: bool) -> None:
    found = understand(text, is_json)
    if isinstance(found, Document):
        assert found.domain
    else:
        assert found.places
        assert all(place.sentence[-1] in ".?" for place in found.places)
