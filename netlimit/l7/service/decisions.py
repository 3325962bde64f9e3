"""`/v1/decide`: a question, and what is decided about it."""

from __future__ import annotations

from json.encoder import encode_basestring_ascii as quote
from math import inf

from netlimit.l7.decision import new
from netlimit.l7.headers import Family, make_headers
from netlimit.l7.identity import Scope
from netlimit.l7.limiter import Limiter, Status, Verdict
from netlimit.l7.listening import Receive
from netlimit.l7.problems import describe_refusal
from netlimit.l7.service.answers import JSON, Answer
from netlimit.l7.service.leases import write_lease
from netlimit.l7.service.questions import read_body, read_question

_WAIT = (Family.RETRY_AFTER,)


async def decide(limiter: Limiter, scope: Scope, receive: Receive) -> Answer:
    """Answer a question: 200 or 429 (403: the client is blocked), and a decision for each descriptor.

    Raises Problem, CountersUnavailable.

    There are no fields such as RateLimit: those would speak of a limit on asking.
    """
    domain, descriptors, hits = read_question(await read_body(receive))
    verdict = await limiter.decide(domain, descriptors, hits)
    if verdict.allowed:
        return new(Answer, (200, [JSON], write_verdict(verdict).encode()))
    return Answer(
        403 if verdict.blocked else 429, [JSON, *make_headers(verdict, _WAIT)], write_verdict(verdict).encode()
    )


def write_verdict(verdict: Verdict) -> str:
    """A verdict as JSON, in ASCII. Times are in seconds, null for never.

    Written by hand: `json` would take as long as the decision.
    """
    told = ",".join([_write_status(status) for status in verdict.statuses])
    leases = ",".join([f'"{write_lease(ask)}"' for ask in verdict.leases if ask.hits])
    if verdict.allowed:
        return f'{{"allowed":true,"delay":{_write_time(verdict.delay)},"descriptors":[{told}],"leases":[{leases}]}}'
    wait, detail = _write_time(verdict.retry_after), quote(describe_refusal(verdict))
    return f'{{"allowed":false,"retry_after":{wait},"detail":{detail},"descriptors":[{told}],"leases":[]}}'


def _write_status(status: Status) -> str:
    allowed, rule, limit, decision, _ = status
    said = '"allowed":true' if allowed else '"allowed":false'
    if rule is None:
        return f'{{{said},"rule":null,"limit":null}}'
    if limit is None or decision is None:
        return f'{{{said},"rule":{quote(rule.name)},"limit":null}}'
    held = f'{{"amount":{limit.amount},"seconds":{limit.seconds},"algorithm":"{limit.algorithm}"}}'
    _, remaining, retry_after, reset_after, delay, _ = decision
    return (
        f'{{{said},"rule":{quote(rule.name)},"limit":{held},"remaining":{remaining},'
        f'"retry_after":{_write_time(retry_after)},"reset_after":{_write_time(reset_after)},"delay":{_write_time(delay)}}}'
    )


def _write_time(seconds: float) -> str:
    if not seconds:
        return "0"
    return "null" if seconds == inf else f"{seconds:.6f}"
