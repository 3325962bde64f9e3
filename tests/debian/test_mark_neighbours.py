"""The neighbours of tests/e2e, and those that only such kernels have: verdicts, for emulated machines keep no rates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scripts.testbed.namespaces import SERVER, Lab
from tests.debian.links import LINKS, NEAR
from tests.e2e.gateway import Gateway
from tests.e2e.test_mark_neighbours import (
    NEIGHBOURS,
    TAKE_OURS,
    THEIRS,
    TOGETHER,
    arrive,
    bits_in_use,
    loaded,
)

SENT = 300
FEW: dict[str, object] = {"protocol": "udp", "rate": "60 packets/h", "burst": 60}
AWAY = "192.0.2.77"
"""Reached through the tunnel alone."""


@contextmanager
def tunnel(lab: Lab, directory: Path) -> Iterator[None]:
    """wg-quick leads everything through a tunnel, with the routing rules and the marks that it loads itself."""
    key, other = (lab.gateway.run("wg", "genkey").stdout.strip() for _ in range(2))
    peer = lab.gateway.run("wg", "pubkey", input=other + "\n").stdout.strip()
    file = directory / "tunnel.conf"
    file.write_text(
        f"[Interface]\nPrivateKey = {key}\nAddress = 10.77.0.1/24\n"
        f"[Peer]\nPublicKey = {peer}\nAllowedIPs = 0.0.0.0/0\nEndpoint = {SERVER}:51820\n"
    )
    file.chmod(0o600)
    lab.gateway.run("wg-quick", "up", str(file))
    try:
        yield
    finally:
        lab.gateway.run("wg-quick", "down", str(file))


@pytest.fixture
def theirs(lab: Lab) -> None:
    lab.server.ip(f"addr add {THEIRS}/32 dev lo")


@pytest.mark.parametrize("names", [*((name,) for name in NEIGHBOURS), TOGETHER], ids=" and ".join)
def test_beside_them_limits_hold_and_theirs_route_as_before(
    gateway: Gateway, theirs: None, names: tuple[str, ...]
) -> None:
    """They are there before the controller begins, as at boot."""
    lab = gateway.lab
    with loaded(lab, *names):
        assert arrive(lab, THEIRS) == SENT, "they route before us"
        gateway.start()
        gateway.add({"target": SERVER, "direction": "to", **FEW})
        if any(name in TAKE_OURS for name in names):
            gateway.wait(lambda: bool(bits_in_use(lab)) and 0xFF000000 not in bits_in_use(lab), "other bits")
        # A minute's refill is one packet.
        assert 60 <= arrive(lab, SERVER) <= 65
        assert arrive(lab, THEIRS) == SENT, "they route beside us"
        gateway.wait_until_applied()


def test_beside_a_tunnel_of_wg_quick(gateway: Gateway, tmp_path: Path) -> None:
    lab = gateway.lab
    gateway.start()
    with tunnel(lab, tmp_path):
        assert "dev tunnel" in lab.gateway.run("ip", "route", "get", AWAY).stdout
        gateway.add({"target": SERVER, "direction": "to", **FEW})
        assert 60 <= arrive(lab, SERVER) <= 65
        assert "dev tunnel" in lab.gateway.run("ip", "route", "get", AWAY).stdout
        assert bits_in_use(lab) == {0xFF000000}
        gateway.wait_until_applied()


def test_in_a_vrf_the_bits_change_and_limits_hold(gateway: Gateway) -> None:
    """Where packets pass PREROUTING twice."""
    lab = gateway.lab
    LINKS["vrf"](lab)
    gateway.start()
    gateway.add({"target": NEAR, **FEW}, {"target": "10.5.9.9", "interface": "vrf0", **FEW})
    assert bits_in_use(lab) == {0xFF000000}
    line = "iptables-legacy -t mangle -A PREROUTING -j MARK --set-mark 0x1000000"
    lab.gateway.run(*line.split())
    gateway.wait(lambda: bool(bits_in_use(lab)) and 0xFF000000 not in bits_in_use(lab), "other bits")
    gateway.wait_until_applied()
    assert 60 <= arrive(lab, SERVER) <= 65
