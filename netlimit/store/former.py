"""The limiter's documents that a restore takes away, written to files first: nothing else would have their texts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from urllib.parse import quote

from netlimit.custody import made_file, opened
from netlimit.errors import StoreError
from netlimit.several import say_more
from netlimit.store.limits import LimitDocument

_LONGEST = 200
"""Bytes of a domain in the name of a file, which may have 255."""


@dataclass(frozen=True, slots=True)
class Former:
    """Documents of these domains that are no more, each a file of the folder, as `netlimit limits put` takes it."""

    folder: Path
    domains: tuple[str, ...]


def keep_former(backup: Path, documents: Sequence[LimitDocument], now: datetime) -> Former:
    """Write these documents to a new folder beside a backup, for its owner alone: all, or none. Raises StoreError."""
    folder = backup.with_name(f"{backup.name}.limits-{now:%Y%m%dT%H%M%S}")
    try:
        with opened(folder.parent.resolve(), directory=True) as above:
            os.mkdir(folder.name, 0o700, dir_fd=above)
            _fill(folder.name, above, documents)
            os.fsync(above)
    except OSError as error:
        first, more = documents[0].domain, say_more(documents)
        raise StoreError(
            f"The backup would take the place of the limits of {first!r}{more}, which are written to {folder} first, "
            f"and that cannot be done: {error.strerror}. Copy the backup to where there is room, and you may write, "
            "and restore it from there."
        ) from error
    return Former(folder, tuple(each.domain for each in documents))


def _fill(folder: str, above: int, documents: Sequence[LimitDocument]) -> None:
    with opened(folder, above, directory=True) as place:
        made: list[str] = []
        try:
            for number, document in enumerate(documents, 1):
                made.append(_name(number, document))
                _write(made[-1], place, document.document.encode())
            os.fsync(place)
        except OSError:
            with suppress(OSError):
                for name in made:
                    os.unlink(name, dir_fd=place)
                os.rmdir(folder, dir_fd=above)
            raise


def _name(number: int, document: LimitDocument) -> str:
    ending = "json" if document.content_type == "application/json" else "yaml"
    return f"{number}-{quote(document.domain, safe='')[:_LONGEST]}.{ending}"


def _write(name: str, place: int, content: bytes) -> None:
    with made_file(name, place, 0o600) as descriptor, open(descriptor, "wb", closefd=False) as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)
