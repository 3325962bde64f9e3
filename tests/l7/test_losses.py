"""Limits that a database has lost, as they are told."""

from __future__ import annotations

import pytest

from netlimit.l7.document import parse_document
from netlimit.l7.losses import Losses
from tests.l7.test_sources import text


def test_however_much_is_lost_little_is_told(caplog: pytest.LogCaptureFixture) -> None:
    domains = [f"d{number:03}" for number in range(150)]
    good = {domain: parse_document(text(domain)) for domain in domains}
    losses = Losses()
    losses.note(dict.fromkeys(domains, b"then"), {}, (), good)
    told, *quoted = caplog.messages
    assert "'d000', 'd001', 'd002', 'd003', 'd004' and 145 more." in told
    assert losses.list_troubles() == [told]
    assert len(told) < 4000
    assert sum("too long to be quoted" in each for each in quoted) == 50


def test_a_long_document_is_quoted_in_parts_that_can_be_put_together(caplog: pytest.LogCaptureFixture) -> None:
    items = "".join(f"- {{key: k, value: 'ü{number}', concurrency: 1}}\n" for number in range(500))
    document = parse_document(f"domain: {'long' * 20}\ndescriptors:\n{items}")
    losses = Losses()
    losses.note({document.domain: b"then"}, {document.domain: b"now"}, (), {document.domain: document})
    _, *quoted = caplog.messages
    assert len(quoted) > 5
    assert all(len(each) < 4000 for each in quoted)
    assert f", part 2 of {len(quoted)}: " in quoted[1]
    joined = "".join(each.split(": ", 1)[1] for each in quoted)
    assert parse_document(joined, is_json=True).root == document.root


def test_what_is_lost_again_is_told_again(caplog: pytest.LogCaptureFixture) -> None:
    losses = Losses()
    losses.note({"web": b"2"}, {"web": b"1"}, (), {})
    losses.heed({"web": b"2"})
    assert losses.list_troubles() == []
    losses.note({"web": b"2"}, {"web": b"1"}, (), {})
    assert losses.list_troubles() == [caplog.messages[0]]
    assert len(caplog.messages) == 2
    losses.note({"web": b"1"}, {"web": b"1"}, (), {})
    losses.heed({"web": b"1"})
    assert len(caplog.messages) == 2
    assert losses.list_troubles() == [caplog.messages[0]]
