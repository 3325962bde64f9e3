"""What operations share: the store, and who asks."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query, Request

from netlimit.store import Store

from .schemas import Strict
from .waiting import Waiting


async def _find_store(request: Request) -> Store:
    store: Store = request.app.state.store
    return store


async def _find_waiting(request: Request) -> Waiting:
    waiting: Waiting = request.app.state.waiting
    return waiting


async def no_query(query: Annotated[Strict, Query()]) -> None:
    """Refuse every query parameter: one that is not known would go unheard."""


StoreOf = Annotated[Store, Depends(_find_store)]
WaitingOf = Annotated[Waiting, Depends(_find_waiting)]
