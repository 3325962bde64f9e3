"""Nothing that others have written is obeyed by the terminal on which a command shows it."""

from __future__ import annotations

import ast
import json
import os
import re
import sqlite3
import subprocess
from collections.abc import Sequence
from contextlib import closing

import pytest

from tests.cli.false_api import answering, make_answer
from tests.cli.running import PROGRAM, SECONDS, Netlimit
from tests.warm import ROOT

HOSTILE = "a\x1b]0;owned\x07\x1b[31mred\x1b[2J\x9b5n\u202eb\u2066\u200e\ufeff\x7f\x08\x00\ud800z\U000e0041"
OURS = re.compile(r"\x1b\[(0|1|2|3|4|22|23|24)?m")
"""How rich begins and ends bold and the like."""


def is_obeyed(said: str) -> bool:
    """Whether a terminal would do anything about it but show it."""
    return any(not letter.isprintable() and letter not in "\n\t" for letter in said)


def make_hostile(netlimit: Netlimit) -> None:
    """Put into the database what the API's user could."""
    netlimit.do("db", "upgrade")
    netlimit.do("token", "create", "one", "--role", "viewer")
    with closing(sqlite3.connect(netlimit.environment["NETLIMIT_DATABASE_URL"].removeprefix("sqlite:///"))) as database:
        database.execute("update tokens set name = ?", (HOSTILE.replace("\ud800", ""),))
        database.commit()


def run_at_terminal(netlimit: Netlimit, *arguments: str) -> str:
    """What a command shows on a terminal, with all its output there."""
    ours, theirs = os.openpty()
    environment = {**netlimit.environment, "TERM": "xterm-256color", "COLUMNS": "300"}
    with subprocess.Popen(
        netlimit.within(*PROGRAM, *arguments), stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment
    ) as process:
        os.close(theirs)
        said = bytearray()
        try:
            while some := os.read(ours, 65536):
                said += some
        except OSError:  # EIO: all others have closed it
            pass
        finally:
            os.close(ours)
        process.wait(SECONDS)
    return said.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("command", [("token", "list"), ("token", "revoke", "1")])
def test_what_the_database_says_is_shown_and_not_obeyed(netlimit: Netlimit, command: Sequence[str]) -> None:
    make_hostile(netlimit)
    piped, shown = netlimit.do(*command), run_at_terminal(netlimit, *command)
    assert not is_obeyed(piped)
    assert not is_obeyed(OURS.sub("", shown)), shown
    if command == ("token", "list"):
        assert "owned" in shown
        assert "\x1b[1m" in shown, "our own bold still is"
    assert "]0;owned" in piped, "and all of it is seen"
    assert "[31mred" in piped


def test_json_is_the_same_document(netlimit: Netlimit) -> None:
    make_hostile(netlimit)
    said = netlimit.do("token", "list", "--json")
    assert not is_obeyed(said)
    assert json.loads(said)["items"][0]["name"] == HOSTILE.replace("\ud800", "")


@pytest.mark.parametrize(
    "command", [("status",), ("rule", "list"), ("rule", "show", "1", "--json"), ("limits", "show", "a"), ("top",)]
)
def test_what_the_api_refuses_with_is_shown_and_not_obeyed(netlimit: Netlimit, command: Sequence[str]) -> None:
    netlimit.do("db", "upgrade")
    problem = make_answer(json.dumps({"detail": HOSTILE, "status": 400}).encode(), status="400 Bad Request")
    with answering(netlimit, problem):
        said = netlimit.refuse(*command)
        shown = run_at_terminal(netlimit, *command)
    assert said.startswith("netlimit: a")
    assert "]0;owned" in said
    assert not is_obeyed(said)
    assert not is_obeyed(shown), shown


def test_what_the_api_answers_is_shown_and_not_obeyed(netlimit: Netlimit) -> None:
    netlimit.do("db", "upgrade")
    gateway = {"name": HOSTILE, "backend": HOSTILE, "applied_revision": 1, "rules": 0, "state": HOSTILE}
    page = {"items": [{**gateway, "paused": False, "seen_at": HOSTILE}]}
    with answering(netlimit, make_answer(json.dumps(page).encode())):
        piped, shown = netlimit.do("gateway", "list"), run_at_terminal(netlimit, "gateway", "list")
        written = netlimit.do("gateway", "list", "--json")
    assert not any(map(is_obeyed, (piped, OURS.sub("", shown), written)))
    assert json.loads(written) == page


def test_json_is_json_where_output_takes_few_letters(netlimit: Netlimit) -> None:
    netlimit.do("db", "upgrade")
    page = {"items": [{"text": "München … 猫 \U0001f431"}]}
    with answering(netlimit, make_answer(json.dumps(page).encode())):
        for encoding in ("ascii", "latin-1"):
            environment = {**netlimit.environment, "PYTHONIOENCODING": encoding}
            command = netlimit.within(*PROGRAM, "gateway", "list", "--json")
            done = subprocess.run(command, capture_output=True, check=True, cwd=ROOT, env=environment)
            assert json.loads(done.stdout.decode(encoding)) == page


def test_a_document_is_as_it_was_given_but_on_a_terminal(netlimit: Netlimit) -> None:
    netlimit.do("db", "upgrade")
    document = "domain: a # \u202eb\u00a0c\r\n"
    with answering(netlimit, make_answer(document.encode())):
        command = netlimit.within(*PROGRAM, "limits", "show", "a")
        done = subprocess.run(command, capture_output=True, check=True, cwd=ROOT, env=dict(netlimit.environment))
        shown = run_at_terminal(netlimit, "limits", "show", "a")
    with answering(netlimit, make_answer(json.dumps({"domain": HOSTILE}, ensure_ascii=True).encode())):
        written = netlimit.do("limits", "show", "a", "--json")
    assert json.loads(written) == {"domain": HOSTILE}
    assert not is_obeyed(written)
    assert done.stdout == document.encode()
    assert not is_obeyed(shown)


def test_what_is_logged_is_shown_and_not_obeyed(netlimit: Netlimit) -> None:
    """A trace, too, which has several lines."""
    program = """
import logging, sys
from netlimit.cli.logs import log_to_stderr
from netlimit.cli.streams import standard_streams
from netlimit.settings import Settings
with standard_streams():
    log_to_stderr("apply", Settings())
    try:
        raise ValueError(sys.argv[1])
    except ValueError:
        logging.getLogger("netlimit").exception("It went wrong")
    print(sys.argv[1], file=sys.stderr)
    logging.shutdown()
"""
    hostile = HOSTILE.replace("\x00", "").replace("\ud800", "")
    done = subprocess.run(
        [PROGRAM[0], "-c", program, hostile], capture_output=True, text=True, check=True, cwd=ROOT, timeout=SECONDS
    )
    assert "Traceback" in done.stderr
    assert done.stderr.count("]0;owned") >= 3
    assert not is_obeyed(done.stderr)


def test_one_place_makes_what_is_written_by_itself() -> None:
    """Rich writes escapes of its own, so what it shows is cleaned before: where cells are made, and nowhere else."""
    found = {
        f"{path.name}: {ast.unparse(node.func)}"
        for path in sorted((ROOT / "netlimit").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and (
            ast.unparse(node.func) in ("Console", "table.add_row", "Panel", "sys.stdout.write", "sys.stderr.write")
            or (ast.unparse(node.func) == "Text" and not isinstance(node.args[0], ast.Constant))
        )
    }
    assert found == {"printing.py: Console", "printing.py: table.add_row", "printing.py: Text"}
