"""`netlimit limits report`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.cli.running import Netlimit
from tests.l7.service.serving import Served, serving
from tests.ports import free_port

RULES = """
domain: web
descriptors:
  - key: user
    rate_limit: {unit: minute, requests_per_unit: 1}
  - key: nobody
    rate_limit: {unit: hour, requests_per_unit: 5}
"""


@pytest.fixture(scope="module")
def limiter() -> Iterator[Served]:
    with serving(RULES) as running:
        yield running


def beside(netlimit: Netlimit, place: str) -> Netlimit:
    return replace(netlimit, environment={**netlimit.environment, "NETLIMIT_LIMITER_LISTEN": place})


def test_what_needs_a_look_comes_first_with_its_reason(netlimit: Netlimit, limiter: Served) -> None:
    with limiter.connect() as http:
        for user in range(60):
            for _ in range(2):
                descriptor = [{"key": "user", "value": f"user {user}"}]
                http.post("/v1/decide", json={"domain": "web", "descriptors": [descriptor]})
    near = beside(netlimit, limiter.place)
    head, _, tight, unused = near.do("limits", "report").splitlines()
    assert head.split() == ["DOMAIN", "RULE", "LIMIT", "IT", "IS", "BECAUSE"]
    assert tight.split()[:5] == ["web", "user", "1/minute", "too", "tight"]
    assert "It refuses 50 % of 120 hits" in tight
    assert unused.split()[:4] == ["web", "nobody", "5/hour", "unused"]
    told = near.ask("limits", "report")["limits"]
    assert [(each["rule"], each["fit"], each["refused"]) for each in told] == [
        ("user", "too tight", 60),
        ("nobody", "unused", 0),
    ]


def test_a_limiter_that_listens_everywhere_is_asked_on_loopback(netlimit: Netlimit, limiter: Served) -> None:
    port = limiter.place.partition(":")[2]
    assert len(beside(netlimit, f"0.0.0.0:{port}").ask("limits", "report")["limits"]) == 2


def test_without_a_limiter_the_report_says_what_is_missing(netlimit: Netlimit, served: Netlimit) -> None:
    place = f"127.0.0.1:{free_port()}"
    said = beside(netlimit, place).refuse("limits", "report")
    assert said.startswith(f"netlimit: No limiter answers at {place} (")
    assert said.endswith("Is `netlimit limiter` running? NETLIMIT_LIMITER_LISTEN is where.\n")
    api = served.environment["NETLIMIT_LISTEN"]
    assert f"What answers at {api} (with status 404) is not netlimit's limiter" in beside(netlimit, api).refuse(
        "limits", "report"
    )
