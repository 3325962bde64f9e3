"""Whether the limits are any good: too tight, too loose, unused, or well."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum

from netlimit.l7.limit import Limit
from netlimit.l7.rules import Rule
from netlimit.l7.usage import Counts, Usage

FEW = 100
"""Of fewer hits nothing is concluded."""
TIGHT_HITS, TIGHT_KEYS = 0.05, 0.2
"""Too tight: it refuses at least this part of the hits, and something of at least this part of the keys."""
LOOSE = 0.25
"""Too loose: no key has ever used this part of it, ..."""
WATCHED, DAY = 10, 86_400
"""... in so many of its units, or in a day (but one unit at least) where those last longer."""


class Fit(StrEnum):
    """How a limit fits what it sees."""

    TIGHT = "too tight"
    """It refuses many keys, not a few that send too much."""
    LOOSE = "too loose"
    """Nobody ever comes near it: it protects nothing, or is meant for worse days."""
    UNUSED = "unused"
    """Nothing has asked for it."""
    WELL = "well"
    EARLY = "too early"
    """It has seen too little, or not for long enough."""


_RANKS = {fit: number for number, fit in enumerate(Fit)}


@dataclass(frozen=True, slots=True)
class Finding:
    """What is to be said of one limit. Numbers are hits unless they are keys; keys are estimates."""

    domain: str
    rule: str
    kind: str
    """`rate` or `concurrency`."""
    limit: str
    fit: Fit
    because: str
    """A sentence with the numbers that say so."""
    seconds: float
    """So long it has been counted, at this limit."""
    admitted: int
    refused: int
    observed: int
    """Would have been refused, but the rule only observes."""
    over: int
    near: int
    queued: int
    deferred: int
    keys: int
    limited_keys: int
    peak: float
    """The largest part of the limit that any key has used, within it: 0 to 1."""


def make_report(rules: Iterable[Rule], usage: Usage, now: float) -> list[Finding]:
    """What is to be said of each limit of these rules, what needs a look first. `now` is in seconds since 1970."""
    found = [
        _find(rule, limit, usage.get(rule, concurrency), concurrency, now)
        for rule in rules
        for limit, concurrency in ((rule.limit, False), (rule.concurrency, True))
        if limit is not None
    ]
    return sorted(found, key=rank)


def rank(finding: Finding) -> tuple[int, str, str, str]:
    """By this findings are in order."""
    return _RANKS[finding.fit], finding.domain, finding.rule, finding.kind


def describe_report(findings: Iterable[Finding]) -> list[dict[str, object]]:
    """As JSON."""
    return [asdict(finding) for finding in findings]


def _find(rule: Rule, limit: Limit, counts: Counts | None, concurrency: bool, now: float) -> Finding:
    if counts is None or counts.limit != limit:  # nothing has asked for it since it became what it is
        counts = Counts(rule, limit, now)
    seconds = max(0.0, now - counts.since)
    keys, limited_keys = counts.keys, counts.limited.estimate()
    peak = 1 - counts.least / counts.capacity if counts.capacity else 0.0
    fit, because = _judge(counts, seconds, keys, limited_keys, peak)
    return Finding(
        rule.domain,
        rule.name,
        "concurrency" if concurrency else "rate",
        str(limit),
        fit,
        because,
        round(seconds, 3),
        counts.admitted,
        counts.refused,
        counts.observed,
        counts.over,
        counts.near,
        counts.queued,
        counts.deferred,
        keys,
        limited_keys,
        round(peak, 4),
    )


def _judge(counts: Counts, seconds: float, keys: int, limited_keys: int, peak: float) -> tuple[Fit, str]:
    """The verdict on a limit, and what says so."""
    seen, beyond = counts.seen, counts.refused + counts.observed
    refuses = "would refuse" if counts.observes else "refuses"
    if not seen:
        return Fit.UNUSED, "Nothing has asked for it."
    if not counts.capacity:
        return Fit.WELL, f"It is to refuse everything: {beyond:,} hits."
    if seen < FEW:
        return Fit.EARLY, f"It has seen {seen} hits; after {FEW} there is something to say."
    if beyond:
        told = (
            f"It {refuses} {_write_part(beyond / seen)} of {seen:,} hits, from {limited_keys:,} of about {keys:,} keys"
        )
        many = limited_keys >= TIGHT_KEYS * keys
        if many and beyond >= TIGHT_HITS * seen:
            return Fit.TIGHT, f"{told}: not a few that ask too much, but many."
        return Fit.WELL, f"{told}: {'seldom' if many else 'a few that ask too much'}."
    if seconds < max(counts.limit.seconds, min(WATCHED * counts.limit.seconds, DAY)):
        return Fit.EARLY, f"It has refused nothing, but that may change: it has been watched for {seconds:.0f} s only."
    used = f"of about {keys:,} keys none has used more than {_write_part(peak)} of it"
    if peak < LOOSE:
        return Fit.LOOSE, f"It refuses nothing: {used}."
    return Fit.WELL, f"It refuses nothing: {used}."


def _write_part(part: float) -> str:
    """Percent, with a digit behind the point where that is needed to tell it from nothing."""
    return f"{100 * part:.{0 if part >= 0.1 else 2}f} %"
