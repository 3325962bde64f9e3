"""Ways from the client to the gateway, besides plain Ethernet. Each makes 10.5.0.2 (client) and 10.5.0.1 (gateway)."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from scripts.testbed.namespaces import CLIENT, LAN, SERVER, SERVER_NETWORK, Lab

NEAR, FAR = "10.5.0.2", "10.5.0.1"
NETWORK = "10.5.0.0/16"
_KEY = "0x" + "42" * 20


def _pair(lab: Lab, *, client: list[str], gateway: list[str], device: str = "in0", far: str = "in0") -> None:
    """Make a device at each end, and have the client's packets for the server take it."""
    lab.client.ip(*client, f"link set {device} up", f"addr add {NEAR}/16 dev {device}")
    lab.gateway.ip(*gateway, f"link set {far} up", f"addr add {FAR}/16 dev {far}")
    lab.client.ip(f"route add {SERVER_NETWORK} via {FAR} dev {device}", f"route add 10.4.0.0/16 via {FAR} dev {device}")


def vlan(lab: Lab) -> None:
    _pair(
        lab,
        client=["link add link eth0 name in0 type vlan id 5"],
        gateway=["link add link lan name in0 type vlan id 5"],
    )


def qinq(lab: Lab) -> None:
    outer = "link add link {} name out0 type vlan proto 802.1ad id 7"
    inner = ["link set out0 up", "link add link out0 name in0 type vlan id 5"]
    _pair(lab, client=[outer.format("eth0"), *inner], gateway=[outer.format("lan"), *inner])


def bridge(lab: Lab) -> None:
    _pair(
        lab,
        client=["link add in0 link eth0 type macvlan mode bridge"],
        gateway=["link add in0 type bridge", "link set lan master in0"],
    )


def bond(lab: Lab) -> None:
    _pair(
        lab,
        client=["link add in0 link eth0 type macvlan mode bridge"],
        gateway=["link add in0 type bond mode active-backup", "link set lan down", "link set lan master in0"],
    )


def vrf(lab: Lab) -> None:
    """The gateway's `lan` is in a VRF, from which a route leads to the server."""
    lab.client.ip(f"addr add {NEAR}/16 dev eth0")
    lab.gateway.ip("link add vrf0 type vrf table 100", "link set vrf0 up", "link set lan master vrf0")
    lab.gateway.ip(f"addr add {FAR}/16 dev lan", f"neigh replace {NEAR} lladdr {_mac(lab)} dev lan")
    lab.gateway.ip(
        f"route add {SERVER_NETWORK} dev wan table 100", f"route add 10.4.0.0/16 via {SERVER} dev wan table 100"
    )
    lab.client.ip(f"route add {SERVER_NETWORK} via {FAR}", f"route add 10.4.0.0/16 via {FAR}")


def _mac(lab: Lab) -> str:
    return lab.client.run("cat", "/sys/class/net/eth0/address").stdout.strip()


def ipip(lab: Lab) -> None:
    _pair(
        lab,
        client=[f"link add in0 type ipip local {CLIENT} remote {LAN}"],
        gateway=[f"link add in0 type ipip local {LAN} remote {CLIENT}"],
    )


def gre(lab: Lab) -> None:
    _pair(
        lab,
        client=[f"link add in0 type gre local {CLIENT} remote {LAN}"],
        gateway=[f"link add in0 type gre local {LAN} remote {CLIENT}"],
    )


def vxlan(lab: Lab) -> None:
    make = "link add in0 type vxlan id 9 dev {} local {} remote {} dstport 4789"
    _pair(lab, client=[make.format("eth0", CLIENT, LAN)], gateway=[make.format("lan", LAN, CLIENT)])


def wireguard(lab: Lab) -> None:
    _pair(lab, client=["link add in0 type wireguard"], gateway=["link add in0 type wireguard"])
    keys = {name: _wg("genkey") for name in ("client", "gateway")}
    for name, other, end in (("client", "gateway", f"{LAN}:51820"), ("gateway", "client", f"{CLIENT}:51820")):
        command = ["wg", "set", "in0", "listen-port", "51820", "private-key", "/dev/stdin"]
        command += ["peer", _wg("pubkey", keys[other]), "allowed-ips", "0.0.0.0/0", "endpoint", end]
        getattr(lab, name).run(*command, input=keys[name])


def _wg(word: str, given: str = "") -> str:
    return subprocess.run(["wg", word], input=given, capture_output=True, text=True, check=True).stdout.strip()


def esp(lab: Lab) -> None:
    """An IPsec tunnel: what leaves it passes PREROUTING again, as what it is."""
    lab.client.ip(
        f"addr add {NEAR}/16 dev eth0", f"route add {SERVER_NETWORK} via {LAN}", f"route add 10.4.0.0/16 via {LAN}"
    )
    lab.gateway.ip(f"addr add {FAR}/16 dev lan")
    ends = ("src", CLIENT, "dst", LAN, "proto", "esp")
    for namespace, direction in ((lab.client, "out"), (lab.gateway, "in"), (lab.gateway, "fwd")):
        if direction != "fwd":
            namespace.run(
                "ip",
                "xfrm",
                "state",
                "add",
                *ends,
                "spi",
                "0x9",
                "mode",
                "tunnel",
                "enc",
                "aes",
                "0x" + "17" * 16,
                "auth",
                "sha1",
                _KEY,
            )
        for network in (SERVER_NETWORK, "10.4.0.0/16"):
            namespace.run(
                "ip",
                "xfrm",
                "policy",
                "add",
                "src",
                NETWORK,
                "dst",
                network,
                "dir",
                direction,
                "tmpl",
                *ends,
                "mode",
                "tunnel",
            )


LINKS: dict[str, Callable[[Lab], None]] = {
    "vlan": vlan,
    "qinq": qinq,
    "bridge": bridge,
    "bond": bond,
    "vrf": vrf,
    "ipip": ipip,
    "gre": gre,
    "vxlan": vxlan,
    "wireguard": wireguard,
    "esp": esp,
}
