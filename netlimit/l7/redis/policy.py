"""Whether a Redis server may throw counters away, or has."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Callable
from math import inf
from time import monotonic
from typing import Any

from netlimit.l7.redis.url import Place

KEEPS = "noeviction"
"""The only policy that does not."""
LOOK_SECONDS = 60.0
"""How often it is looked whether that has changed: anybody may change it while the server runs."""
TOLD_SECONDS = 3600.0
"""For so long it is told that counters were lost."""
_SECONDS = 5.0
_MARK = "nl:mark"
"""A key that never ends: while it is what it was, so are the counters."""

log = logging.getLogger(__name__)


async def find_eviction(place: Place) -> str | None:
    """What is to be said of servers that throw counters away, as a sentence; None if nothing is. A server that does not
    answer, or does not tell, is not accused of it."""
    for address in place.addresses or (None,):
        connection: Any = place.connect(address)
        try:
            async with asyncio.timeout(_SECONDS):
                await connection.connect()
                await connection.send_command("INFO", "memory")
                told = (await connection.read_response()).decode("utf-8", "replace")
        except Exception as error:  # whatever redis-py raises: it only advises
            log.debug("Whether Redis at %s throws counters away is not known: %s", place, error)
            continue
        finally:
            await connection.disconnect(nowait=True)
        facts = dict(line.split(":", 1) for line in told.splitlines() if ":" in line)
        policy = facts.get("maxmemory_policy", KEEPS)
        if policy != KEEPS:
            where = address or place
            return (
                f"Redis at {where} throws counters away when its memory is full (maxmemory-policy {policy}), and "
                f"limits are forgotten without a word: set maxmemory-policy {KEEPS} there."
            )
    return None


async def find_mark(place: Place) -> bytes | None:
    """The mark that a server bears, or is given now: another one than before where it has lost what it kept. None where
    nobody knows: it does not answer, or may not be asked, or is a cluster, whose nodes each keep a part."""
    if place.cluster:
        return None
    connection: Any = place.connect(*place.addresses)
    try:
        async with asyncio.timeout(_SECONDS):
            await connection.connect()
            await connection.send_command("SET", _MARK, secrets.token_hex(8), "NX")
            await connection.read_response()
            await connection.send_command("GET", _MARK)
            mark: bytes | None = await connection.read_response()
            return mark
    except Exception as error:  # whatever redis-py raises: it only advises
        log.debug("Whether Redis at %s has lost counters is not known: %s", place, error)
        return None
    finally:
        await connection.disconnect(nowait=True)


class EvictionWatch:
    """Looks now and then, in a thread of its own."""

    def __init__(self, place: Place, find: Callable[[Place], Any] = find_eviction) -> None:
        self.troubles: tuple[str, ...] = ()
        """What is to be said, as sentences."""
        self.lost = 0
        """How often counters were lost."""
        self._mark: bytes | None = None
        self._lost_at = -inf
        self._place = place
        self._find = find
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eviction", daemon=True)

    def start(self) -> None:
        """Begin: what is found first is told before this returns, if the server answers at once."""
        self._look()
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ending.wait(LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        self._heed_mark(asyncio.run(find_mark(self._place)))
        found = asyncio.run(self._find(self._place))
        if found is not None and found not in self.troubles:
            log.warning("%s", found)
        lost = _word_loss(self._place) if monotonic() - self._lost_at < TOLD_SECONDS else None
        self.troubles = tuple(each for each in (found, lost) if each is not None)

    def _heed_mark(self, mark: bytes | None) -> None:
        if mark is None:
            return
        if self._mark not in (None, mark):
            self.lost += 1
            self._lost_at = monotonic()
            log.warning("%s", _word_loss(self._place))
        self._mark = mark


def _word_loss(place: Place) -> str:
    return (
        f"Redis at {place} has lost its counters (FLUSHALL, eviction, or a restart without persistence): limits have "
        "begun anew within the last hour."
    )
