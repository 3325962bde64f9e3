"""`netlimit guard`: the process that undoes what is not confirmed."""

from __future__ import annotations

import importlib
import logging
import math
import os
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import typer

from netlimit.cli.arrival import Arrival
from netlimit.cli.errors import CommandError
from netlimit.cli.last_settings import load_settings_to_limit, read_settings_or_last, word_recalled
from netlimit.cli.logs import log_to_stderr
from netlimit.cli.parts import (
    GUARD_LOCK,
    SILENCE,
    check_backend,
    make_controller,
    make_kernel,
    open_copy,
    open_store,
    refuse_another,
)
from netlimit.errors import KernelError, SettingsError, StoreError
from netlimit.kernel.lock import is_locked, locked
from netlimit.kernel.tools import own_module
from netlimit.settings import Backend, Settings

START_SECONDS = 15.0
"""How long a guard may take to begin."""
MENDING_SECONDS = 5.0
"""How often a guard that goes by former settings looks whether the present ones can be used."""
_PURPOSE = "be the guard of this host"
_LOCK_SECONDS = 1.0
_LATE = (
    "netlimit.controller", "netlimit.kernel.linux", "netlimit.kernel.fake", "netlimit.l7.redis.hosts",
    "netlimit.store.migrate", "alembic.command",
)  # fmt: skip
_UMASK = 0o007

log = logging.getLogger(__name__)


def guard(
    context: typer.Context,
    once: bool = typer.Option(False, "--once", help="End as soon as no window of confirmation is open."),
) -> None:
    """Undo what is not confirmed in time. It runs until SIGTERM, but does not end while a window of confirmation
    is open."""
    settings, fault = read_settings_or_last(context, whole=True)
    check_backend(settings)
    run_guard(settings, once, fault)


def run_guard(settings: Settings, once: bool = False, fault: SettingsError | None = None) -> None:
    """Be the guard until SIGTERM or SIGINT (or until no window is open) and the window is closed that is open then.
    With a `fault`, which the present settings have, these are the last good ones: then also until those can be used.

    A second one waits here until the first has ended.
    """
    from netlimit.guard import Guard

    for module in _LATE:  # when they are needed the disk may be gone
        importlib.import_module(module)
    os.umask(_UMASK)
    log_to_stderr("guard", settings)
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, frame: stopping.append(received))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    mending, arrival = _Mending(fault), Arrival(settings)
    if fault is not None:
        log.error("%s", word_recalled(fault, settings))
    lock = _find_lock(settings)

    def is_to_stop() -> bool:
        return bool(stopping) or mending.is_done() or arrival.is_sealed()

    while True:
        try:
            # Who looks whether there is a guard holds the lock for a moment.
            with (
                locked(lock, _PURPOSE, keep=False, patience=_LOCK_SECONDS if once else 0),
                open_store(settings, silence=SILENCE) as store,
            ):
                Guard(
                    store,
                    settings.host,
                    lambda: make_kernel(settings),
                    lambda source, kernel: make_controller(settings, source, kernel),
                    lambda: open_copy(settings),
                    None if once or settings.backend is Backend.FAKE else settings.failure_seconds,
                    partial(refuse_another, settings, store),
                ).run(is_to_stop, once)
        except KernelError:
            if is_to_stop() or once:
                return
            time.sleep(1.0)
            continue
        try:
            # A window that was opened while it ended has seen it alive: it is the guard's own.
            if not _is_window_open(settings):
                return
        except StoreError:
            if is_to_stop() or not once:
                raise
            time.sleep(1.0)


class _Mending:
    """Looks now and then whether settings that had a fault can be used again."""

    def __init__(self, fault: SettingsError | None) -> None:
        self._due = math.inf if fault is None else 0.0
        self._is_done = False

    def is_done(self) -> bool:
        """Whether they can, as far as is known."""
        if not self._is_done and time.monotonic() >= self._due:
            self._due = time.monotonic() + MENDING_SECONDS
            with suppress(SettingsError):
                load_settings_to_limit()
                self._is_done = True
                log.warning("The settings can be used again: ending, so that the next guard goes by them.")
        return self._is_done


def guard_lives(settings: Settings) -> bool:
    """Whether this host has a guard."""
    return is_locked(_find_lock(settings), "look for the guard")


def ensure_guard(settings: Settings, config: Path | None) -> None:
    """Start a guard, unless there is one, that outlives this process and its terminal. Raises CommandError."""
    if guard_lives(settings):
        return
    chosen = ("--config", str(config.resolve())) if config else ()
    command = (*own_module("netlimit.cli.main"), *chosen, "guard", "--once")
    nowhere = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)]
    child = os.posix_spawn(sys.executable, command, os.environ, file_actions=nowhere, setsid=True)
    end = time.monotonic() + START_SECONDS
    while not guard_lives(settings):
        ended, _ = os.waitpid(child, os.WNOHANG)
        if ended or time.monotonic() > end:
            raise CommandError("The guard that would undo what is not confirmed does not start; see `netlimit guard`.")
        time.sleep(0.02)


def _find_lock(settings: Settings) -> str:
    if not settings.state.is_dir():  # a disk that is frozen lets even that hang
        settings.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    return str(settings.state / GUARD_LOCK)


def _is_window_open(settings: Settings) -> bool:
    with open_store(settings) as store:
        window = store.window()
        return window is not None and window.outcome is None
