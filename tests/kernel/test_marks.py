"""Who else uses packet marks, as the kernel and its tools tell it, and which bits are left."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from netlimit.marks import USUAL, MarkUse, choose
from tests.kernel.worker import RemoteKernel

MANGLE = "iptables-legacy -t mangle -A"
NFT_MANGLE = "iptables-nft -t mangle -A"
FREE = (
    f"{MANGLE} PREROUTING -j MARK --set-mark 7",
    f"{MANGLE} PREROUTING -j CONNMARK --restore-mark\n{MANGLE} POSTROUTING -j CONNMARK --save-mark",
    f"{MANGLE} POSTROUTING -j MARK --set-mark 0x1000000",
    f"{MANGLE} OUTPUT -j MARK --and-mark 0x00ffffff",
    "iptables-legacy -A OUTPUT -m mark --mark 0x0/0xff000000 -j ACCEPT",
    "iptables-legacy -A OUTPUT -m connmark --mark 0x1000000 -j ACCEPT",
    'iptables-legacy -A OUTPUT -m comment --comment "--set-xmark_0x1000000/0x1000000_mark" -j ACCEPT',
    "ip rule add not fwmark 51820 table 100",
    "ip rule add fwmark 0x100/0xff00 table 100",
    "ip rule add fwmark 0/0xff000000 table 100",
    "nft prerouting meta mark set 0x7",
    "nft prerouting meta mark set ct mark",
    "nft prerouting meta mark set meta mark and 0x00ffffff",
    "nft prerouting ct mark set 0x1000000",
    "nft prerouting ct mark 0x1000000 accept",
    "nft prerouting meta mark and 0xff000000 == 0 accept",
    "nft prerouting meta mark { 1, 2-9 } accept",
    "nft prerouting meta mark set numgen inc mod 3 offset 8",
    "nft prerouting meta mark set jhash ip saddr mod 16",
    "nft postrouting meta mark set 0x1000000",
)
TAKEN = (
    "ip rule add fwmark 0x1000000/0xff000000 table 100",
    "ip rule add not fwmark 0x1000007 table 100",
    "ip -6 rule add fwmark 0x80000000/0x80000000 table 100",
    f"{MANGLE} OUTPUT -j MARK --set-xmark 0x2000000/0x2000000",
    f"{MANGLE} OUTPUT -j MARK --set-mark 0x2000007",
    "ip6tables-legacy -t mangle -A OUTPUT -j MARK --or-mark 0x4000000",
    "ip6tables-legacy -t mangle -A OUTPUT -j MARK --xor-mark 0x4000000",
    "iptables-legacy -A OUTPUT -m mark ! --mark 0x8000000/0x8000000 -j ACCEPT",
    f"{MANGLE} POSTROUTING -j CONNMARK --set-mark 0x1000000\n{MANGLE} PREROUTING -j CONNMARK --restore-mark",
    f"{MANGLE} POSTROUTING -j MARK --set-mark 0x1000000\n{MANGLE} POSTROUTING -j CONNMARK --save-mark\n"
    f"{MANGLE} PREROUTING -j CONNMARK --restore-mark",
    "iptables-nft -t mangle -A PREROUTING -j MARK --set-mark 0x2000000",
    "iptables-nft -t mangle -A PREROUTING -m mark --mark 0x2000000 -j ACCEPT",
    "nft prerouting meta mark set 0x1000000",
    "nft prerouting meta mark set meta mark or 0x1000000",
    "nft prerouting ct mark set 0x1000000 meta mark set ct mark",
    "nft prerouting meta mark set ip protocol map { udp : 0x1000000, tcp : 2 }",
    "nft prerouting meta mark set ip saddr map @marks",
    "nft prerouting meta mark set numgen inc mod 3 offset 0x1000000",
    "nft prerouting meta mark 0x1000000 accept",
    "nft prerouting meta mark != 0x1000000 accept",
    "nft prerouting meta mark and 0xff000000 == 0x1000000 accept",
    "nft prerouting meta mark 0x100-0x1000001 accept",
    "nft prerouting meta mark vmap { 1 : accept, 0x1000000 : drop }",
    "nft prerouting ip saddr . meta mark { 192.0.2.1 . 0x1000000 } accept",
    "nft postrouting ct mark set 0x1000000\nnft prerouting meta mark set ct mark",
)
"""With the usual bits, of which somebody needs one."""


@pytest.fixture
def kernel(linux: RemoteKernel) -> Iterator[RemoteKernel]:
    yield linux
    for family in ("-4", "-6"):
        for line in linux.run("ip", family, "rule", "list").splitlines():
            if "fwmark" in line:
                linux.run("ip", family, "rule", "del", "pref", line.partition(":")[0])
    linux.run("nft", "flush", "ruleset")


def load(kernel: RemoteKernel, lines: str) -> MarkUse:
    for line in lines.splitlines():
        if line.startswith("nft "):
            _, hook, rule = line.split(" ", 2)
            marks = "map marks { type ipv4_addr : mark\nelements = { 192.0.2.1 : 0x1000000 }\n}\n"
            head = f"type filter hook {hook} priority -150\n"
            text = f"table inet {hook} {{\n{marks if '@marks' in rule else ''}chain c {{\n{head}{rule}\n}}\n}}\n"
            kernel.run("nft", "-f", "-", stdin=text)
        else:
            kernel.run(*line.split())
    kernel.structure()
    return kernel.marks()


@pytest.mark.parametrize("lines", FREE)
def test_who_needs_zero_in_our_bits_is_in_nobody_s_way(kernel: RemoteKernel, lines: str) -> None:
    found = load(kernel, lines)
    assert found.unread == ()
    assert choose(found, USUAL).problem is None
    assert not choose(found, None, USUAL).mask & ~USUAL


@pytest.mark.parametrize("lines", TAKEN)
def test_bits_that_somebody_needs_are_taken(kernel: RemoteKernel, lines: str) -> None:
    found = load(kernel, lines)
    asked, free = choose(found, USUAL), choose(found, None, USUAL)
    assert asked.problem is not None
    assert "NETLIMIT_MARK_MASK 0xff000000 covers" in asked.problem
    assert free.problem is None
    assert free.mask != USUAL
    assert f"Set one that is free, such as {free.mask:#010x}, or auto." in asked.problem
    assert choose(found, free.mask).problem is None


LED = "{0} -t {1} -N led\n{0} -t {1} -A led -j MARK --set-mark 7\n{0} -t {1} -A {2} {3} led"


@pytest.mark.parametrize(
    ("rule", "hooks"),
    [
        ("nft forward meta mark set 7", "FORWARD FORWARD6"),
        ("nft input meta mark set ct mark", "INPUT INPUT6"),
        ("nft forward meta mark set meta mark or 7", ""),
        ("nft forward meta mark set meta mark and 0xff0000ff", ""),
        ("nft prerouting meta mark set 7", ""),
        (f"{MANGLE} FORWARD -j MARK --set-mark 7", ""),
        (f"{NFT_MANGLE} FORWARD -j MARK --set-mark 1", "FORWARD"),
        (f"{NFT_MANGLE} FORWARD -j MARK --set-mark 1\n{NFT_MANGLE} INPUT -j MARK --set-mark 1", "FORWARD INPUT"),
        (f"{NFT_MANGLE} OUTPUT -j CONNMARK --restore-mark", "OUTPUT"),
        (f"{NFT_MANGLE} OUTPUT -j HMARK --hmark-tuple src --hmark-mod 3 --hmark-rnd 2", "OUTPUT"),
        (f"{NFT_MANGLE} INPUT -j MARK --and-mark 0x7", "INPUT"),
        ("ip6tables-nft -t mangle -A INPUT -j MARK --set-mark 1", "INPUT6"),
        ("iptables-nft -A FORWARD -j MARK --set-mark 1", "FORWARD"),
        ("iptables-nft -t nat -A OUTPUT -j MARK --set-mark 1", "OUTPUT"),
        (LED.format("iptables-nft", "mangle", "FORWARD", "-g"), "FORWARD"),
        (LED.format("iptables-nft", "mangle", "PREROUTING", "-j"), ""),
        (LED.format("iptables-nft", "nat", "OUTPUT", "-j"), "OUTPUT"),
        (LED.format("iptables-nft", "nat", "PREROUTING", "-j"), ""),
        (f"{NFT_MANGLE} FORWARD -j CONNMARK --save-mark", ""),
        (f"{NFT_MANGLE} FORWARD -j CONNMARK --set-mark 7", ""),
        (f"{NFT_MANGLE} FORWARD -j CONNMARK --restore-mark --nfmask 0x3f00 --ctmask 0x3f00", ""),
        (f"{NFT_MANGLE} FORWARD -j CONNMARK --restore-mark --nfmask 0xff --ctmask 0xff --left-shift-mark 2", ""),
        (f"{NFT_MANGLE} FORWARD -j MARK --set-xmark 0x40000/0xff0000", ""),
        (f"{NFT_MANGLE} FORWARD -j MARK --or-mark 0x4000", ""),
        (f"{NFT_MANGLE} PREROUTING -j MARK --set-mark 1\n{NFT_MANGLE} POSTROUTING -j MARK --set-mark 1", ""),
        ("iptables-nft -t raw -A OUTPUT -j MARK --set-mark 1", ""),
        ("iptables-nft -t security -A OUTPUT -j MARK --set-mark 1", ""),
        ("iptables-nft -t nat -A INPUT -j MARK --set-mark 1", ""),
        ("iptables-legacy -t nat -A OUTPUT -j MARK --set-mark 1", "OUTPUT"),
        (LED.format("iptables-legacy", "nat", "OUTPUT", "-j"), "OUTPUT"),
        (LED.format("ip6tables-legacy", "nat", "OUTPUT", "-g"), "OUTPUT6"),
        (LED.format("iptables-legacy", "nat", "PREROUTING", "-j"), ""),
        ("iptables-legacy -t nat -A INPUT -j MARK --set-mark 1", ""),
        ("iptables-legacy -A FORWARD -j MARK --set-mark 1", ""),
        ("iptables-legacy -t security -A FORWARD -j MARK --set-mark 1", ""),
    ],
)
def test_who_overwrites_what_tells_filter_to_reject(kernel: RemoteKernel, rule: str, hooks: str) -> None:
    choice = choose(load(kernel, rule), None)
    assert sorted(choice.reject) == hooks.split()
    assert choice.mask == USUAL


@pytest.mark.parametrize(
    "rule", [f"{NFT_MANGLE} FORWARD -j MARK --and-mark 0x00ffffff", "nft forward meta mark set meta mark and 0xffffff"]
)
def test_bits_that_somebody_overwrites_there_are_left_to_him(kernel: RemoteKernel, rule: str) -> None:
    found = load(kernel, rule)
    for kept in (None, USUAL):
        choice = choose(found, None, kept)
        assert choice.mask == 0xFF0000
        assert not choice.reject
    assert "FORWARD" in choose(found, USUAL).reject


def test_nothing_is_read_again_while_nothing_changes(kernel: RemoteKernel) -> None:
    before = load(kernel, "nft prerouting meta mark set 7")
    assert kernel.marks() == before
    kernel.run("nft", "add", "rule", "inet", "prerouting", "c", "meta", "mark", "set", "0x1000000")
    assert choose(kernel.marks(), None).mask != USUAL
    kernel.run("ip", "rule", "add", "fwmark", "0xff0000", "table", "100")
    assert not choose(kernel.marks(), None).mask & 0xFFFF0000


def test_a_look_at_a_huge_ruleset_keeps_nobody_waiting(kernel: RemoteKernel) -> None:
    before = load(kernel, "nft prerouting meta mark set 7")
    rules = "\n".join(f"ip daddr 10.{n >> 8}.{n & 255}.1 meta mark set {0x1000000 + n}" for n in range(8000))
    text = f"table inet huge {{\nchain c {{\ntype filter hook prerouting priority -150\n{rules}\n}}\n}}\n"
    kernel.run("nft", "-f", "-", stdin=text)
    end, answered = time.monotonic() + 60, 0
    while choose(kernel.marks(0.0), USUAL).problem is None:
        answered += 1
        assert time.monotonic() < end
    assert answered > 3, "it waited for the look"
    assert kernel.marks(0.0) != before


@pytest.mark.parametrize("text", ["", "\\xff\\xfe", "[1, 2", '{"nftables": 7}', "x" * 100_000])
def test_what_nft_prints_need_not_make_sense(kernel: RemoteKernel, tmp_path: Path, text: str) -> None:
    """It is told as unknown, or taken for nothing; no look fails."""
    (tmp_path / "nft").write_text(f"#!/bin/sh\nprintf '{text}'\n")
    (tmp_path / "nft").chmod(0o755)
    kernel.run("nft", "add", "table", "inet", "prerouting")
    other = RemoteKernel(kernel.namespace, {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    try:
        found = other.marks()
    finally:
        other.close()
    assert found.uses == ()
    assert any("nftables cannot be read" in reason for reason in found.unread)


def test_an_end_of_line_in_a_rule_of_iptables_nft_feigns_no_mark(kernel: RemoteKernel) -> None:
    """It is told that it cannot be read, and nothing is taken for a use of marks."""
    load(kernel, "iptables-nft -t mangle -A INPUT -m mark --mark 8/8 -j ACCEPT")
    comment = "x\n-A INPUT -j MARK --set-xmark 0xffffffff/0xffffffff"
    kernel.run("iptables-nft", "-t", "mangle", "-A", "INPUT", "-j", "MARK", "--or-mark", "0x7")
    assert choose(kernel.marks(), None).problem is None
    kernel.run("iptables-nft", "-t", "mangle", "-A", "INPUT", "-m", "comment", "--comment", comment, "-j", "ACCEPT")
    found = kernel.marks()
    assert choose(found, None).problem is None
    assert any("nftables cannot be read (" in reason and "ends of lines" in reason for reason in found.unread)
