"""What a response says of its limits: header fields, in families that can be chosen.

Two generations of one Internet draft contradict each other. `RateLimit` and `RateLimit-Policy` are written as draft 11
has them (structured fields, RFC 9651); drafts up to 6 had three fields with plain numbers instead, and a client made
for those ignores ours as malformed. So both may be sent together, and by default the plain ones go out under their
common names that begin with `X-`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import StrEnum
from functools import lru_cache
from math import ceil, inf
from typing import NamedTuple

from netlimit.l7.decision import Decision
from netlimit.l7.limit import Algorithm, Limit
from netlimit.l7.limiter import Verdict
from netlimit.l7.rules import Rule

Fields = list[tuple[bytes, bytes]]
"""Names in lower case and values, as ASGI has them."""
_UNPRINTABLE = re.compile(r"[^ -~]")
_NAMES = 4096


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
_WAITS = ((Family.RETRY_AFTER, b"retry-after"), (Family.X_RATELIMIT, b"x-ratelimit-retry-after"))


def make_headers(verdict: Verdict, families: Collection[Family] = USUAL) -> Fields:
    """The header fields that tell a client of a verdict. What only observes is not told: nobody is to heed it."""
    fields: Fields = []
    tellings = _find_tellings(verdict)
    if tellings:
        if Family.IETF in families:
            fields.append((b"ratelimit-policy", b", ".join([_describe(each.name, each.limit)[1] for each in tellings])))
            fields.append((b"ratelimit", b", ".join([_tell(each) for each in tellings])))
        worst = tellings[0] if len(tellings) == 1 else min(tellings, key=_rank)
        for family in _PLAIN:
            if family in families:
                fields += _tell_plainly(family, worst)
    wait = None if verdict.allowed else count_seconds(verdict.retry_after)
    if wait is not None:
        fields += [(name, b"%d" % wait) for family, name in _WAITS if family in families]
    return fields


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


class _Telling(NamedTuple):
    """A policy, and how a client stands with it."""

    name: str
    limit: Limit
    decision: Decision

    @property
    def window(self) -> int | None:
        """Whole seconds in which the client can use no more than remains; None where nobody knows."""
        if self.limit.algorithm is Algorithm.CONCURRENCY:  # requests in flight end when they end
            return None
        wait = self.decision.retry_after or self.decision.reset_after
        return None if wait == inf else ceil(wait)


def _find_tellings(verdict: Verdict) -> list[_Telling]:
    """What a client is to know, once a policy."""
    tellings: dict[str, _Telling] = {}
    for _, rule, limit, decision, _ in verdict.statuses:
        if rule is None or limit is None or decision is None or rule.observes:
            continue
        telling = _Telling(name_policy(rule), limit, decision)
        other = tellings.get(telling.name)
        if other is None or _rank(telling) < _rank(other):
            tellings[telling.name] = telling
    return [*tellings.values()]


def _rank(telling: _Telling) -> tuple[bool, float]:
    """The less, the more it says: what refuses longest, else what has least left."""
    decision = telling.decision
    return (decision.admitted, decision.remaining if decision.admitted else -decision.retry_after)


@lru_cache(_NAMES)
def _describe(name: str, limit: Limit) -> tuple[bytes, bytes]:
    """A policy's name and the whole item of it, as structured fields."""
    quoted = write_string(name)
    concurrent = limit.algorithm is Algorithm.CONCURRENCY
    measure = ';qu="concurrent-requests"' if concurrent else f";w={limit.seconds}"
    return quoted.encode(), f"{quoted};q={limit.amount}{measure}".encode()


def _tell(telling: _Telling) -> bytes:
    name, _ = _describe(telling.name, telling.limit)
    window = telling.window
    if window is None:
        return b"%b;r=%d" % (name, telling.decision.remaining)
    return b"%b;r=%d;t=%d" % (name, telling.decision.remaining, window)


def _tell_plainly(family: Family, telling: _Telling) -> Fields:
    limit, remaining, reset = _PLAIN[family]
    fields = [(limit, b"%d" % telling.limit.amount), (remaining, b"%d" % telling.decision.remaining)]
    window = telling.window
    return fields if window is None else [*fields, (reset, b"%d" % window)]
