"""What a response says of its limits: header fields, in families that can be chosen.

Two generations of one Internet draft contradict each other. `RateLimit` and `RateLimit-Policy` are written as draft 11
has them (structured fields, RFC 9651); drafts up to 6 had three fields with plain numbers instead, and a client made
for those ignores ours as malformed. So both may be sent together, and by default the plain ones go out under their
common names that begin with `X-`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import ceil, inf
from typing import NamedTuple

from netlimit.l7.decision import Decision, new
from netlimit.l7.identity import hash_key
from netlimit.l7.limit import Algorithm, Limit
from netlimit.l7.limiter import Verdict
from netlimit.l7.rules import Rule

Fields = list[tuple[bytes, bytes]]
"""Names in lower case and values, as ASGI has them."""
_UNPRINTABLE = re.compile(r"[^ -~]")
_KNOWN = 4096


class Family(StrEnum):
    """Header fields that belong together."""

    IETF = "ietf"
    """`RateLimit-Policy` and `RateLimit`, of every limit that applies (draft-ietf-httpapi-ratelimit-headers-11). There
    are no partition keys in them: a client could not foretell them, and they would tell others whom it speaks for."""
    RETRY_AFTER = "retry-after"
    """`Retry-After` (RFC 9110, 10.2.3) of what is refused: who waits so many seconds gets in if nobody else comes."""
    X_RATELIMIT = "x-ratelimit"
    """`X-RateLimit-Limit`, `-Remaining` and `-Reset` (seconds from now), and `X-Ratelimit-Retry-After` of what is
    refused; of the one limit that says the most."""
    RATELIMIT = "ratelimit"
    """`RateLimit-Limit`, `-Remaining` and `-Reset` (drafts up to 6), likewise."""


USUAL = frozenset({Family.IETF, Family.RETRY_AFTER, Family.X_RATELIMIT})
"""The families that are sent unless others are chosen."""
_PLAIN = {
    Family.X_RATELIMIT: (b"x-ratelimit-limit", b"x-ratelimit-remaining", b"x-ratelimit-reset"),
    Family.RATELIMIT: (b"ratelimit-limit", b"ratelimit-remaining", b"ratelimit-reset"),
}
_LEFT = {remaining: names for names in _PLAIN.values() for remaining in names[1:2]}
"""By the field that says what remains of one limit, all that tell of that limit."""
_MOST_DIGITS = 20
_WAITS = {Family.RETRY_AFTER: b"retry-after", Family.X_RATELIMIT: b"x-ratelimit-retry-after"}


class _Chosen(NamedTuple):
    """What is sent of some families."""

    ietf: bool
    plain: tuple[tuple[bytes, bytes, bytes], ...]
    waits: tuple[bytes, ...]


@lru_cache
def _choose(families: frozenset[Family]) -> _Chosen:
    """Looked up by the set: to look for a member of an Enum in it takes longer than to write its fields."""
    plain = tuple(names for family, names in _PLAIN.items() if family in families)
    waits = tuple(name for family, name in _WAITS.items() if family in families)
    return _Chosen(Family.IETF in families, plain, waits)


def make_headers(verdict: Verdict, families: Collection[Family] = USUAL) -> Fields:
    """The header fields that tell a client of a verdict. What only observes is not told: nobody is to heed it."""
    ietf, plain, waits = _choose(frozenset(families))
    fields: Fields = []
    tellings = _find_tellings(verdict)
    if tellings:
        worst = tellings[0]
        policies, states = worst.words.policy, worst.state
        if len(tellings) > 1:
            worst = min(tellings, key=lambda each: each.rank)
            policies = b", ".join([each.words.policy for each in tellings])
            states = b", ".join([each.state for each in tellings])
        if ietf:
            fields += ((b"ratelimit-policy", policies), (b"ratelimit", states))
        for names in plain:
            fields += _tell_plainly(names, worst)
    wait = None if verdict.allowed else count_seconds(verdict.retry_after)
    if wait is not None:
        fields += [(name, b"%d" % wait) for name in waits]
    return fields


def add_headers(told: Iterable[tuple[bytes, bytes]], fields: Fields) -> Fields:
    """The fields of a response, and those that tell a client of a limit around what has answered. Where both tell of
    one limit alone, for one RateLimit is around another, those are kept of which less remains."""
    told = [*told]
    for name in {name for name, _ in told} & _LEFT.keys():
        theirs, ours = _read_count(dict(told)[name]), _read_count(dict(fields).get(name, b""))
        if theirs is None or ours is None:
            continue
        if ours < theirs:
            told = _leave_out(_LEFT[name], told)
        else:
            fields = _leave_out(_LEFT[name], fields)
    return [*told, *fields]


def _leave_out(names: Collection[bytes], fields: Fields) -> Fields:
    return [field for field in fields if field[0] not in names]


def _read_count(value: bytes) -> int | None:
    return int(value) if value.isdigit() and len(value) <= _MOST_DIGITS else None


def count_seconds(wait: float) -> int | None:
    """Whole seconds that are never less than a wait, and at least one; None for never."""
    return None if wait == inf else max(1, ceil(wait))


def name_policy(rule: Rule) -> str:
    """What clients know a rule as: the name that it has been given, else its path in the document."""
    return rule.alias or rule.name


def write_string(text: str) -> str:
    """A string of a structured field (RFC 9651, 3.3.3); what is not printable ASCII is percent-encoded."""
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{_UNPRINTABLE.sub(_encode, quoted)}"'


def _encode(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass"))


@dataclass(frozen=True, slots=True)  # read faster than a tuple with names
class _Words:
    """What never changes of the fields of a limit."""

    rule: Rule
    limit: Limit
    name: str
    policy: bytes
    """The item of `RateLimit-Policy`."""
    start: bytes
    """How the item of `RateLimit` begins: before what remains."""
    amount: bytes
    timed: bool
    """Whether there is a time in which it frees itself; requests in flight end when they end."""
    told: bool
    """Whether clients are told of it."""


class _Telling(NamedTuple):
    """A limit, and how a client stands with it."""

    words: _Words
    decision: Decision
    left: bytes
    """What remains."""
    window: bytes | None
    """Whole seconds in which a client can use no more than remains; None where nobody knows."""
    state: bytes
    """The item of `RateLimit`."""

    @property
    def rank(self) -> tuple[bool, float]:
        """The less, the more it says: what refuses longest, else what has least left."""
        admitted, remaining, wait, *_ = self.decision
        return (admitted, remaining if admitted else -wait)


_LONGEST, _MOST = 130, 8
"""Bytes of a name, and policies, of one answer: a proxy has room for 4 KiB of header fields (nginx's
`proxy_buffer_size`), and lets pass what is answered with more. Those that say the most are told."""
_words: dict[int, _Words] = {}


def _find_words(rule: Rule, limit: Limit) -> _Words:
    """By identity: hashing a limit takes longer than all the rest of its fields."""
    words = _words.get(id(limit))
    if words is not None and words.limit is limit and words.rule is rule:
        return words
    name = name_policy(rule)
    quoted = write_string(name)
    if len(quoted) > _LONGEST:  # of each letter, up to twelve: `%F0%9F%9A%A6`
        quoted = write_string(f"{name[: (_LONGEST - 34) // 12]}#{hash_key(name)}")
    timed = limit.algorithm is not Algorithm.CONCURRENCY
    measure = f";w={limit.seconds}" if timed else ';qu="concurrent-requests"'
    policy = f"{quoted};q={limit.amount}{measure}"
    told = not rule.observes
    words = _Words(rule, limit, name, policy.encode(), f"{quoted};r=".encode(), b"%d" % limit.amount, timed, told)
    if len(_words) >= _KNOWN:
        _words.clear()
    _words[id(limit)] = words
    return words


def _find_tellings(verdict: Verdict) -> list[_Telling]:
    """What a client is to know, once a policy."""
    tellings = []
    for _, rule, limit, decision, _ in verdict.statuses:
        if rule is None or limit is None or decision is None:
            continue
        words = _find_words(rule, limit)
        if words.told:
            tellings.append(_make_telling(words, decision))
    if len(tellings) <= 1:
        return tellings
    worst: dict[str, _Telling] = {}
    for telling in tellings:
        name = telling.words.name
        if name not in worst or telling.rank < worst[name].rank:
            worst[name] = telling
    return [*worst.values()] if len(worst) <= _MOST else sorted(worst.values(), key=lambda each: each.rank)[:_MOST]


def _make_telling(words: _Words, decision: Decision) -> _Telling:
    _, remaining, retry_after, reset_after, _, _ = decision
    wait, left = retry_after or reset_after, b"%d" % remaining
    if not words.timed or wait == inf:
        return _Telling(words, decision, left, None, words.start + left)
    window = b"%d" % ceil(wait)
    return new(_Telling, (words, decision, left, window, b"%b%b;t=%b" % (words.start, left, window)))


def _tell_plainly(names: tuple[bytes, bytes, bytes], telling: _Telling) -> Fields:
    words, _, left, window, _ = telling
    limit, remaining, reset = names
    fields = [(limit, words.amount), (remaining, left)]
    if window is not None:
        fields.append((reset, window))
    return fields
