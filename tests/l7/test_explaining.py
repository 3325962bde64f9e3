"""Why a descriptor finds a rule, or none."""

from __future__ import annotations

from itertools import product

import pytest

from netlimit.errors import LimitError
from netlimit.l7.document import parse_document
from netlimit.l7.explain import explain, parse_descriptor
from netlimit.l7.rules import Entry, find_match
from tests.l7.test_matching import TREE

ROOT = parse_document(TREE).root


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("a=b", [("a", "b")]),
        ("a=b,c", [("a", "b"), ("c", "")]),
        ("a=", [("a", "")]),
        (r"a=b\,c,d\=e=f=g", [("a", "b,c"), ("d=e", "f=g")]),
        (r"a\\=\\", [("a\\", "\\")]),
    ],
)
def test_descriptors_are_written_like_the_names_of_rules(text: str, entries: list[tuple[str, str]]) -> None:
    assert parse_descriptor(text) == tuple(Entry(*each) for each in entries)


@pytest.mark.parametrize("text", ["", ",", "=b", "a=b,", ",a", "a,,b", "a\\"])
def test_what_is_no_descriptor_is_refused(text: str) -> None:
    with pytest.raises(LimitError, match="is no descriptor; write for example"):
        parse_descriptor(text)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        (
            "plan=gold,tenant=b",
            [
                "plan=gold: there is this very value.",
                "tenant=b: there is the key without a value; each value has a counter for itself.",
                "The rule is plan=gold,tenant: 5/second by fixed_window (hard; on the limit: reject; without counters: "
                "open).",
                "Its counter is the one of 'b'.",
            ],
        ),
        (
            "plan=gold",
            ["plan=gold: there is this very value.", "No rule ends here: those below are for longer descriptors."],
        ),
        (
            "address=198.51.100.1",
            ["address=198.51.100.1: there is this very value.", "Here is no limit: what is asked is admitted."],
        ),
        (
            "address=192.0.2.1,x=y",
            [
                "address=192.0.2.1: there is the key without a value; each value has a counter for itself.",
                "x=y: nothing goes on here; the document has no descriptors below.",
            ],
        ),
        (
            "file=ace",
            [
                "file=ace: the first pattern that fits is a*c*e, with a counter which all of them share.",
                "The rule is file=a*c*e: 40/day by fixed_window (hard; on the limit: reject; without counters: open).",
                "Its counter is the one of 'a*c*e'.",
            ],
        ),
        (
            "plan=silver",
            ["plan=silver: nothing here fits. There is plan=gold, address=192.0.2.66, address=198.51.100.1, "
             "path=/api/v1/login, path=/api/* and 6 more."],
        ),
    ],
)  # fmt: skip
def test_each_step_is_told(text: str, steps: list[str]) -> None:
    assert list(explain(ROOT, parse_descriptor(text)).steps) == steps


def test_what_is_told_is_what_is_found() -> None:
    entries = [Entry(*each) for each in product(
        ("plan", "tenant", "address", "job", "path", "file", "user", "call"),
        ("", "gold", "acme", "192.0.2.66", "/api/v1/login", "/api/x", "abcde", "staff-ann", "admin"),
    )]  # fmt: skip
    descriptors = [(each,) for each in entries] + list(product(entries, entries))
    found = [explain(ROOT, each) for each in descriptors]
    assert [each.match for each in found] == [find_match(ROOT, each) for each in descriptors]
    assert sum(each.match is not None for each in found) > 40
    for each in found:
        assert each.steps[-1].startswith("Its counter") == (each.match is not None)
