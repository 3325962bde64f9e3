"""`netlimit limiter`: decides about HTTP requests, for proxies and applications that ask."""

from __future__ import annotations

import importlib
import logging
import os
import socket
from contextlib import ExitStack, suppress
from types import ModuleType
from typing import TYPE_CHECKING

import typer

from netlimit.cli import descriptor_store, unix_sockets
from netlimit.cli.daemons import UMASK, hold, listen, raise_open_files, stay_prompt
from netlimit.cli.descriptor_store import GRPC, LIMITER
from netlimit.cli.errors import CommandError
from netlimit.cli.logs import log_to_stderr
from netlimit.cli.parts import SILENCE, open_store, read_settings
from netlimit.cli.privileges import USER, become, find_user, is_root
from netlimit.errors import StoreError
from netlimit.settings import Listen, LocalListen

if TYPE_CHECKING:
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
    place, grpc_place = settings.limiter_listen, settings.limiter_grpc_listen
    taken = descriptor_store.take({LIMITER: place, GRPC: grpc_place})
    if place.is_open or grpc_place.is_open:
        log.warning("The limiter asks nobody who he is: let nobody reach it but proxies and applications of yours.")
    with ExitStack() as closing:
        listening = None
        if isinstance(place, Listen):
            listening = taken.get(LIMITER) or _keep(LIMITER, listen(place, "limiter", "LIMITER_LISTEN"))
            closing.enter_context(listening)
        store = closing.enter_context(open_store(settings, silence=SILENCE))
        if is_root():
            _drop_root(store, user)
        if isinstance(place, LocalListen):  # in its directory nothing is done as root
            listening = closing.enter_context(unix_sockets.listening(place, "LIMITER_LISTEN"))
        assert listening is not None
        if isinstance(grpc_place, LocalListen):
            closing.enter_context(unix_sockets.held(grpc_place, "LIMITER_GRPC_LISTEN"))
            name = str(grpc_place)
        else:
            name = _name(closing.enter_context(_hold_grpc(grpc_place, taken.get(GRPC))))
        deciding.decide(settings, store, listening, name)
    log.info("Stopped.")


def _hold_grpc(place: Listen, taken: socket.socket | None) -> socket.socket:
    """What keeps the place of gRPC, as the user who listens there: the kernel lets no other in beside. One that is
    another user's, for the limiter was his before, is let go. Raises CommandError."""
    if taken is not None and os.fstat(taken.fileno()).st_uid == os.geteuid():
        return taken
    if taken is not None:
        descriptor_store.leave(taken)
        descriptor_store.forget(GRPC)
    return _keep(GRPC, hold(place, "limiter", "LIMITER_GRPC_LISTEN"))


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
