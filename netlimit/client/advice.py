"""What a server says of its limits, read from the headers of an answer.

Whatever a server sends is read in bounded time and becomes bounded numbers; what is malformed is as good as not sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import NamedTuple

import httpx

LONGEST = 366 * 86_400.0
"""Seconds: no advice is longer than a year."""
_MOST_TEXT = 8192
"""Characters of a field that are looked at; a longer one is ignored."""
_MOST_DATE = 64
_MOST_QUOTAS = 16
_EPOCH = 1e9
"""Greater numbers are no seconds from now, but since 1970; those a thousand times as great are milliseconds."""
_OLDER = ("x-ratelimit-", "x-rate-limit-", "ratelimit-")
_NUMBER = re.compile(r"[ \t]*(\d{1,15}(?:\.\d{1,9})?)[ \t]*(?:;.*)?", re.ASCII)
_STRING = r'"(?:[ !#-\[\]-~]|\\["\\])*+"'
_BARE = rf"{_STRING}|-?\d{{1,15}}(?:\.\d{{1,3}})?|:[A-Za-z0-9+/=]*+:|\?[01]|[A-Za-z*][\w!#$%&'*+.^`|~:/-]*+"
_PARAMETER = re.compile(rf"; *([a-z*][a-z0-9_.*-]*+)(?:=({_BARE}))?", re.ASCII)
_ITEM = re.compile(rf"({_STRING})((?:; *[a-z*][a-z0-9_.*-]*+(?:=(?:{_BARE}))?)*+)", re.ASCII)
_COMMA = re.compile(r"[ \t]*+,[ \t]*+")
_INTEGER = re.compile(r"\d{1,15}", re.ASCII)


class Quota(NamedTuple):
    """What is left of a quota: no more than `remaining` for `reset` seconds."""

    policy: str
    """Its name; empty where the server names none."""
    partition: str
    """The key of the part of it that the request has used, as sent; empty where the server divides nothing."""
    remaining: int
    reset: float


class Advice(NamedTuple):
    """What an answer says: how long to wait before the request comes again, and what is left."""

    retry_after: float | None
    """Seconds; None where the server does not say."""
    quotas: tuple[Quota, ...]


def read_advice(headers: httpx.Headers, now: float) -> Advice:
    """Read Retry-After (RFC 9110, 10.2.3), RateLimit and RateLimit-Policy (draft-ietf-httpapi-ratelimit-headers-11),
    and where these are not sent the older fields of several names.

    `now` is the time in seconds since 1970. Dates count from the server's own Date, so that its clock need not agree
    with ours. Retry-After takes precedence over when an exhausted quota ends (draft, section 7), and an answer that
    comes from a cache on the way says nothing of quotas (7.3).
    """
    date = _read_date(headers.get("date", ""))
    now = now if date is None else date
    retry_after = _read_wait(headers, "retry-after", now)
    for prefix in _OLDER:
        if retry_after is None:
            retry_after = _read_wait(headers, prefix + "retry-after", now)
    if (_read_least(headers, "age") or 0) > 0:
        return Advice(retry_after, ())
    return Advice(retry_after, tuple(_read_quotas(headers, retry_after) or _read_older(headers, retry_after, now)))


def _read_quotas(headers: httpx.Headers, retry_after: float | None) -> list[Quota]:
    policies = dict(_read_items(headers.get("ratelimit-policy", "")))
    quotas = []
    for name, told in _read_items(headers.get("ratelimit", "")):
        policy = policies.get(name, {})
        remaining = _read_integer(told.get("r"))
        window = _read_integer(told.get("t"))
        if window is None:
            window = _read_integer(policy.get("w"))
        reset = retry_after if retry_after is not None and remaining == 0 else window
        if remaining is not None and reset is not None:
            partition = told.get("pk", policy.get("pk", ""))
            quotas.append(Quota(name[1:-1], partition, remaining, min(float(reset), LONGEST)))
    return quotas


def _read_older(headers: httpx.Headers, retry_after: float | None, now: float) -> Iterator[Quota]:
    for prefix in _OLDER:
        remaining = _read_least(headers, prefix + "remaining")
        reset = _read_wait(headers, prefix + "reset", now)
        if retry_after is not None and remaining == 0:
            reset = retry_after
        if remaining is not None and reset is not None:
            yield Quota(headers.get(prefix + "resource", "")[:_MOST_TEXT], "", int(remaining), reset)
            return


def _read_items(text: str) -> list[tuple[str, dict[str, str]]]:
    """The strings of a list and their parameters (RFC 9651, 4.2.1); nothing if any of it is malformed."""
    items: list[tuple[str, dict[str, str]]] = []
    position = 0
    while position < len(text) <= _MOST_TEXT:
        item = _ITEM.match(text, position)
        if item is None:
            return []
        items.append((item[1], {name: value or "?1" for name, value in _PARAMETER.findall(item[2])}))
        comma = _COMMA.match(text, item.end())
        if comma is None:
            return items[:_MOST_QUOTAS] if item.end() == len(text) else []
        position = comma.end()
    return []


def _read_integer(text: str | None) -> int | None:
    return int(text) if text is not None and _INTEGER.fullmatch(text) else None


def _read_wait(headers: httpx.Headers, name: str, now: float) -> float | None:
    """The longest wait that a field names: seconds, a time since 1970, or a date."""
    waits: list[float] = []
    for value in headers.get_list(name):
        date = _read_date(value)
        times = _read_numbers(value) if date is None else [date]
        waits += [time - now if time > _EPOCH or date is not None else time for time in times]
    return min(max(0.0, *waits), LONGEST) if waits else None


def _read_least(headers: httpx.Headers, name: str) -> float | None:
    return min((number for value in headers.get_list(name) for number in _read_numbers(value)), default=None)


def _read_numbers(text: str) -> Iterator[float]:
    """The numbers of a list; those that can only be milliseconds since 1970 as seconds."""
    if len(text) > _MOST_TEXT:
        return
    for part in text.split(","):
        number = _NUMBER.fullmatch(part)
        if number:
            value = float(number[1])
            yield value / 1000 if value > 1000 * _EPOCH else value


def _read_date(text: str) -> float | None:
    """A date of HTTP (RFC 9110, 5.6.7) in seconds since 1970."""
    if not text.isascii() or len(text) > _MOST_DATE:
        return None
    try:
        date = parsedate_to_datetime(text)
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()  # asctime names no zone
    except (ValueError, TypeError, OverflowError, IndexError):
        return None
