"""Limits that a database has lost: a standby that lagged has taken the server's place, and has an older state of them.

That is gone by, for whoever must limit an attacker then cannot come to each limiter first. What is lost is told until
it is put anew.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple

from netlimit.l7.document import Document
from netlimit.origins import TOKENS
from netlimit.several import name_some

_MOST_TOLD = 5
_LONGEST_NAME = 50
_LONGEST_PIECE = 3500
"""Letters of a document in one line of the log, which has room for few more."""
_MOST_PIECES = 100
"""So many lines at most quote what one failover has lost."""

log = logging.getLogger(__name__)


class _Kind(StrEnum):
    """What has become of a domain's limits."""

    GONE = "Gone, so that all passes which no file limits,"
    OTHER = "Others than before"
    AGAIN = "In force again, or besides,"


class _Loss(NamedTuple):
    """`found` is the digest of what the database had then in the place of what it has lost, if anything."""

    kind: _Kind
    found: bytes | None


class Losses:
    """The domains of which a database has lost what it had last, until it has something else there."""

    def __init__(self) -> None:
        self._losses: dict[str, _Loss] = {}

    def note(
        self, before: Mapping[str, bytes], now: Mapping[str, bytes], old: Collection[str], good: Mapping[str, Document]
    ) -> None:
        """Log what is lost of documents with these digests, where the database has others `now`, and the limits that
        were in force by them (`good`). Of those that it has besides, the `old` ones were removed once."""
        found = {
            domain: _Loss(_Kind.OTHER if domain in now else _Kind.GONE, now.get(domain))
            for domain, digest in before.items()
            if now.get(domain) != digest
        }
        lost = list(found)
        found |= {domain: _Loss(_Kind.AGAIN, now[domain]) for domain in old if domain not in before}
        if not found:
            return
        self._losses = {**self._losses, **found}  # others read it meanwhile
        log.error("%s", _word(found))
        for line in _quote([good[domain] for domain in lost if domain in good]):
            log.warning("%s", line)

    def heed(self, now: Mapping[str, bytes]) -> None:
        """What was put or removed since is told no more."""
        self._losses = {domain: loss for domain, loss in self._losses.items() if loss.found == now.get(domain)}

    def list_troubles(self) -> list[str]:
        """What is to be said of them: a sentence, or nothing."""
        return [_word(self._losses)] if self._losses else []


def _word(losses: Mapping[str, _Loss]) -> str:
    said = []
    for kind in _Kind:
        names = [_name(domain) for domain, loss in sorted(losses.items()) if loss.kind is kind]
        if names:
            said.append(f"{kind} are those of: {name_some(names, _MOST_TOLD)}.")
    return (
        "The database lacks limits that were in force: a standby that lagged has taken the server's place, or an older "
        f"state of it was put back. {' '.join(said)} Put anew what is missing (`netlimit limits put`; the log has what "
        "was in force, but for what looks like a secret), and remove what is not wanted. "
        f"{TOKENS} This is told until each of these domains is changed, or the limiter is started anew."
    )


def _quote(documents: Collection[Document]) -> Iterator[str]:
    """The limits as JSON, which `netlimit limits put` takes."""
    left = _MOST_PIECES
    for document in documents:
        text, name = json.dumps(document.fields), _name(document.domain)
        pieces = [text[start : start + _LONGEST_PIECE] for start in range(0, len(text), _LONGEST_PIECE)]
        if len(pieces) > left:
            yield f"Lost limits of the domain {name} are too long to be quoted here: {len(text):,} letters of JSON."
            continue
        left -= len(pieces)
        for number, piece in enumerate(pieces, 1):
            part = f", part {number} of {len(pieces)}" if pieces[1:] else ""
            yield f"Lost limits of the domain {name}{part}: {piece}"


def _name(domain: str) -> str:
    return repr(domain if len(domain) <= _LONGEST_NAME else f"{domain[:_LONGEST_NAME]}…")
