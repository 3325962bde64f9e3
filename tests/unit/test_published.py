"""What is led to other hosts of what comes for a gateway's own addresses, and which rules that concerns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest

from netlimit.cases import Host
from netlimit.compile import Compilation
from netlimit.conflicts import Finding, HostReport, Severity, find_conflicts, read_publications
from netlimit.limits import Facts, own_addresses
from netlimit.publications import Publications, find_led
from netlimit.published import find_publications
from netlimit.rules import parse_rule
from netlimit.shaping import Note
from netlimit.spans import Span, join, name, read_address, read_addresses
from tests.unit.shapes import HOME
from tests.unit.strategies import NOW

OWN = frozenset(("10.1.0.1", "10.2.0.1", "fd00:2::1"))
FIRSTS = ("lan", ("10.1.0.1",)), ("wan", ("10.2.0.1", "fd00:2::1"))
HOST = Host(
    join(map(read_address, OWN)), tuple((device, tuple(sorted(map(read_address, some)))) for device, some in FIRSTS)
)
DOCKER = (
    "-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER",
    "-A OUTPUT ! -d 127.0.0.0/8 -m addrtype --dst-type LOCAL -j DOCKER",
    "-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE",
    "-A DOCKER -i docker0 -j RETURN",
    "-A DOCKER ! -i docker0 -p tcp -m tcp --dport 8080 -j DNAT --to-destination 172.17.0.2:80",
    "-A DOCKER -d 10.2.0.1/32 ! -i docker0 -p udp -m udp --dport 53 -j DNAT --to-destination 172.17.0.3:5353",
)
KUBE = (
    "-A PREROUTING -j KUBE-SERVICES",
    "-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m tcp --dport 443 -j KUBE-SVC-A",
    "-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS",
    "-A KUBE-NODEPORTS -p tcp -m tcp --dport 30080 -j KUBE-SVC-B",
    "-A KUBE-SVC-A -j KUBE-SEP-A",
    "-A KUBE-SVC-B -m statistic --mode random --probability 0.5 -j KUBE-SEP-B",
    "-A KUBE-SEP-A -p tcp -m tcp -j DNAT --to-destination 10.0.0.5:6443",
    "-A KUBE-SEP-B -p tcp -m tcp -j DNAT --to-destination 10.0.0.6:80",
)
LISTED = """table inet nat {
	chain ways {
		tcp dport { 80, 443 } dnat ip to 172.17.0.2
	}
	chain unused {
		dnat ip to 172.17.0.9
	}
	chain p {
		type nat hook prerouting priority dstnat; policy accept;
		fib daddr type local jump ways
		RULE
	}
	chain o {
		type nat hook output priority -100; policy accept;
		dnat ip to 172.17.0.8
	}
}
"""


def read(listed: str, *rules: str, host: Host = HOST) -> Publications:
    six = any("fd00:" in rule for rule in rules)
    return find_publications(listed, () if six else (rules,), (rules,) if six else (), host)


def find(rule: str) -> list[str]:
    """What a rule leads away, each as "places: what to where"."""
    found = read("", rule) if rule.startswith("-A") else read(only(rule))
    return sorted(f"{','.join(map(show, each.places))}: {each}" for each in found.found)


def show(place: Span) -> str:
    return name(place[0]) if place[0] == place[1] else f"{name(place[0])}-{name(place[1])}"


def only(rule: str) -> str:
    return f"table ip t {{\n\tchain p {{\n\t\ttype nat hook prerouting priority dstnat;\n\t\t{rule}\n\t}}\n}}\n"


SAVED = {
    "-A PREROUTING -d 10.2.0.1/32 -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.1.0.2:8080": [
        "10.2.0.1: tcp port 80 to 10.1.0.2:8080"
    ],
    "-A PREROUTING -i wan -j DNAT --to-destination 10.1.0.2": ["10.1.0.1,10.2.0.1: all to 10.1.0.2"],
    "-A PREROUTING -p udp -m multiport --dports 53,500:600 -j DNAT --to-destination 10.1.0.2": [
        "10.1.0.1,10.2.0.1: udp ports 53, 500-600 to 10.1.0.2"
    ],
    "-A PREROUTING ! -d 10.1.0.0/16 -p tcp -m tcp ! --dport 22 -j DNAT --to-destination 10.1.0.2": [
        "10.2.0.1: tcp ports 0-21, 23-65535 to 10.1.0.2"
    ],
    "-A PREROUTING ! -p tcp -j DNAT --to-destination [fd00:1::2]:9": [
        "fd00:2::1: icmp and other and udp to [fd00:1::2]:9"
    ],
    "-A PREROUTING -p sctp -j DNAT --to-destination 10.1.0.2-10.1.0.9": [
        "10.1.0.1,10.2.0.1: other to 10.1.0.2-10.1.0.9"
    ],
    "-A PREROUTING -d 10.2.0.0/24 -j NETMAP --to 10.9.0.0/24": [
        "10.2.0.0,10.2.0.1,10.2.0.2-10.2.0.255: all to 10.9.0.0/24"
    ],
    "-A PREROUTING -m set --match-set x dst -j DNAT --to-destination 10.1.0.2": ["10.1.0.1,10.2.0.1: all to 10.1.0.2"],
    "-A PREROUTING ! -d 10.1.0.1 -m comment --comment -d -p tcp -j DNAT --to-destination 10.1.0.2": [
        "10.2.0.1: tcp to 10.1.0.2"
    ],
    '-A PREROUTING -m comment --comment "-d 9.9.9.9 -p tcp" -j DNAT --to-destination 10.1.0.2': [
        "10.1.0.1,10.2.0.1: all to 10.1.0.2"
    ],
    "-A PREROUTING ! --dst-type LOCAL --limit-iface-in -j DNAT --to-destination 10.1.0.2": [
        "10.1.0.1,10.2.0.1: all to 10.1.0.2"
    ],
    "-A PREROUTING -j DNAT --to-destination what": [
        "10.1.0.1,10.2.0.1: all to where cannot be read",
    ],
    "-A PREROUTING -d 198.51.100.7/32 -j DNAT --to-destination 10.1.0.2": ["198.51.100.7: all to 10.1.0.2"],
    "-A PREROUTING -d fd00:9::7/128 -j DNAT --to-destination fd00:1::2": ["fd00:9::7: all to fd00:1::2"],
    "-A PREROUTING -p tcp -m iprange --dst-range 203.0.113.4-203.0.113.9 -j DNAT --to-destination 10.1.0.2": [
        "203.0.113.4-203.0.113.9: tcp to 10.1.0.2"
    ],
    "-A PREROUTING -m iprange ! --dst-range 10.1.0.0-10.1.0.9 -j DNAT --to-destination 10.1.0.2": [
        "10.2.0.1: all to 10.1.0.2"
    ],
    "-A PREROUTING -m iprange --dst-range fd00:9::1-fd00:9::7 -j DNAT --to-destination fd00:1::2": [
        "fd00:9::1-fd00:9::7: all to fd00:1::2"
    ],
    "-A PREROUTING -m conntrack --ctorigdst 203.0.113.5 -j DNAT --to-destination 10.1.0.2": [
        "203.0.113.5: all to 10.1.0.2"
    ],
    "-A PREROUTING -d 203.0.113.0/29 -j NETMAP --to 10.3.0.0/29": ["203.0.113.0-203.0.113.7: all to 10.3.0.0/29"],
    "-A PREROUTING -i wan -p tcp -j REDIRECT --to-ports 9": ["10.1.0.1,10.2.0.1: tcp to 10.2.0.1:9"],
    "-A PREROUTING -i wan -j REDIRECT": ["10.1.0.1,10.2.0.1: all to 10.2.0.1"],
    "-A PREROUTING ! -i w+ -p tcp -j REDIRECT --to-ports 9-10": ["10.1.0.1,10.2.0.1: tcp to 10.1.0.1:9-10"],
    "-A PREROUTING -d fd00:9::7/128 -j REDIRECT --to-ports 9": ["fd00:9::7: all to [fd00:2::1]:9"],
    "-A PREROUTING -m addrtype ! --dst-type LOCAL -j DNAT --to-destination 10.1.0.2": [],
    "-A PREROUTING -m addrtype --dst-type MULTICAST -j DNAT --to-destination 10.1.0.2": [],
    "-A PREROUTING -i lo -j DNAT --to-destination 10.1.0.2": [],
    "-A PREROUTING -p tcp -j REDIRECT --to-ports 9": ["10.1.0.1,10.2.0.1: tcp to 10.1.0.1:9 or 10.2.0.1:9"],
    "-A PREROUTING -p tcp -j DNAT --to-destination :9": ["10.1.0.1,10.2.0.1: tcp to :9"],
    "-A PREROUTING -p tcp -j DNAT --to-destination 10.1.0.1:9": ["10.1.0.1,10.2.0.1: tcp to 10.1.0.1:9"],
    "-A PREROUTING -d 10.1.0.1/32 -j DNAT --to-destination 10.1.0.1": [],
    "-A PREROUTING -p tcp -j DNAT --to-destination 127.0.0.1:9": ["10.1.0.1,10.2.0.1: tcp to 127.0.0.1:9"],
    "-A OUTPUT -j DNAT --to-destination 10.1.0.2": [],
    "-A OTHER -j DNAT --to-destination 10.1.0.2": [],
    '-A PREROUTING -m comment --comment "-j DNAT --to-destination 10.1.0.2" -j ACCEPT': [],
}
RECEIVED = {
    "ip daddr 10.2.0.1 tcp dport 80 dnat to 10.1.0.2:8080": ["10.2.0.1: tcp port 80 to 10.1.0.2:8080"],
    "ip daddr { 10.2.0.1, 10.3.0.0/16 } udp dport 53-60 dnat to 10.1.0.2": [
        "10.2.0.1,10.3.0.0-10.3.255.255: udp ports 53-60 to 10.1.0.2"
    ],
    "ip daddr != 10.2.0.0-10.2.0.9 tcp dport != { 22, 80 } dnat to 10.1.0.2": [
        "10.1.0.1: tcp ports 0-21, 23-79, 81-65535 to 10.1.0.2"
    ],
    "ip daddr @own tcp dport @some dnat to 10.1.0.2": ["10.1.0.1,10.2.0.1: tcp to 10.1.0.2"],
    "meta l4proto { tcp, udp } th dport 53 dnat to 10.1.0.2": ["10.1.0.1,10.2.0.1: tcp and udp port 53 to 10.1.0.2"],
    "ip protocol icmp dnat to 10.1.0.2": ["10.1.0.1,10.2.0.1: icmp to 10.1.0.2"],
    "dnat to tcp dport map { 80 : 10.1.0.2, 443 : 10.1.0.1, 90-99 : 10.1.0.3 }": [
        "10.1.0.1,10.2.0.1: tcp port 443 to 10.1.0.1",
        "10.1.0.1,10.2.0.1: tcp port 80 to 10.1.0.2",
        "10.1.0.1,10.2.0.1: tcp ports 90-99 to 10.1.0.3",
    ],
    "dnat to ip daddr . tcp dport map { 10.2.0.1 . 80 : 10.1.0.2 . 8080 }": ["10.2.0.1: tcp port 80 to 10.1.0.2:8080"],
    "tcp dport 80 dnat to numgen inc mod 2 map { 0 : 10.1.0.2, 1 : 10.1.0.3 }": [
        "10.1.0.1,10.2.0.1: tcp port 80 to 10.1.0.2",
        "10.1.0.1,10.2.0.1: tcp port 80 to 10.1.0.3",
    ],
    "tcp dport 80 dnat to tcp dport map { 443 : 10.1.0.2 }": [],
    "tcp dport 80-90 dnat to tcp dport map { 443 : 10.1.0.2, 85-99 : 10.1.0.3 }": [
        "10.1.0.1,10.2.0.1: tcp ports 85-90 to 10.1.0.3"
    ],
    "dnat to tcp dport map @m": ["10.1.0.1,10.2.0.1: tcp to where cannot be read"],
    'log prefix "ip daddr 9.9.9.9 tcp dport 1 " dnat to 10.1.0.2': ["10.1.0.1,10.2.0.1: all to 10.1.0.2"],
    'dnat to 10.1.0.2 comment "ip daddr 9.9.9.9"': ["10.1.0.1,10.2.0.1: all to 10.1.0.2"],
    "fib daddr . iif type local dnat to 10.1.0.2": ["10.1.0.1,10.2.0.1: all to 10.1.0.2"],
    "fib daddr type != local dnat to 10.1.0.2": [],
    "fib daddr type { broadcast, multicast } dnat to 10.1.0.2": [],
    "ip daddr 198.51.100.7 dnat to 10.1.0.2": ["198.51.100.7: all to 10.1.0.2"],
    "dnat to ip daddr map { 198.51.100.7 : 10.1.0.2, 10.2.0.1 : 10.1.0.3 }": [
        "10.2.0.1: all to 10.1.0.3",
        "198.51.100.7: all to 10.1.0.2",
    ],
    "dnat prefix to ip daddr map { 203.0.113.0/29 : 10.3.0.0/29 }": ["203.0.113.0-203.0.113.7: all to 10.3.0.0/29"],
    "dnat to 10.1.0.2:tcp dport map { 80 : 8080 }": ["10.1.0.1,10.2.0.1: tcp port 80 to 10.1.0.2:8080"],
    "ip daddr . tcp dport { 203.0.113.5 . 80, 10.2.0.1 . 90-99 } dnat to 10.1.0.2": [
        "10.2.0.1: tcp ports 90-99 to 10.1.0.2",
        "203.0.113.5: tcp port 80 to 10.1.0.2",
    ],
    'iifname . ip daddr { "w{n" . 203.0.113.5, "lan" . 10.2.0.1 } dnat to 10.1.0.2': [
        "10.2.0.1,203.0.113.5: all to 10.1.0.2",
    ],
    "ct original ip daddr . tcp dport { 203.0.113.5 . 80 } dnat to 10.1.0.2": ["203.0.113.5: tcp port 80 to 10.1.0.2"],
    "dnat addr . port to ip daddr map { 203.0.113.5 : 10.1.0.2 . 80 }": ["203.0.113.5: all to 10.1.0.2:80"],
    "ip protocol gre ip daddr 203.0.113.5 dnat to 10.1.0.2": ["203.0.113.5: other to 10.1.0.2"],
    "ct reply ip daddr 203.0.113.5 dnat to 10.1.0.2": ["10.1.0.1,10.2.0.1: all to 10.1.0.2"],
    "udp dport 4789 vxlan tcp dport 80 dnat to 10.1.0.2": ["10.1.0.1,10.2.0.1: udp port 4789 to 10.1.0.2"],
    "meta l4proto tcp-udp dnat to 10.1.0.2": ["10.1.0.1,10.2.0.1: all to 10.1.0.2"],
    "fib daddr type { local, unicast } dnat to 10.1.0.2": ["10.1.0.1,10.2.0.1: all to 10.1.0.2"],
    'iifname "wan" tcp dport 80 redirect to :9': ["10.1.0.1,10.2.0.1: tcp port 80 to 10.2.0.1:9"],
    'iifname { "wan", "l*" } tcp dport 80 redirect': ["10.1.0.1,10.2.0.1: tcp port 80 to 10.1.0.1 or 10.2.0.1"],
    'iifname != "wan" redirect to :tcp dport map { 80 : 9 }': ["10.1.0.1,10.2.0.1: tcp port 80 to 10.1.0.1:9"],
    'log prefix "iifname wan" redirect to :9': ["10.1.0.1,10.2.0.1: all to 10.1.0.1:9 or 10.2.0.1:9"],
    "jump redirect": [],
    'iifname "lo" dnat to 10.1.0.2': [],
    "tcp dport 80 redirect to :9": ["10.1.0.1,10.2.0.1: tcp port 80 to 10.1.0.1:9 or 10.2.0.1:9"],
    "tcp dport 80 dnat to :9": ["10.1.0.1,10.2.0.1: tcp port 80 to :9"],
    "tcp dport 80 dnat to 10.1.0.1": ["10.1.0.1,10.2.0.1: tcp port 80 to 10.1.0.1"],
    'accept comment "dnat to 10.1.0.2"': [],
    'log prefix "dnat to 10.1.0.2" accept': [],
    'xt match "multiport" counter packets 0 bytes 0 dnat to 10.1.0.2': [],  # iptables-nft says which
}


@pytest.mark.parametrize("rule", [*SAVED, *RECEIVED])
def test_what_a_rule_leads_away_is_read_as_far_as_it_says_it(rule: str) -> None:
    assert find(rule) == (SAVED | RECEIVED)[rule]


def test_it_is_read_where_docker_leads() -> None:
    found = read("", *DOCKER).found
    assert [(each.rule, [*map(show, each.places)], str(each)) for each in found] == [
        (DOCKER[4], ["10.1.0.1", "10.2.0.1"], "tcp port 8080 to 172.17.0.2:80"),
        (DOCKER[5], ["10.2.0.1"], "udp port 53 to 172.17.0.3:5353"),
    ]


ROUTED_HERE = {
    "of a type": "-A PREROUTING -m addrtype --dst-type LOCAL -p tcp -j DNAT --to-destination 172.17.0.2",
    "of a type, by nftables": "fib daddr type local meta l4proto tcp dnat to 172.17.0.2",
    "any": "-A PREROUTING -p tcp -j DNAT --to-destination 172.17.0.2",
    "all but one": "-A PREROUTING ! -d 10.1.0.1 -p tcp -j DNAT --to-destination 172.17.0.2",
}


@pytest.mark.parametrize("rule", ROUTED_HERE.values(), ids=ROUTED_HERE)
def test_what_is_local_by_a_route_is_led_away_as_own_addresses_are(rule: str) -> None:
    host = HOST._replace(routed=(read_addresses("203.0.113.0/24"),))
    published = read("", rule, host=host) if rule.startswith("-A") else read(only(rule), host=host)
    held, block = "203.0.114.9", BLOCK | {"protocol": "tcp"}
    assert [note.degraded for note in judge_by(published, block | {"target": "203.0.113.9"}).values()] == [True]
    assert [note.degraded for note in judge_by(published, block | {"target": "10.2.0.1"}).values()] == [True]
    assert not judge_by(published, block | {"target": held})


def test_who_leads_to_a_chain_says_of_what() -> None:
    found = read("", *KUBE).found
    assert [([*map(show, each.places)], str(each)) for each in found] == [
        (["10.1.0.1", "10.2.0.1"], "tcp port 30080 to 10.0.0.6:80"),
        (["10.96.0.1"], "tcp port 443 to 10.0.0.5:6443"),
    ]


def test_it_is_read_where_chains_of_nftables_lead() -> None:
    def tell(rule: str) -> list[str]:
        return sorted(map(str, read(LISTED.replace("RULE", rule)).found))

    ways = "tcp ports 80, 443 to 172.17.0.2"
    assert tell("accept") == [ways]
    assert tell("udp dport vmap { 53 : jump unused }") == [ways, "udp port 53 to 172.17.0.9"]
    assert tell("udp dport 9 udp dport vmap @m") == [ways, "udp port 9 to 172.17.0.8", "udp port 9 to 172.17.0.9"]
    assert tell("ip daddr vmap { 203.0.113.5 : jump unused, 203.0.113.6 : accept }") == ["all to 172.17.0.9", ways]
    assert tell("fib daddr type vmap { local : goto unused }") == ["all to 172.17.0.9", ways]


def test_what_both_kinds_of_lists_tell_is_told_once() -> None:
    table = "-A PREROUTING -d 10.2.0.1/32 -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.1.0.2:8080"
    listed = only("ip daddr 10.2.0.1 tcp dport 80 counter packets 0 bytes 0 dnat to 10.1.0.2:8080")
    assert [each.rule for each in read(listed, table).found] == [table]


LED = "-A PREROUTING -p tcp -m tcp --dport 8080 -j DNAT --to-destination 10.1.0.2:80"


class Published(NamedTuple):
    finding: Finding
    published: Publications


def publish(*rules: str, listed: str = "") -> Published:
    six = any("fd00:" in rule for rule in rules)
    nat, nat6 = ((), (rules,)) if six else ((rules,), ())
    report = HostReport(nat=nat, nat6=nat6, nftables=listed, own=OWN, firsts=FIRSTS)
    (finding,) = (each for each in find_conflicts(report) if each.name == "published ports")
    return Published(finding, read_publications(report))


def judge(led: Published, fields: dict[str, object]) -> dict[int, Note]:
    return judge_by(led.published, fields)


def judge_by(published: Publications, fields: dict[str, object]) -> dict[int, Note]:
    compilation = Compilation(Facts(own=own_addresses(tuple(OWN)), topology=HOME))
    rule = parse_rule({"target": "10.2.0.1", "direction": "to"} | fields, NOW)
    assert compilation.put(replace(rule, id=1, forced_by=fields.get("forced_by"))) is None  # type: ignore[arg-type]
    return compilation.find_published(published, Publications())


BLOCK, LIMIT = {"action": "block"}, {"rate": "10 packets/s"}
PORT = {"protocol": "tcp", "ports": [8080]}
CONCERNED: dict[str, tuple[bool, dict[str, object]]] = {
    "a block of the port": (True, BLOCK | PORT),
    "a block of a range": (True, BLOCK | PORT | {"ports": ["8000-9000"]}),
    "a block of all": (True, dict(BLOCK)),
    "a block that was forced": (True, BLOCK | {"forced_by": "ops"}),
    "a limit": (True, LIMIT | PORT),
    "a limit per peer": (True, LIMIT | PORT | {"per": "peer"}),
    "a limit of what has a source port": (True, LIMIT | {"protocol": "tcp", "source_ports": [9]}),
    "connections at once": (True, PORT | {"rate": "10 connections"}),
    "what only counts": (True, LIMIT | PORT | {"action": "observe"}),
    "another protocol": (False, BLOCK | PORT | {"protocol": "udp"}),
    "another port": (False, BLOCK | PORT | {"ports": [80]}),
    "what the gateway sends": (False, BLOCK | {"direction": "from"}),
    "another address": (False, BLOCK | {"target": "10.1.0.2"}),
    "a network around": (False, BLOCK | {"target": "10.2.0.0/24"}),
    "of the other family": (False, BLOCK | {"target": "fd00:2::1"}),
    "an exception": (False, {"action": "allow"}),
}


@pytest.mark.parametrize("name", CONCERNED)
def test_rules_to_own_addresses_are_concerned_of_which_something_is_led_away(name: str) -> None:
    concerned, fields = CONCERNED[name]
    told = judge(publish(LED), fields)
    assert [note.degraded for note in told.values()] == [True] * concerned
    assert all(f"`{LED}`" in note.text and "tcp port 8080 to 10.1.0.2:80" in note.text for note in told.values())


VIP = "-A PREROUTING -d 10.2.0.1/32 -p tcp -m tcp --dport 80"
ROUTED = "-A PREROUTING -d 203.0.113.5/32 -p tcp -m tcp --dport 80 -j DNAT --to-destination"
HELD, DEGRADED, NOTED = "held", "degraded", "noted"
WEB = BLOCK | {"protocol": "tcp", "ports": [80, 8080]}
OUTSIDE = BLOCK | {"target": "203.0.113.5"}
MET: list[tuple[str, dict[str, object], str]] = [
    (f"{VIP} -i wan -j REDIRECT --to-ports 8080", WEB, HELD),
    (f"{VIP} -i wan -j REDIRECT --to-ports 8080", WEB | {"ports": [80]}, DEGRADED),
    (f"{VIP} -i wan -j REDIRECT --to-ports 8080", WEB | {"ports": [8080]}, HELD),
    (f"{VIP} -i wan -j REDIRECT --to-ports 8080", BLOCK, HELD),
    (f"{VIP} -i lan -j REDIRECT --to-ports 8080", WEB, DEGRADED),
    (f"{VIP} -j REDIRECT --to-ports 8080", WEB, DEGRADED),
    (f"{VIP} -j REDIRECT --to-ports 8080", WEB | {"target": "10.1.0.1"}, HELD),
    ("-A PREROUTING -i wan -p tcp -j REDIRECT --to-ports 9", OUTSIDE, HELD),
    (f"{VIP} -j DNAT --to-destination 10.1.0.1:8080", WEB, DEGRADED),
    (f"{VIP} -j DNAT --to-destination 127.0.0.1:8080", WEB, DEGRADED),
    (f"{VIP} -j DNAT --to-destination 10.2.0.1:8080", WEB, HELD),
    (f"{VIP} -j DNAT --to-destination :8080-8090", WEB | {"ports": [80, "8080-8090"]}, HELD),
    (f"{VIP} -j DNAT --to-destination :8080-8090", WEB, DEGRADED),
    (f"{ROUTED} 10.3.0.2", OUTSIDE, DEGRADED),
    (f"{ROUTED} 10.3.0.2", OUTSIDE | {"protocol": "udp"}, HELD),
    (f"{ROUTED} 10.3.0.2", OUTSIDE | PORT, HELD),
    (f"{ROUTED} 10.3.0.2", OUTSIDE | {"direction": "from"}, HELD),
    (f"{ROUTED} 10.3.0.2", OUTSIDE | {"target": "10.3.0.2"}, HELD),
    (f"{ROUTED} 10.3.0.2", OUTSIDE | {"action": "allow"}, HELD),
    (f"{ROUTED} 10.3.0.2", OUTSIDE | {"target": "203.0.113.0/29"}, DEGRADED),
    (f"{ROUTED} 10.3.0.2", OUTSIDE | {"target": "203.0.113.0/24"}, NOTED),
    (f"{ROUTED} 10.3.0.2", OUTSIDE | {"target": "0.0.0.0/0"}, HELD),
    (f"{ROUTED} 203.0.113.9", OUTSIDE | {"target": "203.0.113.0/28"}, HELD),
    (f"{ROUTED} 203.0.113.9:8080", OUTSIDE | {"target": "203.0.113.0/28"} | WEB, HELD),
    (f"{ROUTED} 203.0.113.9:81", OUTSIDE | {"target": "203.0.113.0/28"} | WEB, DEGRADED),
    ("-A PREROUTING -d 203.0.113.0/29 -j NETMAP --to 10.3.0.0/29", OUTSIDE, DEGRADED),
    ("-A PREROUTING -d 203.0.113.0/29 -j NETMAP --to 10.3.0.0/29", OUTSIDE | {"target": "203.0.113.0/25"}, DEGRADED),
    ("-A PREROUTING -d 203.0.113.0/29 -j NETMAP --to 10.3.0.0/29", OUTSIDE | {"target": "203.0.113.9"}, HELD),
    ("-A PREROUTING -d 203.0.113.0/29 -j NETMAP --to 10.3.0.0/29", OUTSIDE | {"target": "203.0.112.0/30"}, HELD),
    ("-A PREROUTING -d fd00:9::5/128 -j DNAT --to-destination fd00:1::2", BLOCK | {"target": "fd00:9::5"}, DEGRADED),
    ("-A PREROUTING -d fd00:9::5/128 -j DNAT --to-destination fd00:1::2", BLOCK | {"target": "fd00:9::6"}, HELD),
    ("-A PREROUTING -d fd00:9::5/128 -j DNAT --to-destination fd00:1::2", BLOCK | {"target": "fd00:9::/64"}, NOTED),
]


@pytest.mark.parametrize(("published", "fields", "expected"), MET)
def test_what_meets_a_rule_behind_a_translation_all_the_same_is_not_told(
    published: str, fields: dict[str, object], expected: str
) -> None:
    (note,) = (*judge(publish(published), fields).values(), None)[:1]
    assert (HELD if note is None else DEGRADED if note.degraded else NOTED) == expected
    assert note is None or note.text.startswith("What" if note.degraded else ("Some of what", "Whether what"))


CHOSEN = "-A PREROUTING -p tcp -m set --match-set public"
LEADS = "-j DNAT --to-destination 10.3.0.2"
UNREAD: list[tuple[str, dict[str, object], str]] = [
    (f"{CHOSEN} dst {LEADS}", OUTSIDE, NOTED),
    (f"{CHOSEN} src,dst {LEADS}", OUTSIDE, NOTED),
    (f"{CHOSEN} dst --dport 80 {LEADS}", OUTSIDE | PORT, HELD),
    (f"{CHOSEN} dst {LEADS}", OUTSIDE | {"protocol": "udp"}, HELD),
    (f"{CHOSEN} dst {LEADS}", OUTSIDE | {"target": "10.3.0.2"}, HELD),
    (f"{CHOSEN} dst {LEADS}", OUTSIDE | {"target": "0.0.0.0/0"}, HELD),
    (f"{CHOSEN} dst {LEADS}", OUTSIDE | {"target": "fd00:9::5"}, HELD),
    (f"{CHOSEN} dst {LEADS}", OUTSIDE | {"direction": "from"}, HELD),
    (f"{CHOSEN} dst {LEADS}", dict(BLOCK), DEGRADED),
    (f"{CHOSEN} dst -d 203.0.113.0/29 {LEADS}", OUTSIDE, DEGRADED),
    (f"{CHOSEN} dst -d 203.0.114.0/29 {LEADS}", OUTSIDE, HELD),
    (f"{CHOSEN} src {LEADS}", OUTSIDE, HELD),
    (f"-A PREROUTING -m set ! --match-set public dst {LEADS}", OUTSIDE, HELD),
    (f"-A PREROUTING -m mark --mark 0x7 {LEADS}", OUTSIDE, NOTED),
    (f"-A PREROUTING -m of-tomorrow --in dst {LEADS}", OUTSIDE, NOTED),
    (f"-A PREROUTING -m iprange ! --dst-range 10.1.0.0-10.1.0.9 {LEADS}", OUTSIDE, HELD),
    (f"-A PREROUTING -m addrtype --dst-type LOCAL --limit-iface-in {LEADS}", OUTSIDE, HELD),
    (f"-A PREROUTING -m mark --mark 0x7 {LEADS.replace('10.3.0.2', ':9')}", OUTSIDE, HELD),
    (f"-A PREROUTING -p tcp -m mark --mark 0x7 {LEADS.replace('10.3.0.2', ':9')}", OUTSIDE | PORT, NOTED),
    ("ip daddr @public dnat to 10.3.0.2", OUTSIDE, NOTED),
    ("ip daddr . tcp dport @public dnat to 10.3.0.2", OUTSIDE, NOTED),
    ("ip daddr . tcp dport @public dnat to 10.3.0.2", OUTSIDE | {"protocol": "udp"}, HELD),
    ("ip daddr != @private dnat to 10.3.0.2", OUTSIDE, HELD),
    ("ip daddr < 203.0.113.9 dnat to 10.3.0.2", OUTSIDE, NOTED),
    ("ip daddr & 0.0.0.7 == 0.0.0.5 dnat to 10.3.0.2", OUTSIDE, NOTED),
    ("dnat to ip daddr map @public", OUTSIDE, NOTED),
    ("dnat to ip saddr map { 10.1.0.9 : 10.3.0.2 }", OUTSIDE, HELD),
    ("meta mark 0x00000007 dnat to 10.3.0.2", OUTSIDE, NOTED),
    ("tcp dport 80 meta mark set 0x00000007 dnat to 10.3.0.2", OUTSIDE, HELD),
    ("ip saddr @private dnat to 10.3.0.2", OUTSIDE, HELD),
]


@pytest.mark.parametrize(("published", "fields", "expected"), UNREAD)
def test_what_may_be_chosen_by_destination_is_told_of_any(
    published: str, fields: dict[str, object], expected: str
) -> None:
    led = publish(published) if published.startswith("-A") else publish(listed=only(published))
    (note,) = (*judge(led, fields).values(), None)[:1]
    assert (HELD if note is None else DEGRADED if note.degraded else NOTED) == expected
    if expected == NOTED:
        assert note is not None
        assert note.text.startswith("Whether what comes for 203.0.113.5 is given another destination ")
        assert f"`{published}`" in note.text
        assert "it cannot be read which are given another destination" in led.finding.what


def test_thousands_that_are_chosen_so_are_told_as_one() -> None:
    ends = (f"meta l4proto tcp dnat to 10.3.{n // 256}.{n % 256}:80" for n in range(2000))
    chains = "\n\t}\n".join(f"\tchain e{n} {{\n\t\t{rule}" for n, rule in enumerate(ends))
    listed = LISTED.replace("RULE", "ip daddr . meta l4proto . th dport vmap @services")
    listed = listed.replace("\tchain unused", f"{chains}\n\t}}\n\tchain unused")
    led = publish(listed=listed)
    began = time.process_time()
    for number in range(20_000):
        found, degraded = led.published.find(f"10.9.{number // 256}.{number % 256}", "any", ())
        assert (0 < len(found) < 9, degraded) == (True, False)
    assert time.process_time() - began < 2
    assert " or elsewhere" in led.finding.what


def test_braces_that_would_be_millions_of_rules_take_no_time_that_anybody_waits_for() -> None:
    many = ", ".join(f"203.{n // 256}.{n % 256}.1 . {n}" for n in range(1, 2000))
    fields = " ".join(f"ip daddr . tcp dport {{ {many} }}" for _ in range(3))
    began = time.process_time()
    found = read(only(f"{fields} dnat to 10.3.0.2"))
    assert time.process_time() - began < 6
    assert found.find("203.0.9.1", "tcp", ((9, 9),))[0], "it is told, though it is not read"


def test_each_rule_tells_what_concerns_it() -> None:
    other = "-A PREROUTING -p udp -j DNAT --to-destination 10.1.0.3"
    led = publish(LED, other)
    assert led.finding.severity is Severity.WARNING
    assert "and 1 more such rule" in led.finding.what
    assert judge(led, BLOCK | PORT) == {1: judge(publish(LED), BLOCK | PORT)[1]}
    (note,) = judge(led, BLOCK | {"protocol": "udp", "ports": [9]}).values()
    assert "udp to 10.1.0.3" in note.text
    assert "8080" not in note.text


LISTENING = [("10.1.0.1", 8080), ("10.2.0.1", 8080), ("10.2.0.1", 53), ("10.2.0.1", 22), ("fd00:2::1", 8080)]


@pytest.mark.parametrize(
    ("rules", "led"),
    [
        (DOCKER, [LISTENING[0], LISTENING[1]]),
        (
            ("-A PREROUTING -d 10.2.0.1/32 -p tcp --dport 22:60 -j DNAT --to-destination 10.1.0.2",),
            LISTENING[2:4],
        ),
        (("-A PREROUTING -d 10.2.0.1/32 -j DNAT --to-destination 10.1.0.2",), LISTENING[1:4]),
        (("-A PREROUTING -d 10.2.0.1/32 -p udp -j DNAT --to-destination 10.1.0.2",), []),
        (("-A PREROUTING -p tcp -m set --match-set x dst,dst -j DNAT --to-destination 10.1.0.2",), LISTENING[:4]),
        (("-A PREROUTING -p tcp -j DNAT --to-destination fd00:1::2",), LISTENING[4:]),
        (("-A PREROUTING -p tcp -j REDIRECT --to-ports 9",), []),
        (("-A PREROUTING -p tcp -j DNAT --to-destination 10.1.0.1:9",), []),
        (("-A PREROUTING -p tcp -j DNAT --to-destination 127.0.0.53:9",), []),
        (("-A PREROUTING -p tcp -j DNAT --to-destination :9",), []),
        ((), []),
    ],
)
def test_of_those_who_listen_are_found_whose_ports_may_be_led_away(
    rules: tuple[str, ...], led: list[tuple[str, int]]
) -> None:
    assert find_led(LISTENING, read("", *rules)) == {*led}


def test_many_published_ports_with_one_who_listens_at_each_take_no_time_that_anybody_waits_for() -> None:
    rules = [
        f"-A PREROUTING -d 10.2.0.1/32 -p tcp -m tcp --dport {port} -j DNAT --to-destination 10.1.0.2:80"
        for port in range(1, 10_000)
    ]
    found = read("", *rules)
    began = time.process_time()
    assert len(find_led([("10.2.0.1", port) for port in range(1, 20_000)], found)) == 9_999
    assert time.process_time() - began < 1


@pytest.mark.parametrize("rule", ["-j REDIRECT", "-i wan -j ACCEPT", "-d 10.2.0.1 -j DNAT --to-destination 10.2.0.1"])
def test_without_any_nothing_is_told(rule: str) -> None:
    firsts = (("wan", ("10.2.0.1",)),)
    report = HostReport(nat=((f"-A PREROUTING {rule}",),), own=frozenset(("10.2.0.1",)), firsts=firsts)
    assert "published ports" not in {each.name for each in find_conflicts(report)}


def test_a_service_is_told_with_where_it_leads() -> None:
    (note,) = judge(publish(*KUBE), BLOCK | {"target": "10.96.0.1", "protocol": "tcp", "ports": [443]}).values()
    assert note.degraded
    assert "tcp port 443 to 10.0.0.5:6443" in note.text
    assert "10.0.0.6" not in note.text


def list_services(count: int) -> Iterator[str]:
    """As kube-proxy has them, each with three hosts."""
    yield from KUBE[:1]
    for number in range(count):
        place = f"10.{96 + number // 65536}.{number // 256 % 256}.{number % 256}"
        yield f"-A KUBE-SERVICES -d {place}/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-{number}"
        yield f"-A KUBE-SVC-{number} ! -s 10.244.0.0/16 -d {place}/32 -p tcp -m tcp --dport 80 -j KUBE-MARK-MASQ"
        for host in range(3):
            yield f"-A KUBE-SVC-{number} -m statistic --mode random --probability 0.5 -j KUBE-SEP-{number}-{host}"
            yield f"-A KUBE-SEP-{number}-{host} -s 10.244.9.{host}/32 -j KUBE-MARK-MASQ"
            yield f"-A KUBE-SEP-{number}-{host} -p tcp -m tcp -j DNAT --to-destination 10.244.9.{host}:{number}"
    yield from KUBE[2:4]
    yield KUBE[5]
    yield KUBE[7]
    yield "-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000"


def test_thousands_of_services_are_told() -> None:
    led = publish(*list_services(1000))
    assert judge(led, BLOCK | {"target": "10.96.3.7"})[1].degraded
    assert not judge(led, BLOCK | {"target": "10.96.0.0/12"})[1].degraded
    assert "more than are looked through" not in led.finding.what


def test_more_services_than_are_looked_through_are_told_as_such() -> None:
    services = tuple(list_services(5000))
    began = time.process_time()
    found = read("", *services)
    assert time.process_time() - began < 6
    assert "30080" in str(found.found[0]), "what is for own addresses is told all the same"
    led = publish(*services)
    assert "more than are looked through" in led.finding.what
    assert not judge(led, BLOCK | PORT)


def test_many_rules_are_judged_in_no_time_that_anybody_waits_for() -> None:
    nets = [f"-A PREROUTING -d 203.{n // 256}.{n % 256}.0/28 -j NETMAP --to 10.3.0.0/28" for n in range(2000)]
    published = publish(*list_services(1000), *nets).published
    began = time.process_time()
    for number in range(20_000):
        target = f"10.{number // 65536}.{number // 256 % 256}.{number % 256}"
        assert published.find(target, "any", ()) == ([], False)
    assert len(published.find("128.0.0.0/1", "tcp", ())[0]) > 0
    assert time.process_time() - began < 2


def test_thousands_of_ports_of_one_network_are_told() -> None:
    """And in no time that anybody waits for, of rules that they do not concern either."""
    led = publish(*(
        f"-A PREROUTING -d 203.0.113.{net}/29 -p tcp -m tcp --dport {port} -j DNAT --to-destination 10.1.{net}.2"
        for net in (8, 16) for port in range(20_000, 21_500)
    ))  # fmt: skip
    for number in range(2):
        for ports, concerned in (([20_000], True), ([21_499], True), ([21_500], False), ([], True)):
            rule = BLOCK | {"target": f"203.0.113.{9 + 8 * number}", "protocol": "tcp", "ports": ports}
            assert bool(judge(led, rule)) == concerned, (number, ports)
    began = time.process_time()
    for number in range(3_000):
        assert led.published.find(f"203.0.113.{8 + number % 16}", "udp", ((number, number),)) == ([], False)
        assert led.published.find(f"203.0.113.{8 + number % 16}", "tcp", ())[1]
    assert time.process_time() - began < 4


def test_a_network_of_which_half_is_led_away_one_by_one_is_degraded() -> None:
    half = (
        f"-A PREROUTING -d 10.96.{n // 128}.{n % 128}/32 -j DNAT --to-destination 10.1.{n // 256}.{n % 256}"
        for n in range(8192)
    )
    led = publish(*half)
    assert judge(led, BLOCK | {"target": "10.96.0.0/18"})[1].degraded
    assert not judge(led, BLOCK | {"target": "10.96.0.0/12"})[1].degraded


@pytest.mark.parametrize("rule", ["tcp dport vmap @m", "tcp dport PORT jump cNEXT"])
def test_many_chains_take_no_time_that_anybody_waits_for(rule: str) -> None:
    chains = []
    for number in range(3000):
        text = rule.replace("PORT", f"{number}-65535").replace("NEXT", f"{number + 1}")
        others = [f"tcp dport {number}-{low} jump c{number + 1}" for low in range(60_000, 60_009)]
        chains.append("\n".join([f"\tchain c{number} {{", *(f"\t\t{each}" for each in (text, *others)), "\t}"]))
    listed = LISTED.replace("RULE", "jump c0").replace("\tchain unused", "\n".join([*chains, "\tchain unused"]))
    began = time.process_time()
    assert "172.17.0.2" in " ".join(map(str, read(listed).found))
    assert time.process_time() - began < 6
