"""A controller that takes the class of a host that has been idle for two seconds: `python -m tests.e2e.hasty`."""

from __future__ import annotations

from datetime import timedelta

from netlimit.controller import Controller, Setup
from netlimit.kernel.linux import LinuxKernel
from netlimit.settings import load_settings
from netlimit.store import Store

if __name__ == "__main__":
    settings = load_settings(None)
    store = Store(settings.database_url)
    setup = Setup(settings.host, safe=tuple(map(str, settings.safe)), idle=timedelta(seconds=2))
    Controller(store, LinuxKernel(), setup).run(lambda: False)
