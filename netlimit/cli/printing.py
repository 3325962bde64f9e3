"""What commands print: tables for people, JSON for programs."""

from __future__ import annotations

import json as jsonlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from netlimit.cli.streams import find_terminal
from netlimit.plain import show_line, show_text

T = TypeVar("T")
JSON = typer.Option(False, "--json", help="Print JSON.")
_ENDLESS = 1000


def say(as_json: bool, document: object, text: str) -> None:
    """Print the document as JSON, or else the text."""
    typer.echo(jsonlib.dumps(document, indent=2, ensure_ascii=False) if as_json else text)


def print_as(as_json: bool, document: T, show: Callable[[T], None]) -> None:
    """Print the document as JSON, or else let it be shown."""
    if as_json:
        typer.echo(jsonlib.dumps(document, indent=2, ensure_ascii=False))
    else:
        show(document)


def open_console() -> Console:
    """Where tables go, of `add_row` and `make_line`: a terminal obeys what rich writes. What is no terminal gets each
    row on one line, for grep."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return Console(file=find_terminal(), highlight=False)
    return Console(file=find_terminal(), highlight=False, width=_ENDLESS, no_color=True)


def make_table(*columns: str, right: Iterable[str] = ()) -> Table:
    """A plain table; `right` are the columns of numbers."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def add_row(table: Table, *cells: object) -> None:
    """Add a row; what is None stays empty, and nothing in a cell is taken for markup or obeyed by a terminal. Where a
    table has a row for each thing, that is one line."""
    show = show_line if table.show_header else show_text
    table.add_row(*(make_line("" if cell is None else show(str(cell))) for cell in cells))


def make_line(text: str) -> Text:
    """What is shown beside tables, or in them."""
    return Text(show_text(text))


def print_table(table: Table) -> None:
    """Print a table."""
    open_console().print(table)


def print_document(text: str) -> None:
    """Print what somebody has given as he has given it; a terminal shows it, and obeys nothing of it."""
    output = sys.stdout if sys.stdout.isatty() else find_terminal()
    output.write(text if text.endswith("\n") else f"{text}\n")


def count(number: int, noun: str) -> str:
    """A number of things."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
