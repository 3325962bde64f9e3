"""Addresses and prefixes that gateways and APIs have kept, read as the kernel takes them. A database may be shared, and
its rows are not all written by netlimit: one text that some libraries take for an address, and others do not, must not
keep anybody from enforcing the rules. What is none is as if it had not been said, and the log tells of it, once."""

from __future__ import annotations

import logging

from netlimit.addresses import read_plain

_MOST_TOLD, _SHOWN = 256, 64
_told = set[tuple[str, str]]()

log = logging.getLogger(__name__)


def read_prefix(text: object, where: str) -> str | None:
    """An address or a prefix that stands in the database; None, with a word in the log, for what is none. `where` says
    to operators what it is of."""
    found = read_plain(text)
    if found is None:
        _tell(text, where)
    return found


def read_address(text: object, where: str) -> str | None:
    """The same for what must be a single address, without the length of a prefix."""
    found = read_plain(text)
    if found is None or "/" in found:
        _tell(text, where)
        return None
    return found


def _tell(text: object, where: str) -> None:
    """Whoever writes such rows must not fill the log: of some is told, and of each once."""
    shown = ascii(text)[:_SHOWN]
    if (where, shown) not in _told and len(_told) < _MOST_TOLD:
        _told.add((where, shown))
        log.warning(
            "The database holds, %s, what the kernel takes for no address: %s. It is as if it had not been said.",
            where,
            shown,
        )
