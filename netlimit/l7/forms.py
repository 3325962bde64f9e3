"""Whether what a document names can be told of a request at all: the limiter compares some things in a form of their
own, and nothing that is written otherwise fits."""

from __future__ import annotations

import re

from netlimit.addresses import read_network
from netlimit.l7.identity import BLOCK, EXTRACTORS, PLAIN, find_block, plain_client, read_address
from netlimit.l7.methods import read_method
from netlimit.l7.rules import CLIENT_KEY, METHOD_KEY, PATH_KEY
from netlimit.l7.targets import Ambiguous, plain_host, read_written
from netlimit.l7.values import QUOTED

_ANY = "\ue000"
"""Stands for the text of a `*`: a letter of nobody's, which no form changes."""
_GROUPS = ("", "1", "1::", "::", ":", ":1::", "1:1::", "1:1:1::", "1:1", ":1", "1:", ":1:")
_TEXTS = (
    *(f"{groups}{length}" for length in ("", f"/{BLOCK}", "/6", "/") for groups in _GROUPS), "4", "6", "64",
    ".1", ".1.1", ".1.1.1", "1.1", "1.1.1", "1.1.1.1", "0.1.1.", "1.1.", "1.", ".1.1.", ".1.", ".",
)  # fmt: skip
"""What makes an address of a part of one."""
_LIKE_ADDRESS = re.compile(r"[0-9*]*\.[0-9.*]*(?::\d+)?(?:/\d*)?|[0-9A-Fa-f*]*:[0-9A-Fa-f:.*]*(?:/[0-9*]*)?")
_ZEROS = re.compile(r"(?<![0-9a-f*])0+(?=[0-9a-f])")
_UNSAID = re.compile(r"//|/\.(?:/|$)")
"""Parts of a path that stand for none."""
_HEADER = re.compile(r"[A-Z][A-Za-z0-9]*(?:-[A-Za-z0-9]+)+")


def find_misfit(key: str, value: str) -> str | None:
    """Why nothing that is told under a key can be as a value with or without `*`, and what would do instead, as a
    sentence; None where something can."""
    if key == CLIENT_KEY:
        return _find_misfit_of_client(value)
    if key == METHOD_KEY:
        plain = read_method(value)
        return None if plain == value else f"Each method is compared in capitals, {plain[:QUOTED]!r}; write that."
    if key not in PLAIN or not value:
        return None
    try:
        plain = _find_plain(key, value)
    except Ambiguous as error:
        return str(error)
    return None if plain == value else f"Each {key} is compared in its plain form, {plain[:QUOTED]!r}; write that."


def find_odd_key(key: str) -> str | None:
    """Why a key is hardly what is told, and what would be; None for others. Whoever asks may name keys as he likes."""
    small = key.lower()
    kind, _, name = small.partition(":")
    if kind == "header" and name:
        return f"A header is told by its name alone, in small letters, {name[:QUOTED]!r}; write that."
    if key != small and (small in EXTRACTORS or _HEADER.fullmatch(key)):
        return (
            f"Keys are compared letter by letter, and netlimit tells {small[:QUOTED]!r}; write that, unless who asks "
            "tells it in capitals."
        )
    return None


def _find_plain(key: str, value: str) -> str:
    """The value in the form in which it is compared."""
    if "*" not in value:
        written = value.encode("utf-8", "surrogatepass")
        return read_written(written)[0] if key == PATH_KEY else PLAIN[key](written)
    if key == PATH_KEY:
        return _find_plain_path(value)
    inner = value.startswith("*") and value.endswith("*") and ":" in value
    if value.startswith("[") or value.endswith("]") or inner:  # of an IPv6 address, whose other end a `*` stands for
        return _straighten(value)
    return plain_host(value.replace("*", _ANY).encode("utf-8", "surrogatepass")).replace(_ANY, "*")


def _find_plain_path(value: str) -> str:
    """A path may mean two things where there is `..` in it: a pattern of either is one that fits. One with `.` or empty
    parts fits what is written so alone, which is hardly what is meant."""
    before = "/" if value.startswith("*") else ""
    wanted = before + value.replace("*", _ANY)
    readings = read_written(wanted.encode("utf-8", "surrogatepass"))
    found = wanted if wanted in readings and not _UNSAID.search(wanted) else readings[0]
    return found.removeprefix(before).replace(_ANY, "*")


def _find_misfit_of_client(value: str) -> str | None:
    """A client is told by the address that it is counted to, or by its block; by what else, nobody knows."""
    if "*" in value:
        return _find_misfit_of_clients(value)
    plain = plain_client(value.encode("utf-8", "surrogatepass"))
    if plain != value:
        return f"Each {CLIENT_KEY} is compared in its plain form, {plain[:QUOTED]!r}; write that."
    try:
        network = read_network(value, strict=False)
    except ValueError:
        return _word_no_address(value) if _LIKE_ADDRESS.fullmatch(value) else None
    if "/" not in value:
        return None
    if network.version == 6 and network.is_link_local:
        return "A link-local client is told by its address, not by a network such as this; `fe80:*` stands for many."
    if network.version == 4 or network.prefixlen != BLOCK:
        told = f"an IPv4 client is told by its address, one of IPv6 by its /{BLOCK}"
        return f"No client is told by a network such as this: {told}. A `*` stands for many: `10.1.*`."
    if str(network) != value:
        return f"Each {CLIENT_KEY} is compared in its plain form, {str(network)!r}; write that."
    return None


def _find_misfit_of_clients(value: str) -> str | None:
    if not _LIKE_ADDRESS.fullmatch(value) or _fits_client(value):
        return None
    plain = _straighten(value)
    if plain != value and _fits_client(plain):
        return f"Each {CLIENT_KEY} is compared in its plain form, {plain[:QUOTED]!r}; write that."
    return _word_no_address(value)


def _straighten(address: str) -> str:
    """In small letters, and without zeros that lead."""
    return _ZEROS.sub("", address.lower())


def _word_no_address(value: str) -> str:
    return (
        f"No client's address is {'as this' if '*' in value else 'this'}: an IPv4 client is told as `192.0.2.7`, one "
        f"of IPv6 by its /{BLOCK}, `2001:db8:1:2::/{BLOCK}`, in small letters and without zeros that lead; `10.1.*` "
        "and `2001:db8:*` stand for many."
    )


def _fits_client(pattern: str) -> bool:
    """Whether some client is told as a pattern. Of one with several `*` it is only known how it is written."""
    before, *between, after = pattern.split("*")
    if between:
        return _straighten(pattern) == pattern
    return any(_is_told(before + text + after) for text in _TEXTS)


def _is_told(text: str) -> bool:
    """Whether a client is told by just this text."""
    address = read_address(text.partition("/")[0])
    return address is not None and find_block(address) == text
