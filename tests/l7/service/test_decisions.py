"""`/v1/decide`, its leases, and `/json`."""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from netlimit.l7.addresses import AddressRules
from netlimit.rules import parse_rule
from tests.l7.service.serving import Served, someone

Descriptors = list[list[dict[str, str]]]


def describe(**entries: str) -> Descriptors:
    return [[{"key": key, "value": value} for key, value in entries.items()]]


def ask(http: httpx.Client, descriptors: Descriptors, **others: Any) -> httpx.Response:
    return http.post("/v1/decide", json={"domain": "web", "descriptors": descriptors, **others})


def test_a_decision_for_each_descriptor(http: httpx.Client, served: Served) -> None:
    who = someone()
    served.begin_minute()
    answer = ask(http, describe(user=who) + describe(stranger=who) + describe(guest=who))
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    user, stranger, guest = answer.json()["descriptors"]
    assert user == {
        "allowed": True,
        "rule": "user",
        "limit": {"amount": 3, "seconds": 60, "algorithm": "fixed_window"},
        "remaining": 2,
        "retry_after": 0,
        "reset_after": 60,
        "delay": 0,
    }
    assert stranger == {"allowed": True, "rule": None, "limit": None}
    assert guest == {"allowed": True, "rule": "guest", "limit": None}


def test_refused_requests_are_told_when_to_come_again(http: httpx.Client, served: Served) -> None:
    who = describe(user=someone())
    served.begin_minute()
    assert [ask(http, who).status_code for _ in range(3)] == [200] * 3
    refused = ask(http, who)
    assert refused.status_code == 429
    said = refused.json()
    assert (said["allowed"], said["leases"]) == (False, [])
    assert said["retry_after"] == said["descriptors"][0]["retry_after"] > 0
    assert int(refused.headers["retry-after"]) - said["retry_after"] < 1
    assert said["detail"].startswith('The limit "per_user" of 3/minute is reached; come again in ')
    assert (said["title"], said["status"], said["violated-policies"]) == ("Too Many Requests", 429, ["per_user"])
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.headers["ratelimit-policy"] == '"per_user";q=3;w=60'
    assert refused.headers["x-ratelimit-remaining"] == "0"
    served.pass_time(said["retry_after"])
    assert ask(http, who).status_code == 200


def test_hits_weigh_and_none_only_look(http: httpx.Client) -> None:
    who = describe(user=someone())
    assert ask(http, who, hits=2).json()["descriptors"][0]["remaining"] == 1
    assert ask(http, who, hits=0).json()["descriptors"][0]["remaining"] == 1
    assert ask(http, who, hits=2).status_code == 429
    assert ask(http, who, hits=1).status_code == 200


def test_never_is_null(http: httpx.Client) -> None:
    refused = ask(http, describe(nobody=someone()))
    assert refused.json()["retry_after"] is None
    assert "retry-after" not in refused.headers


def test_leases_are_held_renewed_and_released(http: httpx.Client, served: Served) -> None:
    who = describe(flight=someone())
    first, second = (ask(http, who).json()["leases"] for _ in range(2))
    assert len(first) == len(second) == 1
    assert ask(http, who).status_code == 429
    released = http.post("/v1/release", json={"leases": first})
    assert (released.status_code, "content-length" in released.headers) == (204, False)
    (third,) = ask(http, who).json()["leases"]
    served.pass_time(50)
    assert http.post("/v1/renew", json={"leases": second}).status_code == 204
    served.pass_time(50)
    assert http.post("/v1/release", json={"leases": [third, *first]}).status_code == 204  # ended by themselves
    assert ask(http, who).status_code == 200
    assert ask(http, who).status_code == 429  # the second still lasts


def test_whoever_has_a_lease_does_not_know_those_of_others(http: httpx.Client) -> None:
    """By them he could end theirs, and so open a limit for whom he likes."""
    (one,), (other,) = (ask(http, describe(flight=someone())).json()["leases"] for _ in range(2))
    names = [json.loads(urlsafe_b64decode(each))[-1] for each in (one, other)]
    assert len(names[0]) == 24
    assert names[0][:6] != names[1][:6]


def test_who_renews_a_lease_that_is_over_is_told(http: httpx.Client, served: Served) -> None:
    """Else it would go on, though another has its place."""
    who = describe(flight=someone())
    first, second = (ask(http, who).json()["leases"] for _ in range(2))
    served.pass_time(50)
    assert http.post("/v1/renew", json={"leases": second}).status_code == 204
    served.pass_time(50)
    told = http.post("/v1/renew", json={"leases": [*first, *second]})
    assert (told.status_code, told.headers["content-type"]) == (404, "application/problem+json")
    assert told.json()["detail"] == "A lease is over, and what it held may be another's: ask again. The others last on."
    served.pass_time(50)
    assert ask(http, who).status_code == 200  # the first one's place is free
    assert ask(http, who).status_code == 429  # the second still lasts
    assert http.post("/v1/release", json={"leases": second}).status_code == 204
    assert http.post("/v1/renew", json={"leases": second}).status_code == 404


def test_a_lease_of_a_rule_that_is_gone_is_no_error(http: httpx.Client) -> None:
    (lease,) = ask(http, describe(flight=someone())).json()["leases"]
    assert http.post("/v1/release", json={"leases": [lease[:-8] + "A" * 8]}).status_code == 422
    assert http.post("/v1/release", json={"leases": ["WyJhIiwiYiIsImMiLCJkIl0="]}).status_code == 204


def test_looking_holds_nothing(http: httpx.Client) -> None:
    who = describe(flight=someone())
    assert ask(http, who, hits=0).json()["leases"] == []
    assert [ask(http, who).status_code for _ in range(2)] == [200, 200]


def test_json_is_the_protocol_in_other_letters(http: httpx.Client) -> None:
    question = {"domain": "web", "descriptors": [{"entries": [{"key": "user", "value": someone()}]}]}
    answer = http.post("/json", json=question)
    assert answer.status_code == 200
    said = answer.json()
    assert said["overallCode"] == "OK"
    assert said["statuses"][0]["currentLimit"] == {"requestsPerUnit": 3, "unit": "MINUTE", "name": "per_user"}
    refused = http.post("/json", json={**question, "hitsAddend": 5})
    assert (refused.status_code, refused.json()["overallCode"]) == (429, "OVER_LIMIT")
    assert {"key": "x-ratelimit-remaining", "value": "0"} in refused.json()["responseHeadersToAdd"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"domain": "web"}',
        b'{"descriptors": []}',
        b'{"domain": 7}',
        b'{"else": 1}',
        b'{"domain": "web", "hitsAddend": 1e400}',
        b'{"domain": "web", "hitsAddend": -1}',
        b'{"domain": ' + b"[" * 50_000,
        b'{"domain": "web", "domain": "twice"}',
        b'{"domain": "\\ud800", "descriptors": [{"entries": [{"key": "user"}]}]}',
    ],
)
def test_json_that_is_no_question_is_refused(http: httpx.Client, body: bytes) -> None:
    answer = http.post("/json", content=body)
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/problem+json")


def test_an_ipv6_client_is_one_whichever_addresses_of_its_block_it_takes(http: httpx.Client, served: Served) -> None:
    told = [describe(remote_address=f"2001:db8:0:75:{number:x}::1") for number in range(1, 9)]
    assert [ask(http, each).status_code for each in told] == [200] * 2 + [429] * 6
    rule = replace(parse_rule({"target": "2001:db8:0:76::2", "action": "block"}, datetime.now(UTC)), id=1, revision=1)
    served.addresses = AddressRules([rule], [1])
    try:
        told = [describe(remote_address=f"2001:db8:0:76::{number}") for number in (1, 2, 3)]
        assert [ask(http, each).status_code for each in told] == [200, 403, 200]
    finally:
        served.addresses = AddressRules()


@pytest.mark.parametrize("blocked", ["2001:db8:0:77::2", "198.51.100.77"])
@pytest.mark.parametrize("other", ["2001:db8:0:78::1", "2001:db8:0:77::3", "198.51.100.78"])
def test_ip_rules_are_asked_about_each_of_several_addresses(
    http: httpx.Client, served: Served, blocked: str, other: str
) -> None:
    served.pass_time(60)
    rule = replace(parse_rule({"target": blocked, "action": "block"}, datetime.now(UTC)), id=1, revision=1)
    served.addresses = AddressRules([rule], [1])
    try:
        told = [describe(remote_address=each)[0] for each in (other, blocked)]
        assert ask(http, told).status_code == 403
        assert ask(http, told[::-1]).status_code == 403
        assert ask(http, told[:1]).status_code == 200
    finally:
        served.addresses = AddressRules()
