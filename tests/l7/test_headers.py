"""What responses say of limits: fields by family, and the problem document of what is refused."""

from __future__ import annotations

import json
import re
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netlimit.l7.headers import USUAL, Family, count_seconds, make_headers, write_string
from netlimit.l7.limit import Algorithm, Limit, parse_limit
from netlimit.l7.problems import QUOTA_EXCEEDED, write_problem
from netlimit.l7.rules import Mode
from tests.l7.verdicts import Sandbox, make_rule

MINUTE = parse_limit("100/minute")


def test_the_fields_of_a_request_that_passes() -> None:
    verdict = Sandbox(make_rule("user", MINUTE)).after(30).ask()
    assert make_headers(verdict) == [
        (b"ratelimit-policy", b'"user";q=100;w=60'),
        (b"ratelimit", b'"user";r=99;t=30'),
        (b"x-ratelimit-limit", b"100"),
        (b"x-ratelimit-remaining", b"99"),
        (b"x-ratelimit-reset", b"30"),
    ]


def test_long_names_and_many_limits_leave_room_in_a_proxy() -> None:
    """Who gets more than 4 KiB of header fields takes it for no answer, and lets the request pass."""
    lights = "\N{VERTICAL TRAFFIC LIGHT}" * 1000
    rules = [make_rule(f"{number}{lights}", parse_limit(f"{number}/day")) for number in range(1, 40)]
    sandbox = Sandbox(*rules)
    sandbox.ask()
    refused = make_headers(sandbox.ask(), {*Family})
    assert sum(len(name) + len(value) + 4 for name, value in refused) < 3000
    policies = dict(refused)[b"ratelimit-policy"].split(b", ")
    assert len({*policies}) == 8
    assert policies[0].startswith(b'"1%F0%9F%9A%A6')
    assert b";q=1;w=86400" in policies[0]


def test_each_family_can_be_chosen() -> None:
    sandbox = Sandbox(make_rule("user", parse_limit("1/minute"))).after(29.5)
    sandbox.ask()
    refused = sandbox.ask()
    assert make_headers(refused, {Family.IETF}) == [
        (b"ratelimit-policy", b'"user";q=1;w=60'),
        (b"ratelimit", b'"user";r=0;t=31'),
    ]
    assert make_headers(refused, {Family.RETRY_AFTER}) == [(b"retry-after", b"31")]
    assert make_headers(refused, {Family.X_RATELIMIT}) == [
        (b"x-ratelimit-limit", b"1"),
        (b"x-ratelimit-remaining", b"0"),
        (b"x-ratelimit-reset", b"31"),
        (b"x-ratelimit-retry-after", b"31"),
    ]
    assert make_headers(refused, {Family.RATELIMIT}) == [
        (b"ratelimit-limit", b"1"),
        (b"ratelimit-remaining", b"0"),
        (b"ratelimit-reset", b"31"),
    ]
    assert make_headers(refused, set()) == []
    assert len(make_headers(refused, {*Family})) == 2 + 1 + 4 + 3
    assert Family.RATELIMIT not in USUAL


def test_all_policies_are_told_and_the_plain_fields_are_of_the_tightest() -> None:
    sandbox = Sandbox(make_rule("day", parse_limit("1000/day")), make_rule("second", parse_limit("2/second")))
    fields = dict(make_headers(sandbox.ask()))
    assert fields[b"ratelimit-policy"] == b'"day";q=1000;w=86400, "second";q=2;w=1'
    assert fields[b"ratelimit"] == b'"day";r=999;t=57600, "second";r=1;t=1'
    assert (fields[b"x-ratelimit-limit"], fields[b"x-ratelimit-remaining"]) == (b"2", b"1")


def test_what_refuses_is_told_before_what_has_less_left() -> None:
    sandbox = Sandbox(make_rule("few", parse_limit("3/day")), make_rule("many", parse_limit("5/hour")))
    sandbox.ask(2)
    refused = sandbox.ask(2)  # one is left of the few, three of the many
    assert refused.refusing is not None
    assert dict(make_headers(refused))[b"x-ratelimit-limit"] == b"3"


def test_retry_after_is_that_of_all_limits_together() -> None:
    sandbox = Sandbox(make_rule("second", parse_limit("1/second")), make_rule("minute", parse_limit("1/minute")))
    sandbox.ask()
    fields = dict(make_headers(sandbox.ask()))
    assert fields[b"retry-after"] == b"60"
    assert fields[b"ratelimit"] == b'"second";r=0;t=1, "minute";r=0;t=60'


def test_never_less_than_a_second_and_nothing_where_waiting_does_not_help() -> None:
    assert [count_seconds(wait) for wait in (0.0, 0.2, 1.0, 1.000001, inf)] == [1, 1, 1, 2, None]
    sandbox = Sandbox(make_rule("fast", Limit(1000, 1, Algorithm.GCRA, burst=1)))
    sandbox.ask()
    assert dict(make_headers(sandbox.ask()))[b"retry-after"] == b"1"
    heavy = sandbox.ask(5)
    assert b"retry-after" not in dict(make_headers(heavy))
    assert dict(make_headers(heavy))[b"ratelimit"] == b'"fast";r=0'


def test_a_policy_that_two_descriptors_find_is_told_once_as_it_stands_worst() -> None:
    sandbox = Sandbox(make_rule("user", parse_limit("3/minute")), make_rule("user", parse_limit("3/minute")))
    assert dict(make_headers(sandbox.ask()))[b"ratelimit"] == b'"user";r=1;t=60'


def test_what_only_observes_is_not_told() -> None:
    sandbox = Sandbox(make_rule("trial", parse_limit("1/minute"), mode=Mode.OBSERVE))
    sandbox.ask()
    verdict = sandbox.ask()
    assert verdict.allowed
    assert make_headers(verdict) == []


def test_requests_in_flight_have_a_unit_of_their_own_and_no_window() -> None:
    fields = dict(make_headers(Sandbox(make_rule("c", None, Limit(3, 60, Algorithm.CONCURRENCY))).ask()))
    assert fields[b"ratelimit-policy"] == b'"c";q=3;qu="concurrent-requests"'
    assert fields[b"ratelimit"] == b'"c";r=2'
    assert b"x-ratelimit-reset" not in fields


def test_a_policy_bears_the_name_that_it_was_given() -> None:
    verdict = Sandbox(make_rule("auth_type=login,user", MINUTE, alias="logins")).ask()
    assert dict(make_headers(verdict))[b"ratelimit"].startswith(b'"logins";')


@given(st.text())
def test_every_name_is_a_string_of_a_structured_field(name: str) -> None:
    text = write_string(name)
    assert re.fullmatch(r'"(?:[ !#-\[\]-~]|\\["\\])*"', text)
    if name.isascii() and name.isprintable():
        assert re.sub(r"\\(.)", r"\1", text[1:-1]) == name


def test_a_name_is_no_way_to_smuggle_a_header() -> None:
    assert write_string('a"b\\c\r\nx: 1 \u00e4') == '"a\\"b\\\\c%0D%0Ax: 1 %C3%A4"'


@pytest.mark.parametrize(
    ("limit", "hits", "detail"),
    [
        (parse_limit("1/minute"), 1, 'The limit "user" of 1/minute is reached; come again in 60 seconds.'),
        (parse_limit("1/second"), 1, 'The limit "user" of 1/second is reached; come again in 1 second.'),
        (parse_limit("1/second"), 2, 'The limit "user" of 1/second never admits a request such as this.'),
        (parse_limit("0/second"), 1, 'The limit "user" of 0/second never admits a request such as this.'),
    ],
)
def test_the_problem_says_which_limit_how_much_and_when(limit: Limit, hits: int, detail: str) -> None:
    sandbox = Sandbox(make_rule("user", limit), make_rule("other", MINUTE))
    sandbox.ask()
    problem = json.loads(write_problem(sandbox.ask(hits)))
    assert problem == {
        "type": QUOTA_EXCEEDED,
        "title": "Too Many Requests",
        "status": 429,
        "detail": detail,
        "violated-policies": ["user"],
    }


def test_nothing_tells_whose_counter_it_is() -> None:
    sandbox = Sandbox(make_rule("api_key", parse_limit("1/minute")))
    sandbox.ask(who="s3cret")
    refused = sandbox.ask(who="s3cret")
    assert b"s3cret" not in write_problem(refused) + b"".join(value for _, value in make_headers(refused, {*Family}))
