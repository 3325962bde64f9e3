"""Tunnels of kinds that only Debian's kernels have all of."""

from __future__ import annotations

import sys

import pytest

from netlimit.tunnels import Followed
from tests.kernel import test_tunnels
from tests.kernel.conftest import untouched
from tests.kernel.test_tunnels import FAR, FAR6, add, check_remote, ends, find
from tests.kernel.worker import RemoteKernel

__all__ = ["kernel", "untouched"]
kernel = test_tunnels.kernel
REMOTES = {
    "geneve": ("id 7", FAR),
    "gre": ("local 10.5.0.1", FAR),
    "gretap": ("local 10.5.0.1", FAR),
    "ipip": ("local 10.5.0.1", FAR),
    "sit": ("local 10.5.0.1", FAR),
    "vti": ("local 10.5.0.1 key 4", FAR),
    "ip6tnl": ("local fd05::1", FAR6),
    "ip6gre": ("local fd05::1", FAR6),
    "vti6": ("local fd05::1 key 4", FAR6),
}
PEERS = f"""
import sys
from pyroute2 import WireGuard
with WireGuard() as wg:
    wg.set("tunnel", private_key="RCdhcHJlc0JpY2hlLEplU2VyYWlzTGFQbHVzQm9ubmU=")
    wg.set("tunnel", peer=dict(public_key="TGFHcm9zc2VCaWNoZV9DJ2VzdExhUGx1c0JlbGxlPDM=",
           endpoint_addr="{FAR}", endpoint_port=51820, allowed_ips=["10.8.0.0/24", "fd08::/64"]))
    wg.set("tunnel", peer=dict(public_key="RCdBcHJlc0JpY2hlLFZpdmVMZXNQcm9iaW90aXF1ZXM=",
           endpoint_addr="{FAR6}", endpoint_port=51820,
           allowed_ips=["10.8.0.7/32"] + [f"10.9.{{n >> 8}}.{{n & 255}}/32" for n in range(2000)]))
"""


@pytest.mark.parametrize("kind", REMOTES)
def test_the_far_end_that_a_link_tells(kernel: RemoteKernel, kind: str) -> None:
    words, remote = REMOTES[kind]
    check_remote(kernel, kind, words, remote)


def test_the_peers_of_wireguard_by_their_allowed_ips(kernel: RemoteKernel) -> None:
    add(kernel, "wireguard")
    kernel.run("ip", "route", "add", "10.9.0.0/16", "dev", "tunnel")
    kernel.run(sys.executable, "-c", PEERS)
    assert ends(find(kernel, "10.8.0.2")) == {FAR: "10.8.0.2"}
    assert ends(find(kernel, "10.8.0.7")) == {FAR6: "10.8.0.7"}
    assert ends(find(kernel, "10.9.7.1")) == {FAR6: "10.9.7.1"}, "of a peer in several messages"
    assert find(kernel, "10.9.200.1") == Followed({})
