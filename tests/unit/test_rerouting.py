"""Which marks of what a host sends lead it another way, as routing rules ask for them."""

from __future__ import annotations

import pytest

from netlimit.kernel.rerouting import find_rerouting

ONE = {(0x1, 0xFF)}
"""ip rule add fwmark 0x1/0xff"""
TABLES = {
    "-j MARK --set-xmark 0x1/0xff": True,
    "-j MARK --set-xmark 0x1/0xffffffff": True,
    "-j MARK --or-mark 0x1": True,
    "-j MARK --set-xmark 0x2/0xff": False,
    "-j MARK --set-xmark 0x3/0xff": False,
    "-j MARK --set-xmark 0x100/0xff00": False,
    "-j MARK --set-xmark 0x80000/0xff0000": False,
    "-j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff": True,
    "-j CONNMARK --restore-mark --nfmask 0xff00 --ctmask 0xff00": False,
    "-j CONNMARK --save-mark --nfmask 0xff --ctmask 0xff": False,
    "-m mark --mark 0x1/0xff -j ACCEPT": False,
    '-m comment --comment "-j MARK --set-xmark 0x1/0xff" -j ACCEPT': False,
    "-j HMARK --hmark-tuple src": True,
}
CHAINS = {
    "meta mark set 0x00000001": True,
    "meta mark set 0x00000001 counter packets 0 bytes 0": True,
    "meta mark set 0x00000002": False,
    "meta mark set ct mark": True,
    "ct mark set meta mark": False,
    "ct mark set 0x00000001": False,
    "counter packets 0 bytes 0 meta mark set mark and 0xffffff00 xor 0x1": True,
    "meta mark set meta mark & 0xffff00ff | 0x00000200": False,
    "meta mark set meta mark | 0x00000001": True,
    "meta mark set jhash ip saddr mod 2": True,
    "meta mark set \udcff": True,
    "meta mark 0x00000001 accept": False,
}


@pytest.mark.parametrize("rule", TABLES)
def test_rules_of_iptables_are_found_where_what_they_write_is_asked_for(rule: str) -> None:
    found = list(find_rerouting("", [["-A OUTPUT -j led", f"-A led {rule}", "-A PREROUTING -j other"]], ONE))
    assert bool(found) is TABLES[rule]
    assert list(find_rerouting("", [[f"-A PREROUTING {rule}", f"-A led {rule}"]], ONE)) == []


@pytest.mark.parametrize("rule", CHAINS)
def test_rules_of_nftables_are_found_where_they_have_packets_routed_again(rule: str) -> None:
    def say(kind: str) -> str:
        lines = "table ip t {", "\tchain o {", f"\t\ttype {kind} hook output priority mangle; policy accept;"
        return "\n".join([*lines, f"\t\t{rule}", "\t}", "}", ""])

    assert bool(list(find_rerouting(say("route"), [], ONE))) is CHAINS[rule]
    assert list(find_rerouting(say("filter"), [], ONE)) == []


def test_a_routing_rule_for_no_mark_asks_for_all_bits_that_are_written() -> None:
    rules = [["-A OUTPUT -j MARK --set-xmark 0x4/0xff"]]
    assert list(find_rerouting("", rules, {(0, 0xFF)}))
    assert not list(find_rerouting("", rules, {(0, 0xFF00)}))
    assert not list(find_rerouting("", rules, set()))
