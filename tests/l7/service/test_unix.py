"""Over Unix sockets neither gRPC nor the kernel tells what they tell of ports: who asks, and since when."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from netlimit.l7.service.callers import Callers
from netlimit.l7.service.room import TICK_SECONDS, Room
from netlimit.l7.service.rpc import find_address
from tests.l7.service.serving import Asker, describe, serving
from tests.l7.service.test_auth import DOOR
from tests.l7.service.test_callers import watch
from tests.l7.service.test_connections import PREFACE, is_open
from tests.places import connect_to

RULES = "domain: web\ndescriptors:\n  - key: user\n    rate_limit: {unit: hour, requests_per_unit: 2}\n"
CROWD = """
import socket, sys
path, number, said = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3])
held = []
for _ in range(number):
    held.append(socket.socket(socket.AF_UNIX))
    held[-1].connect(path)
    held[-1].sendall(said)
print("there", flush=True)
sys.stdin.read()
"""


@contextmanager
def crowding(path: str, number: int, said: bytes = b"") -> Iterator[None]:
    """Another process with so many connections."""
    command = [sys.executable, "-S", "-c", CROWD, path, str(number), said.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as crowd:
        assert crowd.stdout is not None
        assert crowd.stdout.readline() == b"there\n"
        yield
        crowd.kill()


class House:
    """A Unix socket, and connections of this process's to it."""

    def __init__(self, path: str, number: int) -> None:
        self.path = path
        self.door = socket.socket(socket.AF_UNIX)
        self.door.bind(path)
        self.door.listen(1000)
        self.outside = [socket.socket(socket.AF_UNIX) for _ in range(number)]
        for each in self.outside:
            each.connect(path)
        self.inside = [self.door.accept()[0] for _ in range(number)]

    def let_in(self, number: int) -> None:
        self.inside += [self.door.accept()[0] for _ in range(number)]

    def look(self) -> list[bool]:
        """Which of this process's are open."""
        for each in self.outside:
            each.setblocking(False)
        return [is_open(each) for each in self.outside]

    def count_gone(self) -> int:
        """How many of all are shut at this end."""
        poll = select.poll()
        for each in self.inside:
            poll.register(each, 0)
        return len(poll.poll(0))

    def close(self) -> None:
        for each in (self.door, *self.outside, *self.inside):
            each.close()


@pytest.fixture
def make_house(tmp_path: Path) -> Iterator[Callable[[int], House]]:
    with ExitStack() as stack:

        def make(number: int) -> House:
            house = House(str(tmp_path / "grpc.sock"), number)
            stack.callback(house.close)
            return house

        yield make


def test_where_there_are_many_those_go_of_whom_there_are_most(make_house: Callable[[int], House]) -> None:
    house, callers = make_house(60), Callers(200)
    with crowding(house.path, 140):
        house.let_in(140)
        watch(callers, house.path)
        assert all(house.look())
        assert house.count_gone() == 200 - 150 + 9
    assert "connections are open over gRPC" in callers.troubles[0]


def test_of_many_who_have_few_the_first_go(make_house: Callable[[int], House]) -> None:
    """Who comes gets in: he asks, others have perhaps long asked nothing."""
    house = make_house(8)
    watch(Callers(8), house.path)
    assert house.look() == [False] * 2 + [True] * 6


def test_where_there_are_few_none_goes(make_house: Callable[[int], House]) -> None:
    house, callers = make_house(60), Callers(81)
    watch(callers, house.path)
    assert all(house.look())
    assert callers.troubles == []


def test_those_of_other_sockets_are_left_alone(make_house: Callable[[int], House], tmp_path: Path) -> None:
    house = make_house(60)
    watch(Callers(20), str(tmp_path / "http.sock"))
    watch(Callers(20), 8752)
    assert all(house.look())


def test_all_of_it_over_grpc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlimit.l7.service.rpc.find_most", lambda: 200)
    with serving(RULES, directory=tmp_path) as served, ExitStack() as stack:
        path = served.grpc_place.removeprefix("unix:")
        early = Asker(served.grpc_place)
        stack.callback(early.close)
        assert early.ask(describe(user="alice")).overall_code == 1
        kept = stack.enter_context(connect_to(served.grpc_place))
        kept.sendall(PREFACE)
        with crowding(path, 180, PREFACE):
            time.sleep(2)
            kept.setblocking(False)
            assert is_open(kept)
            late = Asker(served.grpc_place)
            stack.callback(late.close)
            answers = [each.ask(describe(user="alice")).overall_code for each in (late, early)]
            assert answers == [1, 2]


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:192.0.2.7:4711", "192.0.2.7"),
        ("ipv6:%5B2001:db8::7%5D:4711", "2001:db8::7"),
        ("unix:", ""),
        ("unix:/run/a:b:c", ""),
        ("unix-abstract:192.0.2.7:4711", ""),  # as the other end may call itself
    ],
)
def test_of_a_unix_socket_nobody_s_address_is_told(peer: str, address: str) -> None:
    assert find_address(peer) == address


def test_who_waits_is_answered_in_time_however_long_the_question_lay_here(tmp_path: Path) -> None:
    """On a connection that is known, or on one that nobody has accepted yet; of both the kernel tells no time."""
    question = b"GET /v1/auth?domain=web&key=door%3D1&deny=429&wait=2 HTTP/1.1\r\nHost: a\r\n\r\n"
    with serving(DOOR, running=True, directory=tmp_path) as served, ExitStack() as stack:
        known = stack.enter_context(connect_to(served.place))
        known.sendall(question)
        assert known.recv(4096).startswith(b"HTTP/1.1 200"), "the only place is taken"
        goes_on = threading.Event()
        stack.callback(goes_on.set)
        served.block(goes_on)
        unknown = stack.enter_context(connect_to(served.place))
        for each in (known, unknown):
            each.sendall(question)
        assert not goes_on.wait(1.5)
        goes_on.set()
        began = time.monotonic()
        assert all(each.recv(4096).startswith(b"HTTP/1.1 429") for each in (known, unknown))
        assert 0.2 < time.monotonic() - began < 1.2
        time.sleep(3 * TICK_SECONDS)
        began = time.monotonic()
        known.sendall(question)
        assert known.recv(4096).startswith(b"HTTP/1.1 429")
        assert time.monotonic() - began > 1.5, "it has not lain here"


def test_what_is_read_has_lain_as_long_as_the_loop_was_kept() -> None:
    room = Room()
    assert room.find_arrival(1000.0) == 1000.0
    for now in (1000.0, 1000.1):
        room.pass_time(now)
    assert room.find_arrival(1000.15) == 1000.15
    assert room.find_arrival(1001.2) == pytest.approx(1000.2)
    room.pass_time(1001.2)
    assert room.find_arrival(1001.21) == pytest.approx(1000.21)
    room.pass_time(1001.3)
    assert room.find_arrival(1001.35) == 1001.35
