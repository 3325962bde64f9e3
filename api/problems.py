"""Errors as RFC 9457 problem documents: which field is wrong, and what would be accepted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import compile_path

from netlimit.errors import DocumentError, NetlimitError, RuleError, StoreError, UnreadableDocument
from netlimit.judgement import NeedsForce
from netlimit.store import (
    Conflict,
    DocumentChanged,
    GatewayAlive,
    ManyErrors,
    NoDocument,
    NoGateway,
    NoSuchRevision,
    NotKept,
    NoWindow,
    Stale,
    TokenEnded,
    TokenExists,
    TooMuchAtOnce,
    WindowOpen,
)

from .origin import HEADER, origin_of

MEDIA_TYPE = "application/problem+json"
TITLES = {
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    409: "Conflict",
    412: "Precondition Failed",
    413: "Content Too Large",
    415: "Unsupported Media Type",
    422: "Unprocessable Content",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
MEANINGS = {
    400: "The body is not JSON (nor YAML, where that is read), or is JSON in a way that readers disagree about (a key "
    "twice, NaN).",
    401: "No bearer token, or one that is not known, or has ended, be it while the request came: nothing was changed.",
    403: "The token's role may not do this, or not so much of it at once.",
    404: "There is no such thing.",
    405: "The method does not exist here; `Allow` names those that do.",
    408: "The body came too slowly.",
    409: "Something is in the way: a rule in force that limits the very same traffic (it is named), a name that is "
    "taken, a window of confirmation that is open, or none that is, a gateway that is alive.",
    412: "It has changed since: `If-Match` does not name its present revision. Or it is there, and was to be new: "
    "`If-None-Match: *`.",
    413: "The body is too large.",
    415: "The body is of a media type that is not read here.",
    422: "A value is wrong; `field` names it, `detail` says what would be accepted.",
    429: "Too many requests, too many at once or in line, or too many bad tokens; `Retry-After` says how long to wait.",
    431: "The head of the request is too large.",
    503: "Something that is needed does not answer; `detail` says what.",
}
EXAMPLES = {
    408: "The body comes too slowly: after 10 seconds, 65536 bytes a second are the least.",
    429: "Too many bad tokens came from 192.0.2.7; try again in 6 seconds.",
}
KEPT = (
    "The kernels of the gateways keep what they hold, but for rules with `on_failure: open`, which a gateway takes out "
    "of force when its controller could read nothing of the database for too long."
)
"""What becomes of the rules when the database cannot do its part."""
MORE = "The log of the API says which one, and why; so does `netlimit doctor`, on its host."
"""Where the rest stands of what nobody is told who may only ask: also who has no token can ask whether it answers."""
RETRY_SECONDS = 5
_LONGEST_DETAIL = 1000


@dataclass(eq=False)
class Problem(Exception):
    """An answer that is an error: its status, and a sentence.

    `field` names what is wrong; `errors` are several such things, each with `detail` and maybe `field` and `line`;
    `rule` is the other rule that a conflict is with.
    """

    status: int
    detail: str
    field: str | None = None
    errors: Sequence[Mapping[str, object]] = ()
    rule: Mapping[str, object] | None = None
    headers: Mapping[str, str] | None = None

    def document(self) -> dict[str, object]:
        """The problem document; members that say nothing are left out."""
        said = {"field": self.field, "errors": list(self.errors), "rule": self.rule}
        return {
            "type": "about:blank",
            "title": TITLES.get(self.status, "Error"),
            "status": self.status,
            "detail": shorten(self.detail),
            **{member: value for member, value in said.items() if value},
        }

    def response(self) -> Response:
        """The whole answer. Written in ASCII, so that whatever was sent can be quoted."""
        content = json.dumps(self.document(), ensure_ascii=True)
        return Response(content, self.status, self.headers, MEDIA_TYPE)


def unauthorized(sentence: str, was_shown: bool = True) -> Problem:
    """What is told to who needs another token; or any, if none was shown."""
    reason = ', error="invalid_token"' if was_shown else ""
    return Problem(401, sentence, headers={"WWW-Authenticate": f'Bearer realm="netlimit"{reason}'})


def say_ending() -> Problem:
    """What is told to whose request cannot be done any more, for the API has been told to end."""
    sentence = "The API ends just now; ask again, and look first whether what was to be changed is."
    return Problem(503, sentence, headers={"Retry-After": str(RETRY_SECONDS)})


def shorten(sentence: str) -> str:
    """Cut a sentence that quotes something endless."""
    return sentence if len(sentence) <= _LONGEST_DETAIL else sentence[:_LONGEST_DETAIL] + " …"


def find_problem(error: NetlimitError) -> Problem:
    """Say what an error of the house means in HTTP."""
    sentence = str(error)
    match error:
        case RuleError():
            return Problem(422, sentence, field=error.field)
        case DocumentError():
            return list_places(error)
        case Conflict():
            other = {"id": error.rule_id, "name": error.name} if error.rule_id is not None else None
            return Problem(409, sentence, rule=other)
        case NeedsForce():
            return Problem(409, sentence, field="target")
        case TokenEnded():
            return unauthorized(sentence)
        case TooMuchAtOnce():
            return Problem(403, sentence)
        case TokenExists():
            return Problem(409, sentence, field="name")
        case Stale() | DocumentChanged():
            return Problem(412, sentence)
        case NotKept() | NoSuchRevision() | NoDocument() | NoGateway():
            return Problem(404, sentence)
        case WindowOpen() | NoWindow() | GatewayAlive():
            return Problem(409, sentence)
        case StoreError():
            return Problem(503, f"{error.public} {MORE} {KEPT}", headers={"Retry-After": str(RETRY_SECONDS)})
    return Problem(500, sentence)


def list_problems(wrong: Sequence[tuple[int, Problem]], words: str = "") -> Problem:
    """One problem for many wrong lines, each with its number; `words` stand behind how many there are. Its status is
    that of all of them, or else 422."""
    (line, first), statuses = wrong[0], {problem.status for _, problem in wrong}
    number = len({line for line, _ in wrong})  # of one line several things may be wrong
    one = f"Line {line} is wrong, and nothing was kept: "
    many = f"{number} lines{words} are wrong, and nothing was kept. The first is line {line}: "
    return Problem(
        statuses.pop() if len(statuses) == 1 else 422,
        (one if number == 1 else many) + first.detail,
        field=first.field,
        errors=[describe_line(number, problem) for number, problem in wrong],
        rule=first.rule if len(wrong) == 1 else None,
    )


def list_places(error: DocumentError) -> Problem:
    """One problem for all the wrong places of a document."""
    first, *more = error.places
    detail = str(first) if not more else f"{first} (and {len(more)} more)"
    said = [{"detail": shorten(each.sentence), "field": each.field, "line": each.line} for each in error.places]
    errors = [{member: value for member, value in each.items() if value} for each in said]
    return Problem(400 if isinstance(error, UnreadableDocument) else 422, detail, field=first.field, errors=errors)


def describe_line(line: int, problem: Problem) -> dict[str, object]:
    """What is wrong with one line of many."""
    said = {"line": line, "field": problem.field, "detail": shorten(problem.detail), "rule": problem.rule}
    return {member: value for member, value in said.items() if value is not None}


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error answers of an operation, for its OpenAPI description; every one can be too much, a body too slow."""
    every = {*statuses, 429, 431, 503} | ({408} if 413 in statuses else set())
    return {status: _describe_response(status) for status in sorted(every)}


def _describe_response(status: int) -> dict[str, Any]:
    content: dict[str, Any] = {"schema": {"$ref": "#/components/schemas/Problem"}}
    if status in EXAMPLES:
        content["example"] = Problem(status, EXAMPLES[status]).document()
    described: dict[str, Any] = {"description": MEANINGS[status], "content": {MEDIA_TYPE: content}}
    if status in (429, 503):
        seconds = {"description": "Seconds after which to try again.", "schema": {"type": "integer", "minimum": 1}}
        described["headers"] = {"Retry-After": seconds}
    return described


def answer_problems(app: FastAPI) -> None:
    """Make every error of `app` a problem document, its own and the framework's."""
    app.add_exception_handler(Problem, _answer_problem)
    app.add_exception_handler(NetlimitError, _answer_problem)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(ClientDisconnect, _answer_gone)
    app.add_exception_handler(Exception, _answer_bug)


async def _answer_problem(request: Request, error: Exception) -> Response:
    if isinstance(error, ManyErrors):
        return list_problems([(index + 1, find_problem(each)) for index, each in error.errors]).response()
    if isinstance(error, StoreError):
        request.state.fault = str(error)
    if isinstance(error, NetlimitError):
        return find_problem(error).response()
    assert isinstance(error, Problem)
    return error.response()


async def _answer_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = [_describe_parameter(each) for each in error.errors()]
    detail = " ".join(str(each["detail"]) for each in errors)
    return Problem(422, detail, field=str(errors[0]["field"]), errors=errors if len(errors) > 1 else ()).response()


def _describe_parameter(error: Mapping[str, Any]) -> dict[str, object]:
    field = str(error["loc"][1]) if len(error["loc"]) > 1 else str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        return {"field": field, "detail": f"There is no parameter {field!r} here."}
    if error["type"] == "missing":
        return {"field": field, "detail": f"The parameter {field!r} is missing."}
    message = str(error["msg"]).removeprefix("Value error, ").rstrip(".")
    return {"field": field, "detail": f"The parameter {field!r} is wrong: {message}."}


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    if error.status_code == 404:
        return Problem(404, f"There is nothing at {path!r}; /docs lists what there is.").response()
    if error.status_code == 405:
        allowed = ", ".join(_find_methods(request.app, path)) or (error.headers or {}).get("Allow", "")
        detail = f"{request.method} does not exist at {path!r}; there is {allowed}."
        return Problem(405, detail, headers={"Allow": allowed}).response()
    return Problem(error.status_code, str(error.detail), headers=error.headers).response()


def _find_methods(app: FastAPI, path: str) -> list[str]:
    """What exists at a path. The framework knows one route at a time, each with its own methods."""
    for template, operations in app.openapi()["paths"].items():
        if compile_path(template)[0].fullmatch(path):
            return [method.upper() for method in operations]
    return []


async def _answer_gone(request: Request, error: Exception) -> Response:
    return Problem(400, "The request ended before its body did.").response()


async def _answer_bug(request: Request, error: Exception) -> Response:
    headers = {HEADER: origin_of(request).request}
    return Problem(500, "This is a fault of netlimit's own; its log says more.", headers=headers).response()
