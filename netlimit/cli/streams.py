"""What commands print to: whatever that is, a command does its work, and says in words what it could not print."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper

import typer

_STANDARD = (0, 1, 2)


@contextmanager
def standard_streams() -> Iterator[None]:
    """Have all three, until the block ends; then all is written that was printed, or it is told why not, with exit
    status 1. Who reads no further (`| head -1`) wants no more."""
    open_missing()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal that cannot show a letter ends no command half way
            stream.reconfigure(errors="backslashreplace")
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
