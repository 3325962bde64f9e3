"""Marks that others write on packets never choose a limit of ours, whoever writes them, before us or behind."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from netlimit.records import State
from scripts.testbed import streams
from scripts.testbed.namespaces import CLIENT, LAN, SERVER, Lab
from tests.e2e.gateway import Gateway
from tests.e2e.test_mark_neighbours import bits_in_use

ELSEWHERE = "192.168.77.99"
FEW = {"rate": "20 packets/s", "burst": 5}
FIRST, ALL = 0x1000000, 0xFF000000


def chain(hook: str, priority: int, rule: str, kind: str = "filter") -> str:
    return f"table inet marking {{ chain c {{ type {kind} hook {hook} priority {priority}\n{rule}\n}}\n}}\n"


LOADED: dict[str, str] = {
    "before us in raw": chain("prerouting", -300, "meta mark set MARK"),
    "between our tables": chain("prerouting", -140, "meta mark set MARK"),
    "with the mark of the connection": chain("prerouting", -140, "ct mark set MARK\nmeta mark set ct mark", "filter"),
    "from a map": chain("prerouting", -160, "meta mark set ip protocol map { udp : MARK, icmp : MARK }"),
    "right before us in forward": chain("forward", -151, "meta mark set MARK"),
    "right before us in input": chain("input", -151, "meta mark set MARK"),
}


@pytest.fixture(autouse=True)
def clean(lab: Lab) -> Iterator[None]:
    """Nothing of others is left."""
    yield
    lab.gateway.run("nft", "flush", "ruleset")
    lab.gateway.run("iptables-legacy", "-t", "mangle", "-F", "PREROUTING")


def arrived(lab: Lab) -> tuple[int, int]:
    """How many of 100 packets come through, and of 20 to the gateway itself are answered."""
    with streams.receive(lab.server) as receiver:
        streams.send(lab.client, SERVER, rate=1000, count=100)
    return receiver.report().packets, streams.ping(lab.client, LAN, count=20)


def limits(mark: int) -> list[dict[str, object]]:
    """Rules that name nobody who sends here, one of which has this number."""
    action = "reject" if mark == ALL else "drop"
    ways: list[dict[str, object]] = [{"direction": "to"}, {}, {"protocol": "udp"}, {"direction": "to", "per": "peer"}]
    return [{"target": ELSEWHERE, "action": action, **FEW, **way} for way in ways]


@pytest.mark.parametrize("mark", [FIRST, ALL])
@pytest.mark.parametrize("how", LOADED)
def test_nobody_whom_no_rule_names_is_limited(gateway: Gateway, lab: Lab, how: str, mark: int) -> None:
    """Loaded while the rules stand; then the rules come while it stands."""
    lab.gateway.run("nft", "-f", "-", input=LOADED[how].replace("MARK", hex(mark)))
    rules = gateway.add(*limits(mark))
    assert arrived(lab) == (100, 20)
    assert not any(gateway.count(rule).matched_packets for rule in rules)


@pytest.mark.parametrize("first", ["the mark", "the rule"])
def test_nor_by_iptables_before_the_rule_or_after_it(gateway: Gateway, lab: Lab, first: str) -> None:
    foreign = ("-A", "PREROUTING", "-s", "10.1.0.0/16", "-j", "MARK", "--set-mark", hex(FIRST))
    if first == "the mark":
        lab.gateway.run("iptables-legacy", "-t", "mangle", *foreign)
    (rule, *_) = gateway.add(*limits(FIRST))
    if first == "the rule":
        lab.gateway.run("iptables-legacy", "-t", "mangle", *foreign)
    assert arrived(lab) == (100, 20)
    assert gateway.count(rule).matched_packets == 0


def test_nor_by_a_socket_of_the_gateway(gateway: Gateway, lab: Lab) -> None:
    (rule, *_) = gateway.add(*limits(FIRST))
    for mark in (FIRST, ALL):
        script = (
            "import socket, struct\n"
            "sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
            f"sock.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, struct.pack('I', {mark}))\n"
            f"for _ in range(50): sock.sendto(b'x', ('{CLIENT}', 9))\n"
        )
        before = lab.client.received_packets("eth0")
        lab.gateway.run("python3", "-c", script)
        assert lab.client.received_packets("eth0") - before >= 50
    assert gateway.count(rule).matched_packets == 0


def test_whom_a_limit_rejects_others_do_not_let_pass(gateway: Gateway, lab: Lab) -> None:
    """What tells filter to reject passes no rule of others in mangle that wipes it out."""
    lab.gateway.run("iptables-legacy", "-t", "mangle", "-A", "FORWARD", "-j", "MARK", "--set-mark", "7")
    lab.gateway.run("iptables-legacy", "-t", "mangle", "-A", "PREROUTING", "-j", "MARK", "--set-mark", "7")
    try:
        (rule,) = gateway.add({"target": CLIENT, "rate": "5 packets/h", "burst": 5, "action": "reject"})
        with streams.receive(lab.server) as receiver:
            streams.send(lab.client, SERVER, rate=1000, count=100)
        assert receiver.report().packets == 5
        assert gateway.count(rule).dropped_packets == 95
    finally:
        lab.gateway.run("iptables-legacy", "-t", "mangle", "-F", "FORWARD")


REJECTED = {"rate": "5 packets/h", "burst": 5, "action": "reject"}
SPARES: dict[str, tuple[dict[str, object], tuple[str, ...], int]] = {
    "kube-proxy": ({"target": CLIENT}, ("iptables-nft -t mangle -A FORWARD -j MARK --or-mark 0x4000",), 0x4000),
    "Tailscale": ({"target": CLIENT}, ("iptables-nft -A FORWARD -j MARK --set-xmark 0x40000/0xff0000",), 0xFF0000),
    "bits of ours, whichever they are": (
        {"target": CLIENT},
        (
            "iptables-nft -t mangle -A FORWARD -j MARK --and-mark 0x00ffffff",
            "iptables-nft -t mangle -A FORWARD -j MARK --and-mark 0xff00ffff",
        ),
        0xFFFF0000,
    ),
    "what is saved and never asked for": (
        {"target": CLIENT},
        ("iptables-nft -t mangle -A FORWARD -j CONNMARK --save-mark",),
        0,
    ),
    "some that are saved": (
        {"target": CLIENT},
        (
            "iptables-nft -t mangle -A PREROUTING -j CONNMARK --restore-mark",
            "iptables-nft -t mangle -A FORWARD -j CONNMARK --save-mark --nfmask 0xff000000 --ctmask 0xff000000",
        ),
        0xFF000000,
    ),
    "another hook": (
        {"target": CLIENT},
        (
            "iptables-nft -t mangle -A OUTPUT -j CONNMARK --restore-mark",
            "ip6tables-nft -t mangle -A FORWARD -j MARK --set-mark 1",
            "iptables-nft -t mangle -A PREROUTING -j MARK --set-mark 1",
            "iptables-legacy -t nat -A PREROUTING -j MARK --set-mark 1",
        ),
        0x1,
    ),
    "those coming in": (
        {"target": CLIENT, "direction": "to"},
        (
            "iptables-nft -t mangle -A INPUT -j MARK --set-mark 1",
            "iptables-nft -t nat -A OUTPUT -j MARK --set-xmark 0x1/0xff",
            "iptables-legacy -A OUTPUT -j MARK --set-mark 1",
            "iptables-legacy -t security -A OUTPUT -j MARK --set-mark 1",
            "iptables-nft -t security -A OUTPUT -j MARK --set-mark 1",
        ),
        0xFF,
    ),
}
"""What is limited, what others do, and the bits that they need."""


@pytest.mark.parametrize("how", SPARES)
def test_whoever_leaves_our_bits_alone_where_a_limit_stands_keeps_it_from_nothing(
    gateway: Gateway, lab: Lab, how: str
) -> None:
    """Or overwrites some, so that others are taken."""
    where, commands, theirs = SPARES[how]
    with loaded(lab, *commands):
        (rule,) = gateway.add({**where, **REJECTED})
        gateway.wait(lambda: not any(mask & theirs for mask in bits_in_use(lab)), "other bits")
        gateway.wait_for_state(rule, State.APPLIED)  # some seconds, where two of those before were in the way
        assert pass_through(lab, where) == 5
        assert gateway.state(rule)[0] is State.APPLIED
        assert gateway.count(rule).dropped_packets >= 95
    gateway.remove(rule)


WIPES: dict[str, tuple[dict[str, object], str]] = {
    "mangle of iptables-nft": ({"target": CLIENT}, "iptables-nft -t mangle -A FORWARD -j MARK --set-mark 1"),
    "the mark of the connection": ({"target": CLIENT}, "iptables-nft -t mangle -A FORWARD -j CONNMARK --restore-mark"),
    "where it ends here": ({"target": CLIENT}, "iptables-nft -t mangle -A INPUT -j MARK --set-mark 1"),
    "what this host sends": (
        {"target": CLIENT, "direction": "to"},
        "iptables-nft -t mangle -A OUTPUT -j MARK --set-mark 1",
    ),
    "legacy nat": ({"target": CLIENT, "direction": "to"}, "iptables-legacy -t nat -A OUTPUT -j MARK --set-mark 1"),
    "nat of iptables-nft": (
        {"target": CLIENT, "direction": "to"},
        "iptables-nft -t nat -A OUTPUT -j MARK --set-mark 1",
    ),
    "saved for all else of the connection": (
        {"target": CLIENT},
        "iptables-nft -t mangle -A PREROUTING -j CONNMARK --restore-mark;"
        "iptables-nft -t mangle -A FORWARD -j CONNMARK --save-mark",
    ),
}


@pytest.mark.parametrize("how", WIPES)
def test_a_limit_that_somebody_keeps_from_rejecting_says_so_and_one_that_drops_holds(
    gateway: Gateway, lab: Lab, how: str
) -> None:
    """It was `applied`, said that it dropped, and all came through."""
    where, commands = WIPES[how]
    with loaded(lab, *commands.split(";")):
        (rule,) = gateway.write({**where, **REJECTED})
        assert re.search(r"(overwrites|saves) the bits 0x", gateway.wait_for_state(rule, State.ERROR))
        gateway.remove(rule)
        (rule,) = gateway.add({**where, **REJECTED, "action": "drop"})
        assert pass_through(lab, where) == 5
        assert "reject marks" in gateway.attempt("doctor").stdout.partition("Missing: ")[2]
        told = json.loads(gateway.attempt("doctor", "--json").stdout)["findings"]
        assert [each["severity"] for each in told if each["name"] == "missing reject marks"] == ["warning"]
    gateway.remove(rule)


@contextmanager
def loaded(lab: Lab, *commands: str) -> Iterator[None]:
    """Rules of others, until the block ends."""
    for command in commands:
        lab.gateway.run(*command.split())
    try:
        yield
    finally:
        for command in commands:
            lab.gateway.run(*command.replace(" -A ", " -D ").split())


def pass_through(lab: Lab, where: dict[str, object]) -> int:
    """How many of 100 packets come through, from the client or what the gateway itself sends to it."""
    ends = (lab.client, SERVER, lab.server) if "direction" not in where else (lab.gateway, CLIENT, lab.client)
    sender, address, receiving = ends
    with streams.receive(receiving) as receiver:
        streams.send(sender, address, rate=1000, count=100)
    return receiver.report().packets
