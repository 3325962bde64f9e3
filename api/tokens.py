"""Access tokens: made, listed, revoked. For admins alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Path, Request
from fastapi.responses import JSONResponse, Response

from netlimit.errors import RuleError
from netlimit.roles import Role, parse_role
from netlimit.rules import parse_ttl
from netlimit.store import Store, Token
from netlimit.tokens import NAME, check_name

from . import bodies, schemas
from .auth import CallerOf, for_admins
from .context import StoreOf, no_query
from .openapi import body_of
from .problems import Problem, responses
from .representation import LONGEST_TEXT, write_time
from .turns import InTurn, run_in_turn

T = TypeVar("T")
router = APIRouter(prefix="/tokens", tags=["access"], dependencies=[Depends(for_admins)], route_class=InTurn)
_EXAMPLES = {
    "for a program that adds rules": {"name": "ci", "role": "operator"},
    "for a guest, for a month": {"name": "auditor", "role": "viewer", "ttl": "30d"},
}

Key = Annotated[str, Path(alias="key", description="The token's id, or its name.", examples=["7", "ci"])]


async def _read_object(request: Request) -> dict[str, object]:
    return bodies.parse_object(await bodies.read_body(request, bodies.SMALL, bodies.JSON))


@router.post(
    "",
    status_code=201,
    summary="Make a token",
    dependencies=[Depends(no_query)],
    responses={
        201: {"description": "The token; its text is shown only here.", "model": schemas.MadeToken},
        **responses(400, 401, 403, 409, 413, 415, 422, 503),
    },
    openapi_extra=body_of({"application/json": (schemas.NewToken, _EXAMPLES)}),
)
async def create_token(
    sent: Annotated[dict[str, Any], Depends(_read_object)], caller: CallerOf, store: StoreOf
) -> Response:
    """Make a token. Only its hash is kept: whoever loses the text makes another."""
    now = datetime.now(UTC)
    name, role, expires_at = _read_token(sent, now)
    token, text = await run_in_turn(store.issue_token, name, role, now, expires_at, caller.actor)
    return JSONResponse({**_write(token), "token": text}, 201, {"Cache-Control": "no-store"})


@router.get(
    "",
    summary="List tokens",
    dependencies=[Depends(no_query)],
    response_model=None,
    responses={200: {"model": schemas.TokenList}, **responses(401, 403, 422, 503)},
)
def list_tokens(store: StoreOf) -> dict[str, Any]:
    """All tokens there ever were, without their texts."""
    return {"items": [_write(token) for token in store.tokens()]}


@router.delete(
    "/{key}",
    status_code=204,
    summary="Revoke a token",
    dependencies=[Depends(no_query)],
    responses={204: {"description": "The token is good for nothing any more."}, **responses(401, 403, 404, 422, 503)},
)
def revoke_token(key: Key, caller: CallerOf, store: StoreOf) -> Response:
    """Revoke a token, within a second on every gateway. It stays in the list, and its name is not free again."""
    token = _find(store, key)
    if token is None or not store.revoke_token(token.id, datetime.now(UTC), caller.actor):
        raise Problem(404, f"There is no token {key!r} that is not revoked already.")
    return Response(status_code=204)


def _find(store: Store, key: str) -> Token | None:
    """By id, or by a name, which may consist of digits."""
    if not NAME.fullmatch(key):
        return None
    return store.token(key) or (store.token(int(key)) if key.isdecimal() else None)


def _read_token(sent: Mapping[str, Any], now: datetime) -> tuple[str, Role, datetime | None]:
    """Name, role and end of a token that is to be made. Raises RuleError."""
    for field in sent:
        if field not in ("name", "role", "ttl"):
            raise RuleError(field, f"A token has no field {field!r}; it has `name`, `role` and `ttl`.")
    name, role = _read("name", check_name, sent), _read("role", parse_role, sent)
    ttl = sent.get("ttl")
    return name, role, None if ttl is None else now + timedelta(seconds=parse_ttl(ttl))


def _read(field: str, parse: Callable[[str], T], sent: Mapping[str, Any]) -> T:
    value = sent.get(field)
    if not isinstance(value, str):
        raise RuleError(field, f"`{field}` is {str(value)[:40]!r}; it must be a text.")
    try:
        return parse(value[:LONGEST_TEXT])
    except ValueError as error:
        raise RuleError(field, str(error)) from None


def _write(token: Token) -> dict[str, Any]:
    return {
        "id": token.id,
        "name": token.name,
        "role": token.role,
        "created_at": write_time(token.created_at),
        "expires_at": write_time(token.expires_at),
        "revoked_at": write_time(token.revoked_at),
    }
