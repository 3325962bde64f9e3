"""Runs many netlimit commands in one process, to spare them the start: a JSON list on stdin, answers as JSON."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import sys

import typer

from netlimit.cli.main import app


def main() -> None:
    print(json.dumps([_run(command) for command in json.load(sys.stdin)]))


def _run(command: str) -> tuple[str, int]:
    program, *words = shlex.split(command)
    assert program == "netlimit"
    printed = io.StringIO()
    status: object = 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            typer.main.get_command(app).main(words, prog_name=program)
        except SystemExit as ended:
            status = ended.code
    return printed.getvalue(), status if isinstance(status, int) else 1


if __name__ == "__main__":
    main()
