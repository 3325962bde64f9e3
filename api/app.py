"""The application: where the parts of the API are put together."""

from __future__ import annotations

from functools import partial
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_address

from fastapi import APIRouter, Depends, FastAPI

from api import audit, bulk, counters, explain, health, metrics, offenders, plan, rules, status
from api.auth import Doorkeeper, authorized
from api.openapi import describe_api
from api.problems import answer_problems
from api.waiting import Waiting
from netlimit.settings import Settings
from netlimit.store import Store

PREFIX = "/api/v1"
_RESOURCES = (bulk, rules, counters, plan, explain, status, offenders, audit)
"""`bulk` before `rules`, whose names it would be one of."""


def create_app(settings: Settings, store: Store) -> FastAPI:
    """The admin API over a store. The caller opens the store, upgrades it and closes it."""
    app = FastAPI(
        title="netlimit",
        version=_find_version(),
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,
        redirect_slashes=False,
    )
    app.state.settings = settings
    app.state.store = store
    app.state.doorkeeper = Doorkeeper(store)
    app.state.waiting = Waiting(store)
    app.state.metrics = metrics.make_registry(store)
    guarded = APIRouter(prefix=PREFIX, dependencies=[Depends(authorized)])
    for resource in _RESOURCES:
        guarded.include_router(resource.router)
    app.include_router(guarded)
    app.include_router(health.router)
    app.include_router(metrics.router, dependencies=[] if _is_loopback(settings.listen.host) else [Depends(authorized)])
    answer_problems(app)
    app.openapi = partial(describe_api, app)  # type: ignore[method-assign]
    return app


def _is_loopback(host: str) -> bool:
    """Whether only this host can connect there."""
    return host == "localhost" or ((host[0].isdigit() or ":" in host) and ip_address(host).is_loopback)


def _find_version() -> str:
    try:
        return version("netlimit")
    except PackageNotFoundError:
        return "0"
