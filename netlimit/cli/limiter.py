"""`netlimit limiter`: decides about HTTP requests, for proxies and applications that ask."""

from __future__ import annotations

import importlib
import logging
import os
import socket
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING

import typer

from netlimit.cli import descriptor_store
from netlimit.cli.daemons import UMASK, hold, listen, raise_open_files, stay_prompt
from netlimit.cli.descriptor_store import GRPC, LIMITER
from netlimit.cli.errors import CommandError
from netlimit.cli.logs import log_to_stderr
from netlimit.cli.parts import open_store, read_settings
from netlimit.cli.privileges import USER, become, find_user, is_root
from netlimit.errors import StoreError

if TYPE_CHECKING:
    from netlimit.settings import Settings
    from netlimit.store import Store

_LATE = (
    "encodings.idna",
    "encodings.utf_8_sig",
    "netlimit.l7.redis.opening",
    "netlimit.l7.redis.policy",
    "uvicorn.lifespan.off",
    "netlimit.l7.service.connection",
)
"""What others import when they need it; by then this process may not read it any more."""

OPEN_FILES = 20_000
"""What the limiter may have open: 8,192 connections over HTTP, those that wait to be let in or closed, and gRPC's."""

log = logging.getLogger(__name__)


def limiter(
    context: typer.Context,
    user: str = typer.Option(USER, "--user", help="Whom to run as when it is started by root."),
) -> None:
    """Say which requests may pass, until SIGTERM."""
    settings = read_settings(context)
    deciding = _import("netlimit.cli.deciding")
    for module in _LATE:
        _import(module)
    stay_prompt()
    os.umask(UMASK)
    raise_open_files(OPEN_FILES)
    log_to_stderr("limiter", settings)
    taken = descriptor_store.take({LIMITER: settings.limiter_listen, GRPC: settings.limiter_grpc_listen})
    listening = taken.get(LIMITER) or _keep(LIMITER, listen(settings.limiter_listen, "limiter", "LIMITER_LISTEN"))
    if settings.limiter_listen.is_open or settings.limiter_grpc_listen.is_open:
        log.warning("The limiter asks nobody who he is: let nobody reach it but proxies and applications of yours.")
    with listening, open_store(settings) as store:
        if is_root():
            _drop_root(store, user)
        with _hold_grpc(settings, taken.get(GRPC)) as held:
            deciding.decide(settings, store, listening, _name(held))
    log.info("Stopped.")


def _hold_grpc(settings: Settings, taken: socket.socket | None) -> socket.socket:
    """What keeps the place of gRPC, as the user who listens there: the kernel lets no other in beside. One that is
    another user's, for the limiter was his before, is let go. Raises CommandError."""
    if taken is not None and os.fstat(taken.fileno()).st_uid == os.geteuid():
        return taken
    if taken is not None:
        taken.close()
        descriptor_store.forget(GRPC)
    return _keep(GRPC, hold(settings.limiter_grpc_listen, "limiter", "LIMITER_GRPC_LISTEN"))


def _name(held: socket.socket) -> str:
    """The place of a socket, as gRPC has it: by address, for by name it may be several."""
    host, port = held.getsockname()[:2]
    return f"[{host}]:{port}" if held.family == socket.AF_INET6 else f"{host}:{port}"


def _keep(name: str, made: socket.socket) -> socket.socket:
    descriptor_store.keep(name, made)
    return made


def _import(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CommandError(f"The limiter lacks the package {error.name}: install netlimit[limiter].") from None


def _drop_root(store: Store, user: str) -> None:
    """Become another user. What the database needs is imported by asking it; then it is opened anew."""
    with suppress(StoreError):
        store.revision()
    store.close()
    become(find_user(user))
