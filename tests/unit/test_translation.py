"""Which addresses translators give to hosts of IPv4, by RFC 6052, section 2.2."""

from __future__ import annotations

import re
from ipaddress import IPv6Address

import pytest

from netlimit.translation import TranslationPrefix, parse_prefixes

NONE = "is no prefix of a translator"
EMBEDDED = [  # the examples of RFC 6052, section 2.4, of 192.0.2.33
    ("2001:db8::/32", "2001:db8:c000:221::"),
    ("2001:db8:100::/40", "2001:db8:1c0:2:21::"),
    ("2001:db8:122::/48", "2001:db8:122:c000:2:2100::"),
    ("2001:db8:122:300::/56", "2001:db8:122:3c0:0:221::"),
    ("2001:db8:122:344::/64", "2001:db8:122:344:c0:2:2100::"),
    ("2001:db8:122:344::/96", "2001:db8:122:344::192.0.2.33"),
]


@pytest.mark.parametrize(("prefix", "address"), EMBEDDED)
def test_what_a_prefix_makes_of_an_ipv4_address_is_translated(prefix: str, address: str) -> None:
    (known,) = parse_prefixes(prefix)
    assert known.translates(IPv6Address(address))


@pytest.mark.parametrize(
    ("prefix", "address"),
    [
        *((prefix, "2001:db9::1") for prefix, _ in EMBEDDED),
        *((prefix, str(IPv6Address(address) + 1)) for prefix, address in EMBEDDED[:-1]),  # bits behind the IPv4 address
        ("2001:db8:122::/48", "2001:db8:122:c000:102:2100::"),  # bits 64 to 71
        ("2001:db8:122:344::/64", "2001:db8:122:344:ffc0:2:2100:0"),
        ("2001:db8:122:344::/96", "2001:db8:122:344:0:1:c000:221"),
    ],
)
def test_what_none_makes_is_not(prefix: str, address: str) -> None:
    """A host that has a /64 of its own in such a prefix chooses the rest of its address as it likes."""
    (known,) = parse_prefixes([prefix])
    assert not known.translates(IPv6Address(address))


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("nonsense", "'nonsense' is no prefix of a translator; write for example 2001:db8:64::/96."),
        ("192.0.2.0/24", "'192.0.2.0/24' is no prefix of a translator: it is of IPv6."),
        ("2001:db8::/44", f"'2001:db8::/44' {NONE}: it has 32, 40, 48, 56, 64 or 96 bits (RFC 6052)."),
        ("2001:db8::1", f"'2001:db8::1' {NONE}: it has 32, 40, 48, 56, 64 or 96 bits (RFC 6052)."),
        ("2001:db8::1/96", "'2001:db8::1/96' has bits behind its length; write 2001:db8::/96."),
        ("2001:db8:0:0:100::/96", f"'2001:db8:0:0:100::/96' {NONE}: bits 64 to 71 are zero (RFC 6052)."),
        (7, "it is a list of prefixes, such as [\"2001:db8:64::/96\"]."),
    ],
)  # fmt: skip
def test_what_is_no_prefix_is_told(told: object, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        parse_prefixes(told)


def test_several_are_told_apart_by_commas() -> None:
    told = parse_prefixes("2001:db8:64::/96, 2001:db8:100::/40,")
    assert list(map(str, told)) == ["2001:db8:64::/96", "2001:db8:100::/40"]
    assert parse_prefixes([]) == ()
    assert told[0] == TranslationPrefix.parse("2001:db8:64::/96")
