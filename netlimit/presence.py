"""Who is still there: hosts that have a class because they appeared lose it when they have been idle."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

from netlimit.tree import Usage

IDLE = timedelta(minutes=2)
"""A host that sends nothing for so long, and has nothing waiting, has gone."""


class Presence:
    """When each class has sent something last, as far as it has been seen."""

    def __init__(self, idle: timedelta = IDLE) -> None:
        self._idle = idle
        self._last: dict[str, dict[int, tuple[int, datetime]]] = {}

    def find_idle(self, device: str, usages: Mapping[int, Usage], among: set[int], now: datetime) -> set[int]:
        """Those of the classes `among` on a device that have been idle long enough, by what they have counted now."""
        before = self._last.get(device, {})
        latest: dict[int, tuple[int, datetime]] = {}
        idle = set()
        for number in among & usages.keys():
            usage = usages[number]
            packets, since = before.get(number, (-1, now))
            latest[number] = (usage.packets, since if usage.packets == packets else now)
            if usage.queued_packets == 0 and now - latest[number][1] >= self._idle:
                idle.add(number)
        self._last[device] = latest
        return idle
