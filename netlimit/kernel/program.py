"""The program on the ingress of a device, as instructions, and how its maps are laid out.

A packet that is not for this host leaves it after one look at its destination: those are the most. For one that is,
the lanes are asked in their order; the first that has an entry decides. What has a socket here then ends here; what
has none may be the reply to a connection that this host has put its own address to (SNAT), and is forwarded.

The filter that holds the program redirects a packet to the IFB device if the program says "matched" (-1). It is not the
program that redirects (bpf_redirect): what comes to an IFB device that way is lost on kernels from before 2023.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from hashlib import sha256
from ipaddress import ip_address

from netlimit.ingress import Ingress, IngressLane
from netlimit.kernel.assembly import STACK, Assembly
from netlimit.kernel.headers import (
    BYTES,
    ENDS,
    FOR_SOMEBODY_ELSE,
    HEADER,
    ICMP,
    NO_PORT,
    NO_PROTOCOL,
    PACKET,
    PORT,
    PROTOCOLS,
    SOCKET,
    SOURCE_PORT,
    TRANSPORT,
    UNTOUCHED,
    leave_to_vlan,
    put_aside_tagged,
    read_ipv4,
    read_ipv6,
)
from netlimit.kernel.maps import Map

KEY = struct.Struct("=I4s16s")
"""Bits that count, those of the tag among them; the lane's tag; the address, an IPv4 one as ::ffff:a.b.c.d."""
VALUE = struct.Struct("=IIIIQQ")
"""Class (skb->priority), mark, the mark's mask, nothing, packets, IP bytes."""
SEEN_KEY = struct.Struct("=4s16s")
SEEN_VALUE = struct.Struct("=I")
TAG_BITS = 32
MAPPED = bytes(10) + b"\xff\xff"
MAPPED_BITS = 8 * len(MAPPED)

_NO_MATCH, _MATCH = 0, -1
_LOOKUP, _UPDATE, _CHECK_MTU = 1, 2, 163
_UDP_SOCKET, _RELEASE_SOCKET, _TCP_SOCKET = 85, 86, 99
_THIS_NAMESPACE = 0xFFFFFFFF
_STATE, _LISTENS = 72, 10
"""Where struct bpf_sock has the state (linux/bpf.h), and that of a socket of TCP that listens (TCP_LISTEN): neither TCP
nor UDP has that number as a protocol."""
_TYPE, _PROTOCOL, _PRIORITY, _DEVICE, _TC_INDEX = 4, 16, 32, 40, 44
"""Helpers of the kernel, and places in struct __sk_buff (linux/bpf.h)."""
_FOUND_BY, _FOUND, _CLASS = 7, 8, 9
"""Registers once a lane has decided: the address with its tag, the entry, its class."""
_SRC, _DST, _WORD = -96, -120, -128
"""Places in the stack below those of `headers`: a key for each side, and a number for the kernel."""
_KEYS: Mapping[str, int] = {"src": _SRC, "dst": _DST}
_TAG_AT, _ADDRESS_AT = 4, 8
_MARK_AT, _PACKETS_AT = 4, 16
"""Places in a key, and in a value."""


def tag(lane: str) -> bytes:
    """What tells the entries of a lane from those of others."""
    return sha256(lane.encode()).digest()[:4]


def write_program(ingress: Ingress, target: int, entries: Map, seen: Map) -> bytes:
    """Write the program: `target` is the index of the IFB device. Raises KernelError if it would be too long."""
    text = Assembly()
    text.copy(PACKET, 1)
    text.load(2, PACKET, _PROTOCOL)
    text.jump_if(2, "==", 0x0008, "ipv4")  # 0800 and 86dd, in the order of the network
    text.jump_if(2, "==", 0xDD86, "ipv6")
    if ingress.lanes and ingress.own:
        put_aside_tagged(text, 2)
    text.place(UNTOUCHED)
    text.leave(_NO_MATCH)
    found: set[tuple[int, str]] = set()
    for family in (4, 6):
        lanes = [lane for lane in ingress.lanes if lane.family == family]
        own = sorted({each.packed for each in map(ip_address, ingress.own) if each.version == family})
        text.place(f"ipv{family}")
        if lanes and own:
            leave_to_vlan(text)
            _ask(text, family, lanes, own, entries)
            found |= {(family, lane.side) for lane in lanes}
        else:
            _hold(text, entries, seen)
        text.jump(UNTOUCHED)
    if found:
        _decide(text, found, ingress, target, seen)
    return text.finish()


def _hold(text: Assembly, *maps: Map) -> None:
    """Use maps for nothing: else they would go, with all that is in them, when no address has a use for them."""
    for each in maps:
        text.load_map(1, each.fd)


def _ask(text: Assembly, family: int, lanes: list[IngressLane], own: list[bytes], entries: Map) -> None:
    """Ask all lanes of a family for a packet of it."""
    read = read_ipv4 if family == 4 else read_ipv6
    read(text, own)
    for side in sorted({lane.side for lane in lanes}):
        _write_key(text, family, side)
    unknown = text.new_label()
    if family == 6:
        text.jump_if(PORT, "==", NO_PROTOCOL, unknown)
    for lane in lanes:
        _ask_lane(text, lane, entries)
    if family == 6:  # asked by themselves: with the others, they would be one more case for the kernel's verifier
        text.jump(UNTOUCHED)
        text.place(unknown)
        for lane in lanes:
            _ask_lane_unknown(text, lane, entries)


# -- asking the lanes -----------------------------------------------------------------------------------------------


def _write_key(text: Assembly, family: int, side: str) -> None:
    """Everything of a key but the tag."""
    key = _KEYS[side]
    text.store_number(STACK, key, TAG_BITS + 128)
    if family == 4:
        text.store_number(STACK, key + _ADDRESS_AT, 0, 8)
        text.store_number(STACK, key + _ADDRESS_AT + 8, 0xFFFF0000)
        text.load(1, STACK, HEADER + (12 if side == "src" else 16))
        text.store(STACK, key + _ADDRESS_AT + 12, 1)
        return
    for half in (0, 8):
        text.load(1, STACK, HEADER + (8 if side == "src" else 24) + half, 8)
        text.store(STACK, key + _ADDRESS_AT + half, 1, 8)


def _ask_lane(text: Assembly, lane: IngressLane, entries: Map) -> None:
    following = text.new_label()
    _compare_device(text, lane, following)
    _compare_protocol(text, lane, following)
    for register, ranges in ((PORT, lane.ports), (SOURCE_PORT, lane.source_ports)):
        if ranges:
            _compare_port(text, register, ranges, following, unknown=_takes_unknown(lane))
    _look_for_entry(text, lane, entries)
    text.place(following)


def _ask_lane_unknown(text: Assembly, lane: IngressLane, entries: Map) -> None:
    """The same for a packet whose protocol nobody knows, but for what it says itself."""
    following = text.new_label()
    _compare_device(text, lane, following)
    if not _takes_unknown(lane):
        if lane.ports or lane.source_ports:
            text.place(following)
            return
        _compare_protocol(text, lane, following)
    _look_for_entry(text, lane, entries)
    text.place(following)


def _takes_unknown(lane: IngressLane) -> bool:
    """Whether what does not tell its port, or its protocol, goes through the lane. Nobody has put fragments together
    here yet, and later ones do not: what a rule names does not pass by that, for which it waits with the rest of its
    target."""
    return lane.side == "src" and not lane.copies


def _compare_device(text: Assembly, lane: IngressLane, otherwise: str) -> None:
    """Go on if the packet has come in by one of the lane's devices."""
    if lane.devices:
        matched = text.new_label()
        text.load(1, PACKET, _DEVICE)
        for index in lane.devices:
            text.jump_if(1, "==", index, matched)
        text.jump(otherwise)
        text.place(matched)


def _compare_protocol(text: Assembly, lane: IngressLane, otherwise: str) -> None:
    if lane.protocol != "any":
        number = ICMP[lane.family] if lane.protocol == "icmp" else PROTOCOLS[lane.protocol]
        text.jump_if(TRANSPORT, "!=", number, otherwise)


def _compare_port(
    text: Assembly, register: int, ranges: tuple[tuple[int, int], ...], otherwise: str, *, unknown: bool
) -> None:
    """Go on if the port is in one of the ranges; or if it is `unknown`."""
    matched = text.new_label()
    if unknown:
        text.jump_if(register, "==", NO_PORT, matched)
    for low, high in ranges:
        above = text.new_label()
        text.jump_if(register, "<", low, above)
        text.jump_if(register, "<=", high, matched)
        text.place(above)
    text.jump(otherwise)
    text.place(matched)


def _look_for_entry(text: Assembly, lane: IngressLane, entries: Map) -> None:
    key = _KEYS[lane.side]
    text.store_number(STACK, key + _TAG_AT, int.from_bytes(tag(lane.name), "little"))
    _look_up(text, entries, key)
    text.jump_unless_null(0, _name_found(lane.family, lane.side))


def _look_up(text: Assembly, where: Map, key: int) -> None:
    text.load_map(1, where.fd)
    text.point(2, key)
    text.call(_LOOKUP)


# -- and what is done with the entry --------------------------------------------------------------------------------


def _name_found(family: int, side: str) -> str:
    """The label at which an entry has been found."""
    return f"found ipv{family} {side}"


def _decide(text: Assembly, found: set[tuple[int, str]], ingress: Ingress, target: int, seen: Map) -> None:
    """An entry has been found (r0)."""
    for family, side in sorted(found):
        text.place(_name_found(family, side))
        text.copy(_FOUND, 0)
        _pass_without_socket(text, family, sure=side == "dst" and family in ingress.translated)
        text.point(_FOUND_BY, _KEYS[side] + _TAG_AT)
        text.jump("found")
    text.place("found")
    text.load(1, PACKET, _TYPE)
    # It comes by again on a device above (macvlan), or nobody gets it.
    text.jump_if(1, "==", FOR_SOMEBODY_ELSE, UNTOUCHED)
    text.load(_CLASS, _FOUND, 0)
    if ingress.stacked:
        _pass_if_done(text, ingress.stacked)
    _count(text)
    _remember(text, seen)
    text.place("classify")
    text.jump_if(_CLASS, "==", 0, UNTOUCHED)
    _pass_without_target(text, target)
    text.store(PACKET, _PRIORITY, _CLASS)
    text.leave(_MATCH)


def _pass_without_socket(text: Assembly, family: int, *, sure: bool) -> None:
    """What comes for this host's address, but not to a socket, is forwarded once its address has been translated back,
    or nobody wants it. A listening socket counts, and what has no ports to find one by is taken to end here; unless it
    must be `sure`. Only where the entry does something."""
    effective, tcp, answered, ends_here = (text.new_label() for _ in range(4))
    for place in (0, _MARK_AT):
        text.load(1, _FOUND, place)
        text.jump_if(1, "!=", 0, effective)
    text.jump(ends_here)
    text.place(effective)
    text.load(_CLASS, STACK, SOCKET, 1)
    text.jump_if(_CLASS, "==", 0, UNTOUCHED if sure else ends_here)
    place, length = ENDS[family]
    text.copy(1, PACKET)
    text.point(2, place)
    text.set(3, length)
    text.set(4, _THIS_NAMESPACE)
    text.set(5, 0)
    text.jump_if(_CLASS, "==", PROTOCOLS["tcp"], tcp)
    text.call(_UDP_SOCKET)
    text.jump(answered)
    text.place(tcp)
    text.call(_TCP_SOCKET)
    if sure:
        text.jump_if_null(0, UNTOUCHED)
        text.load(_CLASS, 0, _STATE)
    text.place(answered)
    text.jump_if_null(0, UNTOUCHED)
    text.copy(1, 0)
    text.call(_RELEASE_SOCKET)
    if sure:
        text.jump_if(_CLASS, "==", _LISTENS, UNTOUCHED)
    text.place(ends_here)


def _pass_if_done(text: Assembly, stacked: tuple[int, ...]) -> None:
    """What comes by on these devices has come by on the one below. The tc_index that it keeps meanwhile tells what has
    been done with it; not only that, for what a tunnel carries is another packet. On any other device nobody goes by
    it: who sends from a namespace of his own, across a veth, may have set it."""
    some, stacks, new = (text.new_label() for _ in range(3))
    text.copy(1, _CLASS)
    text.copy(2, _CLASS)
    text.change(2, ">>", 16)
    text.mix(1, 2)
    text.change(1, "&", 0xFFFF)
    text.jump_if(1, "!=", 0, some)  # 0 is what every packet has at first
    text.set(1, 0xFFFF)
    text.place(some)
    text.load(2, PACKET, _DEVICE)
    for index in stacked:
        text.jump_if(2, "==", index, stacks)
    text.jump(new)
    text.place(stacks)
    text.load(2, PACKET, _TC_INDEX)
    text.jump_if_same(1, 2, UNTOUCHED)
    text.place(new)
    text.store(PACKET, _TC_INDEX, 1)


def _count(text: Assembly) -> None:
    text.set(1, 1)
    text.count(_FOUND, _PACKETS_AT, 1)
    text.load(1, STACK, BYTES, 8)
    text.count(_FOUND, _PACKETS_AT + 8, 1)


def _remember(text: Assembly, seen: Map) -> None:
    """Note the address as seen. Most are noted already: reading is cheap, for it takes no lock."""
    new = text.new_label()
    text.load(1, _FOUND, _MARK_AT)
    text.jump_if(1, "==", 0, "classify")
    text.store(STACK, _WORD, 1)
    text.load_map(1, seen.fd)
    text.copy(2, _FOUND_BY)
    text.call(_LOOKUP)
    text.jump_if_null(0, new)
    text.load(1, 0, 0)
    text.load(2, STACK, _WORD)
    text.jump_if_same(1, 2, "classify")
    text.place(new)
    text.load_map(1, seen.fd)
    text.copy(2, _FOUND_BY)
    text.point(3, _WORD)
    text.set(4, 0)
    text.call(_UPDATE)


def _pass_without_target(text: Assembly, target: int) -> None:
    """Where the IFB device has gone, the packet would be lost. A question for its MTU tells whether it is there."""
    text.store_number(STACK, _WORD, 0)
    text.copy(1, PACKET)
    text.set(2, target)
    text.point(3, _WORD)
    text.set(4, 0)
    text.set(5, 0)
    text.call(_CHECK_MTU)
    text.jump_if(0, "signed <", 0, UNTOUCHED)
