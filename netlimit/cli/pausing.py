"""A teardown whose database cannot be told, nor the copy: a process of its own keeps the controller off until they are.

It claims the network namespace for that, which the controller sees without any disk. Nobody needs it any more when no
controller has run for a while: one that starts knows of the teardown by the copy, if that could be told.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from netlimit.cli.actor import local_actor
from netlimit.cli.errors import CommandError
from netlimit.cli.parts import SILENCE, make_kernel, open_store, pause_copy
from netlimit.errors import KernelError, StoreError
from netlimit.records import Actor
from netlimit.settings import Settings

if TYPE_CHECKING:
    from netlimit.kernel.base import Kernel

BEGIN_SECONDS = 5.0
TOLD_SECONDS = 15.0
"""How long `netlimit apply` waits for one that tells a database which answers again."""
_RETRY_SECONDS = 1.0
_ALONE_SECONDS = 60.0
"""After so long without a controller it ends; one that systemd starts again is back long before."""
_LOOK_SECONDS = 0.05
_MOST_OPEN = 1024


def put_off(settings: Settings) -> bool:
    """Begin to keep a controller off that runs; whether that is done, by this or by a teardown before. Raises
    KernelError."""
    kernel, actor = make_kernel(settings), local_actor(settings)
    if kernel.is_put_off():
        return True
    if not kernel.controlled() or not _fork(settings, actor):
        return False
    end = time.monotonic() + BEGIN_SECONDS
    while not kernel.is_put_off() and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)
    return kernel.is_put_off()


def wait_until_told(kernel: Kernel) -> None:
    """What a teardown has yet to tell must not come after what is asked now. Raises CommandError, KernelError."""
    end = time.monotonic() + TOLD_SECONDS
    while kernel.is_put_off():
        if time.monotonic() >= end:
            raise CommandError(
                "A teardown still waits to tell the database that this gateway is paused; try again when its disk, or "
                "its server, answers."
            )
        time.sleep(_LOOK_SECONDS)


def _fork(settings: Settings, actor: Actor) -> bool:
    try:
        child = os.fork()
    except OSError:
        return False
    if not child:
        _keep_off(settings, actor)
    return True


def _keep_off(settings: Settings, actor: Actor) -> NoReturn:
    """In a process that outlives the command and its terminal, and keeps nothing open of theirs."""
    try:
        os.setsid()
        os.closerange(0, _MOST_OPEN)
        for _ in range(3):
            os.open(os.devnull, os.O_RDWR)
        kernel = make_kernel(settings)
        with kernel.put_off():
            _tell(settings, kernel, actor)
    finally:
        os._exit(0)


def _tell(settings: Settings, kernel: Kernel, actor: Actor) -> None:
    seen = time.monotonic()
    while time.monotonic() - seen < _ALONE_SECONDS:
        with suppress(StoreError), open_store(settings, silence=SILENCE) as store:
            store.pause(settings.host, True, actor)
            pause_copy(settings, store.last_pause(settings.host))
            return
        with suppress(KernelError):
            seen = time.monotonic() if kernel.controlled() else seen
        time.sleep(_RETRY_SECONDS)
