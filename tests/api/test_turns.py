"""Whoever asks much waits for himself: beside a flood of one token, or of none, others are served as if it were not."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException
from ipaddress import ip_network
from urllib.parse import urlsplit

import httpx
import pytest

from api import admission, turns
from api.turns import MOST_OF_ONE, Kind, Turns
from netlimit.rules import Action, Rule
from netlimit.store import Kept, Store
from tests.api.server import PATIENCE, TOKENS, connect, until

RULES = 4000
FLOODERS = 48
PAGE = "/api/v1/rules?limit=1000&state=pending"
"""Dear: no index knows states, and a thousand rules are written."""
ROUNDS, ASKED = 3, 5
SECONDS, TIMES = 0.7, 15
"""Slow is what takes longer than this, and so many times as long as alone, in each of the rounds."""


@pytest.fixture
def many_rules(store: Store) -> None:
    targets = (ip_network(f"10.{n >> 8}.{n & 255}.7") for n in range(RULES))
    store.add([Rule(target, Action.BLOCK, comment="x" * 50) for target in targets], "test", datetime.now(UTC))


@contextmanager
def flood(url: str, role: str | None, path: str, made: list[Turns]) -> Iterator[Counter[int]]:
    """Ask for it on many connections until the block ends. What was answered, by status. Then they hang up, so that
    what is in line is not worked on, and nothing of theirs is in work any more."""
    answers: Counter[int] = Counter()
    ended = threading.Event()
    connections = [HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE) for _ in range(FLOODERS)]
    headers = {"Authorization": f"Bearer {TOKENS[role]}"} if role else {}

    def ask(connection: HTTPConnection) -> None:
        try:
            while not ended.is_set():
                connection.request("GET", path, headers=headers)
                with connection.getresponse() as answer:
                    answer.read()
                answers[answer.status] += 1
        except (HTTPException, OSError):
            if not ended.is_set():
                raise

    threads = [threading.Thread(target=ask, args=[connection]) for connection in connections]
    for thread in threads:
        thread.start()
    try:
        time.sleep(1.0)
        yield answers
    finally:
        ended.set()
        for thread, connection in zip(threads, connections, strict=True):
            hang_up(connection)
            thread.join()
            connection.close()
        until(lambda: not any(turns._working or turns._lines for turns in made))


def hang_up(connection: HTTPConnection) -> None:
    """Whoever reads there sees the end of it."""
    held = connection.sock
    if held is not None:
        with suppress(OSError):
            held.shutdown(socket.SHUT_RDWR)


class Halted:
    """A question to the database that waits until it may go on."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        self.goes_on = threading.Event()
        self._find = store.find
        monkeypatch.setattr(store, "find", self.find)

    def find(self, key: str) -> Kept | None:
        self.asked += 1
        self.goes_on.wait(PATIENCE)
        return self._find(key)


def send(url: str, role: str) -> socket.socket:
    """Ask for a rule."""
    place = urlsplit(url)
    connection = socket.create_connection((place.hostname, place.port), timeout=PATIENCE)
    head = (
        f"GET /api/v1/rules/1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {TOKENS[role]}\r\n\r\n"
    )
    connection.sendall(head.encode())
    return connection


def read_status(connection: socket.socket) -> int:
    """The status of the answer; nothing comes after it."""
    with connection, connection.makefile("rb") as answer:
        return int(answer.read().split()[1])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Turns]:
    """The turns of the API, once there is one."""
    made: list[Turns] = []

    def make() -> Turns:
        made.append(Turns())
        return made[0]

    monkeypatch.setattr(admission, "Turns", make)
    return made


def count_in_line(made: list[Turns]) -> int:
    return sum(len(line) for turns in made for line in list(turns._lines.values()))


def test_who_goes_away_while_he_waits_is_not_served_and_keeps_nobody(
    made: list[Turns], url: str, client: httpx.Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.post("/rules", json={"target": "10.1.2.3", "action": "block"})
    halted = Halted(store, monkeypatch)
    most = MOST_OF_ONE[Kind.LOOK]
    inside = [send(url, "viewer") for _ in range(most)]
    until(lambda: halted.asked == most)
    going = [send(url, "viewer") for _ in range(10)]
    staying = [send(url, "viewer") for _ in range(3)]
    until(lambda: count_in_line(made) == len(going) + len(staying))
    assert halted.asked == most
    for connection in going:
        connection.close()
    until(lambda: count_in_line(made) == len(staying))
    with connect(url, "operator") as other:
        assert other.get("/status").status_code == 200
    halted.goes_on.set()
    assert [read_status(connection) for connection in (*inside, *staying)] == [200] * (most + 3)
    assert halted.asked == most + 3


def test_who_has_too_many_in_line_is_told_to_come_back(
    made: list[Turns], url: str, client: httpx.Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "MOST_IN_LINE", 2)
    client.post("/rules", json={"target": "10.1.2.3", "action": "block"})
    halted = Halted(store, monkeypatch)
    most = MOST_OF_ONE[Kind.LOOK]
    sent = [send(url, "viewer") for _ in range(most)]
    until(lambda: halted.asked == most)
    sent += [send(url, "viewer") for _ in range(2)]
    until(lambda: count_in_line(made) == 2)
    with connect(url, "viewer") as viewer:
        refused = viewer.get("/rules/1")
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
    halted.goes_on.set()
    assert [read_status(connection) for connection in sent] == [200] * (most + 2)


def measure(client: httpx.Client, change: bool) -> float:
    """How long an answer takes, as a rule: in processor time of all who ask and answer here. Beside a flood they are
    never idle, so it is what one waits, but for the time in which the machine has let none of them run."""
    took = []
    for number in range(ASKED):
        began = time.process_time()
        answer = client.patch("/rules/1", json={"comment": str(number)}) if change else client.get("/rules/1")
        took.append(time.process_time() - began)
        assert answer.status_code == 200
    return statistics.median(took)


@pytest.mark.usefixtures("many_rules")
@pytest.mark.parametrize(
    ("flooding", "path", "asking"),
    [
        ("viewer", PAGE, "admin"),
        ("viewer", PAGE, "operator"),
        ("admin", PAGE, "operator"),
        (None, "/metrics", "admin"),
    ],
)
def test_beside_a_flood_others_are_served(
    made: list[Turns], url: str, flooding: str | None, path: str, asking: str
) -> None:
    with connect(url, asking) as client:
        for change in (True, False):
            rounds = []
            for _ in range(ROUNDS):
                alone = measure(client, change)
                with flood(url, flooding, path, made) as answers:
                    beside = measure(client, change)
                rounds.append((round(alone, 3), round(beside, 3), dict(answers)))
                if beside < max(SECONDS, TIMES * alone):
                    break
            else:
                pytest.fail(f"alone, and beside the flood: {rounds} s")
            print(rounds)
