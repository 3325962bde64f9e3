"""What a client does with what a server says: real HTTP, in a time of the test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from email.utils import formatdate
from time import monotonic
from typing import Any

import httpx
import pytest

from netlimit.client import QuotaExhausted, Retry
from tests.l7.client.callers import ThreadCaller
from tests.l7.client.conftest import Open
from tests.l7.client.script import SENT_AT, Answer, Script

IN_SEVEN = formatdate(SENT_AT + 7, usegmt=True)
REFUSALS = [
    {"Retry-After": "7"},
    {"Retry-After": IN_SEVEN},
    {"X-Ratelimit-Retry-After": "7"},
    {"RateLimit": '"default";r=0;t=7', "RateLimit-Policy": '"default";q=10;w=60'},
    {"RateLimit": '"minute";r=5;t=30, "second";r=0;t=7'},
    {"RateLimit": '"default";r=0', "RateLimit-Policy": '"default";q=10;w=7'},
    {"RateLimit": '"default";r=0;t=50', "Retry-After": "7"},
    {"X-RateLimit-Limit": "10", "X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "7"},
    {"X-RateLimit-Limit": "10", "X-RateLimit-Remaining": "0", "X-RateLimit-Reset": str(SENT_AT + 7)},
    {"X-Rate-Limit-Remaining": "0", "X-Rate-Limit-Reset": IN_SEVEN},
    {"RateLimit-Limit": "10, 10;w=60", "RateLimit-Remaining": "0", "RateLimit-Reset": "7"},
]
SPENT = {"RateLimit": '"default";r=0;t=9'}


@pytest.mark.parametrize("headers", REFUSALS, ids=str)
@pytest.mark.parametrize("status", [429, 503])
def test_comes_again_when_the_server_said(
    headers: dict[str, str], status: int, script: Script, open_caller: Open
) -> None:
    script.play(Answer(status, headers))
    assert open_caller()("GET", script.url).status_code == 200
    assert script.times == [0.0, 7.0]


@pytest.mark.parametrize("headers", REFUSALS[3:], ids=str)
def test_waits_before_it_asks_for_more_than_remains(headers: dict[str, str], script: Script, open_caller: Open) -> None:
    script.play(Answer(200, headers))
    call = open_caller()
    for _ in range(3):
        assert call("GET", f"{script.url}/one").status_code == 200
    assert script.times == [0.0, 7.0, 7.0]


def test_another_path_of_the_origin_waits_too_but_no_other_origin(script: Script, open_caller: Open) -> None:
    script.play(Answer(200, SPENT))
    call = open_caller()
    call("GET", f"{script.url}/one")
    call("GET", f"http://localhost:{script.port}/two")
    call("GET", f"{script.url}/two")
    assert script.times == [0.0, 0.0, 9.0]


def test_another_account_does_not_wait(script: Script, open_caller: Open) -> None:
    script.play(Answer(200, SPENT))
    call = open_caller()
    call("GET", script.url, headers={"Authorization": "Bearer one"})
    call("GET", script.url, headers={"Authorization": "Bearer two"})
    call("GET", script.url, headers={"X-API-Key": "three"})
    call("GET", script.url, headers={"Authorization": "Bearer one"})
    assert script.times == [0.0, 0.0, 0.0, 9.0]


def test_another_policy_does_not_wait(script: Script, open_caller: Open) -> None:
    script.play(
        *(Answer(200, {"RateLimit": f'"{policy}";r={left};t=9'}) for policy, left in (("core", 8), ("search", 0)))
    )
    call = open_caller()
    for path in ("core", "search", "core", "core", "search"):
        call("GET", f"{script.url}/{path}")
    assert script.times == [0.0, 0.0, 0.0, 0.0, 9.0]


def test_another_partition_does_not_wait(script: Script, open_caller: Open) -> None:
    partitions = ((":dHdv:", 8), (":b25l:", 0))
    script.play(*(Answer(200, {"RateLimit": f'"user";r={left};t=9;pk={key}'}) for key, left in partitions))
    call = open_caller()
    for path in ("two", "one", "two", "three", "one"):
        call("GET", f"{script.url}/{path}")
    assert script.times == [0.0, 0.0, 0.0, 0.0, 9.0]


def test_a_refusal_that_names_no_quota_is_the_origins_if_429_and_the_places_if_503(
    script: Script, open_caller: Open
) -> None:
    call = open_caller(retry=Retry(attempts=1))
    script.play(Answer(503, {"Retry-After": "5"}))
    for path in ("one", "two", "one"):
        call("GET", f"{script.url}/{path}")
    script.play(Answer(429, {"Retry-After": "5"}))
    for path in ("one", "two", "one"):
        call("GET", f"{script.url}/{path}")
    assert script.times == [0.0, 0.0, 5.0, 5.0, 10.0, 10.0]


def test_what_remains_again_is_asked_for(script: Script, open_caller: Open) -> None:
    script.play(Answer(200, SPENT), Answer(200, {"RateLimit": '"default";r=3;t=9'}))
    call = open_caller()
    for _ in range(4):
        call("GET", script.url)
    assert script.times == [0.0, 9.0, 9.0, 9.0]


def test_an_answer_from_a_cache_on_the_way_says_nothing_of_quotas(script: Script, open_caller: Open) -> None:
    script.play(Answer(200, {**SPENT, "Age": "3"}))
    call = open_caller()
    call("GET", script.url)
    call("GET", script.url)
    assert script.times == [0.0, 0.0]


def test_a_wait_longer_than_its_patience_is_the_callers_affair(script: Script, open_caller: Open) -> None:
    script.play(Answer(429, {"Retry-After": "3600"}, b"later"))
    call = open_caller(retry=Retry(patience=60))
    assert call("GET", script.url).content == b"later"
    with pytest.raises(QuotaExhausted, match=r"127.0.0.1 takes no such request for another 600.0 s, .* 60 s") as raised:
        call("GET", script.url)
    assert isinstance(raised.value, httpx.TransportError)
    assert raised.value.request.url == script.url
    assert len(script.heard) == 1
    script.time.sleep(600)  # what a server says may be a mistake
    assert call("GET", script.url).status_code == 200


def test_patience_is_for_all_waits_together(script: Script, open_caller: Open) -> None:
    script.play(*[Answer(429, {"Retry-After": "6"})] * 3)
    assert open_caller(retry=Retry(attempts=9, patience=15))("GET", script.url).status_code == 429
    assert script.times == [0.0, 6.0, 12.0]


def test_the_patient_wait_for_hours(script: Script, open_caller: Open) -> None:
    script.play(Answer(429, {"Retry-After": "7200"}))
    assert open_caller(retry=Retry(patience=86_400))("GET", script.url).status_code == 200
    assert script.times == [0.0, 7200.0]


def test_backs_off_where_the_server_says_nothing(script: Script, open_caller: Open) -> None:
    script.play(*[Answer(503)] * 9)
    call = open_caller(retry=Retry(attempts=5, base=1, cap=3))
    assert call("GET", script.url).status_code == 503
    assert len(script.heard) == 5
    assert len(script.time.slept) == 4
    assert all(0 <= pause <= most for pause, most in zip(script.time.slept, (1, 2, 3, 3), strict=True))
    assert len(set(script.time.slept)) == 4


@pytest.mark.parametrize("when", ["0", "Thu, 01 Jan 1970 00:00:00 GMT", "Sun Nov  6 08:49:37 1994"])
def test_may_come_again_at_once(when: str, script: Script, open_caller: Open) -> None:
    script.play(Answer(503, {"Retry-After": when}))
    assert open_caller()("POST", script.url, content=b"again").status_code == 200
    assert script.times == [0.0, 0.0]


def test_one_attempt_is_one(script: Script, open_caller: Open) -> None:
    script.play(Answer(503, {"Retry-After": "1"}))
    assert open_caller(retry=Retry(attempts=1))("GET", script.url).status_code == 503


@pytest.mark.parametrize("status", [200, 301, 400, 500, 502, 504])
def test_other_answers_are_the_callers(status: int, script: Script, open_caller: Open) -> None:
    script.play(Answer(status, {"Retry-After": "1"}))
    assert open_caller()("GET", script.url).status_code == status
    assert len(script.heard) == 1


@pytest.mark.parametrize(
    ("method", "answer", "comes_again"),
    [
        ("POST", Answer(503), False),
        ("PATCH", Answer(429, {"RateLimit": '"default";r=0;t=1'}), False),
        ("POST", Answer(429, {"Retry-After": "1"}), True),
        ("PATCH", Answer(503, {"X-Ratelimit-Retry-After": "1"}), True),
        ("PUT", Answer(503), True),
        ("DELETE", Answer(429), True),
        ("GET", Answer(0), True),
        ("PUT", Answer(0), True),
    ],
)
def test_what_is_sent_twice(method: str, answer: Answer, comes_again: bool, script: Script, open_caller: Open) -> None:
    script.play(answer)
    status = open_caller()(method, script.url, content=b"all of it").status_code
    assert status == (200 if comes_again else answer.status)
    assert [heard.body for heard in script.heard] == [b"all of it"] * (1 + comes_again)


def test_what_may_have_arrived_is_not_sent_twice(script: Script, open_caller: Open) -> None:
    script.play(Answer(0))
    with pytest.raises(httpx.RemoteProtocolError):
        open_caller()("POST", script.url, content=b"once")
    assert len(script.heard) == 1


def test_a_server_that_is_away_is_tried_again(script: Script, open_caller: Open) -> None:
    with pytest.raises(httpx.ConnectError):
        open_caller(retry=Retry(attempts=3))("GET", "http://127.0.0.1:1/")
    assert len(script.time.slept) == 2


def read_once() -> Iterator[bytes]:
    yield b"once"


async def read_once_by_a_task() -> AsyncIterator[bytes]:
    yield b"once"


def test_a_body_that_is_read_once_is_sent_once(script: Script, open_caller: Open) -> None:
    script.play(Answer(429, {"Retry-After": "1"}))
    call = open_caller()
    body = read_once if isinstance(call, ThreadCaller) else read_once_by_a_task
    assert call("PUT", script.url, content=body()).status_code == 429
    assert [heard.body for heard in script.heard] == [b"once"]
    assert call("PUT", script.url, content=body()).status_code == 200
    assert script.times == [0.0, 1.0]  # the server's word is kept none the less


def test_a_refusal_that_drips_is_not_read(script: Script, open_caller: Open) -> None:
    script.play(Answer(429, {"Retry-After": "3"}, drips=True))
    began = monotonic()
    assert open_caller()("GET", script.url).status_code == 200
    assert monotonic() - began < 60
    assert script.times == [0.0, 3.0]


def test_absurd_words_are_no_words(script: Script, open_caller: Open) -> None:
    absurd = {"Retry-After": "9" * 400, "RateLimit": '"default";r=-1;t=1e9', "X-RateLimit-Reset": "soon"}
    script.play(Answer(503, absurd))
    assert open_caller(retry=Retry(base=1))("GET", script.url).status_code == 200
    assert script.times[1] <= 1


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"patience": -1}, {"base": 2, "cap": 1}, {"cap": float("inf")}])
def test_a_patience_that_means_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"seconds|attempts"):
        Retry(**wrong)
