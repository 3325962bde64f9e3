"""Who holds connections open, drips, or sends heads without end, keeps no proxy from its answer."""

from __future__ import annotations

import http.client
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from netlimit.l7.service.connection import HEAD_BYTES
from netlimit.l7.service.room import HEAD_SECONDS, Room
from tests.cli.conftest import make_directory  # noqa: F401  a fixture
from tests.cli.running import Server
from tests.cli.test_limiter import USER, Running
from tests.l7.service.serving import Asker, describe
from tests.warm import ROOT

RULES = "domain: web\ndescriptors:\n  - key: remote_address\n    rate_limit: {unit: hour, requests_per_unit: 1000000}\n"
QUESTION = "/v1/auth?domain=web&key=remote_address"
WHOLE = f"GET {QUESTION} HTTP/1.1\r\nHost: a\r\n\r\n".encode()
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")
"""How a connection of HTTP/2 begins: with empty settings (RFC 9113, 3.4)."""
HALF = WHOLE[:-2] + b"X-Half: "
DRIPS = {
    "a field": (HALF, b"x"),
    "fields": (WHOLE[:-2], b"X: y\r\n"),
    "the target": (b"GET /", b"a"),
    "a body whose answer came long before": (WHOLE[:-2] + b"Content-Length: 9999\r\n\r\n", b"x"),
    "trailers": (WHOLE[:-2] + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X: y\r\n"),
}
"""How a request begins, and how it goes on."""
FLOOD = """
import resource, socket, sys, time
port, number, said = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].encode().decode("unicode_escape").encode()
resource.setrlimit(resource.RLIMIT_NOFILE, (number + 100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
held = []
for _ in range(number):
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.sendall(said)
    held.append(connection)
print("there", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def limiter(make_directory: Callable[[], Path]) -> Iterator[Running]:  # noqa: F811
    running = Running(make_directory(), RULES)
    yield running
    running.http.close()
    running.server.end()


def connect(limiter: Running) -> socket.socket:
    host, _, port = limiter.place.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def ask(limiter: Running) -> int:
    connection = http.client.HTTPConnection(limiter.place, timeout=30)
    connection.request("GET", QUESTION)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


def drip(connections: dict[str, socket.socket], seconds: float) -> dict[str, float]:
    """Send a drop now and then; after how many seconds each was cut off."""
    began, ended = time.monotonic(), dict[str, float]()
    while (left := connections.keys() - ended.keys()) and time.monotonic() < began + seconds:
        time.sleep(0.2)
        for name in left:
            connection = connections[name]
            try:
                connection.setblocking(True)
                connection.sendall(DRIPS[name][1])
                connection.setblocking(False)
                closed = not connection.recv(2**16)
            except BlockingIOError:
                closed = False
            except OSError:
                closed = True
            if closed:
                ended[name] = time.monotonic() - began
    return ended


def receive_all(connection: socket.socket) -> bytes:
    said = b""
    with suppress(OSError):
        while more := connection.recv(2**16):
            said += more
    return said


def test_what_drips_is_cut_off(limiter: Running) -> None:
    connections = {name: connect(limiter) for name in DRIPS}
    try:
        for name, connection in connections.items():
            connection.sendall(DRIPS[name][0])
        ended = drip(connections, 5 * HEAD_SECONDS)
    finally:
        for connection in connections.values():
            connection.close()
    assert ended.keys() == DRIPS.keys()
    assert min(ended.values()) > HEAD_SECONDS - 2
    assert max(ended.values()) < 2 * HEAD_SECONDS


@pytest.mark.parametrize(
    "head",
    [
        WHOLE[:-2] + b"X: " + b"x" * HEAD_BYTES + b"\r\n\r\n",
        WHOLE[:-2] + b"X: y\r\n" * (HEAD_BYTES // 6) + b"\r\n",
        b"GET /?" + b"x" * HEAD_BYTES + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        HALF + b"x" * 30_000_000,
    ],
    ids=["field", "fields", "target", "endless"],
)
def test_a_head_without_measure_is_refused(limiter: Running, head: bytes) -> None:
    # What was sent and never read has the kernel reset the connection, and an answer on its way may go with that.
    said = [send_head(limiter, head) for _ in range(5)]
    assert len(head) > 2 * HEAD_BYTES or any(each.startswith(b"HTTP/1.1 431 ") for each in said), said
    assert all(each.startswith(b"HTTP/1.1 431 ") for each in said if each), said
    assert read_memory(limiter) < 200_000_000


def send_head(limiter: Running, head: bytes) -> bytes:
    with connect(limiter) as connection:
        with suppress(OSError):
            connection.sendall(head)
        return receive_all(connection)


@pytest.mark.parametrize("last", [1, 1000, 30_000])
def test_a_target_that_is_too_long_is_refused_as_that_however_it_comes(limiter: Running, last: int) -> None:
    head = b"GET /?" + b"x" * HEAD_BYTES + b" HTTP/1.1\r\nHost: a\r\n\r\n"
    with connect(limiter) as connection:
        connection.sendall(head[:-last])
        time.sleep(0.2)
        connection.sendall(head[-last:])
        assert receive_all(connection).startswith(b"HTTP/1.1 431 ")


def read_memory(limiter: Running) -> int:
    pages = int(Path(f"/proc/{limiter.server.process.pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_a_head_as_proxies_send_them_is_not(limiter: Running) -> None:
    with connect(limiter) as connection:
        connection.sendall(WHOLE[:-2] + b"Cookie: " + b"x" * (HEAD_BYTES - 2000) + b"\r\nConnection: close\r\n\r\n")
        assert receive_all(connection).startswith(b"HTTP/1.1 200 ")


def test_a_trailer_without_end_takes_no_memory(limiter: Running) -> None:
    with connect(limiter) as connection:
        connection.sendall(WHOLE[:-2] + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: ")
        with pytest.raises(OSError, match=r"reset|pipe"):
            connection.sendall(b"x" * 100_000_000)
    assert read_memory(limiter) < 200_000_000


@pytest.mark.parametrize("said", [HALF, b"", WHOLE], ids=["half", "nothing", "whole"])
def test_thousands_of_connections_keep_no_proxy_from_its_answer(limiter: Running, said: bytes) -> None:
    kept = http.client.HTTPConnection(limiter.place, timeout=30)
    kept.request("GET", QUESTION)
    assert kept.getresponse().read() == b""
    port = limiter.place.rpartition(":")[2]
    text = said.decode().encode("unicode_escape").decode()
    command = (sys.executable, "-c", FLOOD, port, "8600", text)
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as flood:
        assert flood.stdout is not None
        assert flood.stdout.readline() == b"there\n"
        assert [ask(limiter) for _ in range(50)] == [200] * 50
        kept.close()
        assert flood.stdin is not None
        flood.stdin.close()
    assert ask(limiter) == 200


def test_answers_that_nobody_takes_are_not_kept_for_ever(limiter: Running) -> None:
    """Whoever does not read is answered no further, and may go for others."""
    before = read_memory(limiter)
    with connect(limiter) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(2)
        with suppress(TimeoutError):
            for _ in range(100_000):
                connection.sendall(WHOLE * 100)
        assert read_memory(limiter) < before + 40_000_000
        assert ask(limiter) == 200


def test_requests_behind_each_other_are_answered_in_their_order(limiter: Running) -> None:
    wanted = [b"GET /healthz", b"GET /nothing", b"HEAD /healthz", b"POST /v1/decide"] * 50
    head = b" HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"
    with connect(limiter) as connection:
        connection.sendall(b"".join(each + head for each in wanted) + WHOLE[:-2] + b"Connection: close\r\n\r\n")
        said = receive_all(connection)
    statuses = [int(each[:3]) for each in said.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [200, 404, 200, 422] * 50 + [200]


AHEAD = {
    "tiny requests": b"GET / HTTP/1.1\r\n\r\n",
    "questions": b"GET /v1/auth?domain=web&key=host HTTP/1.1\r\n\r\n",
    "fields of a head": b"a:\r\n",
    "chunks": b"1\r\na\r\n",
    "a body of line ends": b"\r\n\r\n",
}
BEGINNINGS = {
    "fields of a head": WHOLE[:-2],
    "chunks": b"POST /v1/decide HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
    "a body of line ends": b"POST /v1/decide HTTP/1.1\r\nContent-Length: 60000\r\n\r\n",
}


@pytest.mark.parametrize("what", AHEAD)
def test_what_is_sent_ahead_keeps_nobody_waiting_and_takes_no_memory(limiter: Running, what: str) -> None:
    """As much as goes into a connection, by many, none of whom reads an answer."""
    before = read_memory(limiter)
    said = (BEGINNINGS.get(what, b"") + AHEAD[what] * (2**18 // len(AHEAD[what])))[: 2**18]
    held = [connect(limiter) for _ in range(200)]
    try:
        for connection in held:
            connection.setblocking(False)
            with suppress(OSError):
                connection.send(said)
        took = [measure_ask(limiter) for _ in range(20)]
        assert max(took) < 3, took
        assert sorted(took)[10] < 0.3, took
        assert read_memory(limiter) < before + 60_000_000
    finally:
        for connection in held:
            connection.close()


DEAR_FLOOD = """
import asyncio, sys

KEYS = b"&key=remote_address,path" * 95
QUESTION = b"GET /v1/auth?domain=web" + KEYS + b" HTTP/1.1\\r\\nX-Forwarded-Uri: /\\r\\n\\r\\n"

class Asker(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
        transport.write(QUESTION)

    def data_received(self, data):
        if b"HTTP/1.1 " in data:
            self.transport.write(QUESTION)

async def flood():
    for _ in range(600):
        await asyncio.get_running_loop().create_connection(Asker, "127.0.0.1", int(sys.argv[1]))
    print("on", flush=True)
    await asyncio.sleep(60)

asyncio.run(flood())
"""


def test_dear_questions_wait_for_others(limiter: Running) -> None:
    """Each names as many keys as go into a question; hundreds ask one after the other."""
    command = [sys.executable, "-c", DEAR_FLOOD, limiter.place.rpartition(":")[2]]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as flood:
        assert flood.stdout is not None
        try:
            assert flood.stdout.readline()
            took = sorted(measure_ask(limiter) for _ in range(20))
        finally:
            flood.kill()
    assert took[10] < 0.4, took


def measure_ask(limiter: Running) -> float:
    began = time.monotonic()
    assert ask(limiter) == 200
    return time.monotonic() - began


MANY = [
    (b"GET /nothing HTTP/1.1\r\n\r\n", 404),
    (b"POST /v1/decide HTTP/1.1\r\nContent-Length: 8\r\n\r\n\r\n\r\n\r\n\r\n", 400),
    (b"POST /v1/decide HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n", 422),
    (WHOLE[:-2] + b"X-Long: " + b"x" * 10_000 + b"\r\n\r\n", 200),
    (WHOLE[:-2] + b"X-Many: y\r\n" * 1000 + b"\r\n", 200),
    (b"POST /v1/decide HTTP/1.1\r\nContent-Length: 60000\r\n\r\n" + b"{}\r\n\r\n" * 10_000, 400),
    (b"POST /nothing HTTP/1.1\r\nContent-Length: 20000\r\n\r\n" + b"\n" * 20_000, 404),
    (b"GET /healthz HTTP/1.1\r\n\r\n", 200),
]
"""Requests, and the statuses of their answers."""


@pytest.mark.parametrize("size", [1, 3, 511, 4096, 4097, 2**20])
def test_requests_mean_the_same_in_whatever_pieces_they_come(limiter: Running, size: int) -> None:
    few = MANY if size > 3 else [MANY[0], MANY[1], MANY[2], MANY[-1]]
    said = b"".join(request for request, _ in few)
    with connect(limiter) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for begin in range(0, len(said), size):
            connection.sendall(said[begin : begin + size])
        connection.sendall(WHOLE[:-2] + b"Connection: close\r\n\r\n")
        answers = receive_all(connection)
    assert [int(each[:3]) for each in answers.split(b"HTTP/1.1 ")[1:]] == [*(status for _, status in few), 200]


@pytest.mark.parametrize("long", [b"", b"X: " + b"x" * 9000 + b"\r\n"], ids=["short", "long"])
def test_who_asks_the_last_time_is_answered_whatever_follows(limiter: Running, long: bytes) -> None:
    with connect(limiter) as connection:
        connection.sendall(WHOLE[:-2] + long + b"Connection: close\r\n\r\n" + b"GET / HTTP/1.1\r\n\r\n" * 100)
        said = receive_all(connection)
    assert said.startswith(b"HTTP/1.1 200 ")
    assert said.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("version", [b"HTTP/1.0", b"HTTP/1.1"])
def test_who_wants_to_change_the_protocol_is_answered_and_cut_off(limiter: Running, version: bytes) -> None:
    with connect(limiter) as connection:
        connection.sendall(
            WHOLE.replace(b"HTTP/1.1\r\n", version + b"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n")
        )
        said = receive_all(connection)
    assert said.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in said.lower()


class Somebody:
    """A connection of which the room asks no more than this."""

    def __init__(self, began: int | None, half_sent: bool = False) -> None:
        self.began = began
        self.half_sent = half_sent
        self.dropped = False

    def look(self, now: int) -> None:
        """Nothing happens."""

    def drop(self) -> None:
        self.dropped = True


def test_who_goes_for_the_newest() -> None:
    room = Room(4)
    room.pass_time(10)
    answered, idle, half, fresh = Somebody(None), Somebody(3), Somebody(8, half_sent=True), Somebody(10, half_sent=True)
    for each in (answered, idle, half, fresh):
        room.enter(each)
    for gone in (half, idle, fresh):
        newest = Somebody(None)
        room.enter(newest)
        assert (gone.dropped, newest.dropped) == (True, False)
    last = Somebody(None)
    room.enter(last)
    assert (last.dropped, answered.dropped, len(room)) == (True, False, 4)


class Cramped(Running):
    """A limiter that may open 1,000 files, as many a shell has it."""

    def start(self) -> Server:
        return replace(self.netlimit, before=("prlimit", "--nofile=1000:1000")).start("limiter", *USER)


def test_connections_that_ask_nothing_over_grpc_make_room_for_those_that_ask(
    make_directory: Callable[[], Path],  # noqa: F811
) -> None:
    """Somebody takes all there are, and opens those anew that are closed on him."""
    running = Cramped(make_directory(), RULES)
    ending = threading.Event()
    thread = threading.Thread(target=hold, args=(running.grpc_place, 500, ending))
    early = Asker(running.grpc_place)
    try:
        early.ask(describe(remote_address="192.0.2.1"))
        thread.start()
        time.sleep(2)
        for _ in range(10):
            late = Asker(running.grpc_place)
            try:
                late.ask(describe(remote_address="192.0.2.1"), wait=20)
            finally:
                late.close()
        early.ask(describe(remote_address="192.0.2.1"))
        ends = time.monotonic() + 30
        while "troubles" not in (health := running.http.get("/healthz").json()) and time.monotonic() < ends:
            time.sleep(0.2)  # on a busy machine it takes a while to open so many
        assert "connections are open over gRPC" in health["troubles"][0]
        assert running.server.said().count("connections are open over gRPC") == 1
    finally:
        ending.set()
        thread.join()
        early.close()
        running.http.close()
        running.server.end()


def hold(place: str, number: int, ending: threading.Event) -> None:
    """Hold so many connections that speak HTTP/2 and ask nothing."""
    held: list[socket.socket] = []
    address = "127.0.0.1", int(place.rpartition(":")[2])
    with ExitStack() as stack:
        while not ending.wait(1):
            while len(held) < number:
                try:
                    held.append(stack.enter_context(socket.create_connection(address, timeout=5)))
                    held[-1].sendall(PREFACE)
                    held[-1].setblocking(False)
                except OSError:  # it is closed as it comes
                    break
            held = [each for each in held if is_open(each)]


def is_open(connection: socket.socket) -> bool:
    try:
        if connection.recv(2**16):
            return True
    except BlockingIOError:
        return True
    except OSError:
        pass
    connection.close()
    return False


@pytest.mark.parametrize("wanted", ["http", "grpc"])
def test_with_few_open_files_there_are_few_connections(
    make_directory: Callable[[], Path],  # noqa: F811
    wanted: str,
) -> None:
    running = Cramped(make_directory(), RULES)
    place = running.place if wanted == "http" else running.grpc_place
    held = [socket.create_connection(("127.0.0.1", int(place.rpartition(":")[2])), timeout=60) for _ in range(1200)]
    try:
        for each in held:
            with suppress(OSError):
                each.sendall(HALF if wanted == "http" else PREFACE)
        time.sleep(1)
        assert [ask(running) for _ in range(20)] == [200] * 20
    finally:
        for each in held:
            each.close()
        running.http.close()
        running.server.end()


def test_who_resets_a_connection_before_his_turn_is_no_fault_of_ours(limiter: Running) -> None:
    """Of so many questions at once some wait for the next round, in which their connections are found reset."""
    question = WHOLE.replace(QUESTION.encode(), QUESTION.encode() + b"&wait=0.5")
    for _ in range(5):
        asking = [connect(limiter) for _ in range(400)]
        assert ask(limiter) == 200, "all have been let in"
        for each in asking:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            each.sendall(question)
        for each in asking:
            each.close()
    assert ask(limiter) == 200
    assert "fault" not in limiter.server.said()
    assert 'answer="500"' not in limiter.http.get("/metrics").text
