"""Questions that nobody should ask."""

from __future__ import annotations

import json
import socket

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netlimit.l7.rules import LONGEST_KEY, Entry
from netlimit.l7.service.answers import Problem
from netlimit.l7.service.questions import LARGEST, Question, read_question
from tests.l7.service.serving import Served

GOOD = {"domain": "web", "descriptors": [[{"key": "user", "value": "x"}]]}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["key", "value", "x"]), inner),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"", 400, "Expecting value"),
        (b"{", 400, "line 1, column 2"),
        (b"\xff", 400, "byte 0 is not UTF-8"),
        (b'{"domain": NaN}', 400, "NaN is no number"),
        (b"[" * 60000, 400, "nested too deeply"),
        (b"9" * 5000, 400, "cannot be read as JSON"),
        (b"[]", 422, "not a JSON object"),
        (b"{}", 422, "`domain` is missing"),
        (json.dumps({**GOOD, "domain": ""}).encode(), 422, "`domain` is the name"),
        (json.dumps({**GOOD, "descriptors": []}).encode(), 422, "`descriptors` is a list of 1 to 100"),
        (json.dumps({**GOOD, "descriptors": [[]]}).encode(), 422, "`descriptors[0]` is a list"),
        (json.dumps({**GOOD, "descriptors": [[{"key": 7}]]}).encode(), 422, "`descriptors[0][0]` is an entry"),
        (json.dumps({**GOOD, "descriptors": [["key"]]}).encode(), 422, "`descriptors[0][0]` is an entry"),
        (json.dumps({**GOOD, "hits": True}).encode(), 422, "`hits` is a whole number"),
        (json.dumps({**GOOD, "hits": 2**32}).encode(), 422, "`hits` is a whole number"),
        (json.dumps({**GOOD, "colour": 1}).encode(), 422, "There is no 'colour'"),
        (b" " * (LARGEST + 1), 413, "too large"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(http: httpx.Client, body: bytes, status: int, said: str) -> None:
    answer = http.post("/v1/decide", content=body)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    assert said in answer.json()["detail"]


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from(["domain", "descriptors", "hits", "x"]), JSON))
def test_whatever_is_asked_is_a_question_or_a_problem(asked: dict[str, object]) -> None:
    answered = read(json.dumps(asked).encode())
    if isinstance(answered, Problem):
        assert answered.status in (400, 422)
        assert answered.detail.endswith(".")
    else:
        assert answered.domain == asked["domain"]


def read(body: bytes) -> Question | Problem:
    try:
        return read_question(body)
    except Problem as problem:
        return problem


def test_a_body_that_goes_on_and_on_is_cut_off(served: Served) -> None:
    host, _, port = served.place.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"POST /v1/decide HTTP/1.1\r\nHost: a\r\nContent-Length: 100000000\r\n\r\n")
        with pytest.raises(ConnectionError):
            connection.sendall(b" " * 100_000_000)


def converse(served: Served, *sent: bytes) -> list[bytes]:
    """What is answered to each piece, as one packet."""
    host, _, port = served.place.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        answers = []
        for piece in sent:
            connection.sendall(piece)
            answers.append(connection.recv(2**16))
        return answers


def test_what_is_no_http_is_answered_and_cut_off(served: Served) -> None:
    (answer,) = converse(served, b"nonsense\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"connection: close\r\n" in answer.lower()


def test_a_response_is_one_packet_also_to_those_who_wait_to_continue(served: Served) -> None:
    body = json.dumps(GOOD).encode()
    head = b"POST /v1/decide HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body)
    interim, answer = converse(served, head, body)
    assert interim == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b'"leases":[]}')
    health = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"
    assert [each[-15:] for each in converse(served, health, health)] == [b'{"status":"ok"}'] * 2
    (answer,) = converse(served, health.replace(b"GET", b"HEAD"))
    assert answer.endswith(b"content-length: 15\r\n\r\n")


@pytest.mark.parametrize("leases", [None, 7, [7], ["x"], ["e30="], ["WzFd"], ["\u00e9"], ["W1tbW1s="], [""] * 1001])
def test_what_is_no_lease_is_told(http: httpx.Client, leases: object) -> None:
    answer = http.post("/v1/release", json={"leases": leases})
    assert answer.status_code == 422
    assert "as a decision has" in answer.json()["detail"]


def test_a_long_value_is_as_good_as_a_short_one(http: httpx.Client, served: Served) -> None:
    def ask(value: str) -> int:
        entries = [{"key": "user", "value": value}]
        return http.post("/v1/decide", json={"domain": "web", "descriptors": [entries]}).status_code

    long, other = ("long" * 10_000 + end for end in "ab")
    assert [ask(long) for _ in range(4)] == [200, 200, 200, 429]
    assert ask(other) == 200
    match = served.rules.find("web", [Entry("user", long)])
    assert match is not None
    assert len(match.key) <= LONGEST_KEY


def test_other_places_and_methods(http: httpx.Client) -> None:
    assert http.get("/nothing").status_code == 404
    answer = http.get("/v1/decide")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert http.head("/v1/auth?domain=web&key=user=someone").status_code == 200


def test_it_says_how_it_is(http: httpx.Client, served: Served) -> None:
    assert http.get("/healthz").json() == http.get("/readyz").json() == {"status": "ok"}
    served.service.ending = True
    assert http.get("/readyz").status_code == 503
    assert http.get("/healthz").status_code == 200
    served.service.ending = False


def test_metrics_count_by_rule_and_way(http: httpx.Client) -> None:
    question = {"domain": "web", "descriptors": [[{"key": "user", "value": "metered"}]]}
    statuses = [http.post("/v1/decide", json=question).status_code for _ in range(4)]
    assert statuses == [200, 200, 200, 429]
    lines = dict(line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines() if line[0] != "#")
    hits = 'netlimit_limiter_hits_total{domain="web",limit="rate",outcome="%s",rule="user"}'
    assert float(lines[hits % "admitted"]) >= 3
    assert float(lines[hits % "refused"]) >= 1
    assert float(lines['netlimit_limiter_answers_total{answer="429",way="decide"}']) >= 1
