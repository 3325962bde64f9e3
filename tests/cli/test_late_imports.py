"""In the minute in which a guard must undo something its disk may be gone: all that it runs it has loaded by then."""

from __future__ import annotations

import signal
import sqlite3
import sys
import time
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from netlimit.store import Store
from tests.cli.running import Netlimit, until


def test_a_guard_loads_nothing_when_it_undoes_without_database_and_copy(netlimit: Netlimit, directory: Path) -> None:
    netlimit = replace(netlimit, environment={**netlimit.environment, "NETLIMIT_STATE_DIRECTORY": f"{directory}/state"})
    netlimit.do("db", "upgrade")
    late = directory / "late"
    guard = netlimit.start("guard", program=(sys.executable, "-m", "tests.cli.importing", str(late)))
    url = netlimit.environment["NETLIMIT_DATABASE_URL"]
    try:
        with closing(Store(url)) as store:
            until(store.guards, guard.said)
            (directory / "state" / "applied.db").symlink_to("/nowhere")  # it is opened by nobody
            store.open_window(2, "test", datetime.now(UTC))
            late.touch()
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as other:
            until(lambda: other.execute("BEGIN EXCLUSIVE"))
            until(lambda: "comes back from memory" in guard.said(), guard.said)
            time.sleep(3)
            other.execute("ROLLBACK")
        with closing(Store(url)) as store:
            until(lambda: has_ended(store), guard.said)
    finally:
        guard.end(signal.SIGKILL)
    assert "LOADED LATE" not in guard.said(), guard.said()


def has_ended(store: Store) -> bool:
    window = store.window()
    return window is not None and window.outcome is not None
