"""What doctor makes of what was found: each finding where there is cause, and none without."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from netlimit.conflicts import Fill, Finding, HostReport, Severity, Spoiled, find_conflicts
from netlimit.faults import ServiceReport, find_faults
from netlimit.tree import Diversion

FLOWTABLE = """table inet f {
	flowtable fast {
		hook ingress priority filter
		devices = { lan, wan }
	}

	chain forward {
		type filter hook forward priority filter; policy accept;
		ip protocol tcp flow add @fast
	}
}
"""
LEAVING = """table netdev t {
	chain e {
		type filter hook egress device "wan" priority filter; policy accept;
		ip daddr 10.2.0.2 fwd to "w2"
	}
}
"""
TWIN = """table ip filter {
	chain FORWARD {
		type filter hook forward priority filter; policy accept;
		counter packets 0 bytes 0 drop
	}
}
"""
DUPLICATE = """table ip mangle {
	chain INPUT {
		type filter hook input priority mangle; policy accept;
		counter packets 0 bytes 0 jump NL-INPUT
	}

	chain NL-INPUT {
		counter packets 0 bytes 0 jump NL-G1d521ab726
	}

	chain NL-G1d521ab726 {
		counter packets 0 bytes 0 xt target SET
	}
}
"""
OTHER = "table ip filter {\n\tchain forward {\n\t\ttype filter hook forward priority filter;\n\t}\n}\n"
PRIORITY = "table ip q {\n\tchain voip {\n\t\ttype filter hook forward priority 0;\n\t\tmeta priority set 0:6\n\t}\n}\n"
POLICY = (
    "table inet t {{\n\tct timeout agg {{\n\t\tprotocol tcp\n\t\tl3proto ip\n"
    "\t\tpolicy = {{ established : 100, close_wait : 60, close : {} }}\n\t}}\n}}\n"
)
UNTRACKING = """table inet early {{
	chain entry {{
		type filter hook prerouting priority {}; policy accept;
		jump apart
	}}

	chain apart {{
		udp dport 53 notrack
	}}
}}
"""

CASES: list[tuple[HostReport, str, Severity, str]] = [
    (HostReport(programs=frozenset({"firewalld"})), "firewalld", Severity.NOTE, "FirewallBackend=nftables"),
    (HostReport(programs=frozenset({"dockerd"})), "docker", Severity.NOTE, "/etc/docker/daemon.json"),
    (HostReport(programs=frozenset({"keepalived"})), "other routers", Severity.NOTE, "keepalived runs here"),
    (HostReport(charged={"wan": "the program is missing."}), "full sockets", Severity.WARNING, "body. The program is"),
    (HostReport(flushing=("/etc/nftables.conf",)), "flush ruleset", Severity.NOTE, "flush table"),
    (HostReport(saved=("/etc/iptables/rules.v4",)), "saved rules", Severity.SERIOUS, "grep -v NL-"),
    (HostReport(saved_sets=("/etc/iptables/ipsets",)), "saved sets", Severity.WARNING, "sed -E '/^(create|add) nl-/d'"),
    (HostReport(enabled=("netfilter-persistent.service",)), "restored rules", Severity.NOTE, "after it"),
    (HostReport(nftables=TWIN), "two kinds of iptables", Severity.NOTE, "iptables-legacy"),
    (HostReport(nftables=TWIN, legacy=("-A FORWARD -j DROP",)), "two kinds of iptables", Severity.WARNING, "one kind"),
    (HostReport(nftables=FLOWTABLE), "flow offload", Severity.SERIOUS, "on lan, wan"),
    (HostReport(legacy=("-A FORWARD -j FLOWOFFLOAD --hw",)), "flow offload", Severity.SERIOUS, "FLOWOFFLOAD"),
    (HostReport(legacy=("-A POSTROUTING -j CLASSIFY --set-class 0:6",)), "packet priority", Severity.WARNING, "CLASS"),
    (
        HostReport(legacy=("-A POSTROUTING -j SET --map-set bulk dst --map-prio",)),
        "packet priority",
        Severity.WARNING,
        "--map-prio",
    ),
    (HostReport(legacy=("-A PREROUTING ! -i lo -j NOTRACK",)), "untracked packets", Severity.SERIOUS, "! -i lo"),
    (HostReport(nftables='\tiifname != "lo" notrack\n'), "untracked packets", Severity.SERIOUS, "notrack"),
    (
        HostReport(legacy=('-A PREROUTING -m comment --comment " -i lo " -j NOTRACK',)),
        "untracked packets",
        Severity.SERIOUS,
        "NOTRACK",
    ),
    (HostReport(legacy=("-A OUTPUT ! -o lo -j CT --zone 3",)), "connection zones", Severity.SERIOUS, "--zone 3"),
    (HostReport(legacy=("-A OUTPUT ! -o lo -j TEE --gateway 10.66.0.9",)), "copied packets", Severity.SERIOUS, "TEE"),
    (HostReport(legacy=("-A PREROUTING -j NOTRACK",)), "untracked packets", Severity.SERIOUS, "NOTRACK"),
    (HostReport(legacy=("-A OUTPUT -p udp -j CT --notrack",)), "untracked packets", Severity.SERIOUS, "--notrack"),
    (HostReport(nftables="\tudp dport 53 counter notrack\n"), "untracked packets", Severity.SERIOUS, "dport 53"),
    (HostReport(legacy=("-A PREROUTING -j CT --zone mark",)), "connection zones", Severity.SERIOUS, "--zone mark"),
    (HostReport(legacy=("-A PREROUTING -j CT --zone-orig 3",)), "connection zones", Severity.SERIOUS, "in each zone"),
    (HostReport(nftables="\tct original zone set 3\n"), "connection zones", Severity.SERIOUS, "zone set 3"),
    (
        HostReport(legacy=("-A PREROUTING -i wan -j TTL --ttl-set 64",)),
        "raised hop limits",
        Severity.SERIOUS,
        "--ttl-set 64",
    ),
    (HostReport(closing=11), "reset connections", Severity.WARNING, "nf_conntrack_tcp_timeout_close=10"),
    (HostReport(nftables="\tcounter xt target CT\n"), "connection zones", Severity.SERIOUS, "target CT"),
    (
        HostReport(legacy=("-A PREROUTING -j TEE --gateway 10.66.0.9",)),
        "copied packets",
        Severity.SERIOUS,
        "TEE",
    ),
    (HostReport(nftables='\tdup to 10.66.0.9 device "mir"\n'), "copied packets", Severity.SERIOUS, "dup to 10.66.0.9"),
    (HostReport(nftables='\tcounter packets 0 xt target "TEE"\n'), "copied packets", Severity.SERIOUS, "xt target"),
    (HostReport(legacy=("-A FORWARD -j SYNPROXY --mss 1460",)), "SYNPROXY", Severity.SERIOUS, "twice"),
    (HostReport(nftables="\ttcp dport 80 synproxy mss 1460 wscale 7\n"), "SYNPROXY", Severity.SERIOUS, "dport 80"),
    (HostReport(ahead={"lan": "u32, pref 10"}), "ingress filter", Severity.SERIOUS, "lan (u32, pref 10)"),
    (HostReport(barred={"lan": "A."}), "no program on an ingress", Severity.WARNING, "by lan and ends on this gateway"),
    (HostReport(barred={"b": "B.", "a": "A."}), "no program on an ingress", Severity.WARNING, "by b and 1 more such"),
    (HostReport(skipped={"lan": "A chain."}), "chains passed by", Severity.SERIOUS, "of lan, and should not be: A"),
    (HostReport(clsacts=("lan", "wan")), "clsact", Severity.NOTE, "netlimit uses a clsact qdisc on lan, wan: nobody"),
    (HostReport(nftables=PRIORITY), "packet priority", Severity.WARNING, "chain voip of nftables"),
    (HostReport(offloading=("eth0",)), "hardware offload", Severity.WARNING, "ethtool -K eth0 hw-tc-offload off"),
    (HostReport(closing=60), "reset connections", Severity.WARNING, "timeout_close=10"),
    (HostReport(nftables=POLICY.format("20")), "reset connections", Severity.WARNING, "`ct timeout agg` of nftables"),
    (HostReport(nftables=POLICY.format("1m5s")), "reset connections", Severity.WARNING, "for 65 s"),
    (HostReport(legacy=("-A FORWARD -j CT --timeout agg",)), "reset connections", Severity.WARNING, "cannot read"),
    (HostReport(connections=Fill(95, 100)), "connection table", Severity.SERIOUS, "nf_conntrack_max=200"),
    (
        HostReport(buckets={"nl-a": Fill(95, 100)}),
        "hashlimit table",
        Severity.SERIOUS,
        "nl-a is nearly full (95 of 100)",
    ),
    (HostReport(sets={"nl-a": Fill(95, 100)}), "set size", Severity.WARNING, "NETLIMIT_SET_SIZE"),
    (HostReport(sets={"nl-a": Fill(100, 100)}), "set size", Severity.SERIOUS, "NETLIMIT_SET_SIZE"),
    (HostReport(sets={"nl-peer4-a": Fill(55, 100)}), "peers", Severity.WARNING, "per: target"),
    (HostReport(foreign={"wan": "htb 1:"}), "foreign qdisc", Severity.WARNING, "--take-over wan"),
    (HostReport(hz=100), "clock tick", Severity.NOTE, "divided by 100"),
    (HostReport(bridges=("br0",), bridged={"br0": frozenset()}), "bridge", Severity.NOTE, "br_netfilter"),
    (HostReport(bridges=("br0",), bridged={"br0": frozenset({4, 6})}), "bridge", Severity.WARNING, "VLAN 0"),
    (HostReport(source_routed=True), "source routes", Severity.SERIOUS, "accept_source_route=0"),
    (
        HostReport(diversions=(Diversion("fd00:9::/64", "seg6 mode encap"), Diversion("10.9.0.0/16", "bpf in"))),
        "encapsulated packets",
        Severity.WARNING,
        "`encap seg6 mode encap`, fd00:9::/64 and 1 more",
    ),
    (
        HostReport(diversions=(Diversion("fd00:9::/64", "ila"),)),
        "encapsulated destinations",
        Severity.WARNING,
        "`encap ila`, fd00:9::/64",
    ),
    (HostReport(diverting={"wan": "u32, pref 1"}), "diverted packets", Severity.SERIOUS, "wan (u32, pref 1)"),
    (HostReport(rewriting={"lan": "matchall, pref 1"}), "rewritten packets", Severity.SERIOUS, "lan, matchall, pref 1"),
    (HostReport(editing={"lan": "matchall, pref 1"}), "edited packets", Severity.WARNING, "lan (matchall, pref 1)"),
    (HostReport(handing={"lan": "u32, pref 1"}), "handed packets", Severity.SERIOUS, "lan (u32, pref 1)"),
    (HostReport(looping={"lan": "u32, pref 1"}), "looped packets", Severity.SERIOUS, "lan (u32, pref 1)"),
    (HostReport(mirroring={"lan": "u32, pref 1"}), "mirrored packets", Severity.SERIOUS, "lan (u32, pref 1)"),
    (HostReport(returning={"wan": "u32, pref 1"}), "returned packets", Severity.SERIOUS, "wan (u32, pref 1)"),
    (HostReport(nftables=LEAVING), "diverted packets", Severity.SERIOUS, 'wan (`ip daddr 10.2.0.2 fwd to "w2"`)'),
    (HostReport(translators=("jool",)), "NAT64", Severity.WARNING, "The module jool translates"),
    (HostReport(waypoints=("lan", "wan")), "segment routing", Severity.WARNING, "on lan, wan"),
    (
        HostReport(nat=(("-A INPUT -s 10.1.0.0/16 -j SNAT --to-source 10.1.250.1",),)),
        "translated sources",
        Severity.WARNING,
        "`-A INPUT -s 10.1.0.0/16 -j SNAT --to-source 10.1.250.1`: 10.1.0.0-10.1.255.255",
    ),
    (HostReport(segments=("fd05::6/128", "fd05::7/128")), "SRv6", Severity.WARNING, "fd05::6/128 and 1 more"),
    (
        HostReport(nat=(("-A PREROUTING -j REDIRECT", "-A PREROUTING -j DNAT --to-destination 127.0.0.1"),)),
        "redirected ports",
        Severity.WARNING,
        "`-A PREROUTING -j REDIRECT` and 1 more such rule",
    ),
    (
        HostReport(mangle=(("-A FORWARD -j ips", "-A ips -j NFQUEUE --queue-num 0"),)),
        "queued packets",
        Severity.WARNING,
        "`-A ips -j NFQUEUE --queue-num 0`)",
    ),
    (
        HostReport(rerouting=("-A OUTPUT -j MARK --set-xmark 0x1/0xff", "meta mark set 0x00000001")),
        "rerouted packets",
        Severity.WARNING,
        "`-A OUTPUT -j MARK --set-xmark 0x1/0xff` and 1 more such rule",
    ),
    (HostReport(labelled=("lan", "wan")), "MPLS", Severity.WARNING, "by lan, wan"),
    (HostReport(labelled=("lan",)), "MPLS", Severity.WARNING, "to `dev lo` and is for this gateway itself"),
    (HostReport(namespaces=True), "user namespaces", Severity.WARNING, "user.max_user_namespaces=0"),
    (HostReport(synchronized=False), "clock", Severity.WARNING, "chrony"),
]
QUIET = [
    HostReport(nat=(("-A POSTROUTING -j SNAT --to-source 10.1.250.1", "-A INPUT -j ACCEPT"),)),
    HostReport(legacy=("-A PREROUTING -i lo -j NOTRACK", "-A OUTPUT -o lo -j NOTRACK")),
    HostReport(nftables='\tiif "lo" notrack\n'),
    HostReport(
        legacy=("-A PREROUTING -j CLASSIFY --set-class 0:6",), nftables=PRIORITY.replace("forward", "prerouting")
    ),
    HostReport(),
    HostReport(nftables=OTHER),
    HostReport(nftables=FLOWTABLE.replace("@fast", "@other")),
    HostReport(connections=Fill(89, 100), sets={"nl-a": Fill(0, 1)}, buckets={"nl-a": Fill(0, 0)}),
    HostReport(sets={"nl-peer4-a": Fill(4, 9)}),
    HostReport(
        mangle=(("-A ips -j NFQUEUE", "-A POSTROUTING -j NFQUEUE", '-A INPUT -m comment --comment "-j NFQUEUE"'),)
    ),
    HostReport(joining=("br0", "br1")),
    HostReport(closing=10),
    HostReport(nftables=POLICY.format(10)),
    HostReport(nftables=POLICY.format("9s")),
    HostReport(nftables=POLICY.format(9).replace("close :", "last_ack :")),
    HostReport(bridged={}, hz=1000, programs=frozenset({"sshd"})),
]
SERVICE = ServiceReport("gw1", database=Path("/var/lib/netlimit/netlimit.db"), mode=0o660)
FAULTS: list[tuple[ServiceReport, str, Severity, str]] = [
    (replace(SERVICE, controlled=False), "controller", Severity.SERIOUS, "No controller runs"),
    (replace(SERVICE, silent=None), "controller", Severity.SERIOUS, "none has reported for gw1"),
    (replace(SERVICE, silent=timedelta(minutes=1)), "controller", Severity.SERIOUS, "NETLIMIT_HOST"),
    (replace(SERVICE, silent=timedelta(hours=-1)), "controller", Severity.SERIOUS, "by a clock that was 1 h ahead"),
    (replace(SERVICE, skew="It is ahead."), "clocks apart", Severity.WARNING, "It is ahead."),
    (replace(SERVICE, paused=True), "paused", Severity.SERIOUS, "netlimit apply"),
    (replace(SERVICE, namesake="Two are gw1."), "two of one name", Severity.SERIOUS, "Two are gw1."),
    (replace(SERVICE, closed="Rule 7 does."), "closed to management", Severity.WARNING, "--enable --force"),
    (replace(SERVICE, trouble="a fight."), "last error", Severity.SERIOUS, "a fight."),
    (replace(SERVICE, errors=((7, "why"), (9, "no"))), "rules in error", Severity.SERIOUS, "2 rules are not enforced"),
    (replace(SERVICE, buckets=2**29), "memory for buckets", Severity.WARNING, "here could come to 512 MB"),
    (replace(SERVICE, buckets=2**28, memory=2**29), "memory for buckets", Severity.WARNING, "has 512 MB in all."),
    (replace(SERVICE, lost="It is gone.", silent=None), "database", Severity.SERIOUS, "It is gone."),
    (replace(SERVICE, mode=0o664), "file rights", Severity.WARNING, "chmod o= /var/lib/netlimit/netlimit.db"),
    (replace(SERVICE, unreached="No API."), "api", Severity.WARNING, "No API."),
    (replace(SERVICE, stranger="A user."), "stranger in the API's place", Severity.SERIOUS, "A user."),
    (replace(SERVICE, listen="192.0.2.1"), "no encryption", Severity.WARNING, "NETLIMIT_TLS_CERT"),
    (replace(SERVICE, listen="::"), "no encryption", Severity.WARNING, "NETLIMIT_TLS_CERT"),
]


@pytest.mark.parametrize(("report", "name", "severity", "words"), CASES, ids=[case[1] for case in CASES])
def test_a_conflict_is_found_with_what_to_do(report: HostReport, name: str, severity: Severity, words: str) -> None:
    check(find_conflicts(report), name, severity, words)


@pytest.mark.parametrize("report", QUIET)
def test_what_is_no_conflict_is_not_spoken_of(report: HostReport) -> None:
    assert find_conflicts(report) == []


@pytest.mark.parametrize("early", ["-401", "-450"])
def test_who_leaves_fragments_apart_is_found(early: str) -> None:
    found = {each.name: str(each) for each in find_conflicts(HostReport(nftables=UNTRACKING.format(early)))}
    assert "(`udp dport 53 notrack`, at a priority below -400)" in found["fragments apart"]


@pytest.mark.parametrize("late", ["raw", "-300", "-400", "-399", "raw - 10", "mangle"])
def test_where_fragments_were_put_together_it_does_not_matter_what_is_tracked(late: str) -> None:
    found = {each.name for each in find_conflicts(HostReport(nftables=UNTRACKING.format(late)))}
    assert "fragments apart" not in found


@pytest.mark.parametrize(("report", "name", "severity", "words"), FAULTS, ids=[case[1] for case in FAULTS])
def test_a_fault_is_found_with_what_to_do(report: ServiceReport, name: str, severity: Severity, words: str) -> None:
    check(find_faults(report), name, severity, words)


@pytest.mark.parametrize("listen", ["127.0.0.1", "::1", "localhost"])
def test_a_service_that_is_well_has_no_faults(listen: str) -> None:
    assert find_faults(replace(SERVICE, listen=listen)) == []
    assert find_faults(replace(SERVICE, listen="192.0.2.1", encrypted=True)) == []


@pytest.mark.parametrize(("family", "tool"), [("ip", "iptables-nft"), ("ip6", "ip6tables-nft")])
def test_a_copy_of_our_chains_that_somebody_has_loaded_is_found(family: str, tool: str) -> None:
    report = HostReport(nftables=DUPLICATE.replace("table ip ", f"table {family} "))
    found = [finding for finding in find_conflicts(report) if finding.name == "copied chains"]
    check(found, "copied chains", Severity.SERIOUS, f"{tool}-save -t mangle | grep -v NL- | {tool}-restore")
    assert f"{family} mangle (2 chains)" in found[0].what
    assert found[0].spoils is Spoiled.EVERY
    left_alone = HostReport(
        nftables=DUPLICATE.replace("jump NL-INPUT", "accept").replace("jump NL-G1d521ab726", "drop")
    )
    assert not [finding for finding in find_conflicts(left_alone) if finding.name == "copied chains"]


def test_the_worst_comes_first() -> None:
    found = find_conflicts(HostReport(hz=100, synchronized=False, saved=("/etc/iptables/rules.v4",)))
    assert [finding.severity for finding in found] == [Severity.SERIOUS, Severity.WARNING, Severity.NOTE]


def check(found: list[Finding], name: str, severity: Severity, words: str) -> None:
    (finding,) = found
    assert (finding.name, finding.severity) == (name, severity)
    assert words in str(finding)


def test_copies_that_devices_make_and_names_of_chains_are_none() -> None:
    text = '\tdup to "mir"\n\tcounter jump synproxy\n\tip saddr 10.0.0.1 goto synproxy comment "dup to 10.0.0.1"\n'
    assert find_conflicts(HostReport(nftables=text, legacy=("-A OUTPUT -o lo -j TEE --gateway 10.66.0.9",))) == []


def test_what_only_speaks_of_untracked_packets_is_none() -> None:
    rules = (
        '-A INPUT -m comment --comment "no -j NOTRACK --zone" -j ACCEPT',
        "-A INPUT -m conntrack --ctstate UNTRACKED -j ACCEPT",
        "-A OUTPUT -o lo -j NOTRACK",
        "-A PREROUTING -j CT --helper ftp",
    )
    text = '\tiifname "lo" notrack\n\tct zone 1 accept comment "notrack"\n\tct state untracked accept\n'
    assert find_conflicts(HostReport(legacy=rules, nftables=text)) == []


@pytest.mark.parametrize(
    ("joining", "bridged", "words"),
    [
        (("br0", "br1"), ({4, 6}, {4, 6}), "bridge-nf-call-iptables=0 net.bridge.bridge-nf-call-ip6tables=0; for"),
        (("br0", "br1"), ({6}, {6}), "sysctl -w net.bridge.bridge-nf-call-ip6tables=0; for each"),
        (("br0", "br1"), ({6}, {4, 6}), "each bridge: ip link set BRIDGE type bridge nf_call_ip6tables 0."),
        (("br0",), ({4, 6}, {4, 6}), ""),
        (("br0", "br1"), (set(), set()), ""),
        (("br0", "br1"), ({4}, {6}), ""),
        (("br0", "br1"), ({4}, set()), ""),
    ],
)
def test_bridges_that_hand_the_same_packet_over_are_several_with_ports(
    joining: tuple[str, ...], bridged: tuple[set[int], set[int]], words: str
) -> None:
    report = HostReport(
        bridges=("br0", "br1"), joining=joining, bridged=dict(zip(("br0", "br1"), map(frozenset, bridged), strict=True))
    )
    found = [each for each in find_conflicts(report) if each.name == "several bridges"]
    assert len(found) == bool(words)
    assert all(words in each.advice for each in found)


def test_each_bridge_is_told_of_by_what_it_hands_over_itself() -> None:
    bridged = {"br0": frozenset({4}), "br1": frozenset[int](), "br2": frozenset({4})}
    found = find_conflicts(HostReport(bridges=tuple(bridged), bridged=bridged))
    assert sorted(each.what.partition(" pass")[0] for each in found if each.name == "bridge") == [
        "What br0, br2 forwards between ports",
        "What br0, br2 forwards between ports (IPv6)",
        "What br1 forwards between ports (IPv4 and IPv6)",
    ]
