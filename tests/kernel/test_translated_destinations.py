"""What is read of rules that lead packets elsewhere is no less than what the kernel leads, however they are written."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import count, product
from typing import IO, NamedTuple

import pytest

from netlimit.cases import Host
from netlimit.published import find_publications
from netlimit.spans import join, read_address
from scripts.testbed.namespaces import LAN, SERVER, WAN, Lab

PLACES = (LAN, WAN, "203.0.113.5", "203.0.113.6", "203.0.113.77")
PORTS = (8080, 8081)
HOST = Host(join(map(read_address, (LAN, WAN))), (("lan", (read_address(LAN),)), ("wan", (read_address(WAN),))))
RECEIVE = f"""
import socket
receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
receiver.bind(("{SERVER}", 9000))
print("ready", flush=True)
while True:
    print(receiver.recv(100).decode(), flush=True)
"""
SEND = f"""
import socket, sys
for way in sys.argv[1:]:
    source, place, port = way.split()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.bind(("", int(source)))
        sender.sendto(f"{{place}} {{port}}".encode(), (place, int(port)))
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
    sender.sendto(b"end", ("{SERVER}", 9000))
"""
MARK = "MARK", "--set-mark", "7"
DNAT = "DNAT", "--to-destination", f"{SERVER}:9000"
TO = f"dnat to {SERVER}:9000"
LEAD = f"chain lead {{ meta l4proto udp {TO}; }}"
SETS = """
set places { type ipv4_addr; elements = { 203.0.113.5 }; }
set pairs { type ipv4_addr . inet_service; elements = { 203.0.113.5 . 8080 }; }
map ways { type ipv4_addr . inet_service : verdict; elements = { 203.0.113.5 . 8080 : goto lead }; }
map leads { type ipv4_addr : ipv4_addr . inet_service; elements = { 203.0.113.5 : 10.2.0.2 . 9000 }; }
"""
READ = [
    f"ip daddr 203.0.113.5 udp dport 8080 {TO}",
    f"ip daddr {{ 203.0.113.5, 203.0.113.64/26 }} udp dport {{ 8000-8080, 9 }} {TO}",
    f"ip daddr 203.0.113.5-203.0.113.9 meta l4proto udp {TO}",
    "ip daddr vmap { 203.0.113.5 : goto lead, 203.0.113.6 : accept }",
    "ip daddr vmap { 203.0.113.4-203.0.113.5 : jump lead, 203.0.113.64/26 : goto lead, 10.2.0.1 : accept }",
    "udp dport 8081 ip daddr vmap { 203.0.113.5 : goto lead }",
    "ip daddr 203.0.113.5 udp dport vmap { 8080 : goto lead, 9 : accept }",
    'ip daddr vmap { 203.0.113.5 : goto lead, 10.2.0.1 : goto lead } comment "ip daddr vmap { 9.9.9.9 : accept }"',
    "ip daddr . udp dport vmap { 203.0.113.5 . 8080 : goto lead, 203.0.113.6 . 8081 : goto lead }",
    "meta l4proto vmap { udp : goto byplace }",
    'iifname vmap { "lan" : goto byplace, "wan" : accept }',
    'iifname . ip daddr vmap { "lan" . 203.0.113.5 : goto lead, "wan" . 203.0.113.6 : accept }',
    f"ip daddr . udp dport {{ 203.0.113.5 . 8080, 203.0.113.6 . 8081 }} {TO}",
    f"ip daddr . udp dport {{ 203.0.113.4/31 . 8080-8081, 10.2.0.1 . 8081 }} counter {TO}",
    f"ip daddr . meta l4proto . th dport {{ 203.0.113.5 . udp . 8080 }} meta l4proto udp {TO}",
    f"meta l4proto . ip daddr {{ udp . 203.0.113.5, tcp . 203.0.113.6 }} meta l4proto udp {TO}",
    f'iifname . ip daddr {{ "lan" . 203.0.113.5 }} meta l4proto udp {TO}',
    f"ct state . ip daddr {{ new . 203.0.113.5 }} meta l4proto udp {TO}",
    f"ct original ip daddr 203.0.113.5 meta l4proto udp {TO}",
    f"@nh,128,32 0xcb007105 meta l4proto udp {TO}",
    f"fib daddr type local udp dport 8080 {TO}",
    "fib daddr type vmap { local : goto lead }",
    "meta l4proto udp dnat to ip daddr map { 203.0.113.5 : 10.2.0.2, 203.0.113.6 : 10.2.0.2 }",
    "dnat ip to ip daddr . udp dport map { 203.0.113.5 . 8080 : 10.2.0.2 . 9000, 10.2.0.1 . 8081 : 10.2.0.2 . 9000 }",
    "meta l4proto udp ip daddr 203.0.113.5 dnat ip to udp dport map { 8080 : 10.2.0.2 . 9000 }",
    "meta l4proto udp ip daddr 203.0.113.5 dnat to numgen inc mod 1 map { 0 : 10.2.0.2 }",
    f"ip daddr 203.0.113.5 udp dport 8080 meta mark set 7 {TO}",
    f'meta l4proto udp ip daddr 203.0.113.5 {TO} comment "ip daddr != 203.0.113.5"',
]
"""Rules that are understood in all that they ask for."""
UNREAD = [
    f"fib daddr . iif type local udp dport 8080 {TO}",
    f"ip daddr @places meta l4proto udp {TO}",
    "ip daddr @places goto lead",
    f"ip daddr . udp dport @pairs {TO}",
    "ip daddr . udp dport vmap @ways",
    "meta l4proto udp dnat ip to ip daddr map @leads",
    f"ip daddr & 0.0.0.255 == 0.0.0.5 meta l4proto udp {TO}",
    "ip daddr & 0.0.0.255 vmap { 0.0.0.5 : goto lead, 0.0.0.6 : goto lead }",
    f"ip daddr < 203.0.113.6 udp dport 8080 {TO}",
    f"ip daddr . udp dport . ct mark {{ 203.0.113.5 . 8080 . 0x0 }} {TO}",
    f"@nh,144,16 0x7105 meta l4proto udp {TO}",
    f"meta mark 7 meta l4proto udp {TO}",
    'fib daddr . iif oif vmap { "wan" : accept, 0 : goto lead }',
    "jhash ip daddr mod 1 vmap { 0 : goto lead }",
]
"""Rules that choose by destination, where some may be led elsewhere whom nobody can read."""
OPTIONS = {
    "-d 203.0.113.5": True,
    "-d 203.0.113.4/31 --dport 8080": True,
    "-m iprange --dst-range 203.0.113.5-203.0.113.9": True,
    "-m iprange --src-range 10.1.0.0-10.1.0.9 --dst-range 203.0.113.5 --dport 8081": True,
    "-m iprange ! --dst-range 203.0.113.6-203.0.113.9 -d 203.0.113.0/24": True,
    "-m iprange ! --dst-range 10.2.0.2-10.2.0.9 -d 10.2.0.0/16": True,
    "-m conntrack --ctorigdst 203.0.113.5": True,
    "-m addrtype --dst-type LOCAL --dport 8080": True,
    "-m addrtype --dst-type LOCAL --limit-iface-in": False,
    "-m multiport --dports 8081:8090,7 -d 203.0.113.5": True,
    "-m mark --mark 7": False,
    "-m u32 --u32 16=0xcb007105": False,
    "-m recent --name led --update --rdest": False,
}


class Way(NamedTuple):
    """What a packet is for."""

    place: str
    port: int


class Receiver:
    """Of what is sent, what the kernel leads to the server."""

    def __init__(self, lab: Lab, told: IO[str]) -> None:
        self._lab, self._told, self._sources = lab, told, count(10_000)

    def lead(self) -> set[Way]:
        ways = [f"{next(self._sources)} {place} {port}" for place, port in product(PLACES, PORTS)]
        self._lab.client.run(sys.executable, "-c", SEND, *ways)
        led = set()
        while (line := self._told.readline().strip()) != "end":
            place, port = line.split()
            led.add(Way(place, int(port)))
        return led


@pytest.fixture(scope="module")
def lab(root: None) -> Iterator[Lab]:
    with Lab() as lab:
        yield lab


@pytest.fixture(scope="module")
def receiver(lab: Lab) -> Receiver:
    process = lab.server.popen(sys.executable, "-c", RECEIVE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    lab.server.run(
        "iptables-legacy", "-t", "nat", "-A", "PREROUTING", "-p", "udp", "-j", "REDIRECT", "--to-ports", "9000"
    )
    # Who marks by destination: nothing is said of it where the mark is asked for.
    lab.gateway.run("iptables-legacy", "-t", "mangle", "-A", "PREROUTING", "-d", "203.0.113.5", "-j", *MARK)
    return Receiver(lab, process.stdout)


def find(ruleset: str, saved: tuple[str, ...]) -> tuple[set[Way], set[Way]]:
    """Of what may be led elsewhere is told, and of what it is known."""
    published = find_publications(ruleset, (saved,), (), HOST)
    every = {Way(*way): published.find(way[0], "udp", ((way[1], way[1]),)) for way in product(PLACES, PORTS)}
    return {way for way, (found, _) in every.items() if found}, {way for way, (_, sure) in every.items() if sure}


@pytest.mark.parametrize("rule", [*READ, *UNREAD])
def test_what_nftables_leads_elsewhere_is_told(lab: Lab, receiver: Receiver, rule: str) -> None:
    chains = f"{LEAD}\nchain byplace {{ ip daddr 203.0.113.5 goto lead; }}"
    hook = f"chain pre {{ type nat hook prerouting priority dstnat; {rule}; }}"
    lab.gateway.run("nft", "-f", "-", input=f"table ip led {{{SETS if '@' in rule else ''}\n{chains}\n{hook}\n}}\n")
    try:
        led = receiver.lead()
        told, sure = find(lab.gateway.run("nft", "-t", "list", "ruleset").stdout, ())
    finally:
        lab.gateway.run("nft", "delete", "table", "ip", "led")
    assert led <= told
    assert sure == led if rule in READ else led


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("program", ["iptables-legacy", "iptables-nft"])
def test_what_iptables_leads_elsewhere_is_told(lab: Lab, receiver: Receiver, program: str, options: str) -> None:
    table = (program, "-t", "nat")
    lab.gateway.run(*table, "-A", "PREROUTING", "-p", "udp", *options.split(), "-j", *DNAT)
    try:
        if "--rdest" in options:
            lab.gateway.run("sh", "-c", "echo +203.0.113.5 >/proc/net/xt_recent/led")
        led = receiver.lead()
        saved = tuple(lab.gateway.run(f"{program}-save", "-t", "nat").stdout.splitlines())
        listed = lab.gateway.run("nft", "-t", "list", "ruleset").stdout
    finally:
        lab.gateway.run(*table, "-F")
    told, sure = find(listed, saved)
    assert led
    assert led <= told
    assert sure == led or not OPTIONS[options], (listed, saved, sure, led)
