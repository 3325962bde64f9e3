"""The gRPC service: Envoy's rate limit protocol, and the health of the limiter."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Any
from urllib.parse import quote, unquote

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from netlimit.custody import open_to_all
from netlimit.errors import CountersUnavailable
from netlimit.l7.escalation import Askers
from netlimit.l7.headers import Family
from netlimit.l7.limiter import Limiter
from netlimit.l7.service.callers import Callers
from netlimit.l7.service.calls import Calls
from netlimit.l7.service.envoy import Unanswerable, should_rate_limit
from netlimit.l7.service.metrics import Answers
from netlimit.l7.service.protocol.service_pb2 import RateLimitResponse
from netlimit.l7.service.room import find_most
from netlimit.l7.service.turns import Turns

SERVICE = "envoy.service.ratelimit.v3.RateLimitService"
LARGEST = 4 * 2**20
"""Bytes of a question at most. Clients decide how long it is, since Envoy may tell a header in each descriptor; what is
not answered passes."""
SHORT, HELD_BYTES = 4096, 64 * 2**20
"""Of questions that are longer than the first so many bytes wait for their turn at most, but for those of who shows the
token."""
_STREAMS = 4096
"""Calls at once on one connection, four times as many as an Envoy makes that is told nothing else. gRPC refuses some a
little earlier, for those count that have ended just now."""
_PENDING = 2**14
"""Calls whose turn to be looked at has not come. By default some of 1,000 are thrown away, and all of 3,000: whoever
sends many at once would pass. Each takes 20 KB."""
_OPTIONS = (
    ("grpc.max_receive_message_length", LARGEST),
    ("grpc.max_metadata_size", 256 * 2**10),
    ("grpc.absolute_max_metadata_size", 512 * 2**10),
    ("grpc.server.max_pending_requests", _PENDING),
    ("grpc.server.max_pending_requests_hard_limit", _PENDING),
    # By pings Envoy tells a limiter that hangs.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 100),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_concurrent_streams", _STREAMS),
    # So much of a question is taken before it is asked for: most are shorter. On a fast link it were megabytes else.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 2**14),
    ("grpc.so_reuseport", 1),  # beside the socket that keeps the place, which nobody else shares
    # Who opens connections and says nothing, or no more, keeps none for ever.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
)

Context = grpc.aio.ServicerContext[bytes, RateLimitResponse]
log = logging.getLogger(__name__)


class RpcServer:
    """Answers questions about limits over gRPC. Made in the event loop that it is to run in."""

    def __init__(self, limiter: Limiter, families: Collection[Family], answers: Answers, askers: Askers) -> None:
        self._limiter = limiter
        self._families = families
        self._answers = answers
        self._askers = askers
        self._health = health.aio.HealthServicer()
        self._turns = Turns()
        most = find_most()  # as many as HTTP has, so that files are left for both
        self._callers = Callers(most)
        self._calls = Calls()
        self._watching: list[asyncio.Task[None]] = []
        self._held = 0
        options = [*_OPTIONS, ("grpc.max_allowed_incoming_connections", most)]
        self._server = grpc.aio.server(interceptors=[self._calls], options=options)
        handlers: dict[str, Any] = {
            "ShouldRateLimit": grpc.unary_unary_rpc_method_handler(
                self._should_rate_limit, None, RateLimitResponse.SerializeToString
            )
        }
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    @property
    def troubles(self) -> list[str]:
        """What is wrong with its connections, as sentences."""
        return self._callers.troubles

    async def start(self, place: str) -> int:
        """Listen at "host:port" or "unix:/path", and be healthy; the port. Raises RuntimeError where the place is
        taken; a Unix socket that is there goes, whoever listens at it."""
        path = place.removeprefix("unix:") if place.startswith("unix:/") else None
        port = self._server.add_insecure_port(place if path is None else f"unix:{quote(path)}")
        if path is not None:
            open_to_all(path)
        await self._server.start()
        watching = (self._callers.watch(port if path is None else path), self._calls.watch())
        self._watching = [asyncio.create_task(each) for each in watching]
        for service in ("", SERVICE):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        return port

    async def stop(self, grace: float) -> None:
        """Be healthy no longer, take no more questions, and answer what has been asked within `grace` seconds."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace)
        for each in self._watching:
            each.cancel()

    async def _should_rate_limit(self, question: bytes, context: Context) -> RateLimitResponse:
        peer = context.peer()
        known = self._vouch(context)
        self._callers.note(peer, known)
        if len(question) > SHORT:
            await self._wait_as_long(question, peer, known, context)
        else:
            await self._turns.take(peer, known)
        if address := find_address(peer):
            self._askers.note(address)
        try:
            response = await should_rate_limit(self._limiter, self._families, question, known)
        except Unanswerable as error:
            self._answers["grpc", "error"] += 1
            await context.abort(grpc.StatusCode.UNKNOWN, str(error))  # as Envoy's ratelimit does
        except CountersUnavailable as error:
            self._answers["grpc", "error"] += 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        self._answers["grpc", RateLimitResponse.Code.Name(response.overall_code)] += 1
        return response

    async def _wait_as_long(self, question: bytes, peer: str, known: bool, context: Context) -> None:
        """Wait for the turn of a long question, unless too many do."""
        if self._held + len(question) > HELD_BYTES and not known:
            self._answers["grpc", "error"] += 1
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Too many long questions wait for their turn.")
        self._held += len(question)
        try:
            await self._turns.take(peer, known)
        finally:
            self._held -= len(question)

    def _vouch(self, context: Context) -> bool:
        """Whether who asks has shown the token, in the metadata of the call."""
        told = context.invocation_metadata() or ()
        return self._askers.vouch((str(name).encode(), _encode(value)) for name, value in told)


def _encode(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")


def find_address(peer: str) -> str:
    """The address in what gRPC calls a peer: `ipv4:192.0.2.7:4711`, `ipv6:%5B2001:db8::7%5D:4711`. Nothing of a Unix
    socket, whose other end may have any name."""
    kind, _, place = unquote(peer).partition(":")
    return place.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else ""
