"""One limiter for all tests of the service."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.l7.service.serving import Asker, Served, serving

RULES = """
domain: web
descriptors:
  - key: user
    rate_limit: {unit: minute, requests_per_unit: 3, name: per_user}
  - key: place
    rate_limit: {unit: hour, requests_per_unit: 100}
    descriptors:
      - key: room
        rate_limit: {unit: second, requests_per_unit: 1}
  - key: tens
    rate_limit: {unit: minute, unit_multiplier: 10, requests_per_unit: 5}
  - key: guest
    rate_limit: {unlimited: true}
  - key: shadow
    shadow_mode: true
    rate_limit: {unit: minute, requests_per_unit: 1}
  - key: special
    rate_limit: {unit: minute, requests_per_unit: 1, replaces: [{name: per_user}]}
  - key: quota
    quota_mode: true
    rate_limit: {unit: minute, requests_per_unit: 1}
  - key: remote_address
    rate_limit: {unit: minute, requests_per_unit: 2}
    descriptors:
      - key: path
        value: /login
        rate_limit: {unit: minute, requests_per_unit: 1}
      - key: path
        value: /files/*
        rate_limit: {unit: minute, requests_per_unit: 1}
      - key: path
        value: /reports/*/all
        rate_limit: {unit: minute, requests_per_unit: 1}
  - key: method
    value: POST
    rate_limit: {unit: minute, requests_per_unit: 1}
    descriptors:
      - key: caller
        rate_limit: {unit: minute, requests_per_unit: 1}
  - key: method
    value: GET
    descriptors:
      - key: caller
        rate_limit: {unit: minute, requests_per_unit: 1}
      - key: path
        value: /login
        descriptors:
          - key: caller
            rate_limit: {unit: minute, requests_per_unit: 1}
  - key: method
    value: HEAD
    descriptors:
      - key: caller
        rate_limit: {unit: minute, requests_per_unit: 2}
  - key: host
    rate_limit: {unit: minute, requests_per_unit: 1}
  - key: x-tenant
    rate_limit: {unit: minute, requests_per_unit: 1}
  - key: caller
    rate_limit: {unit: minute, requests_per_unit: 1, name: calls}
  - key: path
    value: /constant/*
    rate_limit: {unit: minute, requests_per_unit: 1, name: calls}
  - key: path
    value: /open/*
    rate_limit: {unit: minute, requests_per_unit: 1000, replaces: [{name: calls}]}
  - key: nobody
    rate_limit: {unit: day, requests_per_unit: 0}
  - key: told
    detailed_metric: true
    rate_limit: {unit: minute, requests_per_unit: 2}
  - key: line
    on_limit: queue
    max_wait: 20s
    rate_limit: {unit: minute, requests_per_unit: 1}
  - key: flight
    concurrency: {limit: 2, lease: 60}
"""


@pytest.fixture(scope="package")
def served() -> Iterator[Served]:
    with serving(RULES) as running:
        yield running


@pytest.fixture(scope="package")
def envoy(served: Served) -> Iterator[Asker]:
    asker = Asker(served.grpc_place)
    yield asker
    asker.close()


@pytest.fixture(scope="package")
def http(served: Served) -> Iterator[httpx.Client]:
    with served.connect() as client:
        yield client
