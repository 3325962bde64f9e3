"""Errors of commands: one sentence on stderr, and an exit status."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from netlimit.cli.streams import standard_streams
from netlimit.errors import NetlimitError

_SPEAKER = "netlimit.speaker"


class CommandError(NetlimitError):
    """A command cannot do what was asked, for a reason that is the command line's own."""


def word(error: BaseException) -> str:
    """An error as a sentence."""
    if isinstance(error, OSError):
        reason = error.strerror or type(error).__name__
        return f"{error.filename}: {reason}." if error.filename else f"{reason}."
    return str(error)


def complain(error: BaseException) -> None:
    """Write what is wrong to stderr."""
    typer.echo(f"netlimit: {word(error)}", err=True)


def note_speaker(context: typer.Context, who: str) -> None:
    """Say who it is whose documents a command is going to show, and may not be what he should be: "at URL is not …"."""
    context.meta[_SPEAKER] = who


@contextmanager
def reading_of(context: Any) -> Iterator[None]:
    """Turn what fails over a document that has another shape into a sentence, where somebody is noted who speaks."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        speaker = context.meta.get(_SPEAKER)
        if speaker is None or isinstance(error, NetlimitError | UnicodeEncodeError):
            raise
        raise CommandError(
            f"What answers {speaker}. (Of what it says: {type(error).__name__}: {str(error)[:200]}.)"
        ) from error


@contextmanager
def in_words() -> Iterator[None]:
    """End with status 1 and a sentence where an error of the house, or of the file system, ends the block."""
    try:
        yield
    except BrokenPipeError:  # typer ends quietly by itself
        raise
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "netlimit":
            raise
        complain(CommandError(f"This needs the package {error.name}: install netlimit[gateway]."))
        raise typer.Exit(1) from None
    except UnicodeEncodeError:  # of what Python could not read as text
        complain(CommandError("What was typed is no text here; write it in UTF-8, with LC_ALL=C.UTF-8 for example."))
        raise typer.Exit(1) from None
    except (NetlimitError, OSError) as error:
        complain(error)
        raise typer.Exit(1) from None


class Sentences(TyperGroup):
    """A group of commands whose errors are sentences."""

    def main(self, *arguments: Any, **named: Any) -> Any:
        """Run the command line, wherever it prints to."""
        with standard_streams():
            return super().main(*arguments, **named)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with in_words(), reading_of(ctx):
            return super().invoke(ctx)
