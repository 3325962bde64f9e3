"""A flood of feigned peers fills what remembers them, and shuts nobody out; who is known stays limited."""

from __future__ import annotations

from dataclasses import replace

import pytest

from netlimit.compile import Compilation
from netlimit.kernel.base import observe
from netlimit.limits import Facts
from netlimit.plan import diff
from netlimit.rules import parse_rule
from tests.kernel.conftest import THERE, THERE6
from tests.kernel.worker import RemoteKernel
from tests.unit.strategies import NOW

FEIGN = """
import socket, struct, sys
target, (family, count, first, block) = sys.argv[1], map(int, sys.argv[2:])
kind = socket.AF_INET if family == 4 else socket.AF_INET6
sock = socket.socket(kind, socket.SOCK_RAW, socket.IPPROTO_RAW)
there, passed = socket.inet_pton(kind, target), 0
udp = struct.pack("!HHHHI", 40000, 9, 12, 0, 0)
for n in range(first, first + count):
    if family == 4:
        ends = struct.pack("!I", 0xC6000000 + n) + there
        packet = struct.pack("!BBHHHBBH", 0x45, 0, 32, 0, 0, 64, 17, 0) + ends + udp
    else:
        source = ((0x20010DB8 << 96) + (n << (128 - block))).to_bytes(16, "big")
        packet = struct.pack("!IHBB", 6 << 28, 12, 17, 64) + source + there + udp
    try:
        sock.sendto(packet, (target, 0))
        passed += 1
    except PermissionError:
        pass
print(passed)
"""
ROOM = 64 * 12
RULE = {"direction": "to", "protocol": "udp", "ports": 9, "rate": "5 packets/h", "per": "peer"}


def hold(linux: RemoteKernel, *rules: dict[str, object]) -> Compilation:
    compilation = Compilation(Facts(set_size=1024))
    for number, fields in enumerate(rules, 1):
        assert compilation.put(replace(parse_rule(fields, NOW), id=number)) is None
    for step in diff(compilation.state, observe(linux)).steps:
        linux.apply(step)
    assert not diff(compilation.state, observe(linux))
    return compilation


def feign(linux: RemoteKernel, target: str, count: int, first: int = 0, block: int = 64) -> int:
    """Send a packet of each of so many peers; returns how many passed."""
    family = "6" if ":" in target else "4"
    return int(linux.run("python3", "-c", FEIGN, target, family, str(count), str(first), str(block)))


def count_buckets(linux: RemoteKernel, target: str) -> int:
    directory = "ip6t_hashlimit" if ":" in target else "ipt_hashlimit"
    return int(linux.run("sh", "-c", f"cat /proc/net/{directory}/nl-* | wc -l"))


@pytest.mark.parametrize("target", [THERE, THERE6])
@pytest.mark.parametrize("action", ["drop", "observe"])
def test_feigned_peers_shut_nobody_out(linux: RemoteKernel, target: str, action: str) -> None:
    compilation = hold(linux, {**RULE, "target": target, "action": action})
    assert [feign(linux, target, 1) for _ in range(7)] == [1] * 5 + [int(action == "observe")] * 2
    assert feign(linux, target, 6000, first=1) == 6000
    assert 0.9 * ROOM < count_buckets(linux, target) <= ROOM, "the table holds nobody whom the set does not"
    assert feign(linux, target, 500, first=100_000) == 500, "newcomers come through while it is full"
    assert feign(linux, target, 1) == int(action == "observe"), "who is known stays limited"
    counts = linux.counts(compilation.peer_sets)
    assert "may pass unlimited" in compilation.find_crowded(counts)[1]
    assert compilation.find_crowded(dict.fromkeys(counts, ROOM // 3)) == {}


def test_a_host_of_ipv6_is_one_peer_with_all_its_addresses(linux: RemoteKernel) -> None:
    hold(linux, {**RULE, "target": THERE6})
    assert feign(linux, THERE6, 2000, block=128) == 5
    assert count_buckets(linux, THERE6) == 1


def test_many_targets_take_no_more_buckets_than_there_may_be(linux: RemoteKernel) -> None:
    hold(linux, *({**RULE, "target": f"10.1.9.{n}"} for n in range(1, 5)))
    for n in range(1, 5):
        linux.run(
            "ip", "neigh", "replace", f"10.1.9.{n}", *["lladdr", "02:00:00:00:00:02", "dev", "near", "nud", "permanent"]
        )
        assert feign(linux, f"10.1.9.{n}", 2000) == 2000
    assert count_buckets(linux, THERE) <= 4 * ROOM
    assert feign(linux, "10.1.9.1", 1) == 1
