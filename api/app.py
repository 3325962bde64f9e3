"""The application: where the parts of the API are put together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from fastapi import APIRouter, Depends, FastAPI

from netlimit.settings import Settings
from netlimit.skew import Skew
from netlimit.store import Store

from . import (
    audit,
    bulk,
    confirmation,
    counters,
    explain,
    gateways,
    health,
    limits,
    metrics,
    offenders,
    plan,
    revisions,
    rules,
    status,
    tokens,
)
from .access import Access
from .admission import Admission
from .auth import authorized, local_or_recognized, recognized
from .description import serve_description
from .doorkeeper import Doorkeeper
from .meter import Meter
from .openapi import describe_api
from .problems import answer_problems
from .visitors import Visitors
from .waiting import Waiting

PREFIX = "/api/v1"
_RESOURCES = (
    bulk, rules, limits, counters, plan, explain, status, gateways, offenders, revisions, confirmation, audit, tokens,
)  # fmt: skip
"""`bulk` before `rules`, whose names it would be one of."""


def create_app(settings: Settings, store: Store, notes: Sequence[str] = ()) -> FastAPI:
    """The admin API over a store. The caller opens the store, upgrades it and closes it. `notes` are what `/status`
    says of the API itself."""
    app = FastAPI(
        title="netlimit",
        version=_find_version(),
        openapi_url=None,
        generate_unique_id_function=lambda route: route.name,
        redirect_slashes=False,
    )
    app.state.settings = settings
    app.state.store = store
    app.state.notes = tuple(notes)
    app.state.skew = Skew(is_api=True)
    given = settings.bootstrap_token.get_secret_value() if settings.bootstrap_token else None
    app.state.doorkeeper = Doorkeeper(store, given)
    app.state.visitors = Visitors(store, settings.host)
    app.state.waiting = Waiting(store)
    app.state.metrics = metrics.make_registry(store, app.version)
    app.state.exposition = metrics.share_exposition(app.state.metrics)
    guarded = APIRouter(prefix=PREFIX, dependencies=[Depends(authorized)])
    for resource in _RESOURCES:
        guarded.include_router(resource.router)
    app.include_router(guarded)
    app.include_router(health.router)
    app.include_router(metrics.router, dependencies=[Depends(recognized if settings.is_open else local_or_recognized)])
    answer_problems(app)
    app.add_middleware(Admission, doorkeeper=app.state.doorkeeper, rate=settings.request_rate)
    app.add_middleware(Access, meter=Meter(app.state.metrics), prefix=PREFIX)
    app.openapi = partial(describe_api, app)  # type: ignore[method-assign]
    serve_description(app)
    return app


def _find_version() -> str:
    try:
        return version("netlimit")
    except PackageNotFoundError:
        return "0"
