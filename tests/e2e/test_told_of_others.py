"""What others have the kernel do keeps rules from holding as they say: the rules concerned tell it, until it goes."""

from __future__ import annotations

import shlex
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import PIPE

import pytest

from netlimit.records import State
from scripts.testbed.namespaces import CLIENT, CLIENT6, LAN, LAN6, SERVER, SERVER6, WAN, Lab
from tests.e2e import frames
from tests.e2e.gateway import Gateway
from tests.e2e.loads import shape

TEE = ("-i", "wan", "-j", "TEE", "--gateway", "10.66.0.9")
PROXY = ("-i", "wan", "-p", "tcp", "-m", "conntrack", "--ctstate", "UNTRACKED", "-j", "SYNPROXY", "--mss", "1460")
TWICE = {
    "TEE": (("-t", "mangle", "-A", "PREROUTING", *TEE), ("-t", "mangle", "-D", "PREROUTING", *TEE)),
    "SYNPROXY": (("-A", "FORWARD", *PROXY), ("-D", "FORWARD", *PROXY)),
}
FILTER = ("filter", "add", "dev", "lan", "ingress", "protocol", "all", "pref", "10", "u32", "match", "u32", "0", "0")


@pytest.mark.parametrize("name", TWICE)
def test_rates_that_count_packets_twice_say_so(gateway: Gateway, lab: Lab, name: str) -> None:
    sent, other = gateway.put(
        {"target": CLIENT, "direction": "to", "rate": "200 packets/s"}, {"target": CLIENT, "rate": "200 packets/s"}
    )
    begin, end = TWICE[name]
    lab.gateway.run("iptables-legacy", *begin)
    try:
        with looked_again(gateway):
            assert name in gateway.wait_for_state(sent, State.DEGRADED)
        assert gateway.state(other) == (State.APPLIED, "")
        assert name in gateway.attempt("doctor").stdout
    finally:
        lab.gateway.run("iptables-legacy", *end)
    with looked_again(gateway):
        gateway.wait_for_state(sent, State.APPLIED)


FORWARDED = """table netdev t {
	chain c {
		type filter hook ingress device "lan" priority 0
		ip protocol udp fwd to "wan"
	}
}
"""
REDIRECT = (*FILTER, "action", "mirred", "egress", "redirect", "dev", "wan")
END_NFT, END_FILTER = ("nft", "flush", "ruleset"), ("tc", "filter", "del", "dev", "lan", "ingress", "pref", "10")
PAST = {
    'fwd to "wan"': (("nft", FORWARDED), END_NFT),
    "u32, pref 10": (("tc", *REDIRECT), END_FILTER),
}


@pytest.mark.parametrize("name", PAST)
def test_what_others_lead_past_the_hooks_is_told(gateway: Gateway, lab: Lab, name: str) -> None:
    blocked, limited, queued, back = gateway.put(
        {"target": CLIENT, "direction": "to", "action": "block", "protocol": "udp", "ports": [7]},
        {"target": CLIENT, "rate": "200 packets/s"},
        shape("10.1.0.0/24", per="target"),
        {"target": SERVER, "action": "block", "protocol": "udp", "ports": [7]},
    )
    begin, end = PAST[name]
    lab.gateway.run(*begin)
    try:
        with looked_again(gateway):
            assert name in gateway.wait_for_state(limited, State.DEGRADED)
        assert gateway.state(blocked)[0] is State.DEGRADED
        assert gateway.state(queued)[0] is State.DEGRADED
        assert gateway.state(back) == (State.APPLIED, ""), "it comes in by another device"
        told = gateway.attempt("doctor")
        assert (told.returncode, "SERIOUS: redirected packets" in told.stdout) == (1, True)
    finally:
        lab.gateway.run(*end)
    with looked_again(gateway):
        gateway.wait_for_state(limited, State.APPLIED)


@pytest.fixture
def beside(lab: Lab) -> Iterator[None]:
    """A second device of the gateway, by which nobody comes."""
    lab.gateway.ip("link add lan2 type veth peer name far", "link set lan2 up", "link set far up")
    yield
    lab.gateway.ip("link del lan2")


HANDED = {"redirect": ("handed packets", 5), "mirror": ("mirrored packets", 10)}
"""Ways of a filter's, with what doctor calls them, and how many of five packets a rule counts that names no device."""


@pytest.mark.parametrize("way", HANDED)
def test_what_filters_have_come_in_by_another_device_is_told(
    beside: None, gateway: Gateway, lab: Lab, way: str
) -> None:
    name, counted = HANDED[way]
    blocked, limited, anywhere, sent, back = gateway.put(
        {"target": "10.1.0.9", "action": "block", "interface": "lan"},
        {"target": "10.1.0.10", "rate": "1 packet/day", "interface": "lan"},
        {"target": "10.1.0.11", "rate": "100 packets/s"},
        {"target": "10.2.0.9", "direction": "to", "rate": "100 packets/s"},
        {"target": SERVER, "action": "block", "protocol": "udp", "ports": [7]},
    )
    lab.gateway.run("tc", "qdisc", "replace", "dev", "lan", "clsact")
    lab.gateway.run("tc", *FILTER, "action", "mirred", "ingress", way, "dev", "lan2")
    try:
        for source in ("10.1.0.9", "10.1.0.10", "10.1.0.11"):
            datagram = frames.udp(source, "10.2.0.9", 9, 9999, b"x")
            frames.send(lab.client, [frames.frame(frames.ip(source, "10.2.0.9", frames.UDP, datagram))] * 5)
        gateway.wait(lambda: gateway.count(anywhere).matched_packets == counted, "what was sent to be counted")
        passed = 5 + 5 + counted
        gateway.wait(lambda: gateway.count(sent).matched_packets >= passed, "what was handed over to pass both rules")
        with looked_again(gateway):
            assert "lan (u32, pref 10)" in gateway.wait_for_state(blocked, State.DEGRADED)
        assert gateway.state(limited)[0] is State.DEGRADED
        for rule in (anywhere, sent):
            assert (gateway.state(rule)[0] is State.DEGRADED) is (way == "mirror")
        assert gateway.state(back) == (State.APPLIED, ""), "it comes in by another device"
        told = gateway.attempt("doctor")
        assert (told.returncode, f"SERIOUS: {name}" in told.stdout) == (1, True)
    finally:
        lab.gateway.run(*END_FILTER)
    with looked_again(gateway):
        gateway.wait_for_state(blocked, State.APPLIED)


def test_what_filters_hand_to_loopback_is_told(gateway: Gateway, lab: Lab) -> None:
    """What comes in by it no rule asks for: the gateway itself sends that."""
    blocked, limited = gateway.put(
        {"target": "10.1.0.9", "action": "block"}, {"target": "10.1.0.0/24", "rate": "1 packet/day", "per": "host"}
    )
    lab.gateway.run("tc", "qdisc", "replace", "dev", "lan", "clsact")
    lab.gateway.run("tc", *FILTER, "action", "mirred", "ingress", "redirect", "dev", "lo")
    try:
        with looked_again(gateway):
            assert "lan (u32, pref 10)" in gateway.wait_for_state(blocked, State.DEGRADED)
        assert gateway.state(limited)[0] is State.DEGRADED
        told = gateway.attempt("doctor")
        assert (told.returncode, "SERIOUS: looped packets" in told.stdout) == (1, True)
    finally:
        lab.gateway.run(*END_FILTER)
    with looked_again(gateway):
        gateway.wait_for_state(blocked, State.APPLIED)


def test_shaping_to_the_gateway_tells_what_it_leaves_to_hosts_behind_nat(gateway: Gateway, lab: Lab) -> None:
    queued, limited = gateway.put(
        shape(WAN, direction="to"), {"target": WAN, "direction": "to", "rate": "900 packets/s"}
    )
    lab.gateway.run("iptables-legacy", "-w", "-t", "nat", "-A", *MASQUERADE)
    try:
        assert "ICMP" in gateway.wait_for_state(queued, State.DEGRADED)
        assert gateway.state(limited) == (State.APPLIED, "")
        before = gateway.count(queued).matched_packets
        lab.client.run("ping", "-q", "-n", "-c", "20", "-i", "0.002", SERVER)
        assert gateway.count(queued).matched_packets == before
    finally:
        lab.gateway.run("iptables-legacy", "-w", "-t", "nat", "-D", *MASQUERADE)


def test_what_others_have_leave_past_queues_is_told(gateway: Gateway, lab: Lab) -> None:
    queued, limited = gateway.put(shape(SERVER, direction="to"), {"target": SERVER, "rate": "900 packets/s"})
    lab.gateway.run("tc", "qdisc", "replace", "dev", "wan", "clsact")
    egress = ("dev", "wan", "egress", "pref", "10")
    match = ("protocol", "all", "u32", "match", "u32", "0", "0", "action", "mirred", "egress", "redirect", "dev", "lan")
    lab.gateway.run("tc", "filter", "add", *egress, *match)
    try:
        with looked_again(gateway):
            assert "wan (u32, pref 10)" in gateway.wait_for_state(queued, State.DEGRADED)
        assert gateway.state(limited) == (State.APPLIED, "")
        assert "SERIOUS: diverted packets" in gateway.attempt("doctor").stdout
    finally:
        lab.gateway.run("tc", "filter", "del", *egress)
    with looked_again(gateway):
        gateway.wait_for_state(queued, State.APPLIED)


IN_THE_WAY = {
    "u32, pref 65535": (
        "qdisc add dev lan clsact",
        "filter add dev lan ingress pref 65535 protocol all u32 match u32 0 0",
    ),
    "bpf, pref 65535": (
        "qdisc add dev lan clsact",
        "filter add dev lan ingress pref 65535 protocol all bpf bytecode 1,6\\ 0\\ 0\\ 0 flowid 1:77",
    ),
    "shared between devices": ("qdisc add dev lan ingress_block 7 clsact",),
}
"""What others put on the ingress of a device where ours should be."""


@pytest.mark.parametrize("name", IN_THE_WAY)
def test_who_is_in_the_way_on_one_ingress_is_told_and_all_else_goes_on(gateway: Gateway, lab: Lab, name: str) -> None:
    for words in ("qdisc replace dev lan clsact", "qdisc del dev lan clsact", *IN_THE_WAY[name]):
        lab.gateway.run("tc", *shlex.split(words))
    try:
        before = lab.gateway.run("tc", "filter", "show", "dev", "lan", "ingress").stdout
        queued, back = gateway.add(shape(CLIENT), shape(SERVER))
        told = gateway.wait_for_state(queued, State.DEGRADED)
        assert told.startswith("What comes in by lan and ends on this host is not shaped: ")
        assert name in told
        (blocked,) = gateway.add({"target": "10.1.0.9", "action": "block"})
        for rule in (back, blocked):
            assert gateway.state(rule) == (State.APPLIED, "")
        assert "nl-in" in lab.gateway.run("tc", "filter", "show", "dev", "wan", "ingress").stdout
        assert lab.gateway.run("tc", "filter", "show", "dev", "lan", "ingress").stdout == before
        lab.gateway.run("iptables-legacy", "-w", "-t", "raw", "-F", "PREROUTING")
        began = time.monotonic()
        gateway.wait(lambda: "NL-" in list_raw(lab), "the chains to lead to ours again")
        assert time.monotonic() - began < REPAIRED
    finally:
        lab.gateway.run("tc", "qdisc", "del", "dev", "lan", "clsact")
    gateway.wait_for_state(queued, State.APPLIED)
    gateway.wait(lambda: gateway.kernel.ingress().get("lan"), "the program on the device")


REPAIRED = 15.0
"""Seconds; what the kernel refuses is tried again after 30."""


def list_raw(lab: Lab) -> str:
    return lab.gateway.run("iptables-legacy", "-w", "-t", "raw", "-S", "PREROUTING").stdout


MASQUERADE = ("POSTROUTING", "-o", "wan", "-j", "MASQUERADE")
PREFIXES = ("--src-pfx", "fd00:1::/64", "--dst-pfx", "fd00:9::/64")


def write(hook: str, rule: str) -> tuple[str, str]:
    """The command by which nft does so at a hook."""
    return "nft", f"table ip t {{ chain c {{ type filter hook {hook} priority raw; {rule}; }}; }}"


REWRITTEN = {
    "ip saddr set 10.1.9.9": write("prerouting", "ip saddr 10.1.0.2 ip saddr set 10.1.9.9"),
    "udp dport set 9001": write("prerouting", "udp dport 9000 udp dport set 9001"),
    "ip saddr set 10.1.9.8": write("input", "ip saddr 10.1.0.2 ip saddr set 10.1.9.8"),
    "xt target SNPT": ("ip6tables-nft", "-t", "mangle", "-A", "INPUT", "-s", CLIENT6, "-j", "SNPT", *PREFIXES),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_addresses_and_ports_that_others_write_into_packets_are_told(gateway: Gateway, lab: Lab, name: str) -> None:
    limited, blocked, queued = gateway.put(
        {"target": CLIENT, "rate": "200 packets/s"},
        {"target": "10.1.0.77", "action": "block", "direction": "to"},
        shape("10.1.0.0/24", per="target"),
    )
    lab.gateway.run(*REWRITTEN[name])
    try:
        with looked_again(gateway):
            assert name in gateway.wait_for_state(limited, State.DEGRADED)
        assert [gateway.state(each)[0] for each in (blocked, queued)] == [State.DEGRADED] * 2
        told = gateway.attempt("doctor")
        assert (told.returncode, "SERIOUS: rewritten packets" in told.stdout) == (1, True)
    finally:
        lab.gateway.run(*END_NFT)
    with looked_again(gateway):
        gateway.wait_for_state(limited, State.APPLIED)


LED = {
    "iptables-legacy": (("-p", "udp", "--dport", "8080"), f"{SERVER}:9"),
    "iptables-nft": (("-p", "udp", "--dport", "8080"), f"{SERVER}:9"),
    "ip6tables-legacy": (("-p", "udp", "--dport", "8080"), f"[{SERVER6}]:9"),
    "ip6tables-nft": (("-p", "udp", "--dport", "8080"), f"[{SERVER6}]:9"),
}


@pytest.mark.parametrize("program", [*LED, "nft"])
def test_what_the_gateway_sends_to_another_address_than_it_asks_for_is_told(
    gateway: Gateway, lab: Lab, program: str
) -> None:
    six = program.startswith("ip6")
    own, server, client = (LAN6, SERVER6, CLIENT6) if six else (LAN, SERVER, CLIENT)
    network = "fd00:2::/64" if six else "10.2.0.0/24"
    blocked, limited, queued, other, from_it, at_once = gateway.put(
        {"target": server, "direction": "to", "action": "block"},
        {"target": network, "direction": "to", "rate": "100 packets/s", "per": "target"},
        shape(server, direction="to"),
        {"target": client, "direction": "to", "rate": "100 packets/s"},
        {"target": server, "rate": "100 packets/s"},
        {"target": server, "direction": "to", "rate": "100 connections"},
    )
    assert reach(lab, server, server, 9) == 0
    assert reach(lab, server, own, 8080) == 0
    if program == "nft":
        lab.gateway.run("nft", "-f", "-", input=TRANSLATED)
    else:
        matches, place = LED[program]
        lab.gateway.run(program, "-t", "nat", "-N", "PUBLISHED")
        lab.gateway.run(
            program, "-t", "nat", "-A", "OUTPUT", "-m", "addrtype", "--dst-type", "LOCAL", "-j", "PUBLISHED"
        )
        lab.gateway.run(program, "-t", "nat", "-A", "PUBLISHED", *matches, "-j", "DNAT", "--to-destination", place)
    try:
        assert reach(lab, server, own, 8080) == 5
        with looked_again(gateway):
            assert "nat OUTPUT" in gateway.wait_for_state(blocked, State.DEGRADED)
        assert gateway.state(limited)[0] is State.DEGRADED
        assert gateway.state(queued)[0] is State.DEGRADED
        for rule in (other, from_it, at_once):
            assert gateway.state(rule) == (State.APPLIED, "")
        told = gateway.attempt("doctor")
        assert (told.returncode, "WARNING: translated destinations" in told.stdout) == (0, True)
    finally:
        if program == "nft":
            lab.gateway.run("nft", "flush", "ruleset")
        else:
            lab.gateway.run(program, "-t", "nat", "-F")
            lab.gateway.run(program, "-t", "nat", "-X")
    with looked_again(gateway):
        gateway.wait_for_state(blocked, State.APPLIED)


def test_what_is_led_elsewhere_is_told_where_a_rule_is_of_its_protocol(gateway: Gateway, lab: Lab) -> None:
    """As Docker has it where a port is published. What the gateway says to itself meets no rule before that, not even
    one to everybody."""
    everybody, other, same = gateway.put(
        {"target": "0.0.0.0/0", "direction": "to", "rate": "1 packet/s", "burst": 1, "per": "target"},
        {"target": SERVER, "direction": "to", "rate": "1 packet/s", "protocol": "tcp"},
        {"target": SERVER, "direction": "to", "rate": "1 packet/s", "protocol": "udp"},
    )
    assert 0 < reach(lab, SERVER, SERVER, 9) < 5
    nat = ("iptables-legacy", "-t", "nat")
    led = ("-m", "addrtype", "--dst-type", "LOCAL", "-p", "udp", "--dport", "8080")
    lab.gateway.run(*nat, "-A", "OUTPUT", *led, "-j", "DNAT", "--to-destination", f"{SERVER}:9")
    try:
        assert reach(lab, SERVER, LAN, 8080) == 5
        with looked_again(gateway):
            gateway.wait_for_state(everybody, State.DEGRADED)
        assert gateway.state(same)[0] is State.DEGRADED
        assert gateway.state(other) == (State.APPLIED, "")
    finally:
        lab.gateway.run(*nat, "-F")
    with looked_again(gateway):
        gateway.wait_for_state(everybody, State.APPLIED)


TAKEN: dict[str, tuple[str, ...]] = {
    "REDIRECT": ("-i", "lan", "-p", "udp", "--dport", "8080", "-j", "REDIRECT", "--to-ports"),
    "DNAT": ("-i", "lan", "-p", "udp", "--dport", "8080", "-j", "DNAT", "--to-destination"),
}


@pytest.mark.parametrize("target", TAKEN)
def test_ports_that_are_redirected_to_the_gateway_are_told_where_they_would_be_shaped(
    gateway: Gateway, lab: Lab, target: str
) -> None:
    shaped, limited, sent = gateway.put(
        shape(CLIENT), {"target": CLIENT, "rate": "1000 packets/s"}, shape(CLIENT, direction="to")
    )
    place = {"REDIRECT": "9", "DNAT": f"{LAN}:9"}[target]
    elsewhere = ("-p", "udp", "--dport", "8081", "-j", "DNAT", "--to-destination", f"{SERVER}:9")
    nat = ("iptables-legacy", "-t", "nat")
    lab.gateway.run(*nat, "-A", "PREROUTING", *elsewhere)
    try:
        with looked_again(gateway):
            assert gateway.wait_for_state(shaped, State.APPLIED) == ""
        lab.gateway.run(*nat, "-A", "PREROUTING", *TAKEN[target], place)
        with looked_again(gateway):
            assert f"-j {target}" in gateway.wait_for_state(shaped, State.DEGRADED)
        assert gateway.state(limited) == (State.APPLIED, "")
        assert gateway.state(sent) == (State.APPLIED, ""), "it shapes what leaves"
        told = gateway.attempt("doctor")
        assert (told.returncode, "WARNING: redirected ports" in told.stdout) == (0, True)
    finally:
        lab.gateway.run(*nat, "-F")
    with looked_again(gateway):
        gateway.wait_for_state(shaped, State.APPLIED)


def test_what_leads_to_the_gateway_itself_is_not_told(gateway: Gateway, lab: Lab) -> None:
    """As Docker without published ports, and a resolver of the host's, have it."""
    (rule,) = gateway.put({"target": "0.0.0.0/0", "direction": "to", "rate": "1000 packets/s", "per": "target"})
    rules = (
        ("-N", "DOCKER"),
        ("-A", "OUTPUT", "!", "-d", "127.0.0.0/8", "-m", "addrtype", "--dst-type", "LOCAL", "-j", "DOCKER"),
        ("-A", "PREROUTING", "-p", "udp", "--dport", "8080", "-j", "DNAT", "--to-destination", f"{SERVER}:9"),
        ("-A", "OUTPUT", "-p", "udp", "--dport", "53", "-j", "REDIRECT", "--to-ports", "5353"),
        ("-A", "OUTPUT", "-p", "udp", "--dport", "54", "-j", "DNAT", "--to-destination", "127.0.0.53:53"),
        ("-A", "OUTPUT", "-p", "udp", "--dport", "55", "-j", "DNAT", "--to-destination", LAN),
        ("-A", "OUTPUT", "-d", LAN, "-p", "udp", "--dport", "56", "-j", "DNAT", "--to-destination", ":53"),
    )
    for words in rules:
        lab.gateway.run("iptables-legacy", "-t", "nat", *words)
    try:
        with looked_again(gateway):
            gateway.wait_for_state(rule, State.APPLIED)
        assert gateway.state(rule) == (State.APPLIED, "")
        assert "translated destinations" not in gateway.attempt("doctor").stdout
    finally:
        lab.gateway.run("iptables-legacy", "-t", "nat", "-F")
        lab.gateway.run("iptables-legacy", "-t", "nat", "-X")


def test_what_routes_take_out_of_tunnels_is_told(gateway: Gateway, lab: Lab) -> None:
    route = ("fd05::6/128", "encap", "seg6local", "action", "End.DX6", "nh6", SERVER6, "dev", "wan")
    lab.gateway.run("ip", "-6", "route", "add", *route)
    try:
        told = gateway.attempt("doctor").stdout
        assert "WARNING: SRv6" in told
        assert "fd05::6/128" in told
    finally:
        lab.gateway.run("ip", "-6", "route", "del", "fd05::6/128")
    assert "SRv6" not in gateway.attempt("doctor").stdout


INTO = {"seg6 mode encap": True, "seg6 mode inline": False}
"""Encapsulations of routes, and whether FORWARD sees the outer packet alone."""


@pytest.mark.parametrize("encapsulation", INTO)
def test_what_routes_put_into_tunnels_before_it_is_forwarded_is_told(
    gateway: Gateway, lab: Lab, encapsulation: str
) -> None:
    hides, network = INTO[encapsulation], "fd00:9::/64"
    limited, peers, blocked, sent, elsewhere, opened = gateway.put(
        {"target": CLIENT6, "rate": "100 packets/s"},
        {"target": CLIENT6, "rate": "100 packets/s", "per": "peer"},
        {"target": "fd00:1::/64", "protocol": "udp", "ports": [8], "action": "block"},
        {"target": network, "direction": "to", "rate": "100 packets/s", "per": "target"},
        {"target": SERVER6, "direction": "to", "rate": "100 packets/s"},
        {"target": CLIENT6, "rate": "100 connections"},
    )
    route = (network, *f"encap {encapsulation} segs fd00:5e::1 dev wan".split())
    lab.gateway.run("ip", "-6", "route", "add", "fd00:5e::/64", "via", SERVER6)
    lab.gateway.run("ip", "-6", "route", "add", *route)
    try:
        send(lab, CLIENT6, "fd00:9::2", 5)
        gateway.wait(lambda: gateway.count(peers).matched_packets == 5, "what was sent to be counted")
        assert gateway.count(limited).matched_packets == (0 if hides else 5)
        assert gateway.count(sent).matched_packets == 0
        with looked_again(gateway):
            for rule in (sent, opened, *([limited] if hides else [])):
                assert f"`encap {encapsulation}`, {network}" in gateway.wait_for_state(rule, State.DEGRADED)
        for rule in (peers, blocked, elsewhere, *([] if hides else [limited])):
            assert gateway.state(rule) == (State.APPLIED, "")
        told = gateway.attempt("doctor")
        assert (told.returncode, "WARNING: encapsulated" in told.stdout) == (0, True)
    finally:
        lab.gateway.run("ip", "-6", "route", "del", network)
        lab.gateway.run("ip", "-6", "route", "del", "fd00:5e::/64")
    with looked_again(gateway):
        gateway.wait_for_state(sent, State.APPLIED)


def test_what_names_this_gateway_as_a_part_of_its_way_is_told(gateway: Gateway, lab: Lab) -> None:
    (limited,) = gateway.put({"target": CLIENT6, "rate": "100 packets/s"})
    keys = [f"net.ipv6.conf.{device}.seg6_enabled" for device in ("all", "lan")]
    assert "segment routing" not in gateway.attempt("doctor").stdout
    lab.gateway.run("sysctl", "-qw", *(f"{key}=1" for key in keys))
    try:
        send(lab, CLIENT6, LAN6, 5, by=SERVER6)
        gateway.wait(lambda: gateway.count(limited).matched_packets == 10, "each packet to be counted twice")
        said = " ".join(gateway.attempt("doctor").stdout.split())
        assert "WARNING: segment routing. IPv6 packets may name this gateway as a part of their way on lan" in said
    finally:
        lab.gateway.run("sysctl", "-qw", *(f"{key}=0" for key in keys))
    assert "segment routing" not in gateway.attempt("doctor").stdout


MASKING = ("-s", f"{CLIENT}/32", "-j", "SNAT", "--to-source", "10.1.250.1")
MASKED = f"""table ip masked {{
	chain i {{
		type nat hook input priority 100
		ip saddr {CLIENT} snat to 10.1.250.1
	}}
}}
"""


@pytest.mark.parametrize("program", ["iptables-legacy", "iptables-nft", "nft"])
def test_who_comes_to_the_gateway_by_another_address_than_his_own_is_told(
    gateway: Gateway, lab: Lab, program: str
) -> None:
    blocked, limited, queued, other, from_him, at_once = gateway.put(
        {"target": CLIENT, "direction": "to", "action": "block", "protocol": "udp", "source_ports": [9]},
        {"target": CLIENT, "direction": "to", "rate": "100 packets/s"},
        shape(CLIENT, direction="to"),
        {"target": SERVER, "direction": "to", "rate": "100 packets/s"},
        {"target": CLIENT, "rate": "100 packets/s"},
        {"target": CLIENT, "direction": "to", "rate": "100 connections"},
    )
    if program == "nft":
        lab.gateway.run("nft", "-f", "-", input=MASKED)
    else:
        lab.gateway.run(program, "-t", "nat", "-A", "INPUT", *MASKING)
    try:
        with looked_again(gateway):
            for rule in (blocked, limited, queued):
                assert "nat INPUT" in gateway.wait_for_state(rule, State.DEGRADED)
        for rule in (other, from_him, at_once):
            assert gateway.state(rule) == (State.APPLIED, "")
        said = " ".join(gateway.attempt("doctor").stdout.split())
        assert "WARNING: translated sources" in said
        assert "NETLIMIT_SAFE" in said
    finally:
        if program == "nft":
            lab.gateway.run("nft", "flush", "ruleset")
        else:
            lab.gateway.run(program, "-t", "nat", "-F")
    with looked_again(gateway):
        gateway.wait_for_state(blocked, State.APPLIED)


def send(lab: Lab, source: str, goal: str, times: int, by: str = "") -> None:
    """Datagrams of the client's; with `by`, their way leads on from the goal to there (a segment routing header)."""
    datagram = frames.udp(source, by or goal, 9, 9999, b"x")
    protocol, payload = frames.UDP, datagram
    if by:
        ends = socket.inet_pton(socket.AF_INET6, by) + socket.inet_pton(socket.AF_INET6, goal)
        protocol, payload = 43, struct.pack("!BBBBBBH", frames.UDP, 4, 4, 1, 1, 0, 0) + ends + datagram
    frames.send(lab.client, [frames.frame(frames.ip(source, goal, protocol, payload)) for _ in range(times)])


TRANSLATED = f"""table ip led {{
	chain o {{
		type nat hook output priority -100
		udp dport 8080 jump led
	}}
	chain led {{
		udp dport 1-65535 dnat to {SERVER}:9 comment "dnat to 10.1.0.2"
	}}
}}
"""
REACH = """
import socket, sys, time
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
with socket.socket(family, socket.SOCK_DGRAM) as sock:
    for _ in range(5):
        try:
            sock.sendto(b"x", (sys.argv[1], int(sys.argv[2])))
        except OSError:
            pass
"""
HEAR = """
import socket, sys
with socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sock.bind((sys.argv[1], 9))
    print("ready", flush=True)
    sys.stdin.read()
    sock.settimeout(0.5)
    heard = 0
    try:
        while True:
            sock.recv(100)
            heard += 1
    except TimeoutError:
        print(heard)
"""


def reach(lab: Lab, server: str, address: str, port: int) -> int:
    """How many of five datagrams of the gateway's own to an address come to the server's port 9."""
    hearing = lab.server.popen(sys.executable, "-S", "-c", HEAR, server, stdin=PIPE, stdout=PIPE)
    assert hearing.stdout is not None
    assert hearing.stdout.readline() == "ready\n"
    lab.gateway.run(sys.executable, "-S", "-c", REACH, address, str(port))
    out, _ = hearing.communicate(timeout=30)
    return int(out)


@contextmanager
def looked_again(gateway: Gateway) -> Iterator[None]:
    """A controller that starts looks round at once."""
    gateway.stop()
    gateway.launch()
    yield


def test_fragments_that_nobody_puts_together_are_told_where_a_rule_has_ports(gateway: Gateway, lab: Lab) -> None:
    held, ported, shaped, queued = gateway.put(
        {"target": CLIENT, "action": "block"},
        {"target": CLIENT, "action": "block", "protocol": "udp", "ports": [9]},
        shape(CLIENT, protocol="udp", source_ports=[9]),
        shape(SERVER),
    )
    early = "table ip early { chain entry { type filter hook prerouting priority -450; ip saddr 10.9.9.9 notrack; }; }"
    lab.gateway.run("nft", early)
    try:
        with looked_again(gateway):
            for rule in (ported, shaped):
                assert "below -400" in gateway.wait_for_state(rule, State.DEGRADED)
        for rule in (held, queued):
            assert gateway.state(rule) == (State.APPLIED, "")
        assert "fragments apart" in gateway.attempt("doctor").stdout
    finally:
        lab.gateway.run("nft", "delete", "table", "ip", "early")
    with looked_again(gateway):
        gateway.wait_for_state(ported, State.APPLIED)
