"""The parts that run: the controller, and the API."""

from __future__ import annotations

import errno
import gc
import importlib
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

import typer

from netlimit.cli import descriptor_store
from netlimit.cli.arrival import Arrival
from netlimit.cli.descriptor_store import API
from netlimit.cli.errors import CommandError
from netlimit.cli.last_settings import keep_settings, read_settings_to_limit
from netlimit.cli.logs import log_to_stderr
from netlimit.cli.parts import (
    SILENCE,
    check_backend,
    make_controller,
    make_kernel,
    open_copy,
    open_store,
    read_settings,
    reopen_copy,
)
from netlimit.cli.privileges import NETWORK, USER, become, find_user, is_root
from netlimit.cli.tls import check_certificate, check_tls
from netlimit.packages import import_beside
from netlimit.settings import Backend, Listen, Settings

if TYPE_CHECKING:
    import uvicorn

    from netlimit.kernel.base import Kernel
    from netlimit.store import Store

UMASK = 0o007
"""Controller and API share the database, and nobody else."""

OPEN_FILES = 4096
"""What the API may have open: about 900 connections and 150 files of the database, at most."""
PATIENCE = 1.0
"""How long the controller waits for who has locked the database, in seconds: the kernel must be looked at."""

_LATE_IN_CONTROLLER = ("netlimit.controller", "netlimit.store", "netlimit.kernel.linux", "encodings.idna")
_LATE = ("anyio._backends._asyncio", "encodings.idna", "encodings.utf_8_sig")

_PASSING = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)

log = logging.getLogger(__name__)


class TakenError(CommandError):
    """The place to listen at may be had later: now another has it, or there is no such address yet."""


def controller(
    context: typer.Context,
    user: str | None = typer.Option(None, "--user", help="Whom to become, with two capabilities, when root starts it."),
) -> None:
    """Keep this host's kernel as the rules say, until SIGTERM. The rules stay in the kernel."""
    run_controller(read_settings_to_limit(context), user)


def api(
    context: typer.Context,
    user: str = typer.Option(USER, "--user", help="Whom to run as when it is started by root."),
) -> None:
    """Serve the admin API, until SIGTERM."""
    settings = read_settings(context)
    log_to_stderr("api", settings)
    with open_store(settings) as store:
        make_token(settings, store)
    run_api(settings, user)


def collect_seldom() -> None:
    """A hundred thousand rules are many objects and no garbage: looking through them again and again takes a fifth of
    the time that a bulk of them takes (measured)."""
    gc.set_threshold(100_000, 20, 100)


def stay_prompt() -> None:
    """Let what other threads do, such as reading many rules, hold answers up as little as can be: who waits for the
    interpreter gets it after half a millisecond (usually 5, each time that a question comes or an answer goes), and
    garbage is looked for among some thousand objects at a time, all of which nothing else goes on."""
    sys.setswitchinterval(0.000_5)
    gc.set_threshold(5_000, 2, 5_000)


def run_controller(settings: Settings, user: str | None = None, api_user: str = USER) -> None:
    """Run the controller until SIGTERM or SIGINT; root becomes `user`, if that is given, and keeps two capabilities.
    `api_user` is whom the API runs as."""
    collect_seldom()
    os.umask(UMASK)
    log_to_stderr("controller", settings)
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, frame: stopping.append(received))
    arrival = Arrival(settings)
    kernel = make_kernel(settings)
    if user is not None and is_root():
        _keep_network(settings, user, kernel)
    with kernel.sole(), open_store(settings, PATIENCE) as store, open_copy(settings) as replica:
        keep_settings(settings)
        reopen = partial(reopen_copy, settings)
        running = make_controller(settings, store, kernel, replica, api_user, reopen)
        log.info("Keeping the rules of %s in its kernel.", settings.host)
        running.run(lambda: bool(stopping) or arrival.is_sealed())
    log.info("Stopped; the rules stay in the kernel.")


def _keep_network(settings: Settings, user: str, kernel: Kernel) -> None:
    """Become another user, who may change the network, if the kernel is not left alone, and nothing else."""
    from netlimit.cli.preparing import give_state, prepare_host

    alone = settings.backend is Backend.L7
    if not alone:
        with kernel.sole():  # what another controller has, which may run as somebody else, is not taken from it
            pass
    give_state(settings, find_user(user))
    if not alone:
        prepare_host(find_user(user))
    for module in _LATE_IN_CONTROLLER:
        importlib.import_module(module)
    become(find_user(user), () if alone else NETWORK)


def run_api(
    settings: Settings,
    user: str,
    listening: socket.socket | None = None,
    tell_begun: Callable[[], None] = lambda: None,
) -> None:
    """Serve the API until SIGTERM or SIGINT, where it is to listen or at what is `listening` there already; root
    becomes `user` before anything is answered. `tell_begun` is called when it answers."""
    import uvicorn

    application, server = import_beside("api.app"), import_beside("api.server")
    collect_seldom()
    os.umask(UMASK)
    log_to_stderr("api", settings)
    for number in (signal.SIGTERM, signal.SIGINT):  # what uvicorn raises again once it has ended
        signal.signal(number, lambda received, frame: None)
    warning = check_certificate(settings, datetime.now(UTC))
    notes = [warning] if warning else []
    raise_open_files(OPEN_FILES)
    if listening is None:
        listening = _take_place(settings.listen)
    with open_store(settings, silence=SILENCE, is_api=True) as store:
        app = application.create_app(settings, store, notes)
        door = server.open_door(settings, app, listening)
        config = server.configure(settings, app, door)
        if is_root():
            _drop_root(config, store, user)
        store.revision()
        for note in notes:  # who tries this again and again tells it once
            log.warning("%s", note)
        log.info("Answering at %s.", settings.listen)
        tell_begun()
        uvicorn.Server(config).run(sockets=[door])


def raise_open_files(wanted: int) -> None:
    """Every connection is an open file, and so is what the database needs: let there be so many, or what may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft < wanted:
        with suppress(OSError, ValueError):  # a unit's filter of system calls may forbid it; then the unit sets it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _drop_root(config: uvicorn.Config, store: Store, user: str) -> None:
    """Become another user, who may not be able to read where Python and its packages lie: import all that comes late,
    and open the database anew."""
    config.load()
    config.get_loop_factory()
    for module in _LATE:
        importlib.import_module(module)
    store.revision()
    store.close()
    become(find_user(user))


def make_token(settings: Settings, store: Store) -> None:
    """See to it that there is an admin token."""
    import_beside("api.bootstrap").bootstrap_token(store, settings, datetime.now(UTC))


def listen(place: Listen, who: str = "API", setting: str = "LISTEN") -> socket.socket:
    """Take the place where the API listens, or another part. Raises CommandError, and TakenError where it may be had
    later."""
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    try:
        listening = socket.create_server((place.host, place.port), family=family, backlog=4096)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        passing = error.errno in _PASSING or isinstance(error, socket.gaierror)  # names may not be known yet
        raise (TakenError if passing else CommandError)(
            f"The {who} cannot listen at {place}: {reason}. Set NETLIMIT_{setting} to another place."
        ) from None
    # The server sends head and body apart; else the body waits 40 ms for the other end to acknowledge the head.
    # asyncio sets this by itself only on sockets that say their protocol.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def hold(place: Listen, who: str, setting: str) -> socket.socket:
    """Take a place for sockets of this user's that are bound with SO_REUSEPORT, and nobody else's. Raises CommandError
    where it is taken."""
    held = socket.socket(socket.AF_INET6 if ":" in place.host else socket.AF_INET)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # beside connections of before that linger
        held.bind((place.host, place.port))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # only now: a place that is taken is to be an error
    except OSError as error:
        held.close()
        raise CommandError(
            f"The {who} cannot listen at {place}: {error.strerror}. Set NETLIMIT_{setting} to another place."
        ) from None
    return held


def _take_place(place: Listen) -> socket.socket:
    """The socket at which the API listened before it was restarted, or else a new one. Raises CommandError."""
    listening = descriptor_store.take({API: place}).get(API)
    if listening is None:
        listening = listen(place)
        descriptor_store.keep(API, listening)
    return listening


def check_parts(settings: Settings, user: str) -> None:
    """Raise CommandError or SettingsError for what would keep the parts from running for good."""
    check_backend(settings)
    check_tls(settings)
    if is_root():
        find_user(user)
