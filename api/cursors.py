"""Cursors: where a page of a list ended. Opaque to clients, so that they may come to mean something else."""

from __future__ import annotations

import base64
import binascii
import re

from netlimit.errors import RuleError


def write_cursor(last: int) -> str:
    """The cursor of what follows the entry of this id."""
    return base64.urlsafe_b64encode(f"after {last}".encode()).decode().rstrip("=")


def read_cursor(cursor: str | None) -> int | None:
    """The id after which the page begins; None at the start. Raises RuleError (field `cursor`)."""
    if cursor is None:
        return None
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
    except (ValueError, binascii.Error):
        text = ""
    match = re.fullmatch(r"after ([0-9]{1,18})", text)
    if match is None:
        raise RuleError("cursor", f"The cursor {cursor!r} is none; send `next` of the page before, unchanged.")
    return int(match[1])
