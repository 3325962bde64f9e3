"""What a rate takes to be held by HTB: bursts, quanta, and how much may wait.

A bucket must hold what its rate sends in one clock tick and a packet more, else a timer that comes late loses tokens
for good. More would only let a host exceed its rate for longer.
"""

from __future__ import annotations

from functools import lru_cache

from netlimit.errors import RuleError
from netlimit.rates import Rate, format_rate
from netlimit.tree import LINE, MANAGEMENT, NEIGHBOURS, ROUTERS, VISITORS, Leaf, LeafKind, QueueClass

MTU = 1514
"""Bytes of a full Ethernet frame."""
SLOWEST = 1000
"""Bytes a second. HTB forgets what a packet owes after a minute (HTB's mbuffer): at less than this a merged packet of
64 kB would owe more."""
LONGEST_QUEUE = 0.2
"""Seconds of the rate that may wait in a class."""
LONGEST_BURST = 60
"""Seconds of the rate: HTB saves up no more than a minute at once, and more than 274 s tc would cut off unseen."""
LARGEST_QUANTUM = 60_000
LEAST_BESIDE, PART_BESIDE = 125_000, 10
"""What management ports answer to those who are safe has a tenth of the device's cap beside it, and at least 1 Mbit/s;
each class of what else stands beside it a quarter of that."""
PART_SERVICES = 40
"""What else this host sends to those who are safe is guaranteed this part of the device's cap."""
_LARGEST_BURST = 2**32 - 1
_FEWEST_BYTES = 80_000
"""A packet merged by GSO or GRO: 64 kB, and the headers of all that it will be cut into, which the kernel counts. One
that never fits into a queue would be lost each time."""
_FEWEST_PACKETS, _MOST_PACKETS = 1024, 10_000
"""An fq_codel keeps delays short by itself, and needs room for many flows."""
_FEWEST_SHARED = 2
"""Packets that may wait of a host, however many hosts there are: while one is sent, another is there."""


def check_rate(field: str, rate: Rate) -> None:
    """Raise RuleError for a rate that tc cannot hold."""
    if rate.per_second > LINE:
        raise RuleError(
            field, f"No queue can hold {rate.text}: tc counts in nanoseconds. The most that works is {_show(LINE)}."
        )
    if rate.per_second < SLOWEST:
        raise RuleError(field, f"No queue can hold {rate.text}; the least that works is {_show(SLOWEST)}.")


def check_burst(rate: Rate, burst: int) -> None:
    """Raise RuleError for a burst (bytes) that tc cannot hold at a rate."""
    longest = min(int(rate.per_second * LONGEST_BURST), _LARGEST_BURST)
    if burst > longest:
        raise RuleError(
            "burst",
            f"tc cannot hold a burst of {burst} bytes at {rate.text}: it saves up no more than {LONGEST_BURST} s of "
            f"the rate. The most that works is {longest} bytes.",
        )


def bytes_per_second(rate: Rate) -> int:
    """A rate as tc keeps it: whole bytes a second."""
    return int(rate.per_second)


@lru_cache(maxsize=4096)
def size_class(
    parent: int,
    rate: int,
    ceil: int,
    hz: int,
    burst: int | None = None,
    leaf: LeafKind | None = None,
    share: int | None = None,
) -> QueueClass:
    """A class for a rate guaranteed and one borrowed (bytes a second), on a host with `hz` clock ticks a second.

    `burst` (bytes) raises the bucket as far as tc can hold it, and never lowers it. `leaf` is the kind of queue it has;
    None for an inner class. `share` is as for `size_leaf`.
    """
    bucket, lent = (_size_burst(each, hz, burst) for each in (rate, ceil))
    quantum = min(max(rate // hz, MTU), LARGEST_QUANTUM)
    return QueueClass(parent, rate, ceil, bucket, lent, quantum, size_leaf(leaf, ceil, share) if leaf else None)


def size_leaf(kind: LeafKind, ceil: int, share: int | None = None) -> Leaf:
    """A queue for a rate in bytes a second: an fq_codel, or a single line. `share` is how many bytes may wait in it
    where many queues share what may (None: as many as if it were alone).

    What waits in a single line is counted in bytes: a number of packets that is right for most holds forty times as
    long when they come merged. But where there is less room than a merged packet takes, packets are counted, so that
    it fits in."""
    waiting = min(int(ceil * LONGEST_QUEUE), _MOST_PACKETS * MTU)
    if kind == "fq_codel":
        alone = max(waiting // MTU, _FEWEST_PACKETS)
        return Leaf(kind, alone if share is None else min(alone, max(share // MTU, _FEWEST_SHARED)))
    alone = max(waiting, _FEWEST_BYTES)
    if share is None or share >= _FEWEST_BYTES:
        return Leaf("bfifo", alone if share is None else min(alone, share))
    return Leaf("pfifo", max(share // MTU, _FEWEST_SHARED))


def size_beside(root: int, cap: int, hz: int, leaf: LeafKind) -> dict[int, QueueClass]:
    """The classes beside the cap (bytes a second) of a device, by minor; `root` is the root HTB. Each has its rate for
    certain, whatever the cap has left, and no more."""
    rate = max(cap // PART_BESIDE, LEAST_BESIDE)
    rates = {MANAGEMENT: rate} | dict.fromkeys((NEIGHBOURS, VISITORS, ROUTERS), rate // 4)
    return {minor: size_class(root, each, each, hz, leaf=leaf) for minor, each in rates.items()}


def size_services(top: int, cap: int, hz: int, leaf: LeafKind) -> QueueClass:
    """The class under the cap (bytes a second) of a device for what else this host sends to those who are safe; `top`
    is the class of the cap. It has a little for certain, and borrows like all others."""
    return size_class(top, max(cap // PART_SERVICES, SLOWEST), cap, hz, leaf=leaf)


def _size_burst(rate: int, hz: int, burst: int | None) -> int:
    # A class may be given less than its rule asks for.
    return max(rate // hz + 2 * MTU, min(burst or 0, rate * LONGEST_BURST, _LARGEST_BURST))


def _show(rate: int) -> str:
    return format_rate(8 * rate, "bits", 1)
