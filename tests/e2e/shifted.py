"""A controller by a clock that can be set: `python -m tests.e2e.shifted FILE`, which holds seconds to add."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from netlimit.controller import Controller, Setup
from netlimit.kernel.linux import LinuxKernel
from netlimit.settings import load_settings
from netlimit.store import Store, open_replica

if __name__ == "__main__":
    settings, file = load_settings(None), Path(sys.argv[1])

    def now() -> datetime:
        return datetime.now(UTC) + timedelta(seconds=float(file.read_text()))

    replica = open_replica(settings.state, settings.host)
    Controller(Store(settings.database_url), LinuxKernel(), Setup(settings.host), now, replica).run(lambda: False)
