"""Envoy's question and answer, in the words of the limiter."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from math import ceil, isinf
from typing import Any

from google.protobuf.json_format import MessageToJson, Parse, ParseError

from netlimit.errors import LimitError
from netlimit.l7.headers import Family, make_headers
from netlimit.l7.identity import PLAIN, find_told
from netlimit.l7.limit import UNITS, Algorithm, Limit
from netlimit.l7.limiter import Limiter, Status, Verdict
from netlimit.l7.methods import find_heads, take_for_get
from netlimit.l7.problems import write_problem
from netlimit.l7.rules import CLIENT_KEY, PATH_KEY, Descriptor, Entry
from netlimit.l7.service.answers import JSON, PROBLEM, Answer, Problem
from netlimit.l7.service.bytewise import MOST_FIELDS, TooMany, parse_question
from netlimit.l7.service.protocol.header_pb2 import HeaderValue
from netlimit.l7.service.protocol.service_pb2 import RateLimitRequest, RateLimitResponse
from netlimit.l7.service.protocol.unit_pb2 import RateLimitUnit
from netlimit.l7.targets import Ambiguous, read_paths

BOUNDLESS = 2**32 - 1
"""`limit_remaining` of what is unlimited."""
_LONGEST = 10**9
"""Seconds until a reset that are told at most."""
_QUOTED = 300
_MODEL = ("backend_name", "model_name_override")
"""Entries by which quotas belong together."""

_Response = RateLimitResponse
_Unit = _Response.RateLimit.Unit
_UNITS = sorted(((seconds, _Unit.Value(name.upper())) for name, seconds in UNITS.items()), reverse=True)
_CLIENT, _PATH = CLIENT_KEY.encode(), PATH_KEY.encode()
_Others = Sequence[tuple[int, Descriptor]]
"""Descriptors of what path and method may mean besides, each with the place of the one that tells them."""


class Unanswerable(ValueError):
    """A question that has no answer; the sentence says what is missing."""


def read_question(data: bytes) -> tuple[str, list[Descriptor], _Others, int, tuple[str, ...]]:
    """The domain, descriptors, those of other meanings, and hits of a RateLimitRequest, and all addresses that are told
    as the client's own. Raises Unanswerable, Ambiguous."""
    try:
        question = parse_question(data)
    except TooMany:
        raise Unanswerable(f"The question has more than {MOST_FIELDS} fields.") from None
    if question is None:
        raise Unanswerable("This is no RateLimitRequest.")
    if not question.domain:
        raise Unanswerable("The domain is empty; name the domain whose rules the request is under.")
    if not question.descriptors:
        raise Unanswerable("There are no descriptors; name at least one.")
    descriptors = [_read_descriptor(each) for each in question.descriptors]
    return (
        _decode(question.domain),
        descriptors,
        _list_others(question, descriptors),
        question.hits_addend or 1,
        find_told(_decode(e.value) for each in question.descriptors for e in each.entries if e.key == _CLIENT),
    )


def _decode(text: bytes) -> str:
    """A text, as Latin-1 if it is no UTF-8, as bytes in header fields are taken over HTTP."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return text.decode("latin-1")


def _read_descriptor(descriptor: Any) -> Descriptor:
    """A descriptor whose texts are bytes."""
    entries = tuple([_read_entry(_decode(entry.key), entry.value) for entry in descriptor.entries])
    if not descriptor.HasField("limit") and not descriptor.HasField("hits_addend") and not descriptor.is_negative_hits:
        return Descriptor(entries)
    if descriptor.is_negative_hits:
        raise Unanswerable("Hits are not given back here: is_negative_hits is not known.")
    hits = descriptor.hits_addend.value if descriptor.HasField("hits_addend") else None
    return Descriptor(entries, hits, _read_limit(descriptor) if descriptor.HasField("limit") else None)


def _read_entry(key: str, value: bytes) -> Entry:
    return Entry(key, PLAIN.get(key, _read_value)(value))


def _read_value(value: bytes) -> str:
    """A value without the blanks around it that servers strip from a field (`header`). A mere blank Envoy has stripped
    itself: it is there since somebody has written it so."""
    told = _decode(value)
    return told if told.isascii() and told.isprintable() else told.strip()


def _list_others(question: Any, descriptors: Sequence[Descriptor]) -> _Others:
    """What paths mean besides, and each of all that with GET where it tells HEAD."""
    others = [*_list_paths(question, descriptors)]
    if find_heads(descriptors):
        told = [*enumerate(descriptors), *others]
        others += [(told[at][0], take_for_get(told[at][1])) for at in find_heads([each for _, each in told])]
    return others


def _list_paths(question: Any, descriptors: Sequence[Descriptor]) -> Iterator[tuple[int, Descriptor]]:
    for place, asked in enumerate(question.descriptors):
        told = {at: read_paths(entry.value) for at, entry in enumerate(asked.entries) if entry.key == _PATH}
        for reading in range(1, max(map(len, told.values()), default=0)):
            entries = [*descriptors[place].entries]
            for at, paths in told.items():
                entries[at] = Entry(PATH_KEY, paths[min(reading, len(paths) - 1)])
            yield place, descriptors[place]._replace(entries=tuple(entries), besides=reading)


def _read_limit(descriptor: Any) -> Limit:
    """The limit that a descriptor brings with it."""
    wanted = descriptor.limit
    if wanted.unit == RateLimitUnit.UNKNOWN or wanted.unit not in RateLimitUnit.values():
        raise Unanswerable("The limit of a descriptor has no unit; name SECOND, MINUTE, HOUR, DAY, MONTH or YEAR.")
    seconds = UNITS[RateLimitUnit.Name(wanted.unit).lower()] * (wanted.unit_multiplier.value or 1)
    try:
        return Limit(wanted.requests_per_unit, seconds)
    except LimitError as error:
        raise Unanswerable(str(error)) from None


def _make_response(verdict: Verdict, others: _Others, families: Collection[Family]) -> RateLimitResponse:
    """The answer: a status for each descriptor, in order; for the client header fields, and why it is refused."""
    fields = make_headers(verdict, families)
    statuses = [_make_status(status) for status in _choose_statuses(verdict.statuses, others)]
    response = _Response(overall_code=_Response.OK, statuses=statuses)
    if not verdict.allowed:
        response.overall_code = _Response.OVER_LIMIT
        response.raw_body = write_problem(verdict)
        fields.append(PROBLEM)
    response.response_headers_to_add.extend(
        [HeaderValue(key=name.decode(), value=value.decode()) for name, value in fields]
    )
    return response


def _refuse(question: bytes, error: Ambiguous) -> RateLimitResponse:
    """The answer where it is not known which limits a request is under: an error would have Envoy let it through."""
    number = len(parse_question(question).descriptors)
    response = _Response(overall_code=_Response.OVER_LIMIT, raw_body=Problem(429, str(error)).answer().body)
    response.statuses.extend([_Response.DescriptorStatus(code=_Response.OVER_LIMIT)] * number)
    response.response_headers_to_add.append(HeaderValue(key=PROBLEM[0].decode(), value=PROBLEM[1].decode()))
    return response


def _choose_statuses(statuses: Sequence[Status], others: _Others) -> Sequence[Status]:
    """The status of each descriptor: that of what it means besides where only that is limited, or refuses."""
    chosen = [*statuses[: len(statuses) - len(others)]]
    for (place, _), status in zip(others, statuses[len(chosen) :], strict=True):
        own = chosen[place]
        if (own.decision is None and status.rule is not None) or (own.allowed and not status.allowed):
            chosen[place] = status
    return chosen


def _may_pass(descriptors: Sequence[Descriptor], statuses: Sequence[Status]) -> bool:
    """Whether the request is over none of its limits; but of quotas, not over all.

    Quotas that belong together, since they are of the same model at the same backend or of one descriptor (HEAD has
    those of GET as well), count as one, which is used up when any of them is. One that another rule takes the place of,
    or that only observes, has no say.
    """
    left: dict[object, bool] = {}
    for status, descriptor in zip(statuses, descriptors, strict=True):
        rule = status.rule
        if rule is not None and rule.quota and status.decision is not None and not rule.observes:
            group = _find_group(descriptor)
            left[group] = left.get(group, True) and status.allowed
        elif not status.allowed:
            return False
    return not left or any(left.values())


def _find_group(descriptor: Descriptor) -> object:
    model = tuple([entry for entry in descriptor.entries if entry.key in _MODEL])
    return model or descriptor.entries


def _make_status(status: Status) -> _Response.DescriptorStatus:
    rule, limit, decision = status.rule, status.limit, status.decision
    if limit is None or decision is None or rule is None:
        unlimited = rule is not None and rule.unlimited
        return _Response.DescriptorStatus(code=_Response.OK, limit_remaining=BOUNDLESS if unlimited else 0)
    made = _Response.DescriptorStatus(
        code=_Response.OK if status.allowed else _Response.OVER_LIMIT,
        current_limit=_make_limit(limit, rule.alias),
        limit_remaining=min(decision.remaining, BOUNDLESS) if decision.admitted else 0,
    )
    made.duration_until_reset.seconds = _LONGEST if isinf(decision.reset_after) else ceil(decision.reset_after)
    return made


def _make_limit(limit: Limit, name: str | None) -> _Response.RateLimit:
    """A limit as Envoy knows it: so many requests in a unit, or in several of them."""
    if limit.algorithm is Algorithm.CONCURRENCY:
        return _Response.RateLimit(name=name or "", requests_per_unit=limit.amount)
    seconds, unit = next(each for each in _UNITS if limit.seconds % each[0] == 0)
    made = _Response.RateLimit(name=name or "", requests_per_unit=limit.amount, unit=unit)
    if limit.seconds != seconds:
        made.unit_multiplier.value = limit.seconds // seconds
    return made


async def should_rate_limit(
    limiter: Limiter, families: Collection[Family], question: bytes, escalates: bool = False
) -> RateLimitResponse:
    """Decide as Envoy asks, in a RateLimitRequest. Refused hits are counted too. Raises Unanswerable,
    CountersUnavailable."""
    try:
        domain, descriptors, others, hits, client = read_question(question)
    except Ambiguous as error:
        return _refuse(question, error)
    judge = partial(_may_pass, [*descriptors, *(descriptors[place] for place, _ in others)])
    asked = [*descriptors, *(descriptor for _, descriptor in others)] if others else descriptors
    verdict = await limiter.decide(domain, asked, hits, charge=True, client=client, escalates=escalates, judge=judge)
    return _make_response(verdict, others, families)


async def answer_json(limiter: Limiter, families: Collection[Family], body: bytes, escalates: bool = False) -> Answer:
    """The same in proto3 JSON, as Envoy's ratelimit has it: 200, 429, and 400. Raises Problem, CountersUnavailable."""
    try:
        question = Parse(body, RateLimitRequest()).SerializeToString()
        response = await should_rate_limit(limiter, families, question, escalates)
    except Unanswerable as error:
        raise Problem(400, str(error)) from None
    except RecursionError:
        raise Problem(400, "The body is no RateLimitRequest in proto3 JSON: it is nested too deeply.") from None
    except (ParseError, ValueError) as error:
        raise Problem(400, f"The body is no RateLimitRequest in proto3 JSON: {str(error)[:_QUOTED]}") from None
    status = 429 if response.overall_code == _Response.OVER_LIMIT else 200
    return Answer(status, [JSON], MessageToJson(response, indent=None).encode())
