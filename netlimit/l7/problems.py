"""What a refused client reads: a problem document (RFC 9457) about which limit, how much, and when to come again."""

from __future__ import annotations

import json
from math import inf

from netlimit.l7.decision import Unanswered
from netlimit.l7.headers import count_seconds, name_policy
from netlimit.l7.limiter import Verdict

MEDIA_TYPE = b"application/problem+json"
QUOTA_EXCEEDED = "https://iana.org/assignments/http-problem-types#quota-exceeded"
"""The problem type of draft-ietf-httpapi-ratelimit-headers-11, 5.1; its member `violated-policies` names policies as
the field `RateLimit-Policy` does."""


REDUCED_CAPACITY = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity"
"""The one of 5.2, for what is refused though nobody knows whether the limit is reached."""


def write_problem(verdict: Verdict) -> bytes:
    """The body of a 429, in ASCII whatever the names of rules contain; of a 403 where the client is blocked."""
    if verdict.blocked:
        return json.dumps({"title": "Forbidden", "status": 403, "detail": describe_refusal(verdict)}).encode()
    document = {
        "type": REDUCED_CAPACITY if _is_unanswered(verdict) else QUOTA_EXCEEDED,
        "title": "Too Many Requests",
        "status": 429,
        "detail": describe_refusal(verdict),
        "violated-policies": sorted(
            {name_policy(status.rule) for status in verdict.statuses if status.rule and not status.allowed}
        ),
    }
    return json.dumps(document).encode()


def write_complaint(status: int, sentence: str) -> bytes:
    """The body of an answer that says what is wrong with a request."""
    return json.dumps({"type": "about:blank", "status": status, "detail": sentence}).encode()


def describe_refusal(verdict: Verdict) -> str:
    """One sentence about a refused request: which limit refuses it, and when it gets in."""
    if verdict.blocked:
        return "Requests of this client are blocked."
    status = verdict.refusing
    if status is not None and status.rule is not None and _is_unanswered(verdict):
        reason = f'The counters of the limit "{name_policy(status.rule)}" cannot be asked, so it refuses'
    elif status is None or status.rule is None:
        reason = "The request is refused"
    else:
        reason = f'The limit "{name_policy(status.rule)}" of {status.limit} is reached'
        if status.decision is not None and status.decision.retry_after == inf:
            return f'The limit "{name_policy(status.rule)}" of {status.limit} never admits a request such as this.'
    wait = count_seconds(verdict.retry_after)
    if wait is None:
        return f"{reason}."
    return f"{reason}; come again in {wait} second{'' if wait == 1 else 's'}."


def _is_unanswered(verdict: Verdict) -> bool:
    return verdict.refusing is not None and isinstance(verdict.refusing.decision, Unanswered)
