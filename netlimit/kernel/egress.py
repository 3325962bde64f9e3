"""Programs on the egress of devices that have a tree of ours: what waits there stays charged to no socket.

A packet that this host sends is charged to the socket it was sent by until it has left the device. TCP needs that. A
socket of UDP, ICMP or raw IP serves many far ends: once it is full of packets that wait in the class of one of them,
nobody else gets an answer either. So a copy waits in the place of the packet. It is of no socket, and the packet goes.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress

from netlimit.errors import KernelError
from netlimit.kernel import bpf, clsact, rtnetlink
from netlimit.kernel.assembly import Assembly
from netlimit.kernel.rtnetlink import TcMessage, decode, encode
from netlimit.kernel.tools import is_shortage
from netlimit.plain import decode_name
from netlimit.tree import BESIDE_HANDLE, FIRST_CHILD, LAST_CHILD, LAST_ROOT, REST

log = logging.getLogger(__name__)

PINNED = "/run/netlimit/bpf/nl_out"
"""Where the program is pinned for a controller that may not load it."""
FILTER = "nl-out"
_PROGRAM = "nl_out"
_PRIORITY = 1
"""Before all others: they are asked about the copy alone."""
_HANDLE = int.from_bytes(b"nl", "big")
"""None that others give theirs (1), who put it in the place of the one that has it."""
_INFO = _PRIORITY << 16 | socket.htons(3)
_KIND, _OPTIONS = 1, 2
_BPF_CLASSID, _BPF_FD, _BPF_NAME, _BPF_FLAGS, _BPF_FLAG_DIRECT = 3, 6, 7, 8, 1
_GET_HARDWARE = 0x8927
"""SIOCGIFHWADDR."""
_INTERFACE = struct.Struct("=16sH22x")
_HEADERS_BEFORE = (778, 823)
"""ARPHRD_IPGRE and ARPHRD_IP6GRE: the outer header may stand before a packet here already, and a copy that is sent on
loses it."""
_refused: set[int] = set()
"""The devices (by index) on which this host cannot have the program: it is no drift there that it is missing."""

_ARGUMENT, _PACKET, _ANSWER = 1, 6, 0
_PLACE_PRIORITY, _PLACE_DEVICE, _PLACE_CLASS, _PLACE_SOCKET = 32, 40, 72, 168
"""Of struct __sk_buff (linux/bpf.h): priority, ifindex, tc_classid, sk."""
_FAMILY, _TYPE, _PORT, _FAR_PORT = 4, 8, 44, 48
"""Of struct bpf_sock."""
_CLONE_REDIRECT, _FULL_SOCKET = 13, 95
_GO_ON, _LOST, _TAKEN = -1, 2, 4
"""TC_ACT_UNSPEC, TC_ACT_SHOT, TC_ACT_STOLEN."""
_DROPPED = 1
"""NET_XMIT_DROP."""
_CLOCKS = (319, 320)
"""PTP: it stops where the kernel does not tell its socket when a packet has left."""
_ASKED_CLOCKS = (123, *_CLOCKS)
"""The same of NTP's clients. Its servers do without, and their one socket answers many."""


def attach(device: str, index: int, *, capped: bool) -> None:
    """Put the program on a device that has, or is about to have, a tree of ours, `capped` where that has a cap. Where
    it cannot be, shaping goes on without it, and an operator is told."""
    held = rtnetlink.read_one(rtnetlink.GET_QDISC, index, clsact.CLSACT)
    if held is not None and _is_in_place(index, capped=capped):
        return
    reason = find_obstacle(device, index, held)
    if reason is None:
        reason = _try_write(index, held is None, capped=capped)
    if reason is not None:
        log.warning(
            "What is shaped to one host by %s can fill the sockets of services of this host: %s", device, reason
        )


def _try_write(index: int, first: bool, *, capped: bool) -> str | None:
    """Write the filter; why it cannot be. What may be had at another moment counts as missing until then."""
    try:
        _write(index, first, capped=capped)
    except (OSError, KernelError) as error:
        if not is_shortage(error):
            _refused.add(index)
        return error.reason if isinstance(error, KernelError) else f"{error.strerror}."
    _refused.discard(index)
    return None


def is_lacking(device: str, index: int, held: TcMessage | None, *, capped: bool) -> bool:
    """Whether the program is not on a device as it should be, and could be. `held` is its clsact, if it has any."""
    if index in _refused or (held is not None and _is_in_place(index, capped=capped)):
        return False
    return find_obstacle(device, index, held) is None


def find_obstacle(device: str, index: int, held: TcMessage | None) -> str | None:
    """Why a device can have no program on its egress: a sentence; None if it can."""
    if _read_hardware(device) in _HEADERS_BEFORE:
        return "a device of GRE is left out."
    if held is None:
        return None
    kind = decode_name(held.attributes[_KIND])
    if kind != "clsact":
        return (
            f"it has a qdisc of the kind {kind}, with which there can be no clsact (tc qdisc del dev {device} {kind})."
        )
    if clsact.EGRESS_BLOCK in held.attributes:
        return "its egress has a filter block that is shared between devices, on which netlimit puts nothing."
    for each in _read(index):
        if each.info >> 16 == _PRIORITY and (each.info != _INFO or decode_name(each.attributes[_KIND]) != "bpf"):
            return (
                f"a filter of somebody else (pref {_PRIORITY}) has the first place on its egress. With a higher pref "
                f"(tc filter show dev {device} egress) both would hold."
            )
    return None


def explain_missing(device: str, index: int) -> str | None:
    """Why a device has no program: a sentence; None if it has it."""
    held = rtnetlink.read_one(rtnetlink.GET_QDISC, index, clsact.CLSACT)
    if held is not None and _find(index) is not None:
        return None
    return find_obstacle(device, index, held) or "the program is missing: the controller's log tells why."


def find_devices() -> set[int]:
    """The devices that have our program on their egress, by their indices."""
    return {index for index in clsact.find_devices() if _find(index) is not None}


def withdraw(index: int) -> None:
    """Take the program from a device, and its clsact, if nothing else is there."""
    found = _find(index)
    if found is not None:
        with clsact.unless_gone():
            ours = TcMessage(index, found.handle, clsact.EGRESS, found.info, {_KIND: b"bpf\0"})
            rtnetlink.write_one(clsact.DELETE_FILTER, 0, ours)
        clsact.remove_unused(index)


def pin() -> None:
    """Leave the program where a controller that has no CAP_BPF finds it; as root. Raises KernelError, OSError."""
    program = bpf.load_program(write_program(), _PROGRAM)
    try:
        bpf.pin(program, PINNED)
    finally:
        os.close(program)


def _write(index: int, first: bool, *, capped: bool) -> None:
    program = _open()
    try:
        if first:
            with suppress(FileExistsError):  # somebody has come first
                clsact.add(index)
        options = encode(_BPF_FD, program.to_bytes(4, sys.byteorder))
        options += encode(_BPF_NAME, f"{FILTER}\0".encode())
        options += encode(_BPF_CLASSID, _choose_class(capped).to_bytes(4, sys.byteorder))
        options += encode(_BPF_FLAGS, _BPF_FLAG_DIRECT.to_bytes(4, sys.byteorder))
        wanted = TcMessage(index, _HANDLE, clsact.EGRESS, _INFO, {_KIND: b"bpf\0", _OPTIONS: options})
        rtnetlink.write_one(rtnetlink.NEW_FILTER, rtnetlink.CREATE | rtnetlink.REPLACE, wanted)
    finally:
        os.close(program)


def _open() -> int:
    """The program: loaded, or the one that root has pinned for those who may not load any."""
    try:
        return bpf.load_program(write_program(), _PROGRAM)
    except KernelError:
        with suppress(OSError):
            return bpf.open_pinned(PINNED)
        raise


def _choose_class(capped: bool) -> int:
    """What the program finds as its class. The kernel hands it on only as far as it is a minor."""
    return REST if capped else 0


def _is_in_place(index: int, *, capped: bool) -> bool:
    found = _find(index)
    return found is not None and _read_class(found) == _choose_class(capped)


def _read_class(found: TcMessage) -> int:
    value = decode(found.attributes.get(_OPTIONS, b"")).get(_BPF_CLASSID, b"")
    return int.from_bytes(value, sys.byteorder)


def _find(index: int) -> TcMessage | None:
    """Our filter on a device."""
    return next(filter(_is_own, _read(index)), None)


def _is_own(each: TcMessage) -> bool:
    name = decode(each.attributes.get(_OPTIONS, b"")).get(_BPF_NAME, b"")
    return each.info == _INFO and each.handle == _HANDLE and decode_name(name) == FILTER


def _read(index: int) -> list[TcMessage]:
    """The filters on the egress that have a number, as those that hold something do."""
    return [each for each in rtnetlink.read_all(rtnetlink.GET_FILTER, index, clsact.EGRESS) if each.handle]


def _read_hardware(device: str) -> int:
    """The kind of link (ARPHRD_…), 0 for a device that has gone."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, suppress(OSError):
        answer = fcntl.ioctl(sock, _GET_HARDWARE, _INTERFACE.pack(device.encode(), 0))
        kind: int = _INTERFACE.unpack(answer)[1]
        return kind
    return 0


def write_program() -> bytes:
    """The program. It copies what a socket for datagrams or raw IP sends to a class of ours; with a class of its own
    (TCA_BPF_CLASSID) whatever such a socket sends, for where there is a cap, what nothing claims waits as well. The
    copy comes by once more, belongs to no socket, and goes on. What the queue does not take is told to the sender as
    ever; where there is no room for a copy, the packet itself waits.

    It goes by the socket, not by the packet: what TCP sends through a tunnel of UDP is TCP's. The kernel's own sockets
    (ICMP, and TCP without a connection) are raw ones. Packet sockets (AF_PACKET) are not looked at: a ring of theirs
    would be written to again while the copy waits.
    """
    text = Assembly()
    text.copy(_PACKET, _ARGUMENT)
    text.load(1, _PACKET, _PLACE_SOCKET, 8)
    text.jump_if_null(1, "go on")
    text.call(_FULL_SOCKET)
    text.jump_if_null(_ANSWER, "go on")
    _compare(text, _TYPE, (socket.SOCK_DGRAM, socket.SOCK_RAW))
    _compare(text, _FAMILY, (socket.AF_INET, socket.AF_INET6))
    text.load(1, _ANSWER, _PORT)
    for port in _CLOCKS:
        text.jump_if(1, "==", port, "go on")
    text.load(1, _ANSWER, _FAR_PORT, 2)
    for port in _ASKED_CLOCKS:
        text.jump_if(1, "==", socket.htons(port), "go on")
    text.load(1, _PACKET, _PLACE_CLASS)
    text.jump_if(1, "!=", 0, "copy")
    text.load(1, _PACKET, _PLACE_PRIORITY)
    text.change(1, ">>", 16)
    text.jump_if(1, "<", BESIDE_HANDLE, "go on")
    text.jump_if(1, "<=", LAST_ROOT, "copy")
    text.jump_if(1, "<", FIRST_CHILD, "go on")
    text.jump_if(1, "<=", LAST_CHILD, "copy")
    text.place("go on")
    text.leave(_GO_ON)
    text.place("copy")
    text.copy(1, _PACKET)
    text.load(2, _PACKET, _PLACE_DEVICE)
    text.set(3, 0)
    text.call(_CLONE_REDIRECT)
    text.jump_if(_ANSWER, "signed <", 0, "go on")
    text.jump_if(_ANSWER, "==", _DROPPED, "lost")
    text.leave(_TAKEN)
    text.place("lost")
    text.leave(_LOST)
    return text.finish()


def _compare(text: Assembly, place: int, values: Iterable[int]) -> None:
    """Go on with what comes next if the socket has one of the values."""
    matched = text.new_label()
    text.load(1, _ANSWER, place)
    for value in values:
        text.jump_if(1, "==", value, matched)
    text.jump("go on")
    text.place(matched)
