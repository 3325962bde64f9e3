"""Who is still there: hosts that have a class because they appeared lose it when they have been idle."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from itertools import islice

from netlimit.tree import Usage

IDLE = timedelta(minutes=2)
"""A host that sends nothing for so long, and has nothing waiting, has gone."""
UNUSED = timedelta(seconds=10)
"""Where more than a FEW have appeared, a class through which nothing has gone at all goes after so long, which is at
its second reading: the packet that it was made for went through the newcomers', and whoever scans a network sends one
to each address, be somebody there or not. Who sends every 20 seconds has his class from the third packet on, at the
latest; who does so once a minute has none there."""
FEW = 1000
"""So many at most have appeared on a device while each may be silent for IDLE."""


class Presence:
    """When each class has sent something last, as far as it has been seen."""

    def __init__(self, idle: timedelta = IDLE, few: int = FEW) -> None:
        self._idle = idle
        self._few = few
        self._unused = min(UNUSED, idle)
        self._last: dict[str, dict[int, tuple[int, datetime]]] = {}

    def find_idle(
        self, device: str, usages: Mapping[int, Usage], among: set[int], now: datetime, wanted: int = 0
    ) -> set[int]:
        """Those of the classes `among` on a device that go, by what they have counted now: who has been idle long
        enough, and, as long as these are fewer than are `wanted` by others, who has been idle longest, be it since the
        last reading. They count as others when they are seen again."""
        before = self._last.get(device, {})
        latest: dict[int, tuple[int, datetime]] = {}
        for number in among & usages.keys():
            usage = usages[number]
            packets, since = before.get(number, (-1, now))
            waits = usage.packets == packets and not usage.queued_packets
            latest[number] = (usage.packets, since if waits else now)
        unused = self._unused if len(among) > self._few else self._idle
        quiet = [(since, number) for number, (_, since) in latest.items() if now - since >= self._unused]
        idle = {n for since, n in quiet if now - since >= (self._idle if latest[n][0] else unused)}
        others = sorted(each for each in quiet if each[1] not in idle)
        idle |= {number for _, number in islice(others, max(0, wanted - len(idle)))}
        self._last[device] = {number: each for number, each in latest.items() if number not in idle}
        return idle

    def line_up(self, device: str) -> list[int]:
        """The classes on a device that stay, those that have been idle longest first."""
        last = self._last.get(device, {})
        return sorted(last, key=lambda number: last[number][1])
