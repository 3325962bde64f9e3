"""`netlimit limiter`: decides about HTTP requests, for proxies and applications that ask."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import typer

from netlimit.cli.daemons import UMASK, collect_seldom, listen
from netlimit.cli.errors import CommandError
from netlimit.cli.logs import log_to_stderr
from netlimit.cli.parts import open_store, read_settings
from netlimit.cli.privileges import USER, become, find_user, is_root
from netlimit.errors import StoreError
from netlimit.settings import Settings

if TYPE_CHECKING:
    import socket

    from netlimit.l7.limiter import Limiter
    from netlimit.l7.sources import Sources
    from netlimit.l7.store import Store as Counters
    from netlimit.store import Store

_LATE = (
    "encodings.idna",
    "encodings.utf_8_sig",
    "netlimit.l7.redis.opening",
    "netlimit.l7.service.server",
    "uvicorn.protocols.http.httptools_impl",
    "uvloop",
)
"""What has to be imported while that may still be read."""

log = logging.getLogger(__name__)


def limiter(
    context: typer.Context,
    user: str = typer.Option(USER, "--user", help="Whom to run as when it is started by root."),
) -> None:
    """Say which requests may pass, until SIGTERM."""
    settings = read_settings(context)
    for module in _LATE:
        _import(module)
    collect_seldom()
    os.umask(UMASK)
    log_to_stderr("limiter", settings)
    listening = listen(settings.limiter_listen, "limiter", "LIMITER_LISTEN")
    if settings.limiter_listen.is_open or settings.limiter_grpc_listen.is_open:
        log.warning("The limiter asks nobody who he is: let nobody reach it but proxies and applications of yours.")
    with listening, open_store(settings) as store:
        if is_root():
            _drop_root(store, user)
        _run(settings, store, listening)
    log.info("Stopped.")


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise CommandError(f"The limiter lacks the package {error.name}: install netlimit[limiter].") from None


def _drop_root(store: Store, user: str) -> None:
    """Become another user. What the database needs is imported by asking it; then it is opened anew."""
    with suppress(StoreError):
        store.revision()
    store.close()
    become(find_user(user))


def _run(settings: Settings, store: Store, listening: socket.socket) -> None:
    """Decide by the rules of files and of the database, both of which are followed."""
    import uvloop

    from netlimit.escalating import Blocks
    from netlimit.l7.assignments import Assignments
    from netlimit.l7.counters import open_counters
    from netlimit.l7.escalation import Escalator, Refusals
    from netlimit.l7.gate import Gate
    from netlimit.l7.limiter import Limiter
    from netlimit.l7.sources import Sources

    sources = Sources(settings.limits, store)
    sources.refresh()
    counters = open_counters(settings.counters_url)
    assignments = Assignments(store, settings.host, settings.failure_seconds)
    refusals = Refusals()
    escalator = Escalator(refusals, Blocks(store, settings.host, settings.trusted_proxies))
    gate = Gate(lambda: assignments.rules, counters)
    limiter = Limiter(lambda: sources.rules, counters, gate=gate, refusals=refusals)
    with _following(sources):
        assignments.start()
        escalator.start()
        try:
            uvloop.run(_serve(settings, limiter, sources, counters, listening))
        finally:
            escalator.stop()
            assignments.stop()


@contextmanager
def _following(sources: Sources) -> Iterator[None]:
    """Follow the rules until the block ends."""
    ending = threading.Event()
    thread = threading.Thread(target=sources.run, args=(ending,), name="sources", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


async def _serve(
    settings: Settings, limiter: Limiter, sources: Sources, counters: Counters, listening: socket.socket
) -> None:
    from netlimit.l7.headers import Family
    from netlimit.l7.service.application import Service
    from netlimit.l7.service.auth import LOOPBACK
    from netlimit.l7.service.rpc import RpcServer
    from netlimit.l7.service.server import serve

    families = [Family(word) for word in settings.limiter_headers]
    proxies = [str(network) for network in settings.trusted_proxies] or LOOPBACK
    service = Service(limiter, lambda: sources.rules, families, proxies, lambda: sources.troubles)
    rpc = RpcServer(limiter, families, service.answers)
    place = settings.limiter_grpc_listen
    try:
        await rpc.start(str(place))
    except RuntimeError:
        raise CommandError(
            f"The limiter cannot listen at {place}. Set NETLIMIT_LIMITER_GRPC_LISTEN to another place."
        ) from None
    log.info("Deciding at %s, and for gRPC at %s.", settings.limiter_listen, place)
    gc.freeze()  # what is there now stays
    try:
        await serve(service, rpc, listening)
    finally:
        await counters.aclose()
