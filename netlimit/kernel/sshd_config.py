"""The ports in sshd's configuration, as OpenSSH reads it (sshd_config(5))."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from netlimit.plain import read_text

USUAL_PORT = 22
_DEEPEST = 16
"""So many files that include each other, as in OpenSSH."""
_LINE = re.compile(r"""\s*"?(\w+)"?(?:\s*=\s*|\s+)(.*)""")
_WORD = re.compile(r"""\s*(#.*|(?:"[^"]*"|'[^']*'|[^\s"'])+)""")
_PORT, _ADDRESS, _INCLUDE, _MATCH = "port", "listenaddress", "include", "match"


def read_ports(path: Path, directory: Path = Path("/etc/ssh")) -> set[int]:
    """The ports that a file of sshd's, and those that it includes, name: the usual one for an address without a port.
    None where there are none, or it cannot be read. What it includes by a name alone is in `directory`."""
    lines = list(_read_lines(path, directory, _DEEPEST))
    named = {port for keyword, word in lines if keyword == _PORT and (port := _parse_port(word))}
    addresses = [word for keyword, word in lines if keyword == _ADDRESS]
    found = {_find_port(word) for word in addresses}
    bare = set() if named or None not in found else {USUAL_PORT}
    return named | bare | {port for port in found if port}


def _read_lines(path: Path, directory: Path, depth: int) -> Iterator[tuple[str, str]]:
    """The keywords that matter, each with its first word, until a Match: what follows is of some connections alone."""
    with suppress(OSError):
        for line in read_text(path).splitlines():
            parts = _LINE.fullmatch(line)
            keyword = parts[1].lower() if parts else ""
            words = list(_split(parts[2])) if parts else []
            if keyword == _MATCH:
                return
            if keyword == _INCLUDE and depth:
                for each in (each for word in words for each in sorted(glob.glob(str(directory / word)))):
                    yield from _read_lines(Path(each), directory, depth - 1)
            elif keyword in (_PORT, _ADDRESS) and words:
                yield keyword, words[0]


def _split(text: str) -> Iterator[str]:
    """The words of a line, without quotes, up to a comment."""
    for word in _WORD.findall(text):
        if word.startswith("#"):
            return
        yield word.replace('"', "").replace("'", "")


def _parse_port(word: str) -> int | None:
    number = int(word) if word.isascii() and word.isdecimal() and len(word) <= len("65535") else 0
    return number if 0 < number < 1 << 16 else None


def _find_port(word: str) -> int | None:
    """The port of `host:port`, `[address]:port`; None for an address alone, of IPv6 too."""
    host, separator, port = word.rpartition(":")
    return _parse_port(port) if separator and (":" not in host or host.endswith("]")) else None
