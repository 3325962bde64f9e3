"""What is read once for all who ask at the same time."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

from netlimit.shared import Shared


def test_all_who_ask_at_once_have_one_reading_and_nobody_has_an_older_one() -> None:
    begun: list[int] = []
    goes_on = threading.Event()

    def read() -> int:
        begun.append(len(begun) + 1)
        goes_on.wait(60)
        return len(begun)

    async def ask() -> tuple[list[int], list[int]]:
        shared = Shared(partial(asyncio.to_thread, read))
        first = [asyncio.create_task(shared.find()) for _ in range(10)]
        while not begun:
            await asyncio.sleep(0.01)
        later = [asyncio.create_task(shared.find()) for _ in range(10)]
        await asyncio.sleep(0.05)
        later[0].cancel()  # who goes away takes it from nobody
        goes_on.set()
        return await asyncio.gather(*first), await asyncio.gather(*later[1:])

    assert asyncio.run(ask()) == ([1] * 10, [2] * 9)


def test_after_an_error_it_is_read_anew() -> None:
    found = iter([ValueError("no"), 7])

    def read() -> int:
        value = next(found)
        if isinstance(value, Exception):
            raise value
        return value

    async def ask() -> list[object]:
        shared = Shared(partial(asyncio.to_thread, read))
        return [(await asyncio.gather(shared.find(), return_exceptions=True))[0] for _ in range(2)]

    first, second = asyncio.run(ask())
    assert isinstance(first, ValueError)
    assert second == 7
