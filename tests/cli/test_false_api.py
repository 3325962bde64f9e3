"""Whoever has taken over the API's user may answer in its place: no command hangs, grows, or breaks down over that."""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import httpx
import pytest

from netlimit.cli import asking, client
from netlimit.cli.errors import CommandError
from netlimit.settings import Settings
from tests.cli.false_api import Answering, answering, make_answer
from tests.cli.running import Netlimit

HEAD = b"HTTP/1.1 200 OK\r\n"
FIELDS = b"Content-Type: application/json\r\nContent-Length: 1000000\r\n\r\n["
EVERY_SECONDS = 0.2


@pytest.fixture
def place(netlimit: Netlimit) -> Netlimit:
    netlimit.do("db", "upgrade")
    return netlimit


def trickle(begin: bytes, drop: bytes) -> Answering:
    """Answer, and add a little again and again."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(begin)
        while True:
            time.sleep(EVERY_SECONDS)
            connection.sendall(drop)

    return answer


def flood(connection: socket.socket) -> None:
    connection.sendall(HEAD + b"Content-Type: application/json\r\n\r\n")
    while True:
        connection.sendall(b" " * 2**20)


TRICKLES = [
    trickle(HEAD + FIELDS, b" "),
    trickle(HEAD, b"X-A: b\r\n"),
    trickle(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
]


@pytest.mark.parametrize("answer", TRICKLES, ids=["body", "head", "other answers before"])
def test_the_whole_answer_is_waited_for_and_not_each_part(place: Netlimit, answer: Answering) -> None:
    with answering(place, answer), httpx.Client() as http, pytest.raises(httpx.TimeoutException):
        asking.ask(http, "GET", place.environment["NETLIMIT_URL"], 1.5)


def test_so_is_who_reads_slowly(place: Netlimit) -> None:
    def read_slowly(connection: socket.socket) -> None:
        while connection.recv(1):
            time.sleep(EVERY_SECONDS)

    with answering(place, read_slowly), httpx.Client() as http, pytest.raises(httpx.TimeoutException):
        asking.ask(http, "POST", place.environment["NETLIMIT_URL"], 1.5, content=b" " * 2**26)


def test_a_command_ends(place: Netlimit) -> None:
    """Each is waited for as long as it waits itself, and all of them at once."""
    settings = {"NETLIMIT_LIMITER_LISTEN": place.environment["NETLIMIT_LISTEN"]}
    with answering(place, trickle(HEAD + FIELDS, b" ")), ThreadPoolExecutor() as pool:
        status = pool.submit(place.refuse, "status")
        report = pool.submit(place.refuse, "limits", "report", **settings)
        doctor = pool.submit(place.run, "doctor")
        assert "did not answer in 30 seconds" in status.result()
        assert "did not answer in 30 seconds" in report.result()
        assert "No API answers" in doctor.result().stdout


def test_the_report_of_the_limiter_is_read_with_care(place: Netlimit) -> None:
    settings = {"NETLIMIT_LIMITER_LISTEN": place.environment["NETLIMIT_LISTEN"]}
    with answering(place, make_answer(b'{"limits": [1]}')):
        assert "is not netlimit's limiter" in place.refuse("limits", "report", **settings)


def test_no_more_is_read_than_there_can_be(place: Netlimit) -> None:
    with answering(place, flood):
        assert "more than 128 MB" in place.refuse("rule", "list")


def test_an_encoded_answer_is_neither_asked_for_nor_read(place: Netlimit) -> None:
    answer = make_answer(gzip.compress(b'{"items": []}'), "Content-Encoding: gzip")
    with answering(place, answer) as asked:
        assert "encodes its answer (gzip)" in place.refuse("gateway", "list")
    assert b"accept-encoding: identity" in asked[-1].lower()
    assert b"gzip" not in asked[-1].lower()


COMMANDS = [
    ("status",),
    ("rule", "list"),
    ("rule", "list", "--json"),
    ("rule", "show", "1"),
    ("rule", "add", "10.0.0.1", "--action", "block"),
    ("rule", "add", "10.0.0.1", "--action", "block", "--dry-run"),
    ("rule", "export"),
    ("counters", "1"),
    ("gateway", "list"),
    ("limits", "list"),
    ("explain", "--src", "10.0.0.1", "--dst", "10.0.0.2"),
    ("top", "--once"),
]
SHAPES = [
    *({}, [[]], "a", {"items": 1}, {"items": [1], "next": None, "total": "a"}),
    {"detail": [1], "errors": 1},
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_document_of_another_shape_is_told_in_a_sentence(place: Netlimit, command: Sequence[str]) -> None:
    for shape in SHAPES:
        with answering(place, make_answer(json.dumps(shape).encode())):
            done = place.run(*command)
        assert "Traceback" not in done.stderr, (shape, done.stderr)
        assert done.returncode == (0 if not done.stderr else 1), (shape, done)


def test_so_is_a_problem_of_another_shape(place: Netlimit) -> None:
    for shape in SHAPES:
        with answering(place, make_answer(json.dumps(shape).encode(), status="400 Bad Request")):
            place.refuse("status")


def test_a_document_that_is_nested_too_deeply_is_none(place: Netlimit) -> None:
    with answering(place, make_answer(b"[" * 200_000)):
        assert "is not netlimit's API" in place.refuse("status")


def test_a_list_that_has_no_end_is_left(place: Netlimit) -> None:
    with answering(place, make_answer(json.dumps({"items": [], "next": "on", "total": 1}).encode())):
        for command in ("list", "export"):
            done = place.run("rule", command)
            assert done.returncode == 1
            assert "tells of more, and shows none" in done.stderr


@pytest.mark.parametrize(("bound", "value"), [("MOST_LISTED", 1000), ("LIST_SECONDS", 0.5)])
def test_so_is_one_that_shows_more_and_more(
    place: Netlimit, monkeypatch: pytest.MonkeyPatch, bound: str, value: float
) -> None:
    monkeypatch.setattr(client, bound, value)
    page = {"items": [{"id": number} for number in range(100)], "next": "on", "total": 10**18}
    settings = Settings(url=place.environment["NETLIMIT_URL"], database_url=place.environment["NETLIMIT_DATABASE_URL"])
    with answering(place, make_answer(json.dumps(page).encode())), closing(client.Client(settings)) as asking_on:
        read = 0
        pages = asking_on.walk("/rules", {})
        with pytest.raises(CommandError, match="goes on; a list has"):  # noqa: PT012  how far it went is looked at
            for each in pages:
                read += len(each["items"])
                assert read < 100_000
    assert read >= 100
