"""What comes in the first packet of QUIC (0-RTT) bears a source address that nobody has proved: it is neither answered
nor counted, and whose address it was can have lost nothing by it."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from pathlib import Path

from aioquic.asyncio.client import connect
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.h3.connection import H3_ALPN, H3Connection
from aioquic.h3.events import HeadersReceived
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import QuicEvent
from aioquic.tls import SessionTicket

from tests.cli.running import SECONDS
from tests.l7.proxies.conftest import Application
from tests.l7.proxies.programs import Places, running_at
from tests.l7.service.serving import Served, serving
from tests.ports import free_port

HOST = "example.test"
FEIGNED = "127.0.0.77"
DAY = 20
RULES = f"""
domain: web
descriptors:
  - key: remote_address
    rate_limit: {{unit: day, requests_per_unit: {DAY}}}
"""
FLIGHTS = 5
GRACE_SECONDS = 1.0


class Visitor(QuicConnectionProtocol):
    """Who has a connection of his own, by HTTP/3."""

    def ask(self, path: str) -> asyncio.Future[bytes]:
        """Ask; the status, in time."""
        self.status: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.http = H3Connection(self._quic)
        self.http.send_headers(self._quic.get_next_available_stream_id(), _fields(path), end_stream=True)
        self.transmit()
        return self.status

    def quic_event_received(self, event: QuicEvent) -> None:
        for each in self.http.handle_event(event) if hasattr(self, "http") else []:
            if isinstance(each, HeadersReceived) and not self.status.done():
                self.status.set_result(dict(each.headers)[b":status"])


def _fields(path: str) -> list[tuple[bytes, bytes]]:
    told = {":method": "GET", ":scheme": "https", ":authority": HOST, ":path": path}
    return [(name.encode(), value.encode()) for name, value in told.items()]


def _configure(ticket: SessionTicket | None = None) -> QuicConfiguration:
    return QuicConfiguration(
        is_client=True,
        alpn_protocols=H3_ALPN,
        verify_mode=ssl.CERT_NONE,
        server_name=HOST,
        session_ticket=ticket,
    )


async def _visit(port: int, tickets: list[SessionTicket]) -> bytes:
    """Make a connection, ask, and wait for a ticket for the next one; the status."""
    async with connect(
        "127.0.0.1", port, configuration=_configure(), create_protocol=Visitor, session_ticket_handler=tickets.append
    ) as visitor:
        status = await asyncio.wait_for(visitor.ask("/visited"), SECONDS)  # type: ignore[attr-defined]
        for _ in range(100):
            if tickets:
                break
            await asyncio.sleep(0.05)
    return bytes(status)


def _visit_in_time(port: int, tickets: list[SessionTicket]) -> bytes:
    """Caddy makes its certificate when it listens already."""
    end = time.monotonic() + SECONDS
    while True:
        try:
            return asyncio.run(_visit(port, tickets))
        except ConnectionError:
            assert time.monotonic() < end, "Caddy has no certificate"
            time.sleep(0.1)


def _make_flight(port: int, ticket: SessionTicket) -> list[bytes]:
    """The first datagrams of a connection, with a request in them."""
    quic = QuicConnection(configuration=_configure(ticket), session_ticket_handler=lambda ticket: None)
    http = H3Connection(quic)
    quic.connect(("127.0.0.1", port), now=time.time())
    http.send_headers(quic.get_next_available_stream_id(), _fields("/feigned"), end_stream=True)
    return [data for data, _ in quic.datagrams_to_send(now=time.time())]


def _give_caddy_a_name(place: str, text: str) -> str:
    port = place.rpartition(":")[2]
    text = text.replace(f"http://{place} {{\n", f"https://{HOST}:{port} {{\n\tbind 127.0.0.1\n\ttls internal\n", 1)
    text = text.replace("auto_https off", "auto_https disable_redirects\n\tskip_install_trust", 1)
    return text.replace("protocols h1 h2c", "protocols h1 h2 h3", 1)


def _find_left(limiter: Served) -> int:
    """What of its day the address has left of which a packet was feigned."""
    question = {"domain": "web", "hits": 0, "descriptors": [[{"key": "remote_address", "value": FEIGNED}]]}
    with limiter.connect() as client:
        return int(client.post("/v1/decide", json=question).json()["descriptors"][0]["remaining"])


def test_nobody_asks_in_the_name_of_another(application: Application, tmp_path: Path) -> None:
    tickets: list[SessionTicket] = []
    with serving(RULES, running=True) as limiter:
        port = free_port()
        places = Places(f"127.0.0.1:{port}", application.place, limiter.place, limiter.grpc_place)
        with running_at("caddy", tmp_path, places, lambda text: _give_caddy_a_name(places.proxy, text)):
            application.asked.clear()
            assert _visit_in_time(port, tickets) == b"200"
            assert tickets[0].max_early_data_size, "Caddy takes no early data: nothing is tried here"
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                sender.settimeout(SECONDS)
                sender.bind((FEIGNED, 0))
                for _ in range(FLIGHTS):
                    for data in _make_flight(port, tickets[0]):
                        sender.sendto(data, ("127.0.0.1", port))
                    assert sender.recv(2048), "Caddy has not heard of it"
            time.sleep(GRACE_SECONDS)
            assert application.asked == ["/visited"]
            assert _find_left(limiter) == DAY
