"""A command by a clock that is ahead: `python -m tests.cli.ahead SECONDS WORD …`."""

from __future__ import annotations

import datetime
import sys
import time
from typing import Self

SECONDS = float(sys.argv[1])
_read = time.time


class Ahead(datetime.datetime):
    """Times that are told so much too late."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Self:
        """What the clock shows."""
        return cls.fromtimestamp(_read() + SECONDS, tz)


if __name__ == "__main__":
    datetime.datetime = Ahead  # type: ignore[misc]
    time.time = lambda: _read() + SECONDS
    from netlimit.cli.main import app

    app(sys.argv[2:])
