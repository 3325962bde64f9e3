"""ShouldRateLimit: what Envoy is answered."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.json_format import MessageToJson
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from netlimit.l7.addresses import AddressRules
from netlimit.l7.escalation import Refusals
from netlimit.l7.limit import parse_limit
from netlimit.l7.limiter import Limiter
from netlimit.l7.memory.store import MemoryStore
from netlimit.l7.rules import LONGEST_KEY, Entry, Escalation, Mode, Node, Rule, RuleSet
from netlimit.l7.service.bytewise import _LEVELS, TooMany, _count_fields, parse_question
from netlimit.l7.service.envoy import should_rate_limit
from netlimit.l7.service.protocol.descriptor_pb2 import RateLimitDescriptor
from netlimit.l7.service.protocol.service_pb2 import RateLimitRequest
from netlimit.l7.service.protocol.unit_pb2 import RateLimitUnit
from netlimit.l7.service.rpc import LARGEST, SERVICE, find_address
from netlimit.l7.service.turns import Turns
from netlimit.rules import parse_rule
from tests.l7.service.serving import Asker, Response, Served, describe, someone

OK, OVER = Response.OK, Response.OVER_LIMIT
Unit = Response.RateLimit.Unit


def override(descriptor: RateLimitDescriptor, amount: int, unit: str, times: int = 0) -> RateLimitDescriptor:
    descriptor.limit.requests_per_unit = amount
    descriptor.limit.unit = RateLimitUnit.Value(unit)
    if times:
        descriptor.limit.unit_multiplier.value = times
    return descriptor


def weigh(descriptor: RateLimitDescriptor, hits: int) -> RateLimitDescriptor:
    descriptor.hits_addend.value = hits
    return descriptor


def headers_of(response: Response) -> dict[str, str]:
    return {header.key: header.value for header in response.response_headers_to_add}


def test_a_status_tells_limit_rest_and_reset(envoy: Asker, served: Served) -> None:
    served.begin_minute()
    (status,) = envoy.ask(describe(user=someone())).statuses
    assert (status.code, status.limit_remaining, status.duration_until_reset.seconds) == (OK, 2, 60)
    limit = status.current_limit
    assert (limit.name, limit.requests_per_unit, limit.unit) == ("per_user", 3, Unit.MINUTE)


def test_refused_hits_are_counted_until_the_window_ends(envoy: Asker, served: Served) -> None:
    who = describe(user=someone())
    assert [envoy.ask(who).overall_code for _ in range(5)] == [OK, OK, OK, OVER, OVER]
    (status,) = envoy.ask(who).statuses
    assert (status.code, status.limit_remaining) == (OVER, 0)
    served.pass_time(60)
    assert envoy.ask(who).statuses[0].limit_remaining == 2


def test_statuses_are_in_order_and_one_refusal_refuses_all(envoy: Asker) -> None:
    who = someone()
    envoy.ask(describe(user=who), hits=3)
    response = envoy.ask(describe(place=who), describe(user=who), describe(stranger=who))
    assert [status.code for status in response.statuses] == [OK, OVER, OK]
    assert response.overall_code == OVER
    assert response.statuses[0].limit_remaining == 99
    assert not response.statuses[2].HasField("current_limit")


def test_a_rule_counts_for_descriptors_of_its_depth_alone(envoy: Asker) -> None:
    deep, deeper = envoy.ask(describe(place="p", room="r"), describe(place="p", room="r", bed="b")).statuses
    assert (deep.current_limit.unit, deep.limit_remaining) == (Unit.SECOND, 0)
    assert not deeper.HasField("current_limit")


def test_hits_of_the_request_and_of_a_descriptor(envoy: Asker) -> None:
    one, other = someone(), someone()
    response = envoy.ask(describe(place=one), weigh(describe(place=other), 7), hits=20)
    assert [status.limit_remaining for status in response.statuses] == [80, 93]
    assert envoy.ask(weigh(describe(place=one), 0)).statuses[0].limit_remaining == 80
    assert envoy.ask(describe(place=one)).statuses[0].limit_remaining == 79


def test_a_heavy_request_uses_up_the_window_though_it_is_refused(envoy: Asker) -> None:
    who = describe(user=someone())
    assert envoy.ask(who, hits=4).overall_code == OVER
    assert envoy.ask(who).overall_code == OVER


def test_what_is_unlimited_has_boundless_rest(envoy: Asker) -> None:
    (status,) = envoy.ask(describe(guest="anybody")).statuses
    assert (status.code, status.limit_remaining, status.HasField("current_limit")) == (OK, 2**32 - 1, False)


def test_a_limit_in_the_request_is_used_instead_of_the_rules(envoy: Asker) -> None:
    who = someone()
    (status,) = envoy.ask(override(describe(user=who), 50, "DAY")).statuses
    limit = status.current_limit
    assert (limit.requests_per_unit, limit.unit, status.limit_remaining) == (50, Unit.DAY, 49)
    assert envoy.ask(describe(user=who)).statuses[0].limit_remaining == 2
    (status,) = envoy.ask(override(describe(elsewhere=who), 1, "MINUTE", times=15)).statuses
    limit = status.current_limit
    assert (limit.unit, limit.unit_multiplier.value) == (Unit.MINUTE, 15)
    assert envoy.ask(override(describe(elsewhere=who), 1, "MINUTE", times=15)).overall_code == OVER


def test_a_unit_may_be_multiplied(envoy: Asker) -> None:
    limit = envoy.ask(describe(tens=someone())).statuses[0].current_limit
    assert (limit.requests_per_unit, limit.unit, limit.unit_multiplier.value) == (5, Unit.MINUTE, 10)


def test_shadow_mode_refuses_nothing_and_says_nothing_to_clients(envoy: Asker) -> None:
    who = describe(shadow=someone())
    responses = [envoy.ask(who) for _ in range(3)]
    assert [response.statuses[0].code for response in responses] == [OK] * 3
    assert responses[2].statuses[0].limit_remaining == 0
    assert headers_of(responses[2]) == {}


def test_a_rule_that_is_replaced_counts_nothing(envoy: Asker) -> None:
    who = someone()
    for _ in range(4):
        response = envoy.ask(describe(user=who), describe(special=someone()))
    assert response.overall_code == OK
    assert not response.statuses[0].HasField("current_limit")


def test_a_quota_refuses_only_when_all_are_used_up(envoy: Asker) -> None:
    one, other, who = describe(quota=someone()), describe(quota=someone()), someone()
    assert envoy.ask(one).overall_code == OK
    response = envoy.ask(one, other)
    assert (response.statuses[0].code, response.overall_code) == (OVER, OK)
    assert "retry-after" not in headers_of(response)
    assert envoy.ask(one, other).overall_code == OVER
    assert envoy.ask(one, describe(user=who)).overall_code == OVER
    envoy.ask(describe(user=who), hits=3)
    fresh = describe(quota=someone())
    assert envoy.ask(fresh, describe(user=who)).overall_code == OVER


@pytest.mark.parametrize(("named", "sent"), [("GET", "HEAD"), ("GET", "head"), ("POST", "post")])
def test_a_method_is_one_however_it_is_written(envoy: Asker, named: str, sent: str) -> None:
    who = someone()
    assert envoy.ask(describe(method=named, caller=who)).overall_code == OK
    assert envoy.ask(describe(method=sent, caller=who)).overall_code == OVER


def test_a_head_has_one_status_of_its_two_limits(envoy: Asker) -> None:
    """That of GET's where this one refuses, or is the only one; so there is one for each descriptor."""
    who, before, after = someone(), describe(place=someone()), describe(stranger=someone())
    answers = [envoy.ask(before, describe(method="HEAD", caller=who), after) for _ in range(3)]
    told = [[(each.code, each.current_limit.requests_per_unit) for each in answer.statuses] for answer in answers]
    assert told[0] == [(OK, 100), (OK, 2), (OK, 0)]
    assert told[1] == [(OK, 100), (OVER, 1), (OK, 0)]
    assert told[2] == [(OK, 100), (OVER, 2), (OK, 0)]
    assert [answer.overall_code for answer in answers] == [OK, OVER, OVER]
    assert b"method=GET,caller" in answers[1].raw_body
    (alone,) = envoy.ask(describe(method="HEAD", path="/login", caller=someone())).statuses
    assert (alone.code, alone.current_limit.requests_per_unit) == (OK, 1)


def test_a_quota_of_get_is_not_stretched_by_one_of_head() -> None:
    """Both are the quota of one descriptor, and not two of which one may have room."""
    quotas = {
        Entry("method", method): Node(Rule("w", f"method={method}", parse_limit(limit), quota=True))
        for method, limit in (("GET", "1/day"), ("HEAD", "9/day"))
    }
    rules = RuleSet({"w": Node(exact=quotas)})
    limiter = Limiter(lambda: rules, MemoryStore())
    question = RateLimitRequest(domain="w", descriptors=[describe(method="HEAD")]).SerializeToString()

    async def ask_all() -> list[int]:
        return [(await should_rate_limit(limiter, (), question)).overall_code for _ in range(2)]

    assert asyncio.run(ask_all()) == [OK, OVER]


def test_who_passes_by_another_quota_holds_his_place(envoy: Asker) -> None:
    used, left, flight = describe(quota=someone()), describe(quota=someone()), describe(flight=someone())
    weigh(left, 0)
    assert envoy.ask(used).overall_code == OK
    answers = [envoy.ask(used, left, flight) for _ in range(4)]
    assert [answer.statuses[0].code for answer in answers] == [OVER] * 4
    assert [answer.overall_code for answer in answers] == [OK, OK, OVER, OVER], "two in flight are allowed"


def test_who_passes_by_another_quota_is_not_taken_for_one_who_is_refused() -> None:
    """Else he would be blocked in the kernel though he has never been refused."""
    rule = Rule("w", "remote_address", parse_limit("1/day"), quota=True, escalate=Escalation(2, 60, 600))
    rules = RuleSet({"w": Node(default={"remote_address": Node(rule), "big": Node(BIG)})})
    refusals = Refusals()
    limiter = Limiter(lambda: rules, MemoryStore(), refusals=refusals)
    question = RateLimitRequest(domain="w", descriptors=[describe(remote_address="192.0.2.9"), describe(big="x")])

    async def ask() -> int:
        answer = await should_rate_limit(limiter, (), question.SerializeToString(), escalates=True)
        return answer.overall_code

    async def ask_all(number: int) -> list[int]:
        return [await ask() for _ in range(number)]

    assert asyncio.run(ask_all(5)) == [OK] * 5
    assert refusals.take() is None
    assert asyncio.run(ask_all(3)) == [OVER] * 3
    assert refusals.take() is not None


BIG = Rule("w", "big", parse_limit("5/day"), quota=True)


@pytest.mark.parametrize("general", [{"alias": "general"}, {"mode": Mode.OBSERVE}], ids=["replaced", "observing"])
def test_a_quota_that_does_not_count_here_is_none_that_has_room(general: dict[str, Any]) -> None:
    every = Rule("w", "model", parse_limit("9/day"), quota=True, **general)
    own = Rule("w", "user", parse_limit("1/day"), quota=True, replaces=("general",))
    rules = RuleSet({"w": Node(default={"model": Node(every), "user": Node(own)})})
    limiter = Limiter(lambda: rules, MemoryStore())

    async def ask_all(*descriptors: RateLimitDescriptor) -> list[int]:
        question = RateLimitRequest(domain="w", descriptors=descriptors).SerializeToString()
        return [(await should_rate_limit(limiter, (), question)).overall_code for _ in range(3)]

    assert asyncio.run(ask_all(describe(model="x"), describe(user="bob"))) == [OK, OVER, OVER]
    assert asyncio.run(ask_all(describe(model="x"))) == [OK, OK, OK]


def test_headers_for_the_client(envoy: Asker, served: Served) -> None:
    who = describe(user=someone())
    served.begin_minute()
    headers = headers_of(envoy.ask(who))
    assert headers["x-ratelimit-limit"] == "3"
    assert headers["x-ratelimit-remaining"] == "2"
    assert headers["ratelimit-policy"] == '"per_user";q=3;w=60'
    envoy.ask(who, hits=2)
    served.pass_time(18)
    refused = envoy.ask(who)
    assert headers_of(refused)["retry-after"] == "42"
    assert headers_of(refused)["content-type"] == "application/problem+json"
    assert b"come again in 42 seconds" in refused.raw_body
    served.pass_time(42)
    assert envoy.ask(who).overall_code == OK


def test_never_is_never(envoy: Asker) -> None:
    refused = envoy.ask(describe(nobody=someone()))
    assert refused.overall_code == OVER
    assert "retry-after" not in headers_of(refused)


@pytest.mark.parametrize(
    ("domain", "descriptors", "said"),
    [
        ("", [describe(user="alice")], "domain"),
        ("web", [], "descriptors"),
        ("web", [override(describe(user="alice"), 5, "UNKNOWN")], "unit"),
        ("web", [override(describe(user="alice"), 5, "YEAR", times=2**32 - 1)], "hundred years"),
        ("web", [RateLimitDescriptor(is_negative_hits=True)], "given back"),
    ],
)
def test_what_cannot_be_answered_is_an_error(
    envoy: Asker, domain: str, descriptors: list[RateLimitDescriptor], said: str
) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        envoy.ask(*descriptors, domain=domain)
    assert raised.value.code() is grpc.StatusCode.UNKNOWN
    assert said in raised.value.details()


def test_a_domain_without_rules_limits_nothing(envoy: Asker) -> None:
    asked = describe(user="alice"), override(describe(user="alice"), 0, "MINUTE")
    response = envoy.ask(*asked, domain="elsewhere")
    assert (response.overall_code, len(response.statuses), list(response.response_headers_to_add)) == (OK, 2, [])


@pytest.mark.parametrize("value", [b"\xff", b"/login\xc3", b"\xed\xa0\x80", b"\0", b"", b"a" * 2**17, b"\xfe" * 2**21])
def test_whatever_a_client_sends_is_counted(envoy: Asker, value: bytes) -> None:
    who = someone().encode() + value
    bare = RateLimitRequest(domain="web", descriptors=[describe(user="@" * len(who))]).SerializeToString()
    question = bare.replace(b"@" * len(who), who)
    assert [envoy.ask_bytes(question).overall_code for _ in range(4)] == [OK, OK, OK, OVER]


@pytest.mark.parametrize("around", [b"\xa0", b"\x85", b"\x1c", b"\t", "\u00a0\u2003".encode(), b" \x85 "])
def test_blanks_around_a_key_make_no_other_key(envoy: Asker, around: bytes) -> None:
    def ask(written: bytes) -> int:
        bare = RateLimitRequest(domain="web", descriptors=[describe(caller="@" * len(written))]).SerializeToString()
        return envoy.ask_bytes(bare.replace(b"@" * len(written), written)).overall_code

    key = someone().encode()
    assert [ask(written) for written in (key, key + around, around + key, b" " + key)] == [OK, OVER, OVER, OK]


def test_a_message_that_is_too_large_is_refused(envoy: Asker) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        envoy.ask(describe(user="a" * LARGEST))
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    "part",
    [
        b"\x12\x08\x0a\x06\x0a\x01k\x12\x01v",
        b"\x12\x00",
        b"\x0a\x00",
        b"\x18\x01",
        b"\x2a\x00",
        b"\x35\x00\x00\x00\x00",
    ],
    ids=["descriptors", "empty ones", "domains", "hits", "unknown", "fixed"],
)
@pytest.mark.parametrize("within", [b"", b"\x12", b"\x12\x0a"], ids=["question", "descriptor", "entry"])
def test_a_question_with_a_million_fields_is_soon_refused(envoy: Asker, part: bytes, within: bytes) -> None:
    question = part * (LARGEST // 2 // len(part))
    for tag in reversed(within):
        question = bytes([tag]) + write_varint(len(question)) + question
    began = time.thread_time()
    with pytest.raises(TooMany):
        parse_question(b"\x0a\x03web" + question)
    assert time.thread_time() - began < 0.1
    with pytest.raises(grpc.RpcError) as raised:
        envoy.ask_bytes(b"\x0a\x03web" + question)
    assert "more than 2000 fields" in raised.value.details()


def write_varint(number: int) -> bytes:
    rest, last = divmod(number, 128)
    return bytes([last | 128]) + write_varint(rest) if rest else bytes([last])


@given(st.binary(min_size=1, max_size=200))
def test_counting_fields_fails_on_no_bytes(data: bytes) -> None:
    assert _count_fields(memoryview(data), _LEVELS, 0) <= len(data)


def test_a_question_as_large_as_any_is_answered(envoy: Asker) -> None:
    who = describe(user=someone(), agent="a" * 60_000)
    assert envoy.ask(*[describe(**{f"agent-{n}": "a" * 30_000}) for n in range(99)], who).overall_code == OK


def test_each_connection_has_its_turn_however_much_another_asks() -> None:
    async def ask() -> list[str]:
        turns, order = Turns(), list[str]()

        async def take(peer: str, known: bool = False) -> None:
            await turns.take(peer, known)
            order.append(peer)

        tasks = [asyncio.create_task(take("greedy")) for _ in range(1000)]
        await asyncio.sleep(0)
        tasks[500].cancel()
        tasks += [asyncio.create_task(take(peer)) for peer in ("modest", "modest", "other")]
        tasks += [asyncio.create_task(take("known", known=True)) for _ in range(3)]
        while len(order) < 100:
            before = len(order)
            await asyncio.sleep(0)
            assert len(order) <= before + 2, "all else goes on meanwhile"
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.wait_for(take("later"), 60)
        return order

    order = asyncio.run(ask())
    assert len(order) == 1006
    assert order[:12].count("known") == 3
    assert {"modest", "other"} <= {*order[:15]}
    assert order[-1] == "later"


def test_what_is_no_question_is_an_error(envoy: Asker) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        envoy.ask_bytes(b"\xff\xff")
    assert "no RateLimitRequest" in raised.value.details()


@pytest.mark.parametrize(
    "path",
    ["/login", "/login?x=1", "//login", "/%6cogin", "/./login", "/a/../login", "/login#1", "http://h/login", "/login;1",
     "/login%3b1", "/;x/login", "/x/..;/login"],
)  # fmt: skip
def test_a_path_is_one_however_it_is_written(envoy: Asker, path: str) -> None:
    who = someone()
    assert envoy.ask(describe(remote_address=who, path="/login")).overall_code == OK
    assert envoy.ask(describe(remote_address=who, path=path)).overall_code == OVER


def test_a_path_that_may_mean_too_much_is_refused(envoy: Asker, served: Served) -> None:
    """Envoy takes an error for leave to pass."""
    asked = describe(remote_address=someone()), describe(remote_address=someone(), path="/login" + "/..;//" * 100)
    answer = envoy.ask(*asked)
    assert answer.overall_code == OVER
    assert [status.code for status in answer.statuses] == [OVER, OVER]
    assert "more than 128 parts" in json.loads(answer.raw_body)["detail"]
    question = RateLimitRequest(domain="web", descriptors=asked)
    assert httpx.post(f"http://{served.place}/json", content=MessageToJson(question)).status_code == 429


@pytest.mark.parametrize("path", [b"/login\xa0", b"/login\x85", b"/%u06cogin", b"/login%zz", b"/login\x1cx"])
def test_what_no_path_is_sent_as_is_refused(envoy: Asker, path: bytes) -> None:
    asked = describe(remote_address=someone()), describe(remote_address=someone(), path="@" * len(path))
    question = RateLimitRequest(domain="web", descriptors=asked).SerializeToString()
    answer = envoy.ask_bytes(question.replace(b"@" * len(path), path))
    assert answer.overall_code == OVER
    assert [status.code for status in answer.statuses] == [OVER, OVER]
    assert "encode it" in json.loads(answer.raw_body)["detail"]


def test_of_a_path_that_means_two_things_one_status_tells(envoy: Asker) -> None:
    """Whatever it means, Envoy has asked one question, and is told the limit of what is limited."""
    who = someone()
    asked = [describe(remote_address=who, path=path) for path in ("/login;1", "/files/..;/x", "/free;1")]
    first, second = envoy.ask(*asked), envoy.ask(*asked)
    assert [status.code for status in first.statuses] == [OK, OK, OK]
    assert [status.current_limit.requests_per_unit for status in first.statuses] == [1, 1, 0]
    assert [status.code for status in second.statuses] == [OVER, OVER, OK]
    assert (first.overall_code, second.overall_code) == (OK, OVER)


@pytest.mark.parametrize("limited", [False, True])
def test_a_limit_that_a_path_brings_is_of_all_that_it_means(envoy: Asker, limited: bool) -> None:
    who = someone()
    asked = [override(describe(user=who, path=path), 1, "MINUTE") for path in ("/it", "/it;1")]
    answers = [envoy.ask(each) for each in (reversed(asked) if limited else asked)]
    assert [answer.overall_code for answer in answers] == [OK, OVER]
    assert [len(answer.statuses) for answer in answers] == [1, 1]


def test_a_quota_of_a_path_is_used_up_whatever_the_path_means() -> None:
    node = Node(default={"path": Node(Rule("w", "path", parse_limit("1/day"), quota=True))})
    limiter = Limiter(lambda: RuleSet({"w": node}), MemoryStore())

    async def ask_all(*paths: str) -> list[int]:
        questions = [RateLimitRequest(domain="w", descriptors=[describe(path=path)]) for path in paths]
        return [(await should_rate_limit(limiter, (), each.SerializeToString())).overall_code for each in questions]

    assert asyncio.run(ask_all("/it;1", "/it;2", "/other")) == [OK, OVER, OK]


def test_a_pattern_fits_however_long_the_value_is(envoy: Asker) -> None:
    who = someone()
    told = [describe(remote_address=who, path=f"/reports/{'x' * length}/all") for length in (600, 600, 5000, 100_000)]
    assert [envoy.ask(each).overall_code for each in told] == [OK, OVER, OK, OK]  # each path has its counter


def test_what_is_long_is_kept_short(envoy: Asker, served: Served) -> None:
    values = [f"{'user' * 10_000}{number}" for number in range(3)]
    assert [envoy.ask(describe(user=value)).overall_code for value in values] == [OK] * 3
    store = served.limiter._store
    assert isinstance(store, MemoryStore)
    (counter,) = (each for (_, name, _), each in store._counters.items() if name == "user")
    assert all(len(key) <= LONGEST_KEY for key in counter._counts)  # type: ignore[attr-defined]


def test_a_host_is_one_however_it_is_written(envoy: Asker) -> None:
    host = f"{someone()}.example"
    told = [host, host.upper(), f"{host}.", f"{host}:8443"]
    assert [envoy.ask(describe(host=each)).overall_code for each in told] == [OK, OVER, OVER, OVER]


def test_an_ipv6_client_is_one_whichever_addresses_of_its_block_it_takes(envoy: Asker) -> None:
    told = [describe(remote_address=f"2001:db8:0:{64:x}:{number:x}::1") for number in range(1, 20)]
    assert [envoy.ask(each).overall_code for each in told] == [OK] * 2 + [OVER] * 17
    mapped = [describe(remote_address=each) for each in ("::ffff:192.0.2.66", "192.0.2.66", "::FFFF:c000:242")]
    assert [envoy.ask(each).overall_code for each in mapped] == [OK, OK, OVER]


def test_ip_rules_are_asked_about_its_own_address(envoy: Asker, served: Served) -> None:
    rule = replace(parse_rule({"target": "2001:db8:0:65::2", "action": "block"}, datetime.now(UTC)), id=1, revision=1)
    served.addresses = AddressRules([rule], [1])
    try:
        told = [describe(remote_address=f"2001:db8:0:65::{number}") for number in (1, 2, 3)]
        assert [envoy.ask(each).overall_code for each in told] == [OK, OVER, OK]
    finally:
        served.addresses = AddressRules()


@pytest.mark.parametrize("blocked", ["2001:db8:0:66::2", "198.51.100.66"])
@pytest.mark.parametrize("other", ["2001:db8:0:67::1", "2001:db8:0:66::3", "198.51.100.67"])
def test_ip_rules_are_asked_about_each_of_several_addresses(
    envoy: Asker, served: Served, blocked: str, other: str
) -> None:
    """Behind `remote_address` a header of the client may tell another."""
    served.pass_time(60)
    rule = replace(parse_rule({"target": blocked, "action": "block"}, datetime.now(UTC)), id=1, revision=1)
    served.addresses = AddressRules([rule], [1])
    try:
        refused = envoy.ask(describe(remote_address=blocked), describe(remote_address=other), describe(user=someone()))
        assert refused.overall_code == OVER
        assert [status.code for status in refused.statuses] == [
            OVER,
            OVER if other[:13] == blocked[:13] == "2001:db8:0:66" else OK,
            OK,
        ]
        assert "blocked" in refused.raw_body.decode()
        assert envoy.ask(describe(remote_address=other), describe(remote_address=blocked)).overall_code == OVER
        assert envoy.ask(describe(remote_address=other)).overall_code == OK
    finally:
        served.addresses = AddressRules()


def test_those_who_ask_all_at_once_are_all_answered(served: Served) -> None:
    """However many ask at once, on one connection or on many, nobody is sent away without an answer."""

    async def ask_all(channels: int, questions: int) -> int:
        request = RateLimitRequest(domain="web", descriptors=[describe(nobody=someone())])
        opened = [
            grpc.aio.insecure_channel(served.grpc_place, options=(("grpc.use_local_subchannel_pool", 1),))
            for _ in range(channels)
        ]
        calls = [
            channel.unary_unary(f"/{SERVICE}/ShouldRateLimit", RateLimitRequest.SerializeToString, Response.FromString)(
                request, timeout=100
            )
            for channel in opened
            for _ in range(questions)
        ]
        answers = await asyncio.gather(*calls)
        for channel in opened:
            await channel.close()
        return sum(answer.overall_code == OVER for answer in answers)

    assert asyncio.run(ask_all(1, 3000)) == 3000
    assert asyncio.run(ask_all(40, 100)) == 4000


def test_it_is_healthy(served: Served) -> None:
    with grpc.insecure_channel(served.grpc_place) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=30)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_who_asks_is_remembered(served: Served, envoy: Asker) -> None:
    for ask in (lambda: envoy.ask(describe(user=someone())), lambda: httpx.get(f"http://{served.place}/healthz")):
        served.service.askers._known.clear()
        ask()
        assert "127.0.0.1" in served.service.askers


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:192.0.2.7:4711", "192.0.2.7"),
        ("ipv6:%5B2001:db8::7%5D:4711", "2001:db8::7"),
        ("ipv6:[::ffff:192.0.2.7]:4711", "::ffff:192.0.2.7"),
        ("unix:", ""),
    ],
)
def test_the_address_of_a_peer(peer: str, address: str) -> None:
    assert find_address(peer) == address
