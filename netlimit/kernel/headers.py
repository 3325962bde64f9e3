"""How a program reads the headers of a packet: whom it is for, and what lanes tell packets by."""

from __future__ import annotations

import struct

from netlimit.kernel.assembly import STACK, Assembly

UNTOUCHED = "untouched"
"""The label at which a packet is let pass."""
PACKET, TRANSPORT, SOURCE_PORT, PORT = 6, 7, 8, 9
"""Registers: the packet, its transport protocol, its ports (beyond 16 bits where it has none)."""
HEADER, _PART, BYTES, SOCKET = -48, -56, -64, -72
"""Places in the stack: the IP header, some of what follows, the length that the IP header tells (8 bytes), and the
protocol whose sockets can be asked for the packet (1 byte): TCP or UDP, 0 where there are no ports to ask with."""
ENDS = {4: (HEADER + 12, 12), 6: (HEADER + 8, 36)}
"""Place and length of both addresses and both ports, as struct bpf_sock_tuple has them: the ports are put right behind
the IP header."""
PROTOCOLS = {"tcp": 6, "udp": 17}
ICMP = {4: 1, 6: 58}
_LENGTH, _TAGGED, _TAG = 0, 20, 24
"""Where struct __sk_buff has them (linux/bpf.h)."""
_SET_TYPE, _PULL, _LOAD_BYTES = 32, 39, 68
_FROM_IP_HEADER = 1
_VLAN, _OUTER_VLAN = 0x0081, 0xA888
_VLAN_ID, _NEXT_VLAN_ID = 0x0FFF, 0xFF0F
"""Kinds of tags, as skb->protocol has them, and the bits that tell the VLAN: in the order of the host, as the tag that
the kernel has taken off is kept, and in that of the network, as the next one stands in the packet."""
FOR_SOMEBODY_ELSE = 3
"""PACKET_OTHERHOST: what IP and ARP throw away (linux/if_packet.h)."""
NO_PORT, NO_PROTOCOL = 1 << 16, 1 << 17
"""Where a port would be: there is none, or nobody knows it; of a protocol that nobody knows either."""
_OFFSET = SOURCE_PORT
"""Until the ports are known, this register holds the offset of the next header."""
_FRAGMENT = 44
_EXTENSIONS = (0, 43, _FRAGMENT, 60, 135)
_MOST_EXTENSIONS = 6
_OFFSET4, _OFFSET6 = 0xFF1F, 0xF8FF
"""The bits that tell a later fragment, which has no ports; in the order of the network."""
_NEIGHBOUR_DISCOVERY = (133, 137)
NEVER_FORWARDED = 255
"""The hop limit of what no router has passed on."""
_OSPF, _VRRP, BFD, BFD_ECHO = 89, 112, 3784, 3785
"""Protocols, and ports of UDP; an echo has been sent back once (RFC 5881)."""
_PULLED = 128
"""Bytes that hold every header up to the ports, in nearly every packet."""


def read_ipv4(text: Assembly, own: list[bytes]) -> None:
    """Read what lanes ask for, if the packet is for one of the addresses `own` (sorted); else go to UNTOUCHED."""
    known = text.new_label()
    _read_header(text, 20)
    _find_own(text, HEADER + 16, own)
    text.load(2, STACK, HEADER + 12)
    text.jump_if(2, "==", 0, UNTOUCHED)  # who has no address yet (DHCP): nobody is named by it, and all would share it
    _read_length(text, HEADER + 2, add=0)
    text.load(TRANSPORT, STACK, HEADER + 9, 1)
    _forget_ports(text)
    text.load(2, STACK, HEADER + 6, 2)
    text.jump_if(2, "&", _OFFSET4, known)
    text.load(2, STACK, HEADER, 1)
    text.change(2, "&", 0xF)
    text.change(2, "<<", 2)
    _read_ports(text, HEADER + 20, known)
    text.place(known)
    _pass_adverts(text, HEADER + 8)


def read_ipv6(text: Assembly, own: list[bytes]) -> None:
    """The same for IPv6. What finds neighbours (RFC 4861) passes: else nobody could reach this host any more.

    What a later fragment says of its protocol nobody else believes: the kernel goes by the first one. So, as where more
    headers stand before the transport's than are read here, it is unknown."""
    known, transport, unknown, read = (text.new_label() for _ in range(4))
    _read_header(text, 40)
    _find_own(text, HEADER + 24, own)
    _read_length(text, HEADER + 4, add=40)
    text.load(TRANSPORT, STACK, HEADER + 6, 1)
    text.set(_OFFSET, 40)
    for _ in range(_MOST_EXTENSIONS):
        _skip_extension(text, transport, unknown)
    for each in _EXTENSIONS:
        text.jump_if(TRANSPORT, "==", each, unknown)
    text.place(transport)
    _pass_neighbour_discovery(text)
    text.copy(2, _OFFSET)
    _forget_ports(text)
    _read_ports(text, HEADER + 40, known)
    text.place(known)
    _pass_adverts(text, HEADER + 7)
    text.jump(read)
    text.place(unknown)
    _forget_ports(text, NO_PROTOCOL)
    text.place(read)


def leave_to_vlan(text: Assembly) -> None:
    """Pass what has the tag of a VLAN: it comes by again on the device of that, and is asked there. If there is none,
    the kernel takes it for somebody else's. There, kernels from before 6.2 still show the number of the tag, and tell
    elsewhere that it has been taken off."""
    untagged = text.new_label()
    text.load(2, PACKET, _TAGGED)
    text.jump_if(2, "==", 0, untagged)
    text.load(2, PACKET, _TAG)
    text.jump_if(2, "&", _VLAN_ID, UNTOUCHED)
    text.place(untagged)


def put_aside_tagged(text: Assembly, kind: int) -> None:
    """Go on behind what has two tags of no VLAN (id 0, priority alone), whose kind of packet the register tells: the
    kernel takes off all of them, but the second and what follows only behind this program, which would not see what is
    there. No honest sender has two, so that they are none of this host's; a bridge still passes them on."""
    tagged = text.new_label()
    text.jump_if(kind, "==", _VLAN, tagged)
    text.jump_if(kind, "!=", _OUTER_VLAN, UNTOUCHED)
    text.place(tagged)
    leave_to_vlan(text)
    _read_header(text, 4)
    text.load(2, STACK, HEADER, 2)
    text.jump_if(2, "&", _NEXT_VLAN_ID, UNTOUCHED)
    text.copy(1, PACKET)
    text.set(2, FOR_SOMEBODY_ELSE)
    text.call(_SET_TYPE)


def _read_header(text: Assembly, length: int) -> None:
    """Read the IP header, or a tag in its place. Some drivers leave it in a page of its own: then it is pulled to where
    it can be read."""
    done, short = text.new_label(), text.new_label()
    text.store_number(STACK, HEADER + length, 0)  # the ports, until they are known
    text.set(2, 0)
    _read_bytes(text, HEADER, length)
    text.jump_if(0, "==", 0, done)
    text.copy(1, PACKET)
    text.load(2, PACKET, _LENGTH)
    text.jump_if(2, "<=", _PULLED, short)
    text.set(2, _PULLED)
    text.place(short)
    text.call(_PULL)
    text.set(2, 0)
    _read_bytes(text, HEADER, length)
    text.jump_if(0, "!=", 0, UNTOUCHED)
    text.place(done)


def _read_bytes(text: Assembly, place: int, length: int) -> None:
    """Read from the offset in r2, which counts from the IP header: a VLAN tag before it does not matter."""
    text.copy(1, PACKET)
    text.point(3, place)
    text.set(4, length)
    text.set(5, _FROM_IP_HEADER)
    text.call(_LOAD_BYTES)


def _find_own(text: Assembly, place: int, own: list[bytes]) -> None:
    """Go on only if the destination is one of ours: a tree of comparisons, for a map would cost more."""
    found = text.new_label()
    _find_words(text, place, [struct.unpack(f"<{len(address) // 4}I", address) for address in own], found)
    text.place(found)


def _find_words(text: Assembly, place: int, own: list[tuple[int, ...]], found: str) -> None:
    """Compare 4 bytes; after those that are alike, the next 4."""
    rest: dict[int, list[tuple[int, ...]]] = {}
    for word, *others in own:
        rest.setdefault(word, []).append(tuple(others))

    def compare(words: list[int]) -> None:
        if len(words) > 1:
            middle, upper = len(words) // 2, text.new_label()
            text.jump_if(1, ">=", words[middle], upper)
            compare(words[:middle])
            text.place(upper)
            compare(words[middle:])
        else:
            text.jump_if(1, "!=", words[0], UNTOUCHED)
            if rest[words[0]] == [()]:
                text.jump(found)
            else:
                _find_words(text, place + 4, rest[words[0]], found)

    text.load(1, STACK, place)
    compare(sorted(rest))


def _read_length(text: Assembly, place: int, add: int) -> None:
    """The length that the IP header tells, as other counters have it; for giants, in which it is 0, the packet's."""
    known = text.new_label()
    text.load(1, STACK, place, 2)
    text.swap(1)
    text.change(1, "+", add)
    text.jump_if(1, "!=", add, known)
    text.load(1, PACKET, _LENGTH)
    text.place(known)
    text.store(STACK, BYTES, 1, 8)


def _skip_extension(text: Assembly, transport: str, unknown: str) -> None:
    """Go to the next header if this is one of those that stand before the transport's."""
    extension, following = text.new_label(), text.new_label()
    for each in _EXTENSIONS:
        text.jump_if(TRANSPORT, "==", each, extension)
    text.jump(transport)
    text.place(extension)
    text.copy(2, _OFFSET)
    _read_bytes(text, _PART, 8)
    text.jump_if(0, "!=", 0, unknown)
    text.copy(1, TRANSPORT)
    text.load(TRANSPORT, STACK, _PART, 1)
    text.load(2, STACK, _PART + 1, 1)
    text.jump_if(1, "!=", _FRAGMENT, following)
    text.load(2, STACK, _PART + 2, 2)
    text.jump_if(2, "&", _OFFSET6, unknown)
    text.set(2, 0)
    text.place(following)
    text.change(2, "+", 1)
    text.change(2, "<<", 3)
    text.add(_OFFSET, 2)


def _pass_neighbour_discovery(text: Assembly) -> None:
    """With any other header before it, a fragment's above all, it is none (RFC 6980)."""
    other = text.new_label()
    text.load(2, STACK, HEADER + 6, 1)
    text.jump_if(2, "!=", ICMP[6], other)
    text.load(2, STACK, HEADER + 7, 1)
    text.jump_if(2, "!=", NEVER_FORWARDED, other)
    text.copy(2, _OFFSET)
    _read_bytes(text, _PART, 1)
    text.load(2, STACK, _PART, 1)
    text.jump_if(2, "<", _NEIGHBOUR_DISCOVERY[0], other)
    text.jump_if(2, "<=", _NEIGHBOUR_DISCOVERY[1], UNTOUCHED)
    text.place(other)


def _pass_adverts(text: Assembly, hop_limit: int) -> None:
    """What keeps gateways alive towards each other passes, as it does in chains: VRRP and BFD by the hop limit, whose
    place is given, which tells that they have come from this link; OSPF without."""
    other = text.new_label()
    text.jump_if(TRANSPORT, "==", _OSPF, UNTOUCHED)
    text.load(2, STACK, hop_limit, 1)
    text.jump_if(2, "<", NEVER_FORWARDED - 1, other)
    echo = text.new_label()
    text.jump_if(2, "!=", NEVER_FORWARDED, echo)
    text.jump_if(TRANSPORT, "==", _VRRP, UNTOUCHED)
    text.jump_if(TRANSPORT, "!=", PROTOCOLS["udp"], other)
    text.jump_if(PORT, "==", BFD, UNTOUCHED)
    text.jump(other)
    text.place(echo)
    text.jump_if(TRANSPORT, "!=", PROTOCOLS["udp"], other)
    text.jump_if(PORT, "==", BFD_ECHO, UNTOUCHED)
    text.place(other)


def _forget_ports(text: Assembly, instead: int = NO_PORT) -> None:
    text.set(SOURCE_PORT, instead)
    text.set(PORT, instead)
    text.store_number(STACK, SOCKET, 0, 1)


def _read_ports(text: Assembly, place: int, unread: str) -> None:
    """Read the ports of TCP and UDP to a place; their header's offset is in r2."""
    has_ports = text.new_label()
    text.jump_if(TRANSPORT, "==", PROTOCOLS["tcp"], has_ports)
    text.jump_if(TRANSPORT, "!=", PROTOCOLS["udp"], unread)
    text.place(has_ports)
    _read_bytes(text, place, 4)
    text.jump_if(0, "!=", 0, unread)
    for register, offset in ((SOURCE_PORT, 0), (PORT, 2)):
        text.load(register, STACK, place + offset, 2)
        text.swap(register)
    # Not only in the register: what a lane has found out of that would be one more case for the kernel's verifier.
    text.store(STACK, SOCKET, TRANSPORT, 1)
