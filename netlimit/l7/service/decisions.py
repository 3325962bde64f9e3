"""`/v1/decide`: a question, and what is decided about it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, MutableMapping
from json.encoder import encode_basestring_ascii as quote
from math import inf
from typing import Any

from netlimit.l7.decision import new
from netlimit.l7.headers import Family, make_headers
from netlimit.l7.limiter import Limiter, Status, Verdict
from netlimit.l7.listening import Receive
from netlimit.l7.problems import write_problem
from netlimit.l7.service.answers import JSON, PROBLEM, Answer
from netlimit.l7.service.leases import write_lease
from netlimit.l7.service.questions import read_body, read_question


async def decide(
    limiter: Limiter,
    families: Collection[Family],
    turn: Callable[[MutableMapping[str, Any]], Awaitable[bool]],
    scope: MutableMapping[str, Any],
    receive: Receive,
) -> Answer:
    """Answer a question: 200 or 429 (403: the client is blocked), and a decision for each descriptor.

    A refusal is a problem document, with the header fields that a refused client is to see: whoever asks can hand both
    on. `turn` waits until it may begin, and tells whether what is said of clients is believed. Raises Problem,
    CountersUnavailable.
    """
    body = await read_body(receive)
    escalates = await turn(scope)
    domain, descriptors, hits, client = read_question(body)
    verdict = await limiter.decide(domain, descriptors, hits, client=client, escalates=escalates)
    if verdict.allowed:
        return new(Answer, (200, [JSON], write_verdict(verdict).encode()))
    status = 403 if verdict.blocked else 429
    return Answer(status, [PROBLEM, *make_headers(verdict, families)], write_verdict(verdict).encode())


def write_verdict(verdict: Verdict) -> str:
    """A verdict as JSON, in ASCII. Times are in seconds, null for never.

    Written by hand: `json` would take as long as the decision.
    """
    told = ",".join([_write_status(status) for status in verdict.statuses])
    leases = ",".join([f'"{write_lease(ask)}"' for ask in verdict.leases if ask.hits])
    if verdict.allowed:
        return f'{{"allowed":true,"delay":{_write_time(verdict.delay)},"descriptors":[{told}],"leases":[{leases}]}}'
    problem = write_problem(verdict)[:-1].decode()  # its members, and more
    wait = _write_time(verdict.retry_after)
    return f'{problem}, "allowed":false,"retry_after":{wait},"descriptors":[{told}],"leases":[]}}'


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
