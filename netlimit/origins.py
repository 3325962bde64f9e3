"""Which database something was read from, and in which state of it.

A database has a random word from when it is made. A backup carries it, and who restores one brings it along: so a
database may have several. None: it is not known, as before there were such words. Besides, each restore leaves a mark,
which no earlier state of that database has.
"""

from __future__ import annotations

from typing import NamedTuple

TOKENS = "Tokens that were revoked since are good again: revoke them anew; those made since are gone."
"""What is told of any state of a database that lacks what was changed last."""
MOST_MARKS = 100
"""So many restores are known; of those before, a database that lacks them all would not be told."""
_MARK = "+"


class Origin(NamedTuple):
    """The words and marks of a database, with blanks between them; the revision of its rules, and that of the limiter's
    documents. `past` is a revision with its stamp, which tells it from others of its number; 0: that is not known.
    `is_server`: a replica that lags may take its place, as no file can."""

    identity: str | None
    revision: int
    limits: int = 0
    past: tuple[int, int] = (0, 0)
    is_server: bool = False


class Trace(NamedTuple):
    """The newest line of a database's audit, which has one for each change of any kind: its number (0: there is none),
    and the digest of what it says. `identity` are the words and marks of the database."""

    identity: str | None
    line: int
    digest: str


def is_another(known: str | None, found: Origin) -> bool:
    """Whether a database is another one than that with the identity from which rules are known; so is one in which
    nothing was ever changed. Where an identity is not known, it is the same."""
    return not found.revision or _differ(known, found.identity)


def is_older(known: Origin, found: Origin, is_doubted: bool = False) -> bool:
    """Whether a database is in an older state than the one from which rules are known, or has gone on from there: it
    has not the revision that is known. One into which a backup was restored since then is not. Where it remembers that
    no more it counts as the same, unless that `is_doubted`."""
    if _is_restored(known, found):
        return False
    (number, stamp), (asked, has) = known.past, found.past
    is_told = number == asked and bool(stamp) and (bool(has) or is_doubted)
    return found.revision < known.revision or (is_told and stamp != has)


def is_same(known: Origin, found: Origin) -> bool:
    """Whether a database is the one from which rules are known, in whatever state, and no backup was restored into it
    since then."""
    return not is_another(known.identity, found) and not _is_restored(known, found)


def has_other_limits(known: str | None, found: Origin) -> bool:
    """As `is_another`, for who knows the limiter's documents."""
    return not (found.revision or found.limits) or _differ(known, found.identity)


def has_older_limits(known: Origin, found: Origin) -> bool:
    """As `is_older`, for who knows them; by their number alone."""
    return found.limits < known.limits and not _is_restored(known, found)


def may_lack(known: Trace, found: str | None) -> bool:
    """Whether a database with these words and marks has lost something where it lacks a line that is known. Another one
    has not, nor has one into which a backup was restored since."""
    return not _differ(known.identity, found) and not _is_marked_since(known.identity, found)


def join(one: str | None, other: str | None) -> str | None:
    """The words and marks of both."""
    return " ".join(dict.fromkeys([*_split(one), *_split(other)])) or None


def mark(identity: str | None, random: str) -> str:
    """With a mark more, of a random word; the oldest marks go."""
    words, marks = _list_words(identity), _list_marks(identity)
    return " ".join([*words, *marks[1 - MOST_MARKS :], f"{_MARK}{random}"])


def has_word(identity: str | None) -> bool:
    """Whether a database has any word by which it is known."""
    return bool(_list_words(identity))


def _is_restored(known: Origin, found: Origin) -> bool:
    return _is_marked_since(known.identity, found.identity)


def _is_marked_since(known: str | None, found: str | None) -> bool:
    return not set(_list_marks(found)) <= set(_list_marks(known))


def _differ(one: str | None, other: str | None) -> bool:
    words, others = set(_list_words(one)), set(_list_words(other))
    return bool(words and others) and not words & others


def _list_words(identity: str | None) -> list[str]:
    return [each for each in _split(identity) if not each.startswith(_MARK)]


def _list_marks(identity: str | None) -> list[str]:
    return [each for each in _split(identity) if each.startswith(_MARK)]


def _split(identity: str | None) -> list[str]:
    return identity.split() if identity else []
