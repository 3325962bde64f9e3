"""Where chains of nftables stand on the ingress of devices, as kernels of several ages tell it."""

from __future__ import annotations

import struct

import pytest

from netlimit.kernel.nft_ingress import EarlyChains, Place, read_chain
from netlimit.kernel.rtnetlink import encode

NETDEV, INET = 5, 1
DEVICE, DEVICES, NAME, PREFIX = 3, 0x8004, 1, 2


def tell(family: int, hook: bytes | None, name: bytes = b"early") -> bytes:
    """A chain as the kernel tells of it, at a hook or at none."""
    told = encode(1, b"filter\0") + encode(3, name + b"\0") + encode(7, b"filter\0")
    return bytes((family, 0, 0, 0)) + told + (b"" if hook is None else encode(0x8004, hook))


def at(number: int, *attributes: bytes) -> bytes:
    return encode(1, struct.pack(">I", number)) + encode(2, struct.pack(">i", -500)) + b"".join(attributes)


CHAIN = "netdev filter early"
TOLD = {
    "a device": (at(0, encode(DEVICES, encode(NAME, b"lan\0")), encode(DEVICE, b"lan\0")), [Place(CHAIN, "lan")]),
    "several": (
        at(0, encode(DEVICES, encode(NAME, b"wan\0") + encode(NAME, b"lan\0"))),
        [Place(CHAIN, "wan"), Place(CHAIN, "lan")],
    ),
    "Linux 5.4": (at(0, encode(DEVICE, b"lan\0")), [Place(CHAIN, "lan")]),
    "names that begin so": (at(0, encode(DEVICES, encode(PREFIX, b"eth\0"))), [Place(CHAIN, "eth", True)]),
    "the same by Linux 6.16": (
        at(0, encode(DEVICES, encode(NAME, b"eth")), encode(DEVICE, b"eth")),
        [Place(CHAIN, "eth", True)],
    ),
    "every name": (at(0, encode(DEVICES, encode(PREFIX, b"\0"))), [Place(CHAIN, "", True)]),
    "no device": (at(0), []),
    "the egress": (at(1, encode(DEVICES, encode(NAME, b"lan\0"))), []),
    "no hook": (None, []),
}


@pytest.mark.parametrize("name", TOLD)
def test_where_a_chain_stands_is_read_as_the_kernel_tells_it(name: str) -> None:
    hook, places = TOLD[name]
    assert [*read_chain(tell(NETDEV, hook))] == places


def test_of_both_families_together_the_hook_has_another_number() -> None:
    devices = encode(DEVICES, encode(NAME, b"lan\0"))
    assert [*read_chain(tell(INET, at(5, devices)))] == [Place("inet filter early", "lan")]
    assert [*read_chain(tell(INET, at(0, devices)))] == []


def test_a_name_that_is_no_text_is_told_as_one_line() -> None:
    (place,) = read_chain(tell(NETDEV, at(0, encode(DEVICES, encode(NAME, b"la\xff\0"))), b"a\nb\x1b"))
    assert place == Place("netdev filter a\\nb\\x1b", "la\\xff")


def test_the_chains_of_a_device_are_those_of_its_name_and_of_how_it_begins() -> None:
    places = Place("a", "eth0"), Place("b", "eth", True), Place("b", "eth0"), Place("c", "", True), Place("d", "eth01")
    assert EarlyChains(places).find("eth0") == ["a", "b", "c"]
    assert EarlyChains(places).find("eth01") == ["d", "b", "c"]
    assert EarlyChains(places).find("lo") == ["c"]
