"""How much may wait for the hosts of a device together.

A queue for each host as long as it would be alone adds up: a flood from thousands of addresses fills thousands. When
it has ended, what waits takes gigabytes of memory, and for minutes its part of the line. So the hosts that lie in one
class share what it sends in LONGEST_SHARED seconds, and all hosts of a device what that sends. Few send at once, as a
rule, and a FEW have each what one has alone.

What a host gets is by their number, rounded up to a power of two, so that most newcomers change nobody's queue but make
their own. It is rounded down once there are less than a quarter: who comes and goes at the edge has nobody resized.
What it has been rounded to is kept with the other numbers: whoever compiles the same rules finds the same sizes.
"""

from __future__ import annotations

from collections.abc import Mapping

from netlimit.numbers import Numbers

FEW = 8
"""So many hosts have each what one has alone."""
LONGEST_SHARED = 2
"""Seconds of what the class above them sends that may wait for all hosts together."""
MOST_SHARED = 32_000_000
"""Bytes that may wait for all hosts together, however fast the line is. The smallest packets take some twenty times as
much memory as they are long."""
_KEPT = "tc backlog"
_MOST_ROUNDED = 1 << 16
_WHOLE = 0
"""Stands for the device."""


class Backlog:
    """What the hosts of one device share. The numbers that they were rounded to are kept in `numbers`."""

    def __init__(self, numbers: Numbers, device: str) -> None:
        self._numbers = numbers
        self._device = device
        self._rounded: set[int] = set()

    def share(self, crowds: Mapping[int, tuple[int, int]], line: int) -> dict[int, int | None]:
        """Bytes that may wait for each host, by the class they lie in; None: as many as if it were alone. `crowds` has
        for each class how many hosts it has and what it sends (bytes a second), `line` is what the device sends."""
        whole = self._part(_WHOLE, sum(hosts for hosts, _ in crowds.values()), line)
        shares: dict[int, int | None] = {}
        for above, (hosts, speed) in crowds.items():
            parts = [part for part in (whole, self._part(above, hosts, speed)) if part is not None]
            shares[above] = min(parts, default=None)
        for above in self._rounded - {*crowds, _WHOLE}:
            self._part(above, 0, line)
        return shares

    def _part(self, above: int, hosts: int, speed: int) -> int | None:
        rounded = self._round(above, hosts)
        return min(LONGEST_SHARED * speed, MOST_SHARED) // rounded if rounded > FEW else None

    def _round(self, above: int, hosts: int) -> int:
        """The number of hosts that counts in a class."""
        group = f"{_KEPT} {self._device} {above:x}"
        kept = self._numbers.kept.get((group, ""), 0)
        known = kept if 0 < kept <= _MOST_ROUNDED and round_up(kept) == kept else 0
        least = round_up(hosts)
        rounded = known if least <= known < 4 * least else least if least > known else 2 * least
        if rounded > FEW:
            self._numbers.keep((group, ""), rounded)
            self._rounded.add(above)
        else:
            self._numbers.release(group, "")
            self._rounded.discard(above)
        return rounded


def round_up(number: int) -> int:
    """The power of two that is no less; 1 for nothing."""
    return 1 << max(number - 1, 0).bit_length()
