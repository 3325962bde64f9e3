"""Access tokens: how they look, and the hash under which one is kept.

A token that netlimit makes is `nl_<handle>_<secret>`. The handle is kept as it is and finds the token, so that one that
is not known costs nothing; the hash of the whole is salted scrypt (RFC 7914), so that a stolen database gives no token.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
from dataclasses import dataclass, field

BOOTSTRAP = "bootstrap"
"""The name of the token that the first start makes, or that the settings give; with a number where it was renewed."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""What a token may be called."""

_FORM = re.compile(r"nl_([a-z0-9]{12})_[A-Za-z0-9_-]{43}")
_ALPHABET = string.ascii_lowercase + string.digits
_COST, _BLOCK, _LANES = 2**14, 8, 1
_MOST_MEMORY = 64 * 2**20


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token that was just made: only now is its text known."""

    handle: str
    text: str = field(repr=False)


def make_token() -> NewToken:
    """Make a token that nobody guesses: 256 bits of chance, and a handle that nobody guesses either."""
    handle = "".join(secrets.choice(_ALPHABET) for _ in range(12))
    return NewToken(handle, f"nl_{handle}_{secrets.token_urlsafe(32)}")


def find_handle(text: str) -> str | None:
    """The handle of a token; None for one that netlimit has not made."""
    match = _FORM.fullmatch(text)
    return match[1] if match else None


def hash_token(text: str, cost: int = _COST) -> str:
    """The salted scrypt hash under which a token is kept; `cost` is its N, a power of two."""
    salt = secrets.token_bytes(16)
    return f"scrypt${cost}${_BLOCK}${_LANES}${salt.hex()}${_scrypt(text, salt, cost, _BLOCK, _LANES).hex()}"


def verify_token(text: str, kept: str) -> bool:
    """Whether `kept` is the hash of this token. Takes the same time either way."""
    try:
        scheme, cost, block, lanes, salt, digest = kept.split("$")
        expected = bytes.fromhex(digest)
        found = _scrypt(text, bytes.fromhex(salt), int(cost), int(block), int(lanes))
    except ValueError:
        return False
    return scheme == "scrypt" and hmac.compare_digest(found, expected)


def is_reserved(name: str) -> bool:
    """Whether a name is that of a token of the first start or of the settings."""
    return re.fullmatch(rf"{BOOTSTRAP}(-\d+)?", name) is not None


def check_name(name: str) -> str:
    """The name, if a token may be called that. Raises ValueError with a sentence."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name for a token: letters, digits, . _ and -, 63 at most.")
    if is_reserved(name):
        raise ValueError(f"The name {name!r} is for the token of the first start, or of the settings; choose another.")
    return name


def _scrypt(text: str, salt: bytes, cost: int, block: int, lanes: int) -> bytes:
    secret = text.encode("utf-8", "surrogateescape")
    return hashlib.scrypt(secret, salt=salt, n=cost, r=block, p=lanes, maxmem=_MOST_MEMORY, dklen=32)
