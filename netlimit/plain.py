"""Text from a host: names, files, and what tools print.

Whoever may name a process, an interface, a rule or a file chooses its bytes. Nothing of that is text until it has come
through here: reading never fails over bytes, and what comes out can be shown by a terminal and kept by every database.
"""

from __future__ import annotations

import os
from pathlib import Path

_PLAIN = bytes([*b"\n\t", *range(0x20, 0x7F)])


def decode(raw: bytes) -> str:
    """Bytes as text. What is no UTF-8, and what a terminal would obey or not show as it is (control characters other
    than the ends of lines and tabs, marks of direction, separators), stands there escaped: `\\xff`, `\\u202e`."""
    raw = raw.replace(b"\r\n", b"\n")
    if not raw.translate(None, _PLAIN):
        return raw.decode("ascii")
    text = raw.decode("utf-8", "backslashreplace")
    return "".join(each if each.isprintable() or each in "\n\t" else _escape(each) for each in text)


def decode_name(raw: bytes) -> str:
    """A name, which is one line: `decode` without ends of lines and tabs, up to the zero at its end if it has one."""
    return decode(raw.partition(b"\0")[0]).replace("\n", "\\n").replace("\t", "\\t")


def name_of(path: str | os.PathLike[str]) -> str:
    """The last part of a path, or a name that Python has read itself, as `decode_name` gives it."""
    return decode_name(os.fsencode(os.path.basename(path)))


def show_line(text: str) -> str:
    """A text as one line, without letters that would end it or move the cursor."""
    return text if text.isprintable() else "".join(each if each.isprintable() else _escape(each) for each in text)


def show_text(text: str) -> str:
    """A text of any number of lines, without what a terminal would obey or not show as it is: that stands there escaped
    as in JSON, `\\u001b`. So JSON stays the same document."""
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join(line if line.isprintable() else "".join(map(_show, line)) for line in lines)


def escape_as_json(letters: str) -> str:
    """Letters as JSON has them in ASCII: those beyond U+FFFF as two halves."""
    # Nor here by a codec (see `_escape`).
    units: list[int] = []
    for number in map(ord, letters):
        beyond = number - 0x10000
        units += [number] if beyond < 0 else [0xD800 + (beyond >> 10), 0xDC00 + (beyond & 0x3FF)]
    return "".join(f"\\u{unit:04x}" for unit in units)


def read_text(path: Path | str) -> str:
    """What a file holds. Raises OSError."""
    return decode(Path(path).read_bytes())


def _show(letter: str) -> str:
    return letter if letter.isprintable() or letter == "\t" else escape_as_json(letter)


def _escape(letter: str) -> str:
    # Not by the codec of that name: it is imported when it is first used, and who has given up root may not be able to.
    return ascii(letter)[1:-1]
