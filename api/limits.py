"""The limiter's rules: a document for each domain, YAML or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from netlimit.errors import DocumentError, Place
from netlimit.l7 import markup
from netlimit.l7.document import Document, parse_document, write_yaml
from netlimit.store import LimitDocument, LimitHead, NoDocument, Store

from . import bodies, schemas
from .auth import CallerOf
from .context import StoreOf, no_query
from .headers import IfMatch, IfNoneMatch, etag, read_preconditions, write_warnings
from .openapi import body_of
from .problems import Problem, responses
from .representation import write_time
from .turns import InTurn, run_in_turn

router = APIRouter(prefix="/limits", tags=["limits"], route_class=InTurn)
JSON = "application/json"
YAML = ("application/yaml", "text/yaml", "application/x-yaml", "text/x-yaml")
"""Names of one media type; the first is that of RFC 9512."""
_LIMITS = "these limits"
_CONVERTED = 4
"""So many documents are remembered in the other type; each may have megabytes."""

Domain = Annotated[str, Path(alias="domain", description="The domain.", examples=["auth"], max_length=1000)]
_TAGGED = {"ETag": {"description": "The revision of the document, for `If-Match`.", "schema": {"type": "string"}}}
_KEPT: dict[str, Any] = {"model": schemas.LimitKept, "headers": _TAGGED}


class PutQuery(schemas.Strict):
    """The parameters of keeping a document."""

    dry_run: schemas.Flag = Field(False, description="Only check the document, and say how it reads; keep nothing.")


@router.get(
    "",
    summary="List domains with limits",
    dependencies=[Depends(no_query)],
    response_model=None,
    responses={200: {"model": schemas.LimitList}, **responses(401, 403, 422, 503)},
)
def list_limits(store: StoreOf) -> dict[str, Any]:
    """The domains that have limits in the database, by name. The limiter may have more, from files."""
    return {"items": [_describe(head) for head in store.list_limits()], "revision": store.limits_revision()}


@router.get(
    "/{domain:path}",
    summary="Show limits",
    dependencies=[Depends(no_query)],
    response_class=Response,
    responses={
        200: {
            "description": "The document, as YAML or JSON as `Accept` has it; if it wants neither, as it was given.",
            "headers": _TAGGED,
            "content": {
                JSON: {"schema": {"$ref": "#/components/schemas/LimitDocument"}},
                YAML[0]: {"schema": {"$ref": "#/components/schemas/LimitDocument"}},
            },
        },
        **responses(401, 403, 404, 422, 503),
    },
)
def get_limits(domain: Domain, request: Request, store: StoreOf) -> Response:
    """The limits of a domain, with their comments if they were YAML and are wanted so."""
    kept = find_kept(store, domain)
    wanted = find_wanted(request.headers.getlist("accept")) or kept.content_type
    headers = {"ETag": etag(kept), "Vary": "Accept"}
    if wanted == kept.content_type:
        return Response(kept.document, media_type=wanted, headers=headers)
    return Response(_convert(kept.document, kept.content_type, wanted), media_type=wanted, headers=headers)


@router.put(
    "/{domain:path}",
    status_code=200,
    summary="Keep limits",
    responses={
        200: {"description": "They took the place of others; for a dry run: how they would be kept.", **_KEPT},
        201: {"description": "They are kept; the domain had none.", **_KEPT},
        **responses(400, 401, 403, 409, 412, 413, 415, 422, 503),
    },
    openapi_extra=body_of(dict.fromkeys((YAML[0], JSON), (schemas.LimitDocument, schemas.LIMITS))),
)
async def put_limits(
    domain: Domain,
    query: Annotated[PutQuery, Query()],
    request: Request,
    caller: CallerOf,
    store: StoreOf,
    if_match: IfMatch = None,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Keep the limits of a domain in the place of those that it had. The limiter hears of it within a second. Every
    wrong place is named, with its line in YAML; what is kept is the text as it came, with its comments."""
    body = await bodies.read_body(request, markup.LARGEST, (*YAML, JSON))
    content_type = JSON if bodies.find_media_type(request) == JSON else YAML[0]
    text, document = await run_in_turn(_read, body, content_type, domain)
    before = await run_in_turn(store.find_limits, domain)
    expected = read_preconditions(if_match, if_none_match, before)
    if query.dry_run:
        nothing = dict.fromkeys(("revision", "created_at", "updated_at"))
        said = {"domain": domain, "content_type": content_type, **nothing, "actor": caller.actor.name}
        return JSONResponse({**said, **_explain(document, [])})
    now = datetime.now(UTC)
    kept, is_new = await run_in_turn(store.put_limits, domain, text, content_type, caller.actor, now, expected)
    headers = {"ETag": etag(kept)} | ({"Location": f"/api/v1/limits/{quote(domain)}"} if is_new else {})
    told = await run_in_turn(store.warn_of_rest, _LIMITS)
    return JSONResponse({**_describe(kept), **_explain(document, told)}, 201 if is_new else 200, headers)


@router.delete(
    "/{domain:path}",
    status_code=204,
    summary="Remove limits",
    dependencies=[Depends(no_query)],
    responses={204: {"description": "The domain has no limits."}, **responses(401, 403, 404, 412, 422, 503)},
)
def remove_limits(
    domain: Domain, caller: CallerOf, store: StoreOf, if_match: IfMatch = None, if_none_match: IfNoneMatch = None
) -> Response:
    """Remove the limits of a domain: the limiter admits what is asked of it, unless files say otherwise. An
    open window of confirmation, which does not undo it, is told by the header `Warning`."""
    kept = find_kept(store, domain)
    expected = read_preconditions(if_match, if_none_match, kept)
    store.remove_limits(domain, caller.actor, datetime.now(UTC), expected)
    return Response(status_code=204, headers=write_warnings(store.warn_of_rest(_LIMITS)))


@lru_cache(maxsize=_CONVERTED)
def _convert(text: str, content_type: str, wanted: str) -> str:
    """The text of a document in the other media type. A large one takes seconds, and is often asked for again."""
    document = parse_document(text, content_type == JSON)
    return json.dumps(document.fields, ensure_ascii=False) if wanted == JSON else write_yaml(document)


def find_kept(store: Store, domain: str) -> LimitDocument:
    """The document of a domain. Raises NoDocument."""
    kept = store.find_limits(domain) if "\0" not in domain else None  # PostgreSQL has no such text
    if kept is None:
        raise NoDocument(domain)
    return kept


def find_wanted(accept: Iterable[str]) -> str | None:
    """Which of YAML and JSON a client would rather have; None if it says nothing of them."""
    wanted = [_read_preference(each, place) for place, each in enumerate(",".join(accept).split(","))]
    for weight, _, media_type in sorted(wanted):
        if weight < 0 and media_type in (*YAML, JSON):
            return JSON if media_type == JSON else YAML[0]
    return None


def _read_preference(text: str, place: int) -> tuple[float, int, str]:
    """The heaviest come first, then the first."""
    media_type, *parameters = [part.strip().lower() for part in text.split(";")]
    weights = [part.removeprefix("q=") for part in parameters if part.startswith("q=")]
    try:
        return -float(weights[0]) if weights else -1.0, place, media_type
    except ValueError:
        return -1.0, place, media_type


def _read(body: bytes, content_type: str, domain: str) -> tuple[str, Document]:
    try:
        text = markup.decode(body)
    except markup.NoMarkup as error:
        raise Problem(400, str(error)) from None
    document = parse_document(text, content_type == JSON)
    if document.domain != domain:
        sentence = f"The document is of the domain {document.domain!r}, but was put to {domain!r}."
        raise DocumentError([Place("domain", sentence)])
    return text, document


def _describe(kept: LimitDocument | LimitHead) -> dict[str, Any]:
    return {
        "domain": kept.domain,
        "content_type": kept.content_type,
        "revision": kept.revision,
        "created_at": write_time(kept.created_at),
        "updated_at": write_time(kept.updated_at),
        "actor": kept.actor,
    }


def _explain(document: Document, told: Iterable[str]) -> dict[str, Any]:
    """How a document reads, and what else is told of it."""
    places = [*document.warnings, *(Place("", sentence) for sentence in told)]
    warnings = [{"detail": each.sentence, "field": each.field, "line": each.line} for each in places]
    return {"rules": [rule.name for rule in document.root.walk()], "warnings": warnings}
