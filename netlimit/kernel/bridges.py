"""Which bridges hand what they forward to iptables (br_netfilter)."""

from __future__ import annotations

from typing import Any

from netlimit.plain import read_text

_SETTINGS = "/proc/sys/net/bridge/"
_TABLES = {4: "iptables", 6: "ip6tables"}


def find_filtered() -> frozenset[int]:
    """The address families of which every bridge of this network namespace does. Without the module none does."""
    try:
        return frozenset(family for family in _TABLES if _read_setting(family) == "1")
    except FileNotFoundError:
        return frozenset()


def read_filtered(about: Any) -> tuple[int, ...]:
    """The address families of which one bridge does, by what netlink says of it (IFLA_LINKINFO): all do, or this one is
    told to by itself (`ip link set … type bridge nf_call_iptables 1`)."""
    try:
        settings = {family: _read_setting(family) for family in _TABLES}
    except FileNotFoundError:
        return ()
    data = about.get_attr("IFLA_INFO_DATA")
    told = {family: data and data.get_attr(f"IFLA_BR_NF_CALL_{name.upper()}") for family, name in _TABLES.items()}
    return tuple(family for family in _TABLES if settings[family] == "1" or told[family])


def _read_setting(family: int) -> str:
    return read_text(f"{_SETTINGS}bridge-nf-call-{_TABLES[family]}").strip()
