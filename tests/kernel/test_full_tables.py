"""No table of buckets is full of those of former targets: whoever is new to it, and below his rate, passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from ipaddress import ip_address

import pytest

from netlimit import chains, peers
from netlimit.compile import Compilation
from netlimit.kernel.base import observe
from netlimit.limits import Facts
from netlimit.plan import diff
from netlimit.rules import parse_rule
from netlimit.state import SLOT_ROOM
from tests.kernel.conftest import THERE
from tests.kernel.test_peers import count_buckets, feign
from tests.kernel.worker import RemoteKernel
from tests.unit.strategies import NOW

SMALL = 16_384
"""Buckets that a table takes here: the kernel takes no fewer than it has slots."""
SEND = """
import contextlib, ipaddress, socket, sys
first, count, times = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
passed = 0
for n in range(first, first + count):
    for _ in range(times):
        with contextlib.suppress(PermissionError):
            sock.sendto(b"x", (str(ipaddress.ip_address(n)), 9))
            passed += 1
print(passed)
"""
HOSTS = {"direction": "to", "protocol": "udp", "rate": "10 packets/day", "per": "host"}
PEERS = {"direction": "to", "protocol": "udp", "rate": "100 packets/day", "burst": 5, "per": "peer"}
FEW = 10


@pytest.fixture(autouse=True)
def small_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tables that a test can fill. How wide targets are, and how many have room, stays as it is."""
    chains._chains_of.cache_clear()
    monkeypatch.setattr(chains, "TABLE_MAX", SMALL)
    yield
    chains._chains_of.cache_clear()


@pytest.fixture
def routed(linux: RemoteKernel) -> Iterator[RemoteKernel]:
    """A kernel that leads everything behind its device."""
    linux.run("ip", "route", "add", "default", "via", THERE)
    yield linux
    linux.run("ip", "route", "del", "default", "via", THERE)


def hold(linux: RemoteKernel, compilation: Compilation) -> None:
    """Bring what is desired into the kernel, as the controller does."""
    known = observe(linux)
    for step in diff(compilation.state, known, compilation.transition(known.structure)).steps:
        linux.apply(step)
    compilation.settle()
    assert not diff(compilation.state, observe(linux))


def send(linux: RemoteKernel, first: str, count: int, times: int = 1) -> int:
    """Packets to so many addresses from the first on; returns how many passed."""
    return int(linux.run("python3", "-c", SEND, str(int(ip_address(first))), str(count), str(times)))


def put(compilation: Compilation, number: int, **fields: object) -> None:
    assert compilation.put(replace(parse_rule(fields, NOW), id=number)) is None


@pytest.mark.parametrize("action", ["drop", "observe"])
@pytest.mark.parametrize("beside", [(), ("11.64.0.0/16",)])
def test_hosts_of_a_new_target_have_buckets_after_a_flood_of_the_former(
    routed: RemoteKernel, action: str, beside: tuple[str, ...]
) -> None:
    compilation = Compilation(Facts())
    for number, target in enumerate(("11.16.0.0/16", *beside), 1):
        put(compilation, number, **HOSTS, target=target, action=action)
    hold(routed, compilation)
    assert send(routed, "11.16.0.0", SMALL + FEW) == SMALL
    assert count_buckets(routed, THERE) == SMALL
    put(compilation, 1, **HOSTS, target="11.32.0.0/16", action=action)
    hold(routed, compilation)
    assert send(routed, "11.32.0.0", FEW, times=2) == 2 * FEW
    for target in beside:
        assert send(routed, target.partition("/")[0], FEW, times=2) == 2 * FEW
    limited = 20 if action == "observe" else 5
    assert send(routed, "11.32.9.9", 1, times=20) == limited, "the limit holds"


def test_a_narrow_target_that_changes_leaves_all_buckets_as_they_are(routed: RemoteKernel) -> None:
    compilation = Compilation(Facts())
    put(compilation, 1, **HOSTS, target="11.16.0.0/16")
    put(compilation, 2, **HOSTS, target="11.17.0.7")
    hold(routed, compilation)
    assert send(routed, "11.16.0.9", 1, times=10) == 5
    put(compilation, 2, **HOSTS, target="11.17.0.8")
    hold(routed, compilation)
    assert send(routed, "11.16.0.9", 1, times=10) == 0


def test_one_more_target_shuts_no_peer_out_after_a_flood_of_feigned_ones(
    linux: RemoteKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With it the set of peers is smaller, and a new one, while those of the former have their buckets."""
    monkeypatch.setattr(peers, "TABLE_MAX", SMALL)
    monkeypatch.setattr(peers, "WIDE", SMALL // 16)
    targets = [f"10.1.9.{n}" for n in range(1, 4)]
    compilation = Compilation(Facts(set_size=64 * 512))
    for number, target in enumerate(targets, 1):
        neighbour = target, "lladdr", "02:00:00:00:00:02", "dev", "near", "nud", "permanent"
        linux.run("ip", "neigh", "replace", *neighbour)
        put(compilation, number, **PEERS, target=target)
    compilation.drop(3)
    hold(linux, compilation)
    for target in targets[:2]:
        assert feign(linux, target, 12_000) == 12_000
    assert count_buckets(linux, THERE) > 0.9 * 2 * 512 * SLOT_ROOM
    put(compilation, 3, **PEERS, target=targets[2])
    hold(linux, compilation)
    for first in (100_000, 200_000):
        assert [feign(linux, target, 6000, first) for target in targets] == [6000] * 3, "newcomers come through"
    assert 0.9 * 3 * 256 * SLOT_ROOM < count_buckets(linux, THERE) <= 3 * 256 * SLOT_ROOM
    assert [feign(linux, targets[2], 1, 100_000) for _ in range(7)] == [1] * 4 + [0] * 3, "who is known stays limited"
