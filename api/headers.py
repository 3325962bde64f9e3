"""The headers that mean something here: ETag, If-Match, If-None-Match (RFC 9110), Prefer (RFC 7240)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Literal

from fastapi import Depends, Header, Request

from netlimit.rules import Rule
from netlimit.store import ABSENT, LimitDocument, Stale

LONGEST_WAIT = 60
USUAL_WAIT = 5
"""Seconds that `Prefer: wait` without a number means."""

_WAIT = re.compile(r'\s*wait\s*(?:=\s*"?(\d{1,9})"?\s*)?(?:;.*)?', re.IGNORECASE)
_UNSAID = re.compile(r'[^ -~]|["\\]')
"""What does not stand in a quoted string of a header as it is."""


def etag(kept: Rule | LimitDocument) -> str:
    """The entity tag of a rule, or of a document of limits: its revision."""
    return f'"{kept.revision}"'


def expect_revision(if_match: str | None, rule: Rule, if_none_match: str | None = None) -> int | None:
    """The revision at which the rule must be when it is changed; None if any will do. Raises Stale, always where there
    was to be none (`If-None-Match: *`)."""
    expected = read_if_match(if_match, rule) if if_none_match is None else ABSENT
    if expected not in (None, rule.revision):
        raise Stale(rule.id, expected or 0, rule.revision)
    return expected


def read_if_match(if_match: str | None, kept: Rule | LimitDocument | None) -> int | None:
    """The revision that is wanted of what is kept, or of nothing: its own if it is among those named; None if any will
    do; 0, which nothing has, for what is no revision. Weak tags never match (RFC 9110, 13.1.1)."""
    if if_match is None or (if_match.strip() == "*" and kept is not None):
        return None
    tags = [tag.strip() for tag in if_match.split(",")]
    if kept is not None and etag(kept) in tags:
        return kept.revision
    named = re.fullmatch(r'"(\d{1,18})"', tags[0])
    return int(named[1]) if named else 0


def read_preconditions(if_match: str | None, if_none_match: str | None, kept: LimitDocument | None) -> int | None:
    """As `read_if_match`, or ABSENT where nothing may be kept yet (`If-None-Match: *`); both at once nothing meets."""
    if if_none_match is None:
        return read_if_match(if_match, kept)
    return ABSENT if if_match is None else 0


def preferred_wait(request: Request) -> int | None:
    """Seconds that `Prefer: wait` asks for, at most a minute; None if it does not. What cannot be read is ignored."""
    for preference in ",".join(request.headers.getlist("prefer")).split(","):
        match = _WAIT.fullmatch(preference)
        if match:
            return min(int(match[1] or USUAL_WAIT), LONGEST_WAIT)
    return None


def preference_applied(wait: int | None) -> dict[str, str]:
    """What to answer to a preference."""
    return {} if wait is None else {"Preference-Applied": f"wait={wait}"}


def write_warnings(sentences: Iterable[str]) -> dict[str, str]:
    """What somebody should know who gets an answer without a body: as `Warning: 299 netlimit "…"` (RFC 7234)."""
    told = ", ".join(f'299 netlimit "{_UNSAID.sub("?", sentence)}"' for sentence in sentences)
    return {"Warning": told} if told else {}


async def _read_wait(
    request: Request,
    prefer: Annotated[
        str | None,
        Header(
            description="`wait=5` (RFC 7240): answer once the kernel holds the change, or after so many seconds "
            "(at most 60) with what is known then.",
            openapi_examples={"wait": {"value": "wait=5"}},
        ),
    ] = None,
) -> int | None:
    return preferred_wait(request)


Wait = Annotated[int | None, Depends(_read_wait)]
"""The parameter of an operation that can wait for the kernel."""

IfMatch = Annotated[
    str | None,
    Header(description="The `ETag` that what is changed must still have: 412 when it has not. `*` takes any."),
]
"""The parameter of an operation that changes a rule, or limits."""

IfNoneMatch = Annotated[
    Literal["*"] | None,
    Header(description="`*`: only if there is nothing yet, else 412."),
]
"""The parameter of an operation that may keep something new."""
