"""Who can have somebody blocked in the kernel by what he asks the limiter, and whom: as a process, with a database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from netlimit.l7.service.protocol.descriptor_pb2 import RateLimitDescriptor
from netlimit.l7.service.protocol.service_pb2 import RateLimitRequest, RateLimitResponse
from netlimit.l7.service.rpc import SERVICE
from netlimit.store import Store
from tests.cli.running import until
from tests.cli.test_limiter import Running

RULES = """
domain: web
descriptors:
  - key: remote_address
    rate_limit: {unit: day, requests_per_unit: 1}
    escalate: {after: 5, within: 1m, block: 10m}
"""
TOKEN = "a-token-of-the-tests"
SHOWN = {"X-Netlimit-Token": TOKEN}
QUESTION = "/v1/auth?domain=web&key=remote_address"


class Gateway:
    """A limiter, and who is blocked."""

    def __init__(self, directory: Path, **settings: str) -> None:
        self.limiter = Running(directory, RULES, **settings)
        self._store = Store(self.limiter.netlimit.environment["NETLIMIT_DATABASE_URL"])

    def close(self) -> None:
        self._store.close()
        self.limiter.http.close()
        self.limiter.server.end()

    def blocked(self) -> set[str]:
        return {str(kept.rule.target) for kept in self._store.select(action="block")[0]}

    def ask(self, client: str, headers: dict[str, str], question: str = QUESTION) -> int:
        return self.limiter.http.get(question, headers={"X-Forwarded-For": client, **headers}).status_code

    def ask_as_envoy(self, client: str, metadata: list[tuple[str, str]]) -> None:
        entry = RateLimitDescriptor.Entry(key="remote_address", value=client)
        request = RateLimitRequest(domain="web", descriptors=[RateLimitDescriptor(entries=[entry])])
        with grpc.insecure_channel(self.limiter.grpc_place) as channel:
            call: Callable[..., object] = channel.unary_unary(
                f"/{SERVICE}/ShouldRateLimit", RateLimitRequest.SerializeToString, RateLimitResponse.FromString
            )
            for _ in range(7):
                call(request, timeout=60, metadata=metadata)

    def decide(self, client: str, headers: dict[str, str]) -> None:
        question = {"domain": "web", "descriptors": [[{"key": "remote_address", "value": client}]]}
        for _ in range(7):
            self.limiter.http.post("/v1/decide", json=question, headers=headers)

    def wait_until_blocked(self, *targets: str) -> None:
        until(lambda: self.blocked() >= set(targets), self.limiter.server.said)


@pytest.fixture
def gateway(directory: Path) -> Iterator[Gateway]:
    running = Gateway(directory, NETLIMIT_LIMITER_TOKEN=TOKEN)
    yield running
    running.close()


def test_who_shows_the_token_has_clients_blocked(gateway: Gateway) -> None:
    assert [gateway.ask("198.51.100.1", SHOWN) for _ in range(6)] == [200] + [403] * 5
    gateway.decide("198.51.100.2", SHOWN)
    gateway.ask_as_envoy("198.51.100.3", [("x-netlimit-token", TOKEN)])
    gateway.wait_until_blocked("198.51.100.1/32", "198.51.100.2/32", "198.51.100.3/32")


def test_who_does_not_has_nobody_blocked(gateway: Gateway) -> None:
    for number, headers in enumerate(({}, {"X-Netlimit-Token": "wrong"}, {"X-Netlimit-Token": ""})):
        assert [gateway.ask(f"198.51.100.{number}", headers) for _ in range(20)] == [200] + [403] * 19
        gateway.decide(f"198.51.100.{number}", headers)
    gateway.ask_as_envoy("198.51.100.9", [])
    gateway.ask_as_envoy("198.51.100.9", [("x-netlimit-token", "wrong")])
    for _ in range(7):
        gateway.ask("203.0.113.1", SHOWN)
    gateway.wait_until_blocked("203.0.113.1/32")
    assert gateway.blocked() == {"203.0.113.1/32"}


@pytest.mark.parametrize(
    "key",
    [
        "remote_address%3D10.255.255.53",
        "remote_address%3D8.8.8.8",
        "remote_address,remote_address%3D10.255.255.53",
        "remote_address%3D10.255.255.53&key=remote_address",
        "header:remote_address",
    ],
)
def test_what_a_question_says_itself_has_nobody_blocked(gateway: Gateway, key: str) -> None:
    headers = {**SHOWN, "remote_address": "10.255.255.53"}
    for _ in range(20):
        gateway.ask("198.51.100.7", headers, f"/v1/auth?domain=web&key={key}")
    for _ in range(7):
        gateway.ask("203.0.113.1", SHOWN)
    gateway.wait_until_blocked("203.0.113.1/32")
    assert gateway.blocked() == {"203.0.113.1/32"}


def test_rotating_addresses_of_one_block_are_one_client(gateway: Gateway) -> None:
    for number in range(100):
        gateway.ask(f"2001:db8:0:7::{number:x}", SHOWN)
        gateway.decide(f"2001:db8:0:9::{number:x}", SHOWN) if number < 5 else None
    for _ in range(7):
        gateway.ask("203.0.113.1", SHOWN)
    gateway.wait_until_blocked("2001:db8:0:7::/64", "2001:db8:0:9::/64", "203.0.113.1/32")
    assert len(gateway.blocked()) == 3


def test_who_has_no_counter_of_his_own_is_not_blocked(directory: Path) -> None:
    """More addresses than there is room for are over their limit, and newcomers share one."""
    running = Gateway(directory, NETLIMIT_LIMITER_TOKEN=TOKEN, NETLIMIT_LIMITER_MEMORY="1")
    try:
        assert running.ask("198.51.100.1", {}) == 200
        for page in range(60):
            values = [f"10.{page}.{number}.1" for number in range(50)]
            question = {"domain": "web", "descriptors": [[{"key": "remote_address", "value": each}] for each in values]}
            for _ in range(2):
                running.limiter.http.post("/v1/decide", json=question)
        assert [running.ask("203.0.113.1", SHOWN) for _ in range(20)][-19:] == [403] * 19
        running.decide("203.0.113.2", SHOWN)
        running.ask_as_envoy("203.0.113.3", [("x-netlimit-token", TOKEN)])
        assert [running.ask("198.51.100.1", SHOWN) for _ in range(6)] == [403] * 6
        running.wait_until_blocked("198.51.100.1/32")
        assert running.blocked() == {"198.51.100.1/32"}
    finally:
        running.close()


def test_without_a_token_nobody_is_blocked_and_that_is_told(directory: Path) -> None:
    running = Gateway(directory)
    try:
        assert [running.ask("198.51.100.1", {"X-Netlimit-Token": ""}) for _ in range(20)] == [200] + [403] * 19
        (trouble,) = running.limiter.http.get("/healthz").json()["troubles"]
        assert "set NETLIMIT_LIMITER_TOKEN" in trouble
        assert trouble in running.limiter.server.said()
        assert "It is not blocked" not in running.limiter.server.said()
        assert running.blocked() == set()
    finally:
        running.close()
