"""What a client may spend."""

from __future__ import annotations

import httpx
import pytest

from netlimit.client import Budget, BudgetExhausted, Retry
from netlimit.client.budget import Ledger
from netlimit.errors import LimitError, NetlimitError
from netlimit.l7.limit import Algorithm, Limit, Refill
from tests.l7.client.conftest import Open
from tests.l7.client.script import Answer, Script


def test_requests_wait_for_their_turn(script: Script, open_caller: Open) -> None:
    call = open_caller(budgets={"127.0.0.1": "3/minute"})
    for _ in range(3):
        call("GET", script.url)
        script.time.sleep(5)
    for _ in range(3):
        call("GET", script.url)
    assert script.times == [0.0, 5.0, 10.0, 60.0, 65.0, 70.0]


@pytest.mark.parametrize(
    ("limit", "times"),
    [
        (Limit(2, 10, Algorithm.FIXED_WINDOW), [0.0, 0.0, 10.0, 10.0, 20.0]),
        (Limit(2, 10, Algorithm.SLIDING_WINDOW_LOG), [0.0, 0.0, 10.0, 10.0, 20.0]),
        (Limit(2, 10, Algorithm.SLIDING_WINDOW_COUNTER), [0.0, 0.0, 10.0 + 1e-9, 15.0 + 1e-9, 20.0]),
        (Limit(2, 10, Algorithm.TOKEN_BUCKET), [0.0, 0.0, 5.0, 10.0, 15.0]),
        (Limit(2, 10, Algorithm.TOKEN_BUCKET, burst=1), [0.0, 5.0, 10.0, 15.0, 20.0]),
        (Limit(2, 10, Algorithm.TOKEN_BUCKET, refill=Refill.INTERVAL), [0.0, 0.0, 10.0, 10.0, 20.0]),
        (Limit(2, 10, Algorithm.LEAKY_BUCKET), [0.0, 5.0, 10.0, 15.0, 20.0]),
        (Limit(2, 10, Algorithm.GCRA), [0.0, 0.0, 5.0, 10.0, 15.0]),
    ],
    ids=lambda value: value.algorithm if isinstance(value, Limit) else "",
)
def test_any_algorithm_will_do(limit: Limit, times: list[float], script: Script, open_caller: Open) -> None:
    call = open_caller(budgets={"*": limit})
    for _ in times:
        call("GET", script.url)
    assert script.times == pytest.approx(times)


def test_what_waits_takes_up_no_room(script: Script, open_caller: Open) -> None:
    call = open_caller(budgets={"*": Limit(2, 10, Algorithm.SLIDING_WINDOW_LOG)})
    for pause in (0, 0, 5, 0):
        script.time.sleep(pause)
        call("GET", script.url)
    assert script.times == [0.0, 0.0, 10.0, 10.0]


def test_several_budgets_by_host(script: Script, open_caller: Open) -> None:
    call = open_caller(budgets={"127.*": ["2/second", "3/minute"], "LOCALHOST": "1/minute", "*": "4/minute"})
    for _ in range(3):
        call("GET", script.url)
    call("GET", f"http://localhost:{script.port}")
    call("GET", script.url)
    assert script.times == [0.0, 0.0, 1.0, 1.0, 60.0]


def test_what_waited_for_the_long_budget_keeps_to_the_short_one(script: Script, open_caller: Open) -> None:
    call = open_caller(budgets={"*": ["4/minute", "2/second"]})
    for _ in range(8):
        call("GET", script.url)
    assert script.times == [0.0, 0.0, 1.0, 1.0, 60.0, 60.0, 61.0, 61.0]


def test_weights(script: Script, open_caller: Open) -> None:
    tokens = Budget("10/minute", weigh=lambda request: len(request.content), name="tokens")
    call = open_caller(budgets={"*": [tokens, "9/minute"]})
    for body in (b"1234567", b"", b"", b"123", b"1"):
        call("POST", script.url, content=body)
    assert script.times == [0.0, 0.0, 0.0, 0.0, 60.0]
    with pytest.raises(BudgetExhausted, match=r"of which the request takes 11: it never holds as much."):
        call("POST", script.url, content=b"12345678901")
    with pytest.raises(LimitError, match="weighs -1"):
        open_caller(budgets={"*": Budget("1/day", lambda request: -1)})("GET", script.url)
    assert len(script.heard) == 5


def test_a_turn_that_comes_too_late_is_an_error(script: Script, open_caller: Open) -> None:
    call = open_caller(budgets={"*": "1/hour"}, retry=Retry(patience=60))
    call("GET", script.url)
    sentence = r"The budget of 1/hour for \*: there is room for it in 3600.0 s, and it may wait 60 s in all."
    with pytest.raises(BudgetExhausted, match=sentence) as raised:
        call("GET", script.url)
    assert isinstance(raised.value, NetlimitError)
    assert isinstance(raised.value, httpx.TransportError)
    assert raised.value.wait == 3600
    assert script.time.slept == []


def test_every_attempt_costs(script: Script, open_caller: Open) -> None:
    call = open_caller(budgets={"*": "3/hour"}, retry=Retry(patience=5000, base=0, cap=0))
    script.play(Answer(503), Answer(0))
    call("GET", script.url)
    call("GET", script.url)
    assert script.times == [0.0, 0.0, 0.0, 3600.0]


def test_who_waits_for_a_server_spends_nothing_meanwhile(script: Script, open_caller: Open) -> None:
    script.play(Answer(200, {"RateLimit": '"default";r=0;t=90'}))
    call = open_caller(budgets={"*": "2/minute"}, retry=Retry(patience=100))
    for _ in range(3):
        call("GET", script.url)
    assert script.times == [0.0, 90.0, 90.0]


@pytest.mark.parametrize(
    ("hosts", "url"),
    [
        ("api.example.com", "https://API.example.com:8443/things"),
        ("*.Example.com", "http://a.b.example.com"),
        ("api.example.com", "https://api.example.com./things"),
        ("api.example.com.", "https://api.example.com"),
        ("*.example.com", "https://api.example.com.:8443"),
        ("::1", "http://[::1]:80"),
        ("[2001:DB8::1]", "http://[2001:db8::1]:80"),
        ("2001:db8::1", "http://[2001:db8:0:0::1]"),
        ("[ab].example.org", "https://a.example.org"),
        ("münchen.example", "https://xn--mnchen-3ya.example"),
        ("xn--mnchen-3ya.example", "https://münchen.example"),
    ],
)
def test_hosts_however_they_are_written(hosts: str, url: str) -> None:
    ledger = Ledger({hosts: "3/minute"})
    assert len(ledger.find_charges(httpx.Request("GET", url))) == 1
    assert not ledger.find_charges(httpx.Request("GET", "https://example.com"))


@pytest.mark.parametrize(
    ("budgets", "sentence"),
    [
        ({"*": "many"}, "is no limit"),
        ({"*": Limit(3, 60, Algorithm.CONCURRENCY)}, "httpx.Limits"),
        ({"*": ["3/minute", "5/minute"]}, "give one of them a name"),
        ({"https://api.example.com": "3/minute"}, "would bind nobody"),
        ({"api.example.com:443": "3/minute"}, "would bind nobody"),
        ({"": "3/minute"}, "would bind nobody"),
        ({".": "3/minute"}, "would bind nobody"),
        ({"[2001:db8::1]:443": "3/minute"}, "would bind nobody"),
        ({"[2001:db8::1": "3/minute"}, "would bind nobody"),
        ({"::1": "3/minute", "[::1]": "3/minute"}, "would share the counter"),
    ],
)
def test_budgets_that_mean_nothing_are_refused(
    budgets: dict[str, str | Limit], sentence: str, open_caller: Open
) -> None:
    with pytest.raises(LimitError, match=sentence):
        open_caller(budgets=budgets)
