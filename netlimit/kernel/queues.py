"""The queues of this network namespace, read from the kernel: trees of ours, what they count, and roots of others."""

from __future__ import annotations

import fcntl
import hashlib
import socket
import struct
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from netlimit.errors import KernelError
from netlimit.kernel import clsact, egress, rtnetlink
from netlimit.kernel.names import read_names
from netlimit.kernel.rtnetlink import TcMessage
from netlimit.plain import decode_name
from netlimit.tree import (
    FIRST_CHILD,
    INGRESS_DEVICE,
    LAST_CHILD,
    REST,
    TOP,
    Leaf,
    QueueClass,
    Queues,
    SavedRoot,
    Tree,
    Usage,
    classid,
    format_handle,
    is_beside,
    is_ours,
    major,
)

FILTER = "nl-lead"
"""The name of the program that leads packets from a root HTB to the child HTBs, and past the cap."""
KIND, OPTIONS, STATISTICS, _SIZE_TABLE, _INVISIBLE = 1, 2, 7, 8, 10
_HTB_PARAMETERS, _HTB_RATE, _HTB_CEIL = 1, 6, 7
_TBF_PARAMETERS = 1
_FQ_CODEL_LIMIT = 2
_BPF_NAME = 7
_BASIC, _QUEUE, _PACKETS = 1, 3, 8
_TICK_NS = 64
_GET_FLAGS, _UP = 0x8913, 0x1
"""SIOCGIFFLAGS, IFF_UP."""
_INTERFACE = struct.Struct("=16sH22x")
"""struct ifreq: the name of a device, and its flags."""
_LINES = {"pfifo", "bfifo", "pfifo_head_drop", "pfifo_fast", "sfq", "skbprio"}
_BUCKET = Tree(0)
"""A TBF of ours, which is what earlier versions made of a cap: as good as another tree, so that one takes its place."""
_MANAGED = {"fq_codel", "codel", "fq", "fq_pie", "pie", "cake", "hhf"}
"""Kinds that take as options what they give as such. Not so red and choke, which keep their tables to themselves."""


class QueueReader:
    """Reads every tree of ours, and every root qdisc that somebody else has put on a device. What is as it was the last
    time is not taken apart again: of a thousand classes that takes ten times as long as to get them from the kernel."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[bytes, Tree]] = {}

    def read(self) -> Queues:
        """Read them now. Raises OSError."""
        by_device: defaultdict[int, list[bytes]] = defaultdict(list)
        for body in rtnetlink.read_bodies(rtnetlink.GET_QDISC, 0):
            by_device[rtnetlink.find_device(body)].append(rtnetlink.cut_statistics(body))
        names = read_names()
        known, self._known = self._known, {}
        foreign, trees = {}, {}
        for index, qdiscs in by_device.items():
            root = _find_root(qdiscs)
            if root is None or index not in names:
                continue
            if is_own_root(root):
                trees[names[index]] = self._read_tree(names[index], root, qdiscs, known)
            elif root.handle and names[index] != INGRESS_DEVICE:  # nobody else has any use for a qdisc there
                foreign[names[index]] = show_root(root)
        return Queues(trees, foreign)

    def _read_tree(
        self, device: str, root: TcMessage, qdiscs: list[bytes], known: Mapping[str, tuple[bytes, Tree]]
    ) -> Tree:
        if not _is_in_use(device):
            return Tree(major(root.handle))
        if kind(root) == "tbf":
            return _BUCKET
        filtered, held = is_filtered(root), _find_clsact(qdiscs)
        classes = list(map(rtnetlink.cut_statistics, rtnetlink.read_bodies(rtnetlink.GET_CLASS, root.device)))
        digest = hashlib.blake2b(b"".join((*qdiscs, *classes, bytes([filtered])))).digest()
        before, tree = known.get(device, (b"", Tree(0)))
        if digest != before:
            tree = _make_tree(root, _take_apart(qdiscs), _take_apart(classes), filtered)
        self._known[device] = digest, tree
        return _leave_out_unreleased(tree, device, root.device, held)


def _leave_out_unreleased(tree: Tree, device: str, index: int, held: TcMessage | None) -> Tree:
    """Where the program is missing that keeps what waits from being charged to sockets, the class of everything is as
    good as missing: that is written with it."""
    capped = classid(tree.handle, REST) in tree.classes
    if device == INGRESS_DEVICE or not egress.is_lacking(device, index, held, capped=capped):
        return tree
    top = classid(tree.handle, TOP)
    return replace(tree, classes={number: each for number, each in tree.classes.items() if number != top})


def _find_clsact(qdiscs: Iterable[bytes]) -> TcMessage | None:
    """The qdisc of a device, of the kind clsact or ingress, that holds what is asked before the root."""
    return next((rtnetlink.take_apart(each) for each in qdiscs if rtnetlink.find_parent(each) in clsact.HELD), None)


def _find_root(qdiscs: Iterable[bytes]) -> TcMessage | None:
    return next((rtnetlink.take_apart(each) for each in qdiscs if rtnetlink.find_parent(each) == rtnetlink.ROOT), None)


def _take_apart(bodies: Iterable[bytes]) -> list[TcMessage]:
    return [rtnetlink.take_apart(body) for body in bodies]


def _is_in_use(device: str) -> bool:
    """Whether packets can go through the queues of a device. What is sent to the device for what ends here is lost
    while that is down: its tree is then as good as empty, so that writing it sets the device up, and the end of ours
    takes it away. Other devices are down because their owner wants them so."""
    return device != INGRESS_DEVICE or is_up(device)


def is_up(device: str) -> bool:
    """Whether a device is set up (netdevice(7)). Raises OSError if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock, _GET_FLAGS, _INTERFACE.pack(device.encode(), 0))
    return bool(_INTERFACE.unpack(answer)[1] & _UP)


def read_tree(index: int) -> Tree | None:
    """Our tree on one device."""
    root = read_root(index)
    if root is None or not is_own_root(root):
        return None
    return _read_tree(root, _read_qdiscs(index))


def read_usages(device: str) -> dict[int, Usage]:
    """What the classes of a device have counted; nothing for one without a tree of ours. What is dropped and what waits
    is counted in leaves only, and added up here for the classes above them."""
    index = find_index(device)
    root = read_root(index) if index else None
    if index is None or root is None or not is_own_root(root):
        return {}
    qdiscs = _read_qdiscs(index)
    # An fq_codel drops packets that its class has taken in.
    lost = {qdisc.parent: _read_usage(qdisc).dropped for qdisc in qdiscs}
    classes = _read_classes(root, qdiscs)
    usages = {each.handle: _read_usage(each) for each in classes}
    for number, dropped in lost.items():
        if number in usages and usages[number].dropped < dropped:
            usages[number] = usages[number]._replace(dropped=dropped)
    return add_up(usages, _find_above(classes, _find_children(qdiscs)))


def save_root(device: str) -> SavedRoot:
    """Read a foreign root qdisc so that it can be put back. Raises KernelError for one that cannot."""
    index = find_index(device)
    root = read_root(index) if index else None
    if index is None or root is None or not root.handle or is_own_root(root):
        raise KernelError(f"save the root qdisc of {device}", "there is none but the kernel's own, or netlimit's")
    reason = _find_loss(root, index)
    if reason:
        advice = "Remove it, or leave this device to whoever put it there."
        raise KernelError(f"save the root qdisc of {device}", f"{show_root(root)} {reason}. {advice}")
    return SavedRoot(major(root.handle), kind(root), root.attributes.get(OPTIONS, b"").hex())


def read_root(index: int) -> TcMessage | None:
    """The root qdisc of a device."""
    return rtnetlink.read_one(rtnetlink.GET_QDISC, index, rtnetlink.ROOT)


def find_index(device: str) -> int | None:
    """The index of a device, None if there is no such device."""
    try:
        return socket.if_nametoindex(device)
    except OSError:
        return None


def has_class(index: int, number: int) -> bool:
    """Whether a device has a class, by its classid."""
    try:
        return rtnetlink.read_one(rtnetlink.GET_CLASS, index, 0, number) is not None
    except OSError:  # there is no such qdisc
        return False


def has_own_root(index: int) -> bool:
    """Whether a device has a tree of ours."""
    root = read_root(index)
    return root is not None and is_own_root(root)


def find_charged() -> dict[str, str]:
    """The devices with a tree of ours where what waits is charged to the sockets that sent it, and why."""
    names, found = read_names(), {}
    for root in rtnetlink.read_all(rtnetlink.GET_QDISC, 0, hanging_on=(rtnetlink.ROOT,)):
        name = names.get(root.device, INGRESS_DEVICE)
        if name != INGRESS_DEVICE and is_own_root(root) and (why := egress.explain_missing(name, root.device)):
            found[name] = why
    return found


def is_own_root(root: TcMessage) -> bool:
    """Whether a root qdisc is one of ours."""
    return is_ours(major(root.handle)) and kind(root) in ("htb", "tbf")


def is_filtered(root: TcMessage) -> bool:
    """Whether the filter is there that leads packets from a root HTB to its child HTBs."""
    filters = rtnetlink.read_all(rtnetlink.GET_FILTER, root.device, root.handle)
    return any(_text(rtnetlink.decode(each.attributes.get(OPTIONS, b"")).get(_BPF_NAME)) == FILTER for each in filters)


def kind(message: TcMessage) -> str:
    """The kind of a qdisc, class or filter."""
    return _text(message.attributes.get(KIND))


def show_root(root: TcMessage) -> str:
    """As tc says it: `htb 1:`."""
    return f"{kind(root)} {format_handle(major(root.handle))}"


# -- trees ----------------------------------------------------------------------------------------------------------


def _read_tree(root: TcMessage, qdiscs: Sequence[TcMessage]) -> Tree:
    if kind(root) == "tbf":
        return _BUCKET
    return _make_tree(root, qdiscs, rtnetlink.read_all(rtnetlink.GET_CLASS, root.device), is_filtered(root))


def _make_tree(root: TcMessage, qdiscs: Sequence[TcMessage], classes: Iterable[TcMessage], filtered: bool) -> Tree:
    leaves = {qdisc.parent: _read_leaf(qdisc) for qdisc in qdiscs}
    found = {each.handle: _read_class(each, leaves) for each in _own_classes(root, qdiscs, classes)}
    if filtered:
        return Tree(major(root.handle), found, _find_children(qdiscs))
    # What no packet reaches is not there: then the filter is written again with it.
    return Tree(major(root.handle), {number: each for number, each in found.items() if not is_beside(number)})


def _find_children(qdiscs: Iterable[TcMessage]) -> dict[int, int]:
    """The class on which each child HTB hangs."""
    return {
        major(qdisc.handle): qdisc.parent
        for qdisc in qdiscs
        if FIRST_CHILD <= major(qdisc.handle) <= LAST_CHILD and kind(qdisc) == "htb"
    }


def _read_qdiscs(index: int) -> list[TcMessage]:
    return [each for each in rtnetlink.read_all(rtnetlink.GET_QDISC, index) if each.device == index]


def _read_classes(root: TcMessage, qdiscs: Iterable[TcMessage]) -> list[TcMessage]:
    """The classes of a root HTB and of its child HTBs."""
    return _own_classes(root, qdiscs, rtnetlink.read_all(rtnetlink.GET_CLASS, root.device))


def _own_classes(root: TcMessage, qdiscs: Iterable[TcMessage], classes: Iterable[TcMessage]) -> list[TcMessage]:
    """Those of some classes that are a root HTB's or its child HTBs', and nothing else that may hang there."""
    ours = {major(root.handle), *_find_children(qdiscs)}
    return [each for each in classes if major(each.handle) in ours]


def _read_class(message: TcMessage, leaves: Mapping[int, Leaf | None]) -> QueueClass:
    """struct tc_htb_opt (linux/pkt_sched.h); rates that do not fit into 32 bits stand beside it."""
    options = rtnetlink.decode(message.attributes[OPTIONS])
    rate, ceil, buffer, cbuffer, quantum = struct.unpack_from("=8xI8xIIII", options[_HTB_PARAMETERS])
    rate = _number(options.get(_HTB_RATE), rate)
    ceil = _number(options.get(_HTB_CEIL), ceil)
    parent = message.handle & 0xFFFF0000 if message.parent == rtnetlink.ROOT else message.parent
    bursts = _count_bytes(buffer, rate), _count_bytes(cbuffer, ceil)
    return QueueClass(parent, rate, ceil, *bursts, quantum, leaves.get(message.handle))


def _read_leaf(message: TcMessage) -> Leaf | None:
    """The queue of a class; None for a kind that is not one of ours."""
    options = message.attributes.get(OPTIONS, b"")
    if kind(message) == "bfifo":
        return Leaf("bfifo", _number(options, 0))
    if kind(message) == "pfifo":
        return Leaf("pfifo", _number(options, 0))
    if kind(message) == "fq_codel":
        return Leaf("fq_codel", _number(rtnetlink.decode(options).get(_FQ_CODEL_LIMIT), 0))
    return None


def _count_bytes(ticks: int, rate: int) -> int:
    """What is sent in a time."""
    return round(ticks * _TICK_NS * rate / 10**9)


# -- statistics -----------------------------------------------------------------------------------------------------


def _read_usage(message: TcMessage) -> Usage:
    """struct gnet_stats_basic and gnet_stats_queue (linux/gen_stats.h)."""
    statistics = rtnetlink.decode(message.attributes.get(STATISTICS, b""))
    count, packets = struct.unpack_from("=QI", statistics[_BASIC])
    queued, waiting, dropped, _, overlimits = struct.unpack_from("=IIIII", statistics[_QUEUE])
    return Usage(_number(statistics.get(_PACKETS), packets), count, dropped, overlimits, queued, waiting)


def add_up(usages: Mapping[int, Usage], above: Mapping[int, int]) -> dict[int, Usage]:
    """Give classes that hold others the sum of what was dropped and what waits in all leaves below them. `above` is
    the class above each, 0 for none."""
    holders = set(above.values())
    direct: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    for number, usage in usages.items():
        if number not in holders:
            _add(direct[above[number]], (usage.dropped, usage.queued_packets, usage.queued_bytes))
    sums: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    for holder, counts in direct.items():
        while holder:
            _add(sums[holder], counts)
            holder = above.get(holder, 0)
    return {number: _put(usage, sums[number]) if number in holders else usage for number, usage in usages.items()}


def _add(sums: list[int], counts: Sequence[int]) -> None:
    for place, count in enumerate(counts):
        sums[place] += count


def _put(usage: Usage, counts: Sequence[int]) -> Usage:
    dropped, packets, size = counts
    return usage._replace(dropped=dropped, queued_packets=packets, queued_bytes=size)


def _find_above(classes: Iterable[TcMessage], children: Mapping[int, int]) -> dict[int, int]:
    """The class above each; above the top of a child HTB it is the class on which that hangs. 0: there is none."""
    return {
        each.handle: children.get(major(each.handle), 0) if each.parent == rtnetlink.ROOT else each.parent
        for each in classes
    }


# -- what can be put back -------------------------------------------------------------------------------------------


def _find_loss(root: TcMessage, index: int) -> str | None:
    """What would be lost of a root qdisc, None if nothing."""
    inner = [each for each in _read_qdiscs(index) if major(each.parent) == major(root.handle)]
    if kind(root) not in {*_LINES, *_MANAGED, "tbf"}:
        return "keeps more than can be read and put back"
    if inner:
        return f"holds another qdisc ({kind(inner[0])}), which would be lost"
    if _SIZE_TABLE in root.attributes:
        return "has a size table (stab), which would be lost"
    if kind(root) == "tbf" and not _has_own_queue(root, index):
        return "holds a queue that is not its own, which would be lost"
    if rtnetlink.read_all(rtnetlink.GET_FILTER, index, root.handle):
        return "has filters, which would be lost"
    return None


def _has_own_queue(root: TcMessage, index: int) -> bool:
    """Whether the bfifo in a TBF is the one that a TBF makes, with a limit equal to its own."""
    shown = rtnetlink.encode(_INVISIBLE, b"")
    qdiscs = rtnetlink.read_all(rtnetlink.GET_QDISC, index, extra=shown)
    queues = [each for each in qdiscs if each.device == index and major(each.parent) == major(root.handle)]
    options = rtnetlink.decode(root.attributes[OPTIONS])
    (limit,) = struct.unpack_from("=24xI", options[_TBF_PARAMETERS])  # struct tc_tbf_qopt (linux/pkt_sched.h)
    return [(kind(each), _number(each.attributes.get(OPTIONS), 0)) for each in queues] == [("bfifo", limit)]


def _number(value: bytes | None, otherwise: int) -> int:
    """The bytes of an attribute as a number."""
    return int.from_bytes(value, sys.byteorder) if value else otherwise


def _text(value: bytes | None) -> str:
    return decode_name(value or b"")
