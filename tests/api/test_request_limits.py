"""What the API limits of itself: how often, how many, how large, how slowly."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from api import admission, connections, room
from api.buckets import Buckets
from api.room import Standing
from netlimit.settings import Settings
from netlimit.store import Store
from tests.api.server import PATIENCE, TOKENS, Controller, connect, get, serve, until
from tests.api.test_tls import make_certificate

RULE = {"target": "10.1.2.3", "rate": "200 packets/s"}
SECONDS = 0.3
"""How patient the API is in these tests."""


@contextmanager
def limited(settings: Settings, store: Store, **others: Any) -> Iterator[str]:
    with serve(settings.model_copy(update=others), store) as url:
        yield url


def open_socket(url: str) -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection((address.hostname, address.port), timeout=PATIENCE)


def read_all(connection: socket.socket) -> bytes:
    """What comes until the other end has closed."""
    received = b""
    try:
        while part := connection.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    return received


def post(length: int) -> bytes:
    return (
        f"POST /api/v1/rules HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKENS['admin']}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


@pytest.fixture
def no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a test takes, nobody may ask more by that."""
    monkeypatch.setattr(admission, "Buckets", partial(Buckets, clock=lambda: 0.0))


@pytest.mark.usefixtures("no_time_passes")
def test_too_many_requests_of_one_are_told_to_wait_and_others_pass(settings: Settings, store: Store) -> None:
    with limited(settings, store, request_rate=5) as url, connect(url, "viewer") as client:
        client.get("/status")  # makes the token known, counted by the address
        answers = [client.get("/status") for _ in range(20)]
        statuses = [answer.status_code for answer in answers]
        assert statuses == [200] * 10 + [429] * 10
        late = answers[-1]
        assert late.headers["Retry-After"] == "1"
        assert late.headers["Content-Type"] == "application/problem+json"
        with connect(url, "operator") as other:
            assert other.get("/status").status_code == 200


@pytest.mark.usefixtures("no_time_passes")
def test_who_has_no_token_is_counted_by_address_and_hinders_nobody_who_has(settings: Settings, store: Store) -> None:
    with limited(settings, store, request_rate=5) as url, connect(url, "viewer") as client:
        assert client.get("/status").status_code == 200
        flood = [client.get(f"{url}/healthz", headers={"Authorization": f"Bearer {n}"}).status_code for n in range(30)]
        assert set(flood[:9]) == {200}
        assert flood[-1] == 429
        assert client.get("/status").status_code == 200


def test_requests_under_way_are_bounded(
    settings: Settings, store: Store, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MOST_AT_ONCE", 6)
    monkeypatch.setattr(admission, "MOST_OF_ONE", 4)
    monkeypatch.setattr(admission, "MOST_LOCAL", 0)
    store.report(controller.status)  # a gateway that is alive, and applies nothing
    with limited(settings, store) as url, connect(url, "operator") as operator, connect(url, "viewer") as viewer:
        assert operator.get("/status").status_code == viewer.get("/status").status_code == 200

        def add(number: int) -> None:
            with connect(url, "operator") as client:
                client.post("/rules", json={**RULE, "target": f"10.0.0.{number}"}, headers={"Prefer": "wait=60"})

        waiting = [threading.Thread(target=add, args=(number,)) for number in range(4)]
        for thread in waiting:
            thread.start()
        until(lambda: store.revision() == 4)
        refused = operator.get("/status")
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
        assert viewer.get("/status").status_code == 200
        monkeypatch.setattr(admission, "MOST_AT_ONCE", 4)
        refused = viewer.get("/status")
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        store.report(replace(controller.status, applied_revision=4))
        for thread in waiting:
            thread.join()
        assert operator.get("/status").status_code == 200


def test_a_body_that_comes_too_slowly_is_408(url: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "BODY_SECONDS", SECONDS)
    with open_socket(url) as connection:
        connection.sendall(post(1000) + b'{"target": ')
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"application/problem+json" in answer
    assert b"comes too slowly" in answer
    assert store.revision() == 0


def test_a_body_that_trickles_gains_no_time(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "BODY_SECONDS", SECONDS)
    with open_socket(url) as connection:
        connection.sendall(post(1000))
        connection.settimeout(0.02)
        answer = b""
        began = time.monotonic()
        while not answer and time.monotonic() - began < PATIENCE:
            connection.sendall(b" ")
            try:
                answer = connection.recv(65536)
            except TimeoutError:
                continue
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_a_large_body_may_take_its_time(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "BODY_SECONDS", SECONDS)
    monkeypatch.setattr(admission, "SLOWEST", 100)
    body = b'{"target": "10.1.2.3", "rate": "200 packets/s"}'.ljust(60_000)
    with open_socket(url) as connection:
        connection.sendall(post(len(body)) + body[:10_000])  # which gains it 100 seconds
        for start in range(10_000, len(body), 10_000):
            time.sleep(SECONDS / 4)  # longer in all than a small one may
            connection.sendall(body[start : start + 10_000])
        assert connection.recv(100).startswith(b"HTTP/1.1 201 ")


def test_bodies_that_are_held_are_bounded(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MOST_BYTES", 1000)

    def in_pieces() -> Iterator[bytes]:
        for _ in range(4):
            yield b" " * 900
            time.sleep(0.05)

    refused = client.post("/rules", content=in_pieces(), headers={"Content-Type": "application/json"})
    assert refused.status_code == 503
    assert client.post("/rules", json=RULE).status_code == 201  # what was held is let go


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-A: b\r\n"])
def test_a_head_that_never_ends_is_cut_off(url: str, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", SECONDS)
    with open_socket(url) as connection:
        connection.sendall(sent)
        assert read_all(connection) == b""


def test_a_head_that_trickles_is_cut_off_on_a_kept_connection_too(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_socket(url) as connection:
        keep(connection)
        monkeypatch.setattr(connections, "HEAD_SECONDS", SECONDS)
        connection.settimeout(0.02)
        began, closed = time.monotonic(), False
        connection.sendall(b"GET /healthz HTTP/1.1\r\n")
        while not closed and time.monotonic() - began < PATIENCE:
            try:
                connection.sendall(b"X")
                closed = not connection.recv(65536)
            except TimeoutError:
                continue
            except OSError:
                closed = True
    assert closed


def keep(connection: socket.socket) -> None:
    """Ask for something, on a connection that stays."""
    connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = b""
    while not answer.endswith(b'{"status":"ok"}'):
        answer += connection.recv(65536)


def test_a_body_that_nobody_reads_is_not_waited_for(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_socket(url) as connection:
        keep(connection)
        monkeypatch.setattr(connections, "HEAD_SECONDS", SECONDS)
        connection.sendall(b"POST /api/v1/rules HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 401 ")


def test_who_reads_nothing_of_the_answer_is_cut_off(
    url: str, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SEND_SECONDS", SECONDS)
    lines = "\n".join(f'{{"target": "10.0.0.{n}", "action": "block", "comment": "{"x" * 1000}"}}' for n in range(200))
    client.post("/rules/bulk", content=lines, headers={"Content-Type": "application/x-ndjson"})
    ask = f"GET /api/v1/rules?limit=200 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKENS['admin']}\r\n\r\n"
    with open_socket(url) as connection:
        until(lambda: is_held(connection))
        connection.sendall(ask.encode() * 50)  # 15 MB of answers: more than the kernel holds for both ends
        until(lambda: not is_held(connection))
    assert client.get("/rules?limit=1").status_code == 200


def is_held(connection: socket.socket) -> bool:
    """Whether the other end, which is on this host, holds its end of a connection."""
    here, there = (f":{connection.getsockname()[1]:04X}", f":{connection.getpeername()[1]:04X}")
    ends = (line.split()[1:4] for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return any(local.endswith(there) and remote.endswith(here) and state == "01" for local, remote, state in ends)


@pytest.mark.parametrize(("end", "status"), [(b"\r\n\r\n", b"431"), (b"", b"400")])
def test_a_head_that_is_too_large_is_refused(url: str, end: bytes, status: bytes) -> None:
    with open_socket(url) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Large: " + b"x" * 100_000 + end)
        assert read_all(connection)[:12] in (b"HTTP/1.1 " + status, b"HTTP/1.1 400")


def in_pieces(text: bytes, size: int) -> list[bytes]:
    return [text[start : start + size] for start in range(0, len(text), size)]


@pytest.mark.parametrize("size", [1_000_000, 1001, 1], ids=["at once", "in pieces", "by the byte"])
@pytest.mark.parametrize(("fields", "status"), [(100, b"200"), (130, b"431"), (2_000, b"431")])
def test_a_head_of_many_fields_is_refused(url: str, fields: int, status: bytes, size: int) -> None:
    """Each is work for the API, in which nobody else is served, however short it is."""
    head = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + b"A:\r\n" * fields + b"\r\n"
    with open_socket(url) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(ConnectionError):
            for piece in in_pieces(head, size):
                connection.sendall(piece)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 " + status) or (size < 1002 < fields and not answer)
    if answer and status == b"431":
        assert b"application/problem+json" in answer
        assert b"The head has too many lines: at most 128 are read." in answer


def test_heads_are_counted_one_by_one(url: str) -> None:
    head = b"GET /healthz HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + TOKENS["admin"].encode() + b"\r\n"
    with open_socket(url) as connection:
        for _ in range(3):
            connection.sendall(head + b"A:\r\n" * 60 + b"\r\n")
            received = b""
            while not received.endswith(b"}"):
                part = connection.recv(65536)
                assert part
                received += part
            assert received.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(("fields", "read"), [(100, True), (2_000, False)])
def test_nor_are_many_fields_read_behind_a_body_in_chunks(url: str, fields: int, read: bool) -> None:
    body = b'{"target": "10.1.2.3", "rate": "200 packets/s"}' + b"\n" * 3_000
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in in_pieces(body, 700))
    head = post(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked\r\nConnection: close")
    with open_socket(url) as connection:
        with suppress(ConnectionError):
            connection.sendall(head + chunks + b"0\r\n" + b"A:\r\n" * fields + b"\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 201" if read else b"") is True
        connection.close()


def test_behind_a_body_that_may_end_at_two_places_nothing_is_asked(url: str) -> None:
    """A proxy before the API may have seen one request there."""
    body = b'{"target": "10.1.2.3", "rate": "200 packets/s"}'
    head = post(0).replace(b"Content-Length: 0", b"Content-Length: 4\r\nTransfer-Encoding: chunked")
    hidden = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    with open_socket(url) as connection:
        connection.sendall(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) + hidden)
        answer = read_all(connection)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith(b"HTTP/1.1 201")
    assert b"connection: close" in answer.lower()


def test_connections_are_bounded_and_the_newest_takes_the_place_of_who_waits_longest(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(room.MOST, Standing.LOCAL, 3)
    with ExitStack() as stack:
        kept = [stack.enter_context(open_socket(url)) for _ in range(3)]
        time.sleep(0.1)
        kept[0].sendall(b"GET /healthz HTTP/1.1\r\n")  # half a request is waited for, too
        time.sleep(0.1)
        assert get(f"{url}/healthz").status_code == 200
        assert read_all(kept[0]) == b""
        kept[1].sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert read_all(kept[1]).startswith(b"HTTP/1.1 200 ")


def test_who_never_agrees_on_tls_is_cut_off(
    settings: Settings, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", SECONDS)
    certificate, key = make_certificate(tmp_path)
    with limited(settings, store, tls_cert=certificate, tls_key=key) as url, ExitStack() as stack:
        silent = stack.enter_context(open_socket(url))
        trickling = stack.enter_context(open_socket(url))
        sent = 0
        with suppress(OSError):
            for byte in b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(490):
                trickling.sendall(bytes([byte]))
                sent += 1
                time.sleep(SECONDS / 10)
        assert sent < 501, "it is cut off before it has said all"
        assert read_all(silent) == b""


def test_who_takes_a_little_of_the_answer_now_and_then_is_cut_off(
    url: str, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SEND_SECONDS", SECONDS)
    monkeypatch.setattr(connections, "DRAIN_SECONDS", 0.01)
    lines = "\n".join(f'{{"target": "10.0.0.{n}", "action": "block", "comment": "{"x" * 1000}"}}' for n in range(200))
    client.post("/rules/bulk", content=lines, headers={"Content-Type": "application/x-ndjson"})
    ask = f"GET /api/v1/rules?limit=200 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKENS['admin']}\r\n\r\n"
    with open_socket(url) as connection:
        until(lambda: is_held(connection))
        connection.sendall(ask.encode() * 50)

        def take() -> bool:
            with suppress(OSError):
                connection.recv(20_000)
            return not is_held(connection)

        until(take)


def test_waiting_for_the_kernel_is_no_slowness(
    url: str, client: httpx.Client, store: Store, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.get("/rules").status_code == 200  # on a connection that stays
    for module, name in ((admission, "BODY_SECONDS"), (connections, "HEAD_SECONDS"), (connections, "SEND_SECONDS")):
        monkeypatch.setattr(module, name, SECONDS)
    controller.delay = 4 * SECONDS
    controller.start()
    answer = client.post("/rules", json=RULE, headers={"Prefer": "wait=60"})
    assert (answer.status_code, answer.json()["status"]["state"]) == (201, "applied")


def test_every_answer_has_the_id_of_its_request(url: str, client: httpx.Client, store: Store) -> None:
    sent = client.post("/rules", json=RULE, headers={"X-Request-ID": "deploy-7.a_B"})
    assert sent.headers["X-Request-ID"] == "deploy-7.a_B"
    (entry,) = client.get("/audit", params={"request": "deploy-7.a_B"}).json()["items"]
    assert (entry["actor"], entry["address"], entry["action"]) == ("admin", "127.0.0.1", "add")
    for bad in ("", "a b", "x" * 65, "ü".encode(), "a,b"):
        for address in ("/rules", "/nothing", f"{url}/healthz"):
            made = client.get(address, headers={"X-Request-ID": bad}).headers["X-Request-ID"]
            assert len(made) == 32
            assert made.isalnum()
    assert client.get("/rules").headers["X-Request-ID"] != client.get("/rules").headers["X-Request-ID"]


def test_a_forwarded_address_is_believed_only_of_a_trusted_proxy(settings: Settings, store: Store) -> None:
    forwarded = {"X-Forwarded-For": "203.0.113.9, 192.0.2.7"}
    with limited(settings, store) as url, connect(url, "admin") as client:
        client.post("/rules", json=RULE, headers=forwarded)
    proxied = Settings(database_url=settings.database_url, host="gw1", trusted_proxies="127.0.0.0/8,198.51.100.1")  # type: ignore[arg-type]
    with serve(proxied, store) as url, connect(url, "admin") as client:
        client.post("/rules", json={**RULE, "target": "10.1.2.4"}, headers=forwarded)
        client.post("/rules", json={**RULE, "target": "10.1.2.5"}, headers={"X-Forwarded-For": "nonsense"})
    assert [entry.address for entry in reversed(store.audit(limit=3))] == ["127.0.0.1", "192.0.2.7", None]
    # Who comes through the proxy is a client of this gateway's, too; this host itself is none.
    until(lambda: [*store.clients("gw1")] == ["192.0.2.7"])


def test_few_come_in_before_those_who_are_in_have_their_turn() -> None:
    """The rest waits in the kernel, and nobody goes for it."""

    async def accept_all(door: connections.Door) -> list[int]:
        counts = []
        for _ in range(2):
            inside = []
            with suppress(BlockingIOError):
                while True:
                    inside.append(door.accept()[0])
            counts.append(len(inside))
            await asyncio.sleep(0.05)
            for each in inside:
                each.close()
        return counts

    with ExitStack() as opened:
        listening = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        place = listening.getsockname()
        door = opened.enter_context(connections.Door(listening, lambda place, here: Standing.LOCAL))
        door.setblocking(False)
        for _ in range(connections._AT_ONCE + 3):
            opened.enter_context(socket.create_connection(place, timeout=PATIENCE))
        assert asyncio.run(accept_all(door)) == [connections._AT_ONCE, 3]


def test_who_has_gone_before_he_is_let_in_costs_nobody_a_turn() -> None:
    with ExitStack() as opened:
        listening = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        place = listening.getsockname()
        door = opened.enter_context(connections.Door(listening, lambda place, here: Standing.LOCAL))
        door.setblocking(False)
        for _ in range(connections._AT_ONCE + 3):
            reset(socket.create_connection(place, timeout=PATIENCE))
        stays = opened.enter_context(socket.create_connection(place, timeout=PATIENCE))
        connection, address = door.accept()
        with connection:
            assert address == stays.getsockname()


def reset(connection: socket.socket) -> None:
    """End a connection at once: the other end hears that nobody is there any more."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
