"""Buckets of a target that has gone shut out nobody, and those of all that stay are kept."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest

from scripts.testbed import streams
from scripts.testbed.namespaces import SERVER, Lab
from tests.e2e import frames
from tests.e2e.cramped import BUCKETS
from tests.e2e.gateway import Gateway

CRAMPED = "-m", "tests.e2e.cramped"
FEW = {"rate": "10 packets/day", "burst": 5, "per": "host", "protocol": "udp"}
BELOW = 4


@pytest.fixture
def gateway(lab: Lab, tmp_path: Path) -> Iterator[Gateway]:
    gateway = Gateway(lab, tmp_path)
    gateway.start(*CRAMPED)
    yield gateway
    gateway.clear()
    gateway.close()


def send(lab: Lab, first: str, hosts: int = 1, times: int = BELOW) -> int:
    """Packets from so many addresses, from the first on; returns how many pass."""
    number = int(ip_address(first))
    packets = (
        frames.frame(frames.ip(source, SERVER, frames.UDP, frames.udp(source, SERVER, 9000, 2000 + n, b"x")))
        for source in (str(ip_address(number + host)) for host in range(hosts))
        for n in range(times)
    )
    with streams.receive(lab.server) as receiver:
        frames.send(lab.client, packets)
    return receiver.report().packets


def count_buckets(lab: Lab) -> int:
    return int(lab.gateway.run("sh", "-c", "cat /proc/net/ipt_hashlimit/nl-* | wc -l").stdout)


def test_new_hosts_below_their_rate_pass_where_a_flooded_target_has_gone(gateway: Gateway, lab: Lab) -> None:
    flooded, _ = gateway.put({**FEW, "target": "10.16.0.0/16"}, {**FEW, "target": "10.48.0.0/16"})
    send(lab, "10.16.0.0", hosts=BUCKETS + 100, times=1)
    assert count_buckets(lab) == BUCKETS
    assert send(lab, "10.48.0.9") == 0, "whoever is new to a full table is dropped"
    gateway.replace(flooded, **FEW, target="10.32.0.0/16")
    assert [send(lab, host) for host in ("10.32.0.9", "10.32.255.1", "10.48.0.9")] == [BELOW] * 3
    assert send(lab, "10.32.0.9", times=20) == 1, "the limit holds"


def test_what_changes_no_wide_target_leaves_buckets_as_they_are(gateway: Gateway, lab: Lab) -> None:
    wide, narrow = gateway.put({**FEW, "target": "10.16.0.0/16"}, {**FEW, "target": "10.48.0.9"})
    assert send(lab, "10.16.0.9", times=20) == 5
    gateway.replace(narrow, **FEW, target="10.48.0.10")
    gateway.remove(narrow)
    gateway.replace(wide, **FEW, target="10.16.0.0/16", comment="until Monday", ttl="2d")
    gateway.stop()
    gateway.start(*CRAMPED)
    assert send(lab, "10.16.0.9") == 0
