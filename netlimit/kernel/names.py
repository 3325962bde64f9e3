"""The names of network devices, which may be any bytes but blanks, slashes and colons (the kernel's dev_valid_name)."""

from __future__ import annotations

import re
import socket

from netlimit.plain import decode_name, name_of

_SPEAKABLE = re.compile(r"(?!-)[A-Za-z0-9_.:@+%~=^,-]{1,15}(?<!\+)")


def read_names() -> dict[int, str]:
    """The devices of this network namespace, by index, as text. Raises OSError."""
    return {index: name_of(name) for index, name in socket.if_nameindex()}


def read_name(said: str | bytes) -> str:
    """A name as text; pyroute2 leaves it as bytes where it is no UTF-8."""
    return decode_name(said if isinstance(said, bytes) else said.encode("utf-8", "surrogateescape"))


def is_speakable(name: str) -> bool:
    """Whether tools can be told this name, and take it for this device alone: a `#` begins a comment for `tc -batch`,
    and quotes are taken away; to iptables a `+` at the end stands for every name that begins so, and what begins with
    `-` and has a `t` is an option of its own."""
    return _SPEAKABLE.fullmatch(name) is not None
