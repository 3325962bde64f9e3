"""What was worked out of a report of a host, kept for as long as what it was worked out of is the same.

Others may have tens of thousands of rules on a host: to read them takes seconds, and from one look to the next they are
nearly always what they were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar, cast

Report = TypeVar("Report")
T = TypeVar("T")


class _Answer(NamedTuple):
    """What was worked out, and of what: the fields of the report that were read for it."""

    found: Any
    fields: dict[str, object]


class Unchanged(Generic[Report]):
    """Remembers the last answer to each question about a report. Not thread-safe."""

    def __init__(self) -> None:
        self._answers: dict[object, _Answer] = {}

    def ask(self, question: Callable[[Report], T], report: Report) -> T:
        """The answer to a question, which goes by fields of the report alone: the one of before, if each field that was
        read for it is as it was. Raises what the question raises; then nothing is remembered of it."""
        known = self._answers.pop(question, None)
        if known is None or any(getattr(report, name) != value for name, value in known.fields.items()):
            watched = _Watched(report)
            known = _Answer(question(cast(Report, watched)), watched.fields)
        # Of texts that are the same, those of the new report stay: a copy for each question would be many.
        self._answers[question] = _Answer(known.found, {name: getattr(report, name) for name in known.fields})
        return cast(T, known.found)


class _Watched:
    """A report that notes which of its fields are read."""

    def __init__(self, report: object) -> None:
        self._report = report
        self.fields: dict[str, object] = {}

    def __getattr__(self, name: str) -> object:
        value = self.fields[name] = getattr(self._report, name)
        return value
