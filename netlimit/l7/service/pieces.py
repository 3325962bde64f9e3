"""What takes long to make is made in pieces, with the event loop in between: nobody who asks about a request waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from itertools import islice
from typing import TypeVar

PIECE = 100
"""Things that are told in one piece: some milliseconds."""
T = TypeVar("T")


async def in_pieces(things: Iterable[T]) -> AsyncIterator[list[T]]:
    """All of them, some at a time; after each time there is a round of the event loop."""
    rest = iter(things)
    while piece := list(islice(rest, PIECE)):
        yield piece
        await asyncio.sleep(0)
