"""What clients get through real proxies that ask the limiter."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import count

import httpx
import pytest

from tests.l7.proxies.conftest import Application
from tests.l7.service.serving import Served

OPEN = {"nginx", "haproxy", "envoy"}
"""Those that let everything pass without the limiter."""
_addresses = count(10)


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    """A client whom nobody has met, by its address, at the beginning of a minute."""
    served.begin_minute()
    transport = httpx.HTTPTransport(local_address=f"127.0.0.{next(_addresses)}")
    with httpx.Client(transport=transport, trust_env=False, timeout=60) as opened:
        yield opened


def test_so_many_pass_then_429_until_the_time_told_is_over(
    proxy: str, client: httpx.Client, served: Served, application: Application
) -> None:
    application.asked.clear()
    answers = [client.get(f"http://{proxy}/some/page?of=7") for _ in range(5)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
    assert application.asked == ["/some/page?of=7"] * 3
    assert [answer.text for answer in answers[:3]] == ["ok"] * 3
    for number, answer in enumerate(answers):
        assert answer.headers["ratelimit-policy"] == '"each_client";q=3;w=60'
        assert answer.headers["ratelimit"].startswith(f'"each_client";r={max(2 - number, 0)};t=')
    refused = answers[4]
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.json()["status"] == 429
    assert "retry-after" not in answers[0].headers
    served.pass_time(int(refused.headers["retry-after"]))
    assert client.get(f"http://{proxy}/").status_code == 200


def test_nobody_is_somebody_else_by_writing_so(proxy: str, client: httpx.Client) -> None:
    statuses = []
    for number in range(4):
        forged = f"203.0.113.{number}"
        headers = {
            "X-Forwarded-For": forged,
            "Forwarded": f"for={forged}",
            "X-Real-IP": forged,
            "X-Forwarded-Uri": f"/{number}",
            "X-Forwarded-Method": "OPTIONS",
            "X-Envoy-External-Address": forged,
        }
        statuses.append(client.get(f"http://{proxy}/", headers=headers).status_code)
    assert statuses == [200, 200, 200, 429]


def test_without_the_limiter_a_proxy_does_as_the_page_says(unlimited: tuple[str, str], client: httpx.Client) -> None:
    name, place = unlimited
    statuses = {client.get(f"http://{place}/").status_code for _ in range(5)}
    assert statuses == ({200} if name in OPEN else {502})


def test_a_refusal_of_the_application_stays_one(nginx: str, client: httpx.Client) -> None:
    assert client.get(f"http://{nginx}/forbidden").status_code == 403


def test_nginx_waits_where_a_limit_queues(nginx: str, served: Served) -> None:
    served.pass_time(60)

    async def ask() -> list[int]:
        transport = httpx.AsyncHTTPTransport(local_address="127.0.0.9")
        async with httpx.AsyncClient(transport=transport, trust_env=False, timeout=60) as client:
            answers = await asyncio.gather(*(client.get(f"http://{nginx}/queue") for _ in range(3)))
        return [answer.status_code for answer in answers]

    begun = time.monotonic()
    assert asyncio.run(ask()) == [200] * 3
    assert time.monotonic() - begun > 0.39
