"""Fragments: a rule that asks for what only the first of them tells needs the kernel to put them together before.

Ports stand in the first fragment alone. So may the protocol with IPv6, where a later fragment says only what the next
header of the whole is. The kernel puts fragments together, per address family, for whoever asks for sockets
(xt_socket) or for connection tracking: ahead of every table, and as long as such a rule exists, whether any packet
comes to it or not. So there is one in a chain that nothing leads to, which costs no packet anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from netlimit.rules import Protocol, Selector
from netlimit.state import CHAIN_PREFIX, ChainRule, HasSocket, Opens, Verdict, chain_rule

DEFRAG = f"{CHAIN_PREFIX}DEFRAG"
"""The chain."""


def are_told_apart(family: int, selector: Selector) -> bool:
    """Whether a selector takes some fragments of a packet for others than the first."""
    protocol = family == 6 and selector.protocol is not Protocol.ANY
    return bool(selector.ports or selector.source_ports or protocol)


def join(family: int, selectors: Iterable[Selector], capabilities: Mapping[str, str | None]) -> tuple[ChainRule, ...]:
    """The rules that make the kernel put fragments together; none where no selector needs it, or nothing can.

    For IPv6 there is always one, if that is possible without tracking connections: what is spared (OSPF, VRRP) is known
    by its protocol, which a later fragment may feign.
    """
    needed = any(are_told_apart(family, selector) for selector in selectors)
    six = "6" if family == 6 else ""
    if (needed or six) and capabilities.get(f"socket{six}") is None:
        return (chain_rule(Verdict("RETURN"), HasSocket()),)
    if needed and capabilities.get(f"conntrack{six}") is None:
        return (chain_rule(Verdict("RETURN"), Opens()),)
    return ()


def find_leak(family: int, selector: Selector, capabilities: Mapping[str, str | None]) -> str | None:
    """Why fragments pass a rule with this selector; None if they do not."""
    if not are_told_apart(family, selector) or join(family, [selector], capabilities):
        return None
    what = "ports" if selector.ports or selector.source_ports else "a protocol"
    return (
        f"Fragments pass it: it names {what}, which only the first fragment of a packet tells, and this host can put "
        "none together, for it has neither xt_socket nor connection tracking. Try `modprobe xt_socket`."
    )
