"""What the long-running parts say on stderr: one line each, all of the same form."""

from __future__ import annotations

import logging

_FORM = "%(asctime)s %(levelname)s {part}: %(message)s"


def log_to_stderr(part: str) -> None:
    """Log as this part of netlimit."""
    logging.basicConfig(level=logging.INFO, format=_FORM.format(part=part), force=True)
    logging.getLogger("alembic").setLevel(logging.WARNING)
