"""The qdiscs that hold what is asked about packets that come in, and before the root qdisc about those that leave."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from netlimit.kernel import rtnetlink
from netlimit.kernel.rtnetlink import TcMessage
from netlimit.plain import decode_name

CLSACT, INGRESS, EGRESS = 0xFFFFFFF1, 0xFFFFFFF2, 0xFFFFFFF3
"""What such a qdisc hangs on, and what the filters of its two sides do."""
HELD = (CLSACT,)
"""What qdiscs of the kinds clsact and ingress hang on."""
INGRESS_BLOCK, EGRESS_BLOCK = 13, 14
DELETE_QDISC, DELETE_FILTER = 37, 45
_KIND = 1


def add(index: int) -> None:
    """Give a device a clsact. Raises FileExistsError where it has one already, or an "ingress", and other OSErrors."""
    wanted = TcMessage(index, CLSACT & 0xFFFF0000, CLSACT, 0, {_KIND: b"clsact\0"})
    rtnetlink.write_one(rtnetlink.NEW_QDISC, rtnetlink.CREATE | rtnetlink.EXCLUSIVE, wanted)


def read_all() -> list[TcMessage]:
    """Those of every device, of both kinds. Raises OSError."""
    return rtnetlink.read_all(rtnetlink.GET_QDISC, 0, hanging_on=HELD)


def find_devices() -> set[int]:
    """The devices that have a clsact."""
    return {each.device for each in read_all() if decode_name(each.attributes[_KIND]) == "clsact"}


def find_shared(qdiscs: Iterable[TcMessage]) -> set[int]:
    """The devices of which a side has a block that is shared."""
    return {qdisc.device for qdisc in qdiscs if qdisc.attributes.keys() & {INGRESS_BLOCK, EGRESS_BLOCK}}


def remove_unused(index: int) -> None:
    """Take away the clsact of a device if it has no filters. It may be that somebody else has made it, but without
    filters it does nothing, and whoever wants one adds it as we do. One with a block that is shared is somebody else's:
    filters may come into the block elsewhere."""
    if index in find_shared(read_all()) or index not in find_devices():
        return
    if not any(_has_filters(index, side) for side in (INGRESS, EGRESS)):
        with unless_gone():
            rtnetlink.write_one(DELETE_QDISC, 0, TcMessage(index, 0, CLSACT, 0, {}))


def _has_filters(index: int, side: int) -> bool:
    return any(True for _ in rtnetlink.read_all(rtnetlink.GET_FILTER, index, side))


@contextmanager
def unless_gone() -> Iterator[None]:
    """A device may go at any time, and all that hangs on it."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENODEV):
            raise
