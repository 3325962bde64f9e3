"""Who leads packets past our rules, read from what nft and iptables print of themselves."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from netlimit.compile import Compilation
from netlimit.conflicts import HostReport, Severity, find_conflicts
from netlimit.detours import (
    Areas,
    find_brouting,
    find_forwards,
    find_masked,
    find_raising,
    find_rewriting,
    find_taking,
    find_translations,
)
from netlimit.limits import Facts, own_addresses
from netlimit.rules import parse_rule
from netlimit.tree import Diversion
from tests.unit.shapes import HOME
from tests.unit.strategies import NOW

NETDEV = """table netdev t {
	set s {
		type ipv4_addr
	}
	chain d {
		fwd ip to 10.0.0.1 device "wan"
	}
	chain c {
		type filter hook ingress device "lan" priority filter; policy accept;
		ip protocol udp accept comment "fwd to wan\\"
		ip saddr @s jump d
	}
	chain e {
		type filter hook ingress devices = { "dmz", vpn } priority filter + 10; policy accept;
		fwd to "ifb9"
	}
	chain f {
		type filter hook egress devices = { wan } priority filter + 10; policy accept;
		fwd to "wan"
	}
	chain g {
		fwd to "wan"
	}
}
"""
SENT = """table ip t {
	chain q {
		dnat to 10.9.0.9
	}
	chain unused {
		dnat to 10.8.0.8
	}
	chain o {
		type nat hook output priority -100; policy accept;
		tcp dport 80 dnat to RULE
		tcp dport 80 counter packets 0 bytes 0 jump q
	}
	chain p {
		type nat hook prerouting priority dstnat; policy accept;
		dnat to 10.7.0.7
	}
}
"""
LED = {
    "10.2.0.2:9": ["10.2.0.2"],
    "10.2.0.2-10.2.0.9:80-90 random,persistent": ["10.2.0.2-10.2.0.9"],
    "10.2.0.0/30": ["10.2.0.0-10.2.0.3"],
    "numgen inc mod 2 map { 0 : 10.2.0.2, 1 : 10.2.0.3 }": ["10.2.0.2", "10.2.0.3"],
    "tcp dport map { 80 : 10.2.0.2 . 9 }": ["10.2.0.2"],
    "tcp dport map @m": ["0.0.0.0-255.255.255.255"],
    "what nobody knows": ["0.0.0.0-255.255.255.255"],
    "": [],
    ":80": ["0.0.0.0-255.255.255.255"],
    "127.0.0.1:80": [],
    "10.1.0.1:80": [],
}
TABLE = (
    "-A PREROUTING -j DNAT --to-destination 10.7.0.7",
    '-A OUTPUT -m comment --comment "-j DNAT --to-destination 10.6.0.6" -j ACCEPT',
    "-A OUTPUT -j DOCKER",
    "-A OUTPUT -j DNAT --to-destination [fd00::2-fd00::9]:80",
    "-A OUTPUT -p tcp -j REDIRECT --to-ports 9",
    "-A OUTPUT -j NETMAP --to 10.5.0.0/24",
    "-A DOCKER ! -i docker0 -p tcp -m tcp --dport 8080 -j DNAT --to-destination 172.17.0.2:80",
    "-A OTHER -j DNAT --to-destination 10.8.0.8",
)


def test_devices_are_named_of_which_nftables_forwards_what_comes_in() -> None:
    assert find_forwards(NETDEV, {"ifb9"}) == {"lan": 'fwd ip to 10.0.0.1 device "wan"'}
    assert find_forwards(NETDEV).keys() == {"lan", "dmz", "vpn"}
    assert find_forwards(NETDEV.replace("netdev", "inet")) == {}


BROUTE = """Bridge table: broute

Bridge chain: BROUTING, entries: 5, policy: ACCEPT
-p IPv4 -i lan -j DROP
-p ARP -i lan -j DROP
-p IPv6 -j routed
-i lan -j ACCEPT
-i dmz -j redirect  --redirect-target DROP

Bridge chain: routed, entries: 0, policy: RETURN
"""
BRIDGED = """table bridge b {
	chain other {
		type filter hook forward priority 0; policy accept;
		ether type ip accept comment "meta broute set 1"
	}
	chain c {
		type filter hook prerouting priority dstnat; policy accept;
		ether type arp accept
		jump d
	}
	chain d {
		ether type ip meta broute set 1 comment "x"
	}
}
"""


def test_rules_are_named_by_which_ports_of_bridges_take_packets_themselves() -> None:
    assert [*find_brouting("", BROUTE)] == ["-p IPv4 -i lan -j DROP", "-i dmz -j redirect  --redirect-target DROP"]
    policy = BROUTE.splitlines()[2].replace("ACCEPT", "DROP")
    assert [*find_brouting("", policy)] == [policy]
    assert [*find_brouting(BRIDGED, "")] == ["ether type ip meta broute set 1"]
    assert [*find_brouting(BRIDGED.replace("bridge b", "inet b").replace("jump d", "accept"), "")] == []


BROUTED = {
    "by the bridge": (True, {"target": "10.1.0.2", "action": "block", "interface": "lan"}),
    "limited by the bridge": (True, {"target": "10.1.0.2", "rate": "5 packets/s", "interface": "lan"}),
    "allowed by the bridge": (False, {"target": "10.1.0.2", "action": "allow", "interface": "lan"}),
    "by another device": (False, {"target": "10.1.0.2", "action": "block", "interface": "wan"}),
    "by whatever": (False, {"target": "10.1.0.2", "rate": "5 packets/s"}),
    "to who leaves by it": (False, {"target": "10.1.0.2", "direction": "to", "action": "block", "interface": "lan"}),
    "shaped": (True, {"target": "10.1.0.2", "rate": "1 Mbit/s", "action": "shape"}),
    "shaped where it leaves": (
        False,
        {"target": "10.1.0.2", "direction": "to", "rate": "1 Mbit/s", "action": "shape", "interface": "lan"},
    ),
}


@pytest.mark.parametrize("name", BROUTED)
@pytest.mark.parametrize("report", [HostReport(brouting=BROUTE), HostReport(nftables=BRIDGED)])
def test_what_comes_by_a_bridge_is_told_where_its_ports_take_it(name: str, report: HostReport) -> None:
    concerned, rule = BROUTED[name]
    assert find_conflicts(report) == [], "no bridge has ports"
    joined = replace(report, joining=("lan",))
    (finding,) = find_conflicts(joined)
    assert (finding.name, finding.severity) == ("brouted packets", Severity.SERIOUS)
    assert find_concerned(joined, rule) == ({1} if concerned else set())


HANDED = {
    "by the device": (True, True, {"target": "10.1.0.2", "action": "block", "interface": "lan"}),
    "at once by the device": (True, True, {"target": "10.1.0.2", "rate": "5 connections", "interface": "lan"}),
    "by what stands on it": (True, True, {"target": "10.1.0.2", "rate": "5 packets/s", "interface": "lan.7"}),
    "allowed by the device": (False, False, {"target": "10.1.0.2", "action": "allow", "interface": "lan"}),
    "by another device": (False, False, {"target": "10.1.0.2", "rate": "5 packets/s", "interface": "wan"}),
    "a rate by whatever": (False, True, {"target": "10.1.0.2", "rate": "5 packets/s"}),
    "a rate per peer": (False, True, {"target": "10.1.0.2", "rate": "5 packets/s", "per": "peer"}),
    "a rate of connections": (False, True, {"target": "10.1.0.2", "rate": "5 connections/s"}),
    "a rate of who does not come by it": (False, False, {"target": "10.2.0.2", "rate": "5 packets/s"}),
    "a rate to somebody": (False, True, {"target": "10.2.0.2", "direction": "to", "rate": "5 packets/s"}),
    "a rate to the gateway": (False, True, {"target": "10.1.0.1", "direction": "to", "rate": "5 packets/s"}),
    "a rate from the gateway": (False, False, {"target": "10.1.0.1", "rate": "5 packets/s"}),
    "at once": (False, False, {"target": "10.1.0.2", "rate": "5 connections"}),
    "blocked": (False, False, {"target": "10.1.0.2", "action": "block"}),
    "to who leaves by it": (
        False,
        False,
        {"target": "10.1.0.2", "direction": "to", "action": "block", "interface": "lan"},
    ),
    "shaped where it leaves": (
        False,
        False,
        {"target": "10.1.0.2", "direction": "to", "rate": "1 Mbit/s", "action": "shape", "interface": "lan"},
    ),
}


@pytest.mark.parametrize("name", HANDED)
def test_what_filters_hand_or_copy_to_another_device_is_told_where_a_rule_misses_it_or_counts_it_twice(
    name: str,
) -> None:
    handed, mirrored, rule = HANDED[name]
    above = {"lan": ("lan.7",)}
    concerned = {1} if handed else set[int]()
    assert find_concerned(HostReport(handing={"lan": "u32, pref 1"}, above=above), rule) == concerned
    concerned = {1} if mirrored else set()
    assert find_concerned(HostReport(mirroring={"lan": "u32, pref 1"}, above=above), rule) == concerned


@pytest.mark.parametrize("rule", LED)
def test_places_are_named_where_nftables_leads_what_is_sent(rule: str) -> None:
    found = [str(each) for each in find_translations(SENT.replace("RULE", rule), (), {"10.1.0.1"})]
    assert found == [*LED[rule], "10.9.0.9"]


@pytest.mark.parametrize(
    "header", ["table ip t { # progname firewalld", "table ip t { # progname a {", "table new t {"]
)
def test_a_table_is_read_whatever_is_said_of_it(header: str) -> None:
    text = SENT.replace("table ip t {", header)
    assert text != SENT
    before = 'table bridge b {\n\tchain o {\n\t\tcomment "x"\n\t}\n}\n'
    for ruleset in (text, before + text):
        found = {str(each) for each in find_translations(ruleset.replace("RULE", "10.1.0.2"), ())}
        assert "10.9.0.9" in found


def test_where_the_port_alone_is_changed_it_stays_with_whom_it_is_for() -> None:
    text = SENT.replace("tcp dport 80 dnat to RULE", "ip daddr 10.2.0.2 tcp dport 80 dnat to :3128")
    assert [str(each) for each in find_translations(text, ())] == ["10.2.0.2", "10.9.0.9"]
    table = ("-A OUTPUT -d 10.2.0.2/32 -p udp -m udp --dport 9000 -j DNAT --to-destination :3128",)
    assert [str(each) for each in find_translations("", [table])] == ["10.2.0.2"]
    elsewhere = ("-A OUTPUT ! -d 10.2.0.2/32 -p udp -j DNAT --to-destination :3128",)
    assert len({str(each) for each in find_translations("", [elsewhere])}) == 2, "all of both families"


def test_a_map_of_verdicts_may_lead_to_every_chain_of_its_table() -> None:
    text = SENT.replace("dnat to RULE", "vmap @services")
    assert {str(each) for each in find_translations(text, ())} >= {"10.9.0.9", "10.8.0.8"}
    six = "table inet t {\n\tchain o {\n\t\ttype nat hook output priority 0;\n\t\tdnat RULE\n\t}\n}\n"
    assert [str(each) for each in find_translations(six.replace("RULE", "ip6 to [fd00::2]:9"), ())] == ["fd00::2"]
    assert len(list(find_translations(six.replace("RULE", "to meta mark map @m"), ()))) == 2


def test_many_maps_of_verdicts_are_followed_once() -> None:
    chains = [f"\tchain c{number} {{\n\t\ttcp dport vmap @services\n\t}}\n" for number in range(15_000)]
    text = SENT.replace("dnat to RULE", "vmap @services").replace("\tchain unused", f"{''.join(chains)}\tchain unused")
    began = time.process_time()
    assert [str(each) for each in find_translations(text, ())].count("10.8.0.8") == 1
    assert time.process_time() - began < 4


def test_places_are_named_where_iptables_leads_what_is_sent() -> None:
    found = [str(each) for each in find_translations("", [TABLE])]
    assert sorted(found) == ["10.5.0.0-10.5.0.255", "172.17.0.2", "fd00::2-fd00::9"]


TAKEN = [
    "-A PREROUTING -i lan -p udp -m udp --dport 80 -j REDIRECT --to-ports 9000",
    "-A PREROUTING -j REDIRECT",
    "-A PREROUTING -j DNAT --to-destination 10.1.0.1:80",
    "-A PREROUTING -j DNAT --to-destination 10.1.0.0-10.1.0.9",
    "-A PREROUTING -j DNAT --to-destination 127.0.0.1:80",
    "-A PREROUTING -j DNAT --to-destination [fd00:1::1]:80",
    "-A PREROUTING -j DNAT --to-destination :80",
]
LEFT = [
    "-A PREROUTING -j DNAT --to-destination 172.17.0.2:80",
    "-A OUTPUT -j REDIRECT --to-ports 9000",
    '-A PREROUTING -m comment --comment "to -j REDIRECT" -j ACCEPT',
    "-A PREROUTING -j REDIRECTED",
    "-A OTHER -j REDIRECT",
]
RECEIVED = {
    "tcp dport 80 redirect to :9000": True,
    "redirect": True,
    "iifname redirect accept": True,  # who calls a device so is told too much
    'iifname "redirect" accept': False,
    "ip daddr @redirect accept": False,
    'accept comment "redirect to :9"': False,
    'accept comment "redirect to :9\\"': False,
    'log prefix "a comment " redirect to :9 comment "b"': True,
    'iifname "a\\" redirect to :9 comment "b"': True,
    'accept comment "dnat to 10.1.0.1\\"': False,
    'ip saddr { 10.3.0.1 comment "dnat to 10.1.0.1", 10.3.0.2 } accept': False,
    "dnat to 10.1.0.1:9000": True,
    "dnat to :9000": True,
    "dnat to 10.2.0.2:9000": False,
    "dnat to tcp dport map { 80 : 10.2.0.2, 81 : 10.1.0.1 }": True,
    "dnat to tcp dport map @m": False,
}


@pytest.mark.parametrize("rule", [*TAKEN, *LEFT])
def test_rules_of_iptables_are_named_that_lead_what_comes_in_to_this_host(rule: str) -> None:
    assert [*find_taking("", [[rule]], {"10.1.0.1", "fd00:1::1"})] == [rule] * (rule in TAKEN)


def test_they_are_found_where_other_rules_lead() -> None:
    table = ("-A PREROUTING -i lan -g PROXY", "-A PROXY -p tcp -j REDIRECT --to-ports 3128")
    assert [*find_taking("", [table], ())] == [table[1]]


@pytest.mark.parametrize("rule", RECEIVED)
def test_rules_of_nftables_are_named_that_lead_what_comes_in_to_this_host(rule: str) -> None:
    text = "table ip t {\n\tchain p {\n\t\ttype nat hook prerouting priority dstnat; policy accept;\n\t\tRULE\n\t}\n}\n"
    assert bool([*find_taking(text.replace("RULE", rule), (), {"10.1.0.1"})]) == RECEIVED[rule]
    assert not [*find_taking(text.replace("RULE", rule).replace("prerouting", "output"), (), {"10.1.0.1"})]


def test_areas_are_met_where_they_overlap() -> None:
    areas = Areas(["10.2.0.2", "10.2.0.9-10.2.0.20", "10.2.0.10-10.2.0.11", "fd00::2"])
    met = {"10.2.0.2": True, "10.2.0.3": False, "10.2.0.0/24": True, "10.2.0.20": True, "10.2.0.21": False}
    met |= {"10.2.0.16/28": True, "10.0.0.0/24": False, "::/0": True, "fd00::1": False, "0.0.0.0/0": True}
    assert {text: areas.meet(text) for text in met} == met


@pytest.mark.parametrize(
    "line", ['"', "table ip", "table ip t {", "\tchain {", "\t\tdnat to", "\t\ttype nat hook output"]
)
def test_odd_lines_end_nothing(line: str) -> None:
    text = "\n".join([line, *(f"{line}\n{each}" for each in (NETDEV + SENT).splitlines())])
    assert list(find_conflicts(HostReport(nftables=text, nat=((line, f"-A {line}", f"-A OUTPUT -j DNAT {line}"),))))


def test_what_stands_on_a_device_is_concerned_too() -> None:
    report = HostReport(redirecting={"eth0": "u32, pref 1"}, above={"eth0": ("bond0",), "bond0": ("eth0", "bond0.7")})
    (finding,) = find_conflicts(report)
    assert (finding.severity, finding.devices) == (Severity.SERIOUS, ("bond0", "bond0.7", "eth0"))


def test_many_translations_are_one_finding() -> None:
    lines = [f"-A OUTPUT -j DNAT --to-destination 10.2.0.{last}" for last in (2, 2, 3, 4)]
    (finding,) = find_conflicts(HostReport(nat=(tuple(lines),)))
    assert finding.places == (("any", "10.2.0.2"), ("any", "10.2.0.3"), ("any", "10.2.0.4"))
    assert "to 10.2.0.2 and 2 more such destinations" in finding.what


TOLD = {
    "-A OUTPUT -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.2.0.2:9": "tcp",
    "-A OUTPUT ! -p tcp -j DNAT --to-destination 10.2.0.2": "any",
    "-A OUTPUT -p sctp -j DNAT --to-destination 10.2.0.2": "any",
    "-A OUTPUT -p ipv6-icmp -j DNAT --to-destination fd00::2": "icmp",
    '-A OUTPUT -m comment --comment " -p tcp " -j DNAT --to-destination 10.2.0.2': "any",
    "tcp dport 80 dnat to 10.2.0.2": "tcp",
    "meta l4proto udp dnat to 10.2.0.2": "udp",
    "ip protocol icmp dnat to 10.2.0.2": "icmp",
    "ip protocol tcp tcp dport != 80 dnat to 10.2.0.2": "tcp",
    "dnat to udp dport map { 80 : 10.2.0.2 }": "udp",
    "meta l4proto != tcp dnat to 10.2.0.2": "any",
    "meta l4proto { tcp, udp } th dport 80 dnat to 10.2.0.2": "any",
    'log prefix "tcp dport 80 " dnat to 10.2.0.2': "any",
    "iifname tcp dnat to 10.2.0.2": "any",
    "dnat to 10.2.0.2": "any",
}


@pytest.mark.parametrize("rule", TOLD)
def test_the_protocol_is_told_that_is_translated(rule: str) -> None:
    listed = "" if rule.startswith("-A") else SENT.replace("tcp dport 80 dnat to RULE", rule)
    found = [*find_translations(listed, [[rule]])]
    assert found[0].protocol == TOLD[rule]


@pytest.mark.parametrize(
    ("protocol", "rule", "concerned"),
    [
        ("-p tcp", {"protocol": "udp"}, False),
        ("-p tcp", {"protocol": "tcp"}, True),
        ("-p tcp", {}, True),
        ("", {"protocol": "udp"}, True),
        ("-p tcp", {"target": "10.3.0.0/24"}, False),
        ("-p tcp", {"action": "shape", "rate": "1 Mbit/s", "protocol": "udp"}, False),
        ("-p tcp", {"action": "shape", "rate": "1 Mbit/s", "protocol": "tcp"}, True),
        ("-p tcp", {"target": "0.0.0.0/0"}, True),  # what this host says to itself meets no rule before
    ],
)
def test_rules_of_another_protocol_are_not_concerned(protocol: str, rule: dict[str, object], concerned: bool) -> None:
    report = HostReport(nat=((f"-A OUTPUT {protocol} -j DNAT --to-destination 10.2.0.2:80",),))
    (finding,) = find_conflicts(report)
    compilation = Compilation(Facts(topology=HOME))
    fields = {"target": "10.2.0.0/24", "direction": "to", "rate": "10 packets/s", "per": "target"} | rule
    assert compilation.put(replace(parse_rule(fields, NOW), id=1)) is None
    assert finding.spoils is not None
    assert [*compilation.find_spoiled({finding.spoils: finding})] == [1] * concerned


# -- who comes to this host with another address than his own

MASKED = {
    "-A INPUT -s 10.1.0.0/16 -j SNAT --to-source 10.1.250.1": ["10.1.0.0-10.1.255.255"],
    "-A INPUT -p tcp -j SNAT --to-source 10.1.250.1": ["0.0.0.0-255.255.255.255", f"::-{'ffff:' * 7}ffff"],
    "-A INPUT ! -s 10.1.0.0/16 -j SNAT --to-source 10.1.250.1": ["0.0.0.0-255.255.255.255", f"::-{'ffff:' * 7}ffff"],
    "-A INPUT -s 10.1.0.2/32 -j NETMAP --to 10.9.0.0/24": ["10.1.0.2"],
    '-A INPUT -m comment --comment "-j SNAT --to-source 10.1.250.1" -j ACCEPT': [],
    "-A POSTROUTING -s 10.1.0.0/16 -j SNAT --to-source 10.1.250.1": [],
    "ip saddr 10.1.0.0/16 snat to 10.1.250.1": ["10.1.0.0-10.1.255.255"],
    "ip saddr != 10.1.0.0/16 snat to 10.1.250.1": ["0.0.0.0-255.255.255.255"],
    "ip saddr @some snat to 10.1.250.1:1-9": ["0.0.0.0-255.255.255.255"],
    'iifname "ip saddr 10.1.0.2" snat to 10.1.250.1': ["0.0.0.0-255.255.255.255"],
    'iifname "snat to 10.1.250.1" accept': [],
    "counter packets 0 bytes 0 accept": [],
}


@pytest.mark.parametrize("rule", MASKED)
def test_whose_source_is_translated_before_it_comes_to_this_host(rule: str) -> None:
    text = "table ip t {\n\tchain i {\n\t\ttype nat hook input priority 100; policy accept;\n\t\tRULE\n\t}\n}\n"
    listed, table = ("", [rule]) if rule.startswith("-A") else (text.replace("RULE", rule), [])
    assert [str(each) for each in find_masked(listed, [table])] == MASKED[rule]
    assert [*find_masked(listed.replace("hook input", "hook postrouting"), ())] == []


REWRITTEN = {
    "ip saddr 10.1.0.2 ip saddr set 10.9.0.2": True,
    "ip6 daddr set fd00::9 counter packets 0 bytes 0": True,
    "ip daddr set ip saddr map { 10.1.0.2 : 10.9.0.2 }": True,
    "udp dport 9000 udp dport set 9001": True,
    "@nh,128,32 set 0xa090002": True,
    "@th,16,16 set 0x2329": True,
    "-A PREROUTING -d 10.1.0.9/32 -j RAWDNAT --to-destination 10.9.0.2/32": True,
    "-A OUTPUT -d fd00:1::/64 -j DNPT --src-pfx fd00:1::/64 --dst-pfx fd00:2::/64": True,
    "-A POSTROUTING -s fd00:1::/64 -j SNPT --src-pfx fd00:1::/64 --dst-pfx 2001:db8::/64": False,
    "meta l4proto udp ip6 saddr fd00:1::/64  counter packets 0 bytes 0 xt target SNPT": True,
    'counter packets 0 bytes 0 xt target "DNPT"': True,
    "counter packets 0 bytes 0 xt target RAWSNAT": True,
    "counter packets 0 bytes 0 xt target MARK": False,
    'log prefix "xt target SNPT" accept': False,
    "ip saddr 10.1.0.2 ip dscp set cs1": False,
    "tcp flags syn tcp option maxseg size set rt mtu": False,
    "meta mark set 0x00000001 ip ttl set 64": False,
    "ip saddr @set accept": False,
    "add @seen { ip saddr . udp dport }": False,
    'log prefix "ip saddr set 10.9.0.2" accept': False,
}


@pytest.mark.parametrize("hook", ["prerouting", "input"])
@pytest.mark.parametrize("rule", REWRITTEN)
def test_rules_are_named_that_write_addresses_or_ports_themselves(rule: str, hook: str) -> None:
    text = f"table ip t {{\n\tchain c {{\n\t\ttype filter hook {hook} priority raw;\n\t\tRULE\n\t}}\n}}\n"
    listed, saved = ("", [rule]) if rule.startswith("-A") else (text.replace("RULE", rule), [])
    assert [*find_rewriting(listed, saved)] == ([rule.replace('"', "")] if REWRITTEN[rule] else [])
    assert not listed or [*find_rewriting(listed.replace(f"hook {hook}", "hook postrouting"), ())] == []


# -- which rules are concerned

FROM, TO = {"target": "10.1.0.2", "rate": "10 packets/s"}, {"target": "10.9.0.2", "direction": "to"}
MISSED: dict[str, tuple[bool, dict[str, object], dict[str, object]]] = {
    "a limit": (True, FROM, {}),
    "with ports": (True, FROM | {"protocol": "udp", "ports": [9]}, {}),
    "with source ports": (True, FROM | {"protocol": "udp", "source_ports": [9]}, {}),
    "per peer": (False, FROM | {"per": "peer"}, {}),
    "per peer, beside what is allowed": (
        True,
        FROM | {"per": "peer"},
        {"target": "10.3.0.9", "direction": "to", "action": "allow"},
    ),
    "per peer, beside what rejects": (
        True,
        FROM | {"per": "peer"},
        {"target": "10.3.0.9", "rate": "1 packets/s", "action": "reject"},
    ),
    "connections": (True, FROM | {"rate": "10 connections/s"}, {}),
    "connections with ports": (True, FROM | {"rate": "10 connections/s", "protocol": "tcp", "ports": [9]}, {}),
    "connections per peer": (False, FROM | {"rate": "10 connections/s", "per": "peer"}, {}),
    "connections at once with ports": (
        True,
        FROM | {"rate": "10 connections", "protocol": "tcp", "ports": [9]},
        {},
    ),
    "connections at once": (True, FROM | {"rate": "10 connections"}, {}),
    "shaped": (True, FROM | {"rate": "1 Mbit/s", "action": "shape"}, {}),
    "blocked": (False, {"target": "10.1.0.2", "action": "block"}, {}),
    "blocked beside what is allowed": (
        True,
        {"target": "10.1.0.0/24", "action": "block"},
        {"target": "10.3.0.9", "direction": "to", "action": "allow"},
    ),
    "allowed": (False, {"target": "10.1.0.2", "action": "allow"}, {}),
    "of the other family": (False, {"target": "fd00:1::2", "rate": "10 packets/s"}, {}),
    "to it": (True, TO | {"rate": "10 packets/s"}, {}),
    "all to it": (True, TO | {"rate": "10 packets/s", "target": "10.0.0.0/8", "per": "target"}, {}),
    "blocked to it": (True, TO | {"action": "block"}, {}),
    "to another": (False, TO | {"rate": "10 packets/s", "target": "10.3.0.2"}, {}),
}


def find_concerned(report: HostReport, *rules: dict[str, object]) -> set[int]:
    (finding,) = find_conflicts(report)
    assert finding.spoils is not None
    compilation = Compilation(Facts(own=own_addresses(["10.1.0.1"]), topology=HOME))
    for number, fields in enumerate(rules, start=1):
        if fields:
            compilation.put(replace(parse_rule(fields, NOW), id=number))
    return {*compilation.find_spoiled({finding.spoils: finding})}


@pytest.mark.parametrize("name", MISSED)
def test_rules_are_concerned_that_look_where_packets_are_in_a_tunnel_already(name: str) -> None:
    missed, rule, beside = MISSED[name]
    report = HostReport(diversions=(Diversion("10.9.0.0/16", "seg6 mode encap"),))
    assert (1 in find_concerned(report, rule, beside)) == missed


def test_where_routes_change_the_destination_alone_only_what_looks_at_it_is_concerned() -> None:
    report = HostReport(diversions=(Diversion("10.9.0.0/16", "seg6 mode inline"),))
    concerned = {name for name, (_, rule, _) in MISSED.items() if find_concerned(report, rule)}
    counted = {name for name in MISSED if name.startswith("connections") and "per peer" not in name}
    assert concerned == {"to it", "all to it", "blocked to it", *counted}


def test_rules_to_those_are_concerned_whom_this_host_knows_by_another_address() -> None:
    report = HostReport(nat=(("-A INPUT -s 10.9.0.0/16 -j SNAT --to-source 10.1.250.1",),))
    concerned = {name for name, (_, rule, _) in MISSED.items() if find_concerned(report, rule)}
    assert concerned == {"to it", "all to it", "blocked to it"}


RAISED = {
    "-A PREROUTING -i wan -j TTL --ttl-set 64": True,
    "-A wan_in -p tcp -j HL --hl-inc 1": True,
    "-A POSTROUTING -o wan -j TTL --ttl-set 65": False,
    "-A PREROUTING -m ttl --ttl-lt 2 -j DROP": False,
    "meta mark set 0x00000001 ip ttl set 64": True,
    "ip6 hoplimit set 64": True,
    'counter packets 0 bytes 0 xt target "TTL"': True,
    "ip ttl < 2 drop": False,
    'log prefix " ip ttl set 64"': False,
}


@pytest.mark.parametrize("rule", RAISED)
def test_who_writes_another_hop_limit_before_the_kernel_asks_for_it(rule: str) -> None:
    text = "table ip t {\n\tchain c {\n\t\ttype filter hook prerouting priority 0;\n\t\tRULE\n\t}\n}\n"
    listed, saved = ("", [rule]) if rule.startswith("-A") else (text.replace("RULE", rule), [])
    assert [*find_raising(listed, saved)] == ([rule.replace('"', "")] if RAISED[rule] else [])
    assert not listed or [*find_raising(listed.replace("hook prerouting", "hook postrouting"), ())] == []
