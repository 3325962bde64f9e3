"""What commands print to: whatever that is, a command does its work, and says in words what it could not print.

What it prints may quote what others have written: the database, the API, a tool. No terminal is to obey that, so all of
it goes through `PlainStream`.
"""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import Any, TextIO

import typer

from netlimit.plain import escape_as_json, show_text

_STANDARD = (0, 1, 2)
_ESCAPE = "netlimit.escape"
"""How a letter is written that the encoding of a stream does not have: JSON stays JSON."""


class PlainStream:
    """Stands for a text stream, and writes to it what `netlimit.plain.show_text` gives. Of what is written to `stream`
    itself a terminal obeys all."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # bytes that would go by; click looks for it
            raise AttributeError(name)
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write a text of which nothing is obeyed."""
        self.stream.write(show_text(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several."""
        for line in lines:
            self.write(line)


def find_terminal() -> TextIO:
    """Stdout itself: for who shows nothing that others have written before `show_text` or `show_line` has seen it, and
    has the terminal obey what is his own."""
    return sys.stdout.stream if isinstance(sys.stdout, PlainStream) else sys.stdout


@contextmanager
def standard_streams() -> Iterator[None]:
    """Have all three, until the block ends; then all is written that was printed, or it is told why not, with exit
    status 1. Who reads no further (`| head -1`) wants no more."""
    open_missing()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal that cannot show a letter ends no command half way
            stream.reconfigure(errors=_ESCAPE)
    sys.stdout, sys.stderr = _make_plain(sys.stdout), _make_plain(sys.stderr)
    try:
        yield
    finally:
        _flush()


def open_missing() -> None:
    """Let what was closed (`>&-`) lead nowhere: the next file that is opened, as the database, would take its number,
    and what is printed would be written to it."""
    for number in _STANDARD:
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  # for as long as the process lives
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def _make_plain(stream: Any) -> Any:
    return stream if isinstance(stream, PlainStream) else PlainStream(stream)


def _escape(error: UnicodeError) -> tuple[str, int]:
    """What stands for letters that an encoding does not have, and where to go on (codecs.register_error)."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return escape_as_json(error.object[error.start : error.end]), error.end


codecs.register_error(_ESCAPE, _escape)


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _lead_nowhere()
    except OSError as error:
        _lead_nowhere()
        with suppress(OSError):
            typer.echo(f"netlimit: What was printed could not be written: {error.strerror}.", err=True)
        raise SystemExit(1) from None


def _lead_nowhere() -> None:
    """What is left in the buffer is written when Python ends, which must not fail once more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
