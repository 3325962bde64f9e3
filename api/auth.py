"""Who asks, and whether they may: every operation under /api/v1 passes here first."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from netlimit.errors import StoreError
from netlimit.records import Actor
from netlimit.roles import MAY, WORDS, Act, Role
from netlimit.store import Token

from .admission import LOOKING
from .doorkeeper import Doorkeeper
from .origin import origin_of
from .problems import Problem, unauthorized
from .turns import TURN, Rank
from .visitors import Visitors

_bearer = HTTPBearer(
    auto_error=False, description="An access token: the one that the first start made, or of `netlimit token create`."
)
_OF_PROXIES = "forwarded", "via", "x-forwarded-for", "x-real-ip"
_NOT_GOOD = "The token is not known, or was revoked, or has expired."


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the role of the token, and how the audit is to name them."""

    role: str
    actor: Actor

    def may(self, act: Act) -> bool:
        """Whether they may do it."""
        return self.role in MAY and act in MAY[Role(self.role)]

    def require(self, act: Act) -> None:
        """Raise Problem 403 unless they may do it."""
        if not self.may(act):
            roles = " or ".join(f"{role}'s" for role in Role if act in MAY[role])
            raise Problem(
                403,
                f"The token {self.actor.name!r} is of the role {self.role!r}, which may not {WORDS[act]}; "
                f"that takes {'an' if roles[0] in 'aeiou' else 'a'} {roles}.",
            )


async def authorized(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> Caller:
    """Let the request pass if its token may look, or, where it is to change something, may change rules.

    Raises Problem 401, 403, 429 and 503.
    """
    if credentials is None:
        raise unauthorized("A token is needed: send the header `Authorization: Bearer TOKEN`.", was_shown=False)
    doorkeeper: Doorkeeper = request.app.state.doorkeeper
    visitors: Visitors = request.app.state.visitors
    origin = origin_of(request)
    token = await doorkeeper.find(credentials.credentials, origin.place)
    if token is None:
        raise unauthorized(_NOT_GOOD)
    turn = TURN.get()
    if turn is not None:
        rank = Rank.ADMIN if token.role == Role.ADMIN else Rank.KNOWN
        turn.show(token.id, rank, partial(_look_again, doorkeeper, token))
    caller = Caller(token.role, Actor(token.name, origin.address, origin.request, token.id, token.role))
    request.state.caller = caller
    caller.require(Act.READ if request.method in LOOKING else Act.CHANGE)
    for address in filter(None, dict.fromkeys((origin.address, origin.neighbour))):  # who is refused proves nothing
        visitors.see(address, token.name, Role(token.role))
    return caller


async def _look_again(doorkeeper: Doorkeeper, token: Token) -> None:
    """A body may take ten minutes to come, and a turn some more. Raises Problem 401 for a token that ended more than a
    second ago, and 503, and StoreError. With what is changed the store looks at it once more, without that second."""
    if not await doorkeeper.is_good(token):
        raise unauthorized(_NOT_GOOD)


async def recognized(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> None:
    """As `authorized`, but while the database does not answer, a token passes that was good when it last did: what
    watches netlimit must not go blind just then."""
    try:
        await authorized(request, credentials)
    except StoreError:
        doorkeeper: Doorkeeper = request.app.state.doorkeeper
        if credentials is None or doorkeeper.recall(credentials.credentials) is None:
            raise


async def local_or_recognized(request: Request) -> None:
    """As `recognized`, but whoever is on this host, as far as the request says, needs no token."""
    address = origin_of(request).address
    is_local = address is None or ip_address(address).is_loopback
    if not is_local or any(header in request.headers for header in _OF_PROXIES):
        await recognized(request, await _bearer(request))


CallerOf = Annotated[Caller, Depends(authorized)]
"""The parameter of an operation that must know who asks."""


async def for_admins(caller: CallerOf) -> None:
    """Let only those pass who may deal with tokens. Raises Problem 403."""
    caller.require(Act.TOKENS)
