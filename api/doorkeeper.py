"""Who knows tokens again, and who may try how often."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

from fastapi.concurrency import run_in_threadpool

from netlimit.errors import StoreError
from netlimit.store import Store, Token
from netlimit.tokens import find_handle, verify_token

from .buckets import Buckets
from .problems import Problem

FAILURES = 10
"""So often a minute one place may show a token that is not good."""
_PLACES = 4096
_REMEMBERED = 1024
_FRESH_SECONDS = 1.0
_ANSWER_SECONDS = 5.0
"""How long tokens are read at most before whoever waits for that hears that the database does not answer."""
_LOOK_SECONDS = 0.05
"""Between two looks for tokens that are not known, at least: whoever shows some waits for the next one."""
_HASHING, _MOST_HASHING = 2, 32


class Doorkeeper:
    """Knows tokens again. Revocations count within a second, and new tokens at once.

    A hash takes long on purpose (50 ms and 16 MiB), so it must not be had for nothing:

    - a good token is hashed once, and from then on remembered by its SHA-256;
    - a token with a handle that is not known is hashed never, and one that has a known handle once, with that;
    - a handle that is not known is looked for in the database before it is refused, with all others that are waiting:
      however many come, from however many places, the database is asked twenty times a second at most;
    - whoever shows bad ones is soon told to wait. Good ones that are remembered pass all the same, and tokens that have
      a handle are counted each by itself: nobody is locked out by what others try from the same address;
    - two are hashed at a time, on threads of their own, and few may wait for that.
    """

    def __init__(
        self, store: Store, given: str | None = None, verify: Callable[[str, str], bool] = verify_token
    ) -> None:
        self._store, self._verify = store, verify
        self._given = _digest(given) if given else None
        self._failures = Buckets(FAILURES / 60, FAILURES, _PLACES)
        self._remembered: OrderedDict[bytes, tuple[int, str]] = OrderedDict()
        self._checking: dict[bytes, asyncio.Task[Token | None]] = {}
        self._hashing = ThreadPoolExecutor(_HASHING, "hashing")
        self._active: dict[int, Token] = {}
        self._read_at = -_FRESH_SECONDS
        self._read_from = 0.0
        self._look: asyncio.Task[None] | None = None
        self._looked_at = -_LOOK_SECONDS
        self._reading: asyncio.Task[None] | None = None
        self._began_at = 0.0

    async def find(self, text: str, place: str) -> Token | None:
        """The active token that this is; `place` is where it was shown. Raises Problem 429, 503, and StoreError."""
        came_at = time.monotonic()
        await self._refresh()
        known = self.recall(text)
        if known is not None:
            return known
        digest = _digest(text)
        task = self._checking.get(digest)
        if task is None:  # who shows the same token meanwhile waits for the same answer
            task = self._checking[digest] = asyncio.create_task(self._check(text, digest, place, came_at))
            task.add_done_callback(lambda done: self._checking.pop(digest, None))
        return await asyncio.shield(task)

    def recall(self, text: str) -> Token | None:
        """The active token that this is, if it was shown before. Asks nobody."""
        kept = self._remembered.get(_digest(text))
        token = self._active.get(kept[0]) if kept else None
        if kept is None or token is None or token.hash != kept[1]:
            return None
        return None if _has_expired(token) else token

    async def is_good(self, token: Token) -> bool:
        """Whether a token that was found before is as it was then, and good. Raises Problem 503, StoreError."""
        await self._refresh()
        return self._active.get(token.id) == token and not _has_expired(token)

    async def _refresh(self) -> None:
        """See to it that what is known of tokens is a second old at most. Raises Problem 503, StoreError."""
        if time.monotonic() - self._read_at >= _FRESH_SECONDS:
            await self._read()

    async def _read(self) -> None:
        """Read which tokens there are: once for all who come meanwhile. Raises StoreError."""
        if self._reading is None:
            self._reading, self._began_at = asyncio.create_task(self._read_active()), time.monotonic()
            self._reading.add_done_callback(self._forget_reading)
        await self._await_reading(self._reading, self._began_at)

    async def _look_again(self) -> None:
        """Read them once more, for there may be one that was made just now. Raises StoreError."""
        if self._look is None:
            self._look = asyncio.create_task(self._read_soon())
            self._look.add_done_callback(_hear)
        await self._await_reading(self._look, time.monotonic())

    async def _read_soon(self) -> None:
        await asyncio.sleep(self._looked_at + _LOOK_SECONDS - time.monotonic())
        self._look, self._looked_at = None, time.monotonic()  # who comes from now on needs a later one
        await self._read_active()

    async def _await_reading(self, reading: asyncio.Task[None], began_at: float) -> None:
        try:
            async with asyncio.timeout(began_at + _ANSWER_SECONDS - time.monotonic()):
                await asyncio.shield(reading)
        except TimeoutError:
            sentence = f"The database has said nothing for {_ANSWER_SECONDS:g} seconds: nobody's token can be read."
            raise StoreError(sentence, public=sentence) from None

    async def _read_active(self) -> None:
        began_at = time.monotonic()
        active = await run_in_threadpool(self._store.active_tokens, datetime.now(UTC))
        if began_at >= self._read_from:  # else a later look has come back before
            self._active = {token.id: token for token in active}
            self._read_at, self._read_from = time.monotonic(), began_at

    def _forget_reading(self, done: asyncio.Task[None]) -> None:
        self._reading = None
        _hear(done)

    async def _find_candidates(self, handle: str | None, came_at: float) -> list[Token]:
        """The active tokens with this handle, also one that was made since they were read. Raises StoreError."""
        candidates = self._list_active(handle)
        if handle is None or candidates or self._read_from >= came_at:
            return candidates
        await self._look_again()
        return self._list_active(handle)

    def _list_active(self, handle: str | None) -> list[Token]:
        return [token for token in self._active.values() if token.handle == handle]

    async def _check(self, text: str, digest: bytes, place: str, came_at: float) -> Token | None:
        handle = find_handle(text)
        candidates = await self._find_candidates(handle, came_at)
        key = (place, handle if candidates else None)
        wait = 0.0 if digest == self._given else self._failures.take(key)
        if wait:
            seconds = math.ceil(wait)
            raise Problem(
                429,
                f"Too many bad tokens came from {place or 'there'}; try again in {seconds} seconds.",
                headers={"Retry-After": str(seconds)},
            )
        for token in candidates:
            try:
                good = await self._hash(text, token.hash)
            except Problem:
                self._failures.give_back(key)  # nobody knows yet whether it is bad
                raise
            if good:
                self._failures.give_back(key)
                self._remember(digest, token)
                return token
        return None

    async def _hash(self, text: str, kept: str) -> bool:
        if len(self._checking) > _MOST_HASHING:
            raise Problem(503, "Too many tokens are being looked at; try again.", headers={"Retry-After": "1"})
        return await asyncio.get_running_loop().run_in_executor(self._hashing, self._verify, text, kept)

    def _remember(self, digest: bytes, token: Token) -> None:
        self._remembered[digest] = (token.id, token.hash)
        if len(self._remembered) > _REMEMBERED:
            self._remembered.popitem(last=False)


def _hear(done: asyncio.Task[None]) -> None:
    """Take note of an error: who waited has heard it, or has given up before."""
    if not done.cancelled():
        done.exception()


def _has_expired(token: Token) -> bool:
    return token.expires_at is not None and token.expires_at <= datetime.now(UTC)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
