"""Beside others who use packet marks our rates hold, theirs route as before, and no rule is in error.

What each of them loads is what it is known to load, for one address that can be reached by its routing table alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from netlimit.records import State
from scripts.testbed import streams
from scripts.testbed.namespaces import CLIENT, SERVER, Lab
from tests.e2e.gateway import Gateway

THEIRS = "10.9.0.9"
"""Behind the server."""
MANGLE = "iptables-legacy -t mangle -A"
NFT = "table inet fw {{ chain c {{ type filter hook prerouting priority mangle\nip daddr 10.9.0.9 {}\n}}\n}}"

NEIGHBOURS: dict[str, tuple[str, ...]] = {
    "set-mark 7": (f"{MANGLE} PREROUTING -d {THEIRS} -j MARK --set-mark 7", "ip rule add fwmark 7 table 100"),
    "ip rule": (
        "ip rule add fwmark 0x12/0xff table 101",
        "ip rule add not fwmark 0x13/0x13 table 101",
        f"ip rule add to {THEIRS} fwmark 0/0xff000000 table 100",
    ),
    "CONNMARK": (
        f"{MANGLE} PREROUTING -j CONNMARK --restore-mark",
        f"{MANGLE} PREROUTING -d {THEIRS} -m mark --mark 0 -j MARK --set-mark 9",
        f"{MANGLE} POSTROUTING -j CONNMARK --save-mark",
        "ip rule add fwmark 9 table 100",
    ),
    "mwan3": (
        "iptables-legacy -t mangle -N mwan3_hook",
        f"{MANGLE} mwan3_hook -j CONNMARK --restore-mark --nfmask 0x3f00 --ctmask 0x3f00",
        f"{MANGLE} mwan3_hook -d {THEIRS} -m mark --mark 0x0/0x3f00 -j MARK --set-xmark 0x100/0x3f00",
        f"{MANGLE} mwan3_hook -m mark --mark 0x0/0x3f00 -j MARK --set-xmark 0x3f00/0x3f00",
        f"{MANGLE} mwan3_hook -j CONNMARK --save-mark --nfmask 0x3f00 --ctmask 0x3f00",
        f"{MANGLE} PREROUTING -j mwan3_hook",
        f"{MANGLE} OUTPUT -j mwan3_hook",
        "ip rule add pref 2001 fwmark 0x100/0x3f00 table 100",
        "ip rule add pref 2061 fwmark 0x3d00/0x3f00 blackhole",
        "ip rule add pref 2062 fwmark 0x3e00/0x3f00 unreachable",
    ),
    "wg-quick": (
        "ip rule add not fwmark 51820 table 100",
        "ip rule add table main suppress_prefixlength 0",
        f"{MANGLE} PREROUTING -p udp -j CONNMARK --restore-mark",
        f"{MANGLE} POSTROUTING -p udp -m mark --mark 0xca6c -j CONNMARK --save-mark",
    ),
    "Tailscale": (
        "ip rule add pref 5210 fwmark 0x80000/0xff0000 table main",
        "ip rule add pref 5250 fwmark 0x80000/0xff0000 unreachable",
        "ip rule add pref 5270 table 100",
        "iptables-legacy -N ts-forward",
        "iptables-legacy -A ts-forward -i tailscale0 -j MARK --set-xmark 0x40000/0xff0000",
        "iptables-legacy -A ts-forward -m mark --mark 0x40000/0xff0000 -j ACCEPT",
        "iptables-legacy -A FORWARD -j ts-forward",
    ),
    "Calico": (
        "iptables-legacy -t raw -A PREROUTING -j MARK --set-xmark 0x0/0xf0000",
        "iptables-legacy -N cali-FORWARD",
        "iptables-legacy -A cali-FORWARD -j MARK --set-xmark 0x0/0xe0000",
        "iptables-legacy -A cali-FORWARD -i cali+ -j MARK --set-xmark 0x10000/0x10000",
        "iptables-legacy -A cali-FORWARD -m mark --mark 0x10000/0x10000 -j ACCEPT",
        "iptables-legacy -A FORWARD -j cali-FORWARD",
        f"{MANGLE} PREROUTING -d {THEIRS} -j MARK --set-xmark 0xa1f00000/0xfff00000",
        "ip rule add pref 99 fwmark 0x100000/0x100000 table 100",
    ),
    "kube-proxy": (
        "iptables-legacy -t nat -N KUBE-MARK-MASQ",
        "iptables-legacy -t nat -A KUBE-MARK-MASQ -j MARK --or-mark 0x4000",
        f"iptables-legacy -t nat -A PREROUTING -d {THEIRS} -j KUBE-MARK-MASQ",
        "iptables-legacy -t nat -A POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN",
        "iptables-legacy -t nat -A POSTROUTING -j MARK --xor-mark 0x4000",
        "iptables-legacy -t nat -A POSTROUTING -j MASQUERADE",
        "iptables-legacy -A FORWARD -m mark --mark 0x8000/0x8000 -j DROP",
        f"ip rule add to {THEIRS} table 100",
    ),
    "strongSwan": (
        f"{MANGLE} PREROUTING -d {THEIRS} -j MARK --set-mark 42",
        "ip rule add pref 220 fwmark 42 table 100",
        "ip xfrm policy add src 192.0.2.0/24 dst 198.51.100.0/24 dir out mark 42 mask 0xffffffff "
        "tmpl src 192.0.2.1 dst 198.51.100.1 proto esp mode tunnel",
    ),
    "nftables": (f"nft {NFT.format('meta mark set 0x21')}", "ip rule add fwmark 0x21 table 100"),
    "nftables with our bits": (
        f"nft {NFT.format('ct mark set 0x21000000 meta mark set ct mark')}",
        "ip rule add fwmark 0x21000000 table 100",
    ),
}
RATE, FIRST, SECONDS = 1000, 500, 1.2
TOGETHER = ("set-mark 7", "ip rule", "CONNMARK", "mwan3")
TAKE_OURS = ("Calico", "nftables with our bits")


@pytest.fixture(scope="module", autouse=True)
def theirs(lab: Lab) -> None:
    """An address that only the neighbour's table knows."""
    lab.server.ip(f"addr add {THEIRS}/32 dev lo")
    lab.gateway.run("sysctl", "-qw", "net.ipv4.conf.all.rp_filter=0")


@contextmanager
def loaded(lab: Lab, *names: str, lines: tuple[str, ...] = ()) -> Iterator[None]:
    """They are there until the block ends, and what else is to be run."""
    gateway = lab.gateway
    lines = (*(line for name in names for line in NEIGHBOURS[name]), *lines)
    rules = gateway.run("ip", "rule", "list").stdout.splitlines()
    gateway.ip(f"route add {THEIRS} via {SERVER} dev wan table 100")
    try:
        for line in lines:
            if line.startswith("nft "):
                gateway.run("nft", "-f", "-", input=line.removeprefix("nft ") + "\n")
            else:
                gateway.run(*line.split())
        yield
    finally:
        gateway.run("ip", "route", "flush", "table", "100")
        for line in set(gateway.run("ip", "rule", "list").stdout.splitlines()) - set(rules):
            gateway.run("ip", "rule", "del", "pref", line.partition(":")[0])
        gateway.run("ip", "xfrm", "policy", "flush", check=False)
        gateway.run("nft", "flush", "ruleset")
        for table in ("raw", "mangle", "nat", "filter"):
            listed = gateway.run("iptables-legacy", "-t", table, "-S").stdout.splitlines()
            foreign = [line.split() for line in listed if "NL-" not in line]
            for verb, undo in (("-A", "-D"), ("-N", "-X")):
                for words in (words[1:] for words in foreign if words[0] == verb):
                    gateway.run("iptables-legacy", "-t", table, undo, *words)


def bits_in_use(lab: Lab) -> set[int]:
    """The masks under which entries of ours have numbers."""
    return {int(mask, 16) for mask in re.findall(r"skbmark \w+/(\w+)", lab.gateway.run("ipset", "save").stdout)}


def arrive(lab: Lab, address: str) -> int:
    """How many of 300 packets from the client come to an address of the server's."""
    with streams.receive(lab.server) as receiver:
        streams.send(lab.client, address, rate=3000, count=300)
    return receiver.report().packets


def measure(lab: Lab) -> float:
    """Packets a second that come through the limit, behind the burst. A sender that others hold up for less than half a
    second takes nothing from it: the bucket keeps that much."""
    with streams.receive(lab.server) as receiver:
        streams.send(lab.client, SERVER, rate=4 * RATE, seconds=SECONDS)
    report = receiver.report()
    assert report.first is not None
    assert report.last is not None
    return (report.packets - FIRST) / (report.last - report.first)


def check(gateway: Gateway, lab: Lab, names: tuple[str, ...]) -> None:
    fields: dict[str, object] = {"direction": "to", "protocol": "udp", "rate": f"{RATE} packets/s", "burst": FIRST}
    with loaded(lab, *names):
        assert arrive(lab, THEIRS) == 300, "they route before us"
        gateway.add({"target": SERVER, **fields})
        if any(name in TAKE_OURS for name in names):
            gateway.wait(lambda: bool(bits_in_use(lab)) and 0xFF000000 not in bits_in_use(lab), "other bits")
        assert measure(lab) == pytest.approx(RATE, rel=0.01)
        assert arrive(lab, THEIRS) == 300, "they route beside us"
        gateway.wait_until_applied()


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_one(gateway: Gateway, lab: Lab, name: str) -> None:
    check(gateway, lab, (name,))


def test_four_together(gateway: Gateway, lab: Lab) -> None:
    check(gateway, lab, TOGETHER)


def test_who_comes_later_takes_the_bits_and_nobody_is_without_a_limit_meanwhile(gateway: Gateway, lab: Lab) -> None:
    """Under a flood, to and fro."""
    rules = gateway.add(
        {"target": CLIENT, "rate": "50 packets/h", "burst": 50},
        {"target": "10.9.9.9", "direction": "to", "rate": "1 packets/h", "action": "reject"},
    )
    (before,) = bits_in_use(lab)
    with (
        streams.receive(lab.server) as receiver,
        streams.sending(lab.client, SERVER, rate=1000, count=4000) as flood,
        loaded(lab, lines=(f"{MANGLE} PREROUTING -j MARK --set-mark {before & -before:#x}",)),
    ):
        gateway.wait(lambda: before not in bits_in_use(lab), "other bits")
        flood.report()
    assert receiver.report().packets == 50
    assert gateway.count(rules[0]).dropped_packets >= 2000, "what the former sets had counted is not lost"


def test_where_no_bits_are_left_the_rule_says_who_has_them(gateway: Gateway, lab: Lab) -> None:
    (rule,) = gateway.add({"target": CLIENT, "rate": "50 packets/h", "burst": 50})
    with loaded(lab, lines=("ip rule add fwmark 0xffffffff table 100",)):
        assert "fwmark 0xffffffff" in gateway.wait_for_state(rule, State.ERROR)
    gateway.wait(lambda: gateway.state(rule)[0] is State.APPLIED, "the rule to be in force again")
    assert arrive(lab, SERVER) == 50
