"""Which lightweight tunnels of routes take packets that come in before they are forwarded (linux/lwtunnel.h)."""

from __future__ import annotations

import struct

from netlimit.kernel import rtnetlink

SEG6LOCAL = "seg6local"
_NUMBER, _MODE = struct.Struct("=H"), struct.Struct("=i")
_SEG6, _BPF = 5, 6
_OTHERS = {4: "ila", 7: SEG6LOCAL, 8: "rpl"}
_SEG6_HEADER, _BPF_IN = 1, 1
"""SEG6_IPTUNNEL_SRH, which begins with the mode, and LWT_BPF_IN."""
_MODES = {0: "inline", 1: "encap", 2: "l2encap", 3: "encap.red", 4: "l2encap.red"}


def read_encapsulation(kind: bytes, data: bytes) -> str:
    """The encapsulation of a route as `ip route` names it, from what tells its kind and what it says of itself; empty
    for none, and for those that only take what leaves (`ip`, `mpls`, `bpf out`)."""
    number = _NUMBER.unpack_from(kind)[0] if len(kind) >= _NUMBER.size else 0
    if number == _SEG6:
        header = rtnetlink.decode(data).get(_SEG6_HEADER, b"")
        mode = _MODE.unpack_from(header)[0] if len(header) >= _MODE.size else -1
        return f"seg6 mode {_MODES.get(mode, mode)}"
    if number == _BPF:
        return "bpf in" if _BPF_IN in rtnetlink.decode(data) else ""
    return _OTHERS.get(number, "")
