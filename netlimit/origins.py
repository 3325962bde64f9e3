"""Which database something was read from.

A database has a random word from when it is made. A backup carries it, and who restores one brings it along: so a
database may have several. None: it is not known, as before there were such words.
"""

from __future__ import annotations

from typing import NamedTuple


class Origin(NamedTuple):
    """The words of a database, with blanks between them; the revision of its rules, and that of the limiter's
    documents."""

    identity: str | None
    revision: int
    limits: int = 0


def is_another(known: str | None, found: Origin) -> bool:
    """Whether a database is another one than that with the identity from which rules are known; so is one in which
    nothing was ever changed. Where an identity is not known, it is the same."""
    return not found.revision or _differ(known, found.identity)


def has_other_limits(known: str | None, found: Origin) -> bool:
    """The same, for who knows the limiter's documents."""
    return not (found.revision or found.limits) or _differ(known, found.identity)


def join(one: str | None, other: str | None) -> str | None:
    """The words of both."""
    return " ".join(dict.fromkeys([*_split(one), *_split(other)])) or None


def _differ(one: str | None, other: str | None) -> bool:
    return bool(one and other) and not set(_split(one)) & set(_split(other))


def _split(identity: str | None) -> list[str]:
    return identity.split() if identity else []
