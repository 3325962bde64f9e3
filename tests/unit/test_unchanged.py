"""What has not changed is not worked out once more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from netlimit.conflicts import Fill, Finding, HostReport, find_conflicts
from netlimit.unchanged import Unchanged

REPORT = HostReport(nftables="table", legacy=("one", "two"), nat=(("three",),))


def ask_twice(question: Callable[[HostReport], object], first: HostReport, second: HostReport) -> int:
    """How often a question is worked out."""
    asked = []

    def count(report: HostReport) -> object:
        asked.append(report)
        return question(report)

    held = Unchanged[HostReport]()
    assert held.ask(count, first) == question(first)
    assert held.ask(count, second) == question(second)
    return len(asked)


def test_what_goes_by_the_same_is_worked_out_once() -> None:
    again = replace(REPORT, legacy=(*REPORT.legacy,), connections=Fill(1, 2))
    assert ask_twice(lambda report: (report.legacy, report.translating), REPORT, again) == 1


@pytest.mark.parametrize(
    "changed", [{"legacy": ("one",)}, {"nat": (("four",),)}, {"nat6": (("four",),)}, {"nftables": ""}]
)
def test_what_goes_by_something_that_has_changed_is_worked_out_anew(changed: dict[str, object]) -> None:
    again = replace(REPORT, **changed)  # type: ignore[arg-type]
    assert ask_twice(lambda report: (report.legacy, report.translating, report.nftables), REPORT, again) == 2


def test_what_was_read_is_known_for_each_answer() -> None:
    """One that looked at less at first looks at what it needs then."""
    held = Unchanged[HostReport]()

    def read(report: HostReport) -> object:
        return report.legacy or report.nftables

    for report in (REPORT, replace(REPORT, legacy=()), replace(REPORT, legacy=(), nftables="other"), REPORT):
        assert held.ask(read, report) == read(report)


def test_a_question_that_fails_is_asked_again() -> None:
    held, waiting = Unchanged[HostReport](), [ValueError("no")]

    def fail_once(report: HostReport) -> int:
        if waiting:
            raise waiting.pop()
        return report.hz

    with pytest.raises(ValueError, match="no"):
        held.ask(fail_once, REPORT)
    assert held.ask(fail_once, REPORT) == REPORT.hz


def test_findings_are_the_same_whether_something_is_held_or_not() -> None:
    held = Unchanged[HostReport]()

    def known(report: HostReport) -> list[Finding]:
        found = find_conflicts(report, held)
        assert found == find_conflicts(report)
        return found

    report = HostReport(legacy=("-A FORWARD -j NFQUEUE", "-A PREROUTING -j TEE --gateway 10.0.0.1"))
    first = known(report)
    assert first
    second = known(replace(report, connections=Fill(99, 100)))
    assert {*map(id, first)} < {*map(id, second)}, "what is of rules is that of before"
    assert known(HostReport()) == []
