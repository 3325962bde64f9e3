"""Whom a request comes from and what it is about: extractors, each of which tells one thing of an ASGI scope.

Nothing that a client can write by itself is believed, but for what names itself such (a header, a key): an address in
a header counts only where a proxy that is trusted has added it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import lru_cache, wraps
from hashlib import blake2b
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any

from netlimit.addresses import read_network
from netlimit.errors import LimitError
from netlimit.l7.methods import plain_method, read_method
from netlimit.l7.targets import plain_host, plain_path, resolve
from netlimit.translation import TranslationPrefix, Translators, find_translators, know_translators, parse_prefixes

Scope = Mapping[str, Any]
"""A connection as ASGI describes it."""
Extractor = Callable[[Scope], str | None]
"""Tells one thing of a request; None where there is no such thing."""
Extract = Callable[[str], str | None]
"""Tells one thing of a text."""
UNIX = "unix"
"""What stands for the other end of a Unix socket in a list of proxies."""
HOPS = 32
"""So many addresses of a chain of proxies are looked at."""
BLOCK = 64
"""Bits of the prefix of an IPv6 client's block."""
_LINK_LOCAL = IPv6Network("fe80::/10")
_MOST_SEEN = 4096
_LONGEST = 64
"""Letters of an address at most, and of what is remembered: a text may come with megabytes."""
_PAIR = re.compile(r"""\s*+(?:([\w!#$%&'*+.^`|~-]++)\s*+=\s*+(?:"((?:[^"\\]|\\.)*+)"|([^\s";,]*+))\s*+)?(?:;|\Z)""")
"""A parameter of `Forwarded`. Nothing is tried twice, here and below: a client may write very much."""
_BACKWARDS = re.compile(r"""((?:[^",]++|"(?:[^"]|"(?=\\(?:\\\\)*+(?!\\)))*+")*+)(?:,|\Z)""")
"""An element of it, read from its end to its beginning: a quote ends a text, and begins it where none escapes it."""
_ADDRESS = re.compile(r"\[(?P<six>[^\]]*)\](?::\w*)?|(?P<four>[0-9.]+)(?::\w*)?|(?P<bare>[^\[\]]*)")


def _remember(find: Extract) -> Extract:
    """What was found for the texts that came last, the short ones."""
    find_again = lru_cache(_MOST_SEEN)(find)

    @wraps(find)
    def look(text: str) -> str | None:
        return find_again(text) if len(text) <= _LONGEST else find(text)

    return look


@_remember
def read_address(text: str) -> str | None:
    """An address in its usual form, IPv4 as such, without a zone; None for what is none."""
    place = text.partition("%")[0]
    if len(place) > _LONGEST:
        return None
    try:
        address = ip_address(place)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)


def find_block(address: str, prefix: int = BLOCK) -> str:
    """Whom to count an address to: itself, or the block of an IPv6 one, in which a client may choose freely. What a
    translator gives to a host of IPv4 none can choose, and its neighbours are others' hosts. A link-local one is
    counted whole: all on all links are in the block."""
    if ":" not in address or prefix == 128:
        return address
    return _find_block(address, prefix, find_translators())


@lru_cache(_MOST_SEEN)
def _find_block(address: str, prefix: int, translators: Translators) -> str:
    place = IPv6Address(address)
    if place in _LINK_LOCAL or translators.translate(place):
        return address
    return str(ip_network(f"{address}/{prefix}", strict=False))


def plain_client(text: bytes) -> str:
    """Whom a client is counted to, by its address: itself, or its /64. What is no address is left as it is."""
    told = text.decode("utf-8", "replace")
    address = read_address(told)
    return told if address is None else find_block(address)


def find_told(values: Iterable[str]) -> tuple[str, ...]:
    """The addresses that values tell, each once."""
    return tuple(dict.fromkeys([address for address in map(read_address, values) if address is not None]))


def find_network(address: str) -> str:
    """The network that an address is likely to share with others of the same owner: its /24, of an IPv6 one its /48.
    All link-local ones are of one, since a host gives itself as many as it likes."""
    if _is_link_local(address):
        return str(_LINK_LOCAL)
    return find_block(address, 48) if ":" in address else address.rpartition(".")[0]


def find_culprit(text: str) -> str | None:
    """Whom refusals are counted to and who is blocked for them: an IPv4 address, or all of the block of an IPv6 one, in
    which a client may choose freely. Such a block may be told as it is; None for what is no client."""
    place, slash, length = text.partition("/")
    address = read_address(place)
    if address is None or (slash and (":" not in address or length != "64" or _is_link_local(address))):
        return None
    return find_block(address)


def _is_link_local(address: str) -> bool:
    """Whether an address in its usual form is one of fe80::/10."""
    return address.startswith("fe") and IPv6Address(address) in _LINK_LOCAL


class ClientAddress:
    """The extractor `remote_address`: the peer of the socket, or whom trusted proxies have written down.

    `trusted` are addresses and networks, and `unix` for whoever comes by a Unix socket. Where the peer is one of them,
    the chain in `header` is read from right to left until the first that is not: that is the client. What is no address
    ends the chain, and so the proxy is taken that has passed it on. `header` is `X-Forwarded-For`, `Forwarded` (RFC
    7239), or one with a single address such as `X-Real-IP`; the others are never looked at, since a proxy that writes
    the one lets the others through as clients sent them.

    An IPv6 client is counted by its block of `prefix` bits. `translators` are prefixes of one's own by which IPv4
    clients come as IPv6 ones (NAT64, SIIT-DC), such as `2001:db8:64::/96`: each such client is counted by himself.
    They are known to the whole process. Raises LimitError for what is no network.
    """

    def __init__(
        self,
        trusted: Iterable[str] = (),
        header: str = "X-Forwarded-For",
        prefix: int = BLOCK,
        translators: Iterable[str] = (),
    ) -> None:
        places = list(trusted)
        if not 1 <= prefix <= 128:
            raise LimitError("prefix", f"{prefix} is no length of an IPv6 prefix; it is 1 to 128, mostly 64.")
        know_translators(_read_translators(translators))
        self._unix = UNIX in places
        self._networks = [_read_network(place) for place in places if place != UNIX]
        self._header = header.lower().encode()
        self._read_chain = _read_forwarded if self._header == b"forwarded" else _read_list
        self._prefix = prefix
        self._trusts = lru_cache(_MOST_SEEN)(self._find_trust)

    def __call__(self, scope: Scope) -> str | None:
        """The client, or its block. Those whose address nobody knows are one client, by the name of their socket."""
        address = self.find(scope)
        if address is not None:
            return find_block(address, self._prefix)
        client = scope.get("client")
        return str(client[0]) if client else UNIX

    def find(self, scope: Scope) -> str | None:
        """The client's own address; None where nobody knows."""
        client = scope.get("client")
        peer = read_address(client[0]) if client else None
        if not (self._networks or self._unix) or not self._trusts(peer):
            return peer
        chain = [value for name, value in scope["headers"] if name == self._header]
        if not chain:
            return peer
        found = peer
        for text in reversed(self._read_chain(b",".join(chain).decode("latin-1"))):
            address = read_address(text)
            if address is None:
                return found
            found = address
            if not self._trusts(address):
                return found
        return found

    def _find_trust(self, address: str | None) -> bool:
        if address is None:
            return self._unix
        known = ip_address(address)
        return any(known in network for network in self._networks)


def _read_network(text: str) -> IPv4Network | IPv6Network:
    try:
        return read_network(text, strict=False)
    except ValueError:
        raise LimitError(
            "trusted", f'{text!r} is no proxy; write an address, a network such as "10.0.0.0/8", or "{UNIX}".'
        ) from None


def _read_translators(texts: Iterable[str]) -> Sequence[TranslationPrefix]:
    try:
        return parse_prefixes([*texts])
    except ValueError as error:
        raise LimitError("translators", str(error)) from None


def _read_list(value: str) -> Sequence[str]:
    return [_strip_port(part.strip()) for part in _split(value)]


def _read_forwarded(value: str) -> Sequence[str]:
    """The `for` of each element; an empty text where one has none, or is none as RFC 7239 (section 4) has it. Read from
    the end, where the nearest proxy has written: no quote that a client has left open reaches there."""
    chain: list[str] = []
    backwards, at = value[::-1], 0
    while at < len(backwards) and len(chain) < HOPS:
        element = _BACKWARDS.match(backwards, at)
        if element is None:
            return ["", *reversed(chain)]
        chain.append(_read_element(element[1][::-1]))
        at = element.end()
    return chain[::-1]


def _read_element(element: str) -> str:
    found, at = [], 0
    while at < len(element):
        pair = _PAIR.match(element, at)
        if pair is None:
            return ""
        if (pair[1] or "").lower() == "for":
            found.append(pair[2] or pair[3] or "")
        at = pair.end()
    return _strip_port(found[0]) if len(found) == 1 else ""


def _split(value: str) -> Sequence[str]:
    """The last elements of a list, those that the nearest proxies have added, whatever clients leave unquoted."""
    return value.rsplit(",", HOPS)[-HOPS:] if value else ()


def _strip_port(text: str) -> str:
    match = _ADDRESS.fullmatch(text)
    return (match["six"] or match["four"] or match["bare"] or "") if match else ""


def take_fields(scope: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A request as ASGI describes it without fields that others of it are to whoever makes variables of fields, as CGI
    does (RFC 3875, 4.1.18): `X_API_Key` beside `X-API-Key`. Applications would take either."""
    fields = scope["headers"]
    if not any(b"_" in name for name, _ in fields):
        return scope
    plain = {name for name, _ in fields if b"_" not in name}
    kept = [each for each in fields if b"_" not in each[0] or _fold(each[0]) not in plain]
    return scope if len(kept) == len(fields) else {**scope, "headers": kept}


def _fold(name: bytes) -> bytes:
    return name.replace(b"_", b"-")


def header(name: str) -> Extractor:
    """The value of a header, the first one as Starlette takes it: a second is no way around a limit. Where there is
    none, that of one with `_` for `-`, which is the same to whoever makes variables of fields (Django). It is told
    without blanks around it."""
    find = field(name)

    def find_stripped(scope: Scope) -> str | None:
        value = find(scope)
        return None if value is None else _strip(value)

    return find_stripped


def _strip(value: str) -> str:
    """A value (Latin-1) without blanks around it, those beyond ASCII as well, which servers of Python and applications
    strip: with one of them `k1` would be another key here, and the same there. In UTF-8 a letter may end in such a
    byte."""
    if value.isascii():
        return value.strip()
    try:
        return value.encode("latin-1").decode().strip().encode().decode("latin-1")
    except UnicodeDecodeError:
        return value.strip()


def field(name: str) -> Extractor:
    """The same just as it was sent."""
    wanted = name.lower().encode()
    folded = _fold(wanted)

    def find(scope: Scope) -> str | None:
        other: bytes | None = None
        for name, value in scope["headers"]:
            if name == wanted:
                text: str = value.decode("latin-1")
                return text
            if other is None and len(name) == len(wanted) and _fold(name) == folded:
                other = value
        return None if other is None else other.decode("latin-1")

    return find


def api_key(name: str = "X-API-Key") -> Extractor:
    """What stands for the key in a header (in `Authorization`: for the bearer token), never the key itself.

    It is the BLAKE2b hash of the key in 32 hexadecimal digits. The key may be anything as far as the limiter knows: a
    rule for keys alone can be evaded by inventing some, unless others are refused before they come here.
    """
    find = header(name)
    bearer = name.lower() == "authorization"

    def find_hash(scope: Scope) -> str | None:
        key = find(scope)
        if key is not None and bearer:
            scheme, key, *_ = *key.split(None, 2), "", ""  # by a tab as well, and without what follows
            key = key if scheme.lower() == "bearer" else None
        return hash_key(key) if key else None

    return find_hash


def hash_key(key: str) -> str:
    """What stands for an API key in counters, and in the rules for a certain one."""
    return blake2b(key.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def user(scope: Scope) -> str | None:
    """The user whom the application has found before the limiter is asked: `scope["user"]` of Starlette, or of Django's
    Channels, if it is authenticated, else `request.state.user`, if that is a text."""
    known = scope.get("user")
    if known is not None and getattr(known, "is_authenticated", False):
        return str(known.get_username() if hasattr(known, "get_username") else known.display_name)
    told = scope.get("state", {}).get("user")
    return told if isinstance(told, str) else None


def path(scope: Scope) -> str | None:
    """The path in its plain form: decoded, without the query, and without `.`, `..` and empty parts."""
    return resolve(scope["path"])


def host(scope: Scope) -> str | None:
    """The host that a request is for, in its plain form: without port, in small letters."""
    told = next((value for name, value in scope["headers"] if name == b"host"), None)
    return None if told is None else plain_host(told)


def method(scope: Scope) -> str | None:
    """The method in capitals; a websocket has none."""
    name: str | None = scope.get("method")
    return None if name is None else read_method(name)


EXTRACTORS: Mapping[str, Extractor] = {
    "remote_address": ClientAddress(),
    "user": user,
    "api_key": api_key(),
    "path": path,
    "host": host,
    "method": method,
}
"""What a rule's descriptors can be made of, by the key that they bear there."""

PLAIN: Mapping[str, Callable[[bytes], str]] = {
    "path": plain_path,
    "host": plain_host,
    "method": plain_method,
    "remote_address": plain_client,
}
"""How values are read, by key, that are compared in a form of their own."""
