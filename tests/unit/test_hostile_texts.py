"""Parsers, given what nobody should send: each refuses it in words, or takes it; none fails in another way.

Each test counts what was refused, every input once: here 3,000 at least, and with `scripts/test --long` 9,000, which
with `tests/api/test_fuzz.py` are more than 10,000.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from starlette.requests import Request
from typer import BadParameter

from api import bodies
from api.cursors import read_cursor
from api.headers import expect_revision, preferred_wait
from api.origin import find_origin, read_address
from api.problems import Problem
from api.representation import read_rule
from netlimit.cli.undo import parse_length
from netlimit.errors import RuleError, SettingsError
from netlimit.rates import Kind, parse_burst, parse_rate
from netlimit.roles import parse_role
from netlimit.rules import parse_ports, parse_rule, parse_target, parse_ttl
from netlimit.settings import Settings, load_settings, parse_listen, parse_mark_mask, parse_safe
from netlimit.store.errors import Stale
from netlimit.tokens import check_name, find_handle, verify_token
from tests.size import choose
from tests.unit.hostile import VALUES, damaged

NOW = datetime(2030, 1, 1, tzinfo=UTC)
EXAMPLES = choose(200, 600)
RULE = replace(parse_rule({"target": "10.1.2.3", "rate": "200 packets/s"}, NOW), revision=1)
FIELDS = (
    "name", "target", "direction", "protocol", "ports", "source_ports", "interface", "rate", "burst", "per", "action",
    "ceil", "on_failure", "enabled", "expires_at", "ttl", "hosts", "labels", "comment", "colour", "id",
)  # fmt: skip


def count_refused(strategy: st.SearchStrategy[Any], parse: Callable[[Any], object], *errors: type[Exception]) -> int:
    """Give hostile inputs to a parser; how many it refused. Any other error than these fails the test."""
    refused: set[str] = set()

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def give(value: Any) -> None:
        try:
            parse(value)
        except errors as error:
            refused.add(repr(value) if str(error).strip() else "no word")

    give()
    assert "no word" not in refused
    return len(refused)


@pytest.mark.parametrize(
    ("name", "strategy", "parse", "error"),
    [
        ("rates", damaged("200 packets/s", "1.5 Mbit/s", "30 connections", "5 MiB/min"), parse_rate, RuleError),
        ("bursts", damaged("100", "100 packets", "2 MB"), lambda text: parse_burst(text, Kind.PACKETS), RuleError),
        ("targets", damaged("10.1.2.0/24", "2001:db8::/32", "192.0.2.1"), parse_target, RuleError),
        ("ports", damaged("80", "80,443", "8000-8100", "53:54"), lambda text: parse_ports("ports", text), RuleError),
        ("values for ports", VALUES, lambda value: parse_ports("ports", value), RuleError),
        ("lengths of time", damaged("90s", "10m", "30d", "2 h", "600"), parse_ttl, RuleError),
        ("windows", damaged("60s", "5m", "1h", "90"), parse_length, BadParameter),
        ("places", damaged("127.0.0.1:8750", "[::1]:80", "gw:1"), parse_listen, ValueError),
        ("masks", damaged("0xff000000", "255", "0b1100"), parse_mark_mask, ValueError),
        ("networks", damaged("10.0.0.0/8,192.0.2.1", "2001:db8::/32"), parse_safe, ValueError),
        ("cursors", damaged("YWZ0ZXIgMTA", "YWZ0ZXIgMQ"), read_cursor, RuleError),
        ("roles", damaged("viewer", "operator", "admin"), parse_role, ValueError),
        ("names of tokens", damaged("ci", "a b", "bootstrap"), check_name, ValueError),
        ("JSON", damaged('{"target": "10.1.2.3"}', '{"a": [1, {"b": "\\u00e9"}]}'), bodies.parse_json, Problem),
        ("objects", damaged('{"a": 1}', '{"a": {"b": 2}}').map(lambda text: text.encode("utf-8", "surrogatepass")),
         bodies.parse_object, Problem),
        ("arrays", damaged('[{"a": 1}, {"b": 2}]', "[[], []]"), lambda text: list(bodies.parse_array(text)), Problem),
        ("If-Match", damaged('"1"', '"1", "2"', 'W/"1"', "*"), lambda text: expect_revision(text, RULE), Stale),
    ],
)  # fmt: skip
def test_a_parser_refuses_in_words(
    name: str, strategy: st.SearchStrategy[Any], parse: Callable[[Any], object], error: type[Exception]
) -> None:
    assert count_refused(strategy, parse, error) >= EXAMPLES // 2, name


@pytest.mark.parametrize("field", FIELDS)
def test_a_rule_is_refused_by_its_field(field: str) -> None:
    """Each field in turn with whatever JSON can say."""

    def read(value: object) -> None:
        read_rule({"target": "10.1.2.0/24", "rate": "200 packets/s", "per": "host", field: value}, NOW)

    texts = damaged("10.1.2.0/24", "20 Mbit/s", "udp", "eth0", "office", "/24", "2030-01-31T18:00:00Z", "drop")
    assert count_refused(VALUES | texts, read, RuleError, Problem) >= EXAMPLES // 4, field  # a comment may be any text


def test_what_cannot_be_a_preference_a_request_id_or_an_address_is_none() -> None:
    @settings(max_examples=EXAMPLES, deadline=None, database=None)
    @given(damaged("wait=5", "respond-async, wait=10", 'wait="7"; foo'))
    def give(text: str) -> None:
        sent = text.encode("latin-1", "replace")
        scope = {"type": "http", "client": (text, 0), "headers": [(b"prefer", sent), (b"x-request-id", sent)]}
        wait = preferred_wait(Request(scope))
        assert wait is None or 0 <= wait <= 60
        origin = find_origin(scope)
        assert 1 <= len(origin.request) <= 64
        assert origin.request.isascii()
        assert origin.address is None or read_address(origin.address) == origin.address
        assert find_handle(text) is None
        assert not verify_token("x", text)

    give()


def test_settings_are_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "netlimit.toml"
    good = ('listen = "127.0.0.1:1"', "set_size = 5", 'safe = ["10.0.0.1"]', 'host = "gw"', "request_rate = 5")
    given_by_file = count_refused(damaged(*good), lambda text: _load(path, text), SettingsError)
    values = st.tuples(st.sampled_from(sorted(Settings.model_fields)), VALUES)
    by_name = count_refused(values, lambda pair: Settings(**{pair[0]: pair[1]}), ValidationError)
    assert given_by_file + by_name >= EXAMPLES


def _load(path: Path, text: str) -> Settings:
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return load_settings(path)
