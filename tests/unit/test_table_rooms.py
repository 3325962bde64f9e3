"""Rules of one kind and rate share a table of hashlimit, and a full one drops whoever is new to it: none gets full."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from netlimit.compile import Compilation
from netlimit.limits import Facts
from netlimit.rules import Rule, parse_rule

NOW = datetime(2030, 1, 1, tzinfo=UTC)
PER_HOST = {"rate": "60 packets/h", "per": "host"}


def make(number: int, target: str, **fields: object) -> Rule:
    return replace(parse_rule({**PER_HOST, "target": target, **fields}, NOW), id=number)


def fill(compilation: Compilation, count: int = 16, **fields: object) -> None:
    for n in range(count):
        assert compilation.put(make(n + 1, f"10.{96 + n}.0.0/16", **fields)) is None


@pytest.mark.parametrize("direction", ["from", "to"])
def test_the_rule_that_would_overfill_a_table_is_refused_and_told_what_works(direction: str) -> None:
    compilation = Compilation(Facts())
    fill(compilation, direction=direction)
    problem = compilation.put(make(17, "10.120.0.6", direction=direction))
    assert problem is not None
    assert "1048577 buckets" in problem
    assert "slightly other rate" in problem
    assert compilation.put(make(18, "10.120.0.6", direction=direction, rate="61 packets/h")) is None
    assert compilation.put(make(19, "10.120.0.6", direction=direction, burst=4)) is None


def test_a_rule_that_changes_counts_once_and_one_that_goes_makes_room() -> None:
    compilation = Compilation(Facts())
    fill(compilation)
    assert compilation.put(make(3, "10.98.0.0/16")) is None
    assert compilation.put(make(3, "10.130.0.0/16")) is None
    assert compilation.put(make(3, "10.130.0.0/15")) is not None
    assert compilation.put(make(3, "10.130.0.0/16")) is None
    assert compilation.put(make(17, "10.120.0.0/24")) is not None
    compilation.drop(1)
    assert compilation.put(make(17, "10.120.0.0/24")) is None


def test_budgets_and_blocks_count_as_what_they_are() -> None:
    compilation = Compilation(Facts())
    fill(compilation, per="/24")
    for n in range(40):
        assert compilation.put(make(100 + n, f"10.{n}.0.0/16", per="target")) is None
        assert compilation.put(make(200 + n, f"172.{16 + n // 16}.{n % 16 * 16}.0/20", per="peer")) is None
        assert compilation.put(make(300 + n, f"11.{n}.0.0/16", rate="5 connections")) is None
    assert compilation.put(make(400, "2001:db8::/108")) is None
    assert compilation.put(make(401, "2001:db8:1::/124")) is not None


def test_what_stays_is_the_same_whatever_came_before() -> None:
    compilation = Compilation(Facts())
    fill(compilation)
    for n in range(16):
        compilation.drop(n + 1)
    fill(compilation)
    assert compilation.problems == {}
