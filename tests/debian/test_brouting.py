"""What a port of a bridge hands to IP in the bridge's place is told, while it is there."""

from __future__ import annotations

import pytest

from netlimit.records import State
from scripts.testbed.namespaces import CLIENT, LAN
from tests.e2e.gateway import Gateway
from tests.e2e.loads import shape

BROUTE = ("ebtables-legacy", "-t", "broute", "-A", "BROUTING", "-p", "IPv4", "-j", "DROP")
NFT = "table bridge b { chain c { type filter hook prerouting priority -400; ether type ip meta broute set 1; }; }"


@pytest.mark.parametrize("command", [BROUTE, ("nft", NFT)], ids=["ebtables", "nftables"])
def test_ports_that_take_packets_themselves_are_told(gateway: Gateway, command: tuple[str, ...]) -> None:
    """With nftables it takes nft 1.0.8, which Debian 13 has and Debian 12 has not."""
    lab = gateway.lab
    lab.gateway.ip("link add br0 type bridge", "link set br0 up", "addr flush dev lan", "link set lan master br0")
    lab.gateway.ip(f"addr add {LAN}/16 dev br0")
    version = lab.gateway.run("nft", "--version").stdout.split()[1].lstrip("v")
    if command[0] == "nft" and tuple(map(int, version.split("."))) < (1, 0, 8):
        pytest.skip(f"nft {version} does not know `meta broute`")
    lab.gateway.run(*command)
    gateway.start()
    by_bridge, anyway, queued = gateway.add(
        {"target": CLIENT, "action": "block", "protocol": "udp", "ports": [7], "interface": "br0"},
        {"target": CLIENT, "action": "block", "protocol": "udp", "ports": [8]},
        shape(CLIENT),
    )
    for rule in (by_bridge, queued):
        assert "hand packets to IP themselves" in gateway.wait_for_state(rule, State.DEGRADED)
    assert gateway.state(anyway) == (State.APPLIED, "")
    told = gateway.attempt("doctor")
    assert (told.returncode, "SERIOUS: brouted packets" in told.stdout) == (1, True)
