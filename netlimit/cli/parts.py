"""The parts, put together as the settings say.

Store, kernel and controller take a while to import, and most commands only speak to the API; so they are imported
where they are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from netlimit.cli.errors import CommandError
from netlimit.cli.privileges import may_change_network
from netlimit.settings import Backend, Settings, load_settings

if TYPE_CHECKING:
    from netlimit.controller import Controller
    from netlimit.kernel.base import Kernel
    from netlimit.store import Store
    from netlimit.tree import Topology


def read_settings(context: typer.Context) -> Settings:
    """The settings that this command goes by. Raises SettingsError."""
    config: Path | None = context.find_root().params.get("config")
    return load_settings(config)


@contextmanager
def open_store(settings: Settings) -> Iterator[Store]:
    """The database, until the block ends."""
    from netlimit.store import Store

    store = Store(settings.database_url)
    try:
        yield store
    finally:
        store.close()


def make_kernel(settings: Settings) -> Kernel:
    """The kernel that the settings name. Raises CommandError when this process may not change it."""
    check_backend(settings)
    if settings.backend is Backend.FAKE:
        from netlimit.kernel.fake import FakeKernel

        return FakeKernel(routes=_imagine_routes())
    from netlimit.kernel.linux import LinuxKernel

    return LinuxKernel()


def _imagine_routes() -> Topology:
    """A small gateway for the kernel in memory, so that there is somewhere to shape: 10.0.0.0/8 behind `lan`, the rest
    behind `wan`."""
    from netlimit.tree import Device, Route, Topology

    routes = (
        Route("10.0.0.0/8", ("lan",), connected=True),
        Route("fd00::/8", ("lan",), connected=True),
        *(Route(everything, ("wan",)) for everything in ("0.0.0.0/0", "::/0")),
    )
    return Topology({"lan": Device(2, True), "wan": Device(3, True)}, routes)


def check_backend(settings: Settings) -> None:
    """Raise CommandError unless this process can do what the backend needs."""
    if settings.backend is Backend.L7:
        raise CommandError(
            'The backend "l7" is not built yet; set NETLIMIT_BACKEND to "auto", or to "fake" for a look round.'
        )
    if settings.backend is not Backend.FAKE and not may_change_network():
        raise CommandError(
            "The kernel lets only root (CAP_NET_ADMIN and CAP_NET_RAW) see and set limits: run this as root. "
            "For a look round without root, set NETLIMIT_BACKEND=fake."
        )


def make_controller(settings: Settings, store: Store, kernel: Kernel) -> Controller:
    """The controller of this host."""
    from netlimit.controller import Controller, Setup

    setup = Setup(
        host=settings.host,
        backend="fake" if settings.backend is Backend.FAKE else "iptables",
        mark_mask=settings.mark_mask,
        safe=tuple(map(str, settings.safe)),
        set_size=settings.set_size,
    )
    return Controller(store, kernel, setup)
