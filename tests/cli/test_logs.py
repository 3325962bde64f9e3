"""What the parts say on stderr, and what they must never say."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from netlimit.cli.logs import MOST_RULES, log_to_stderr
from netlimit.settings import LogFormat, LogLevel, Settings
from tests.unread import opened

log = logging.getLogger("netlimit.some.module")
TOKEN = "nl_3Jx7Yk0aVt-Qd_f9PzL2bN8mWcR5sHgU"
FAULT = """
import logging
from netlimit.cli.logs import log_to_stderr
from netlimit.settings import Settings
log_to_stderr("api", Settings())
logging.getLogger("uvicorn.error").error("A fault\\n", exc_info=ValueError("boom"))
"""


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """Reads what was written to stderr; afterwards logging is as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    yield lambda: capsys.readouterr().err
    root.handlers, root.level = handlers, level


def begin(**settings: Any) -> None:
    log_to_stderr("controller", Settings(host="gw1", **settings))


def read(said: Callable[[], str]) -> dict[str, Any]:
    (line,) = said().splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def test_json_has_the_sentence_and_the_fields(said: Callable[[], str]) -> None:
    begin(log_format=LogFormat.JSON)
    log.info("Revision %d is applied.", 7, extra={"revision": 7, "rules": [1, 2], "seconds": 0.25})
    line = read(said)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "part": "controller",
        "host": "gw1",
        "event": "Revision 7 is applied.",
        "revision": 7,
        "rules": [1, 2],
        "seconds": 0.25,
    }


def test_a_line_names_only_some_of_many_rules(said: Callable[[], str]) -> None:
    begin(log_format=LogFormat.JSON)
    log.info("All have changed.", extra={"rules": range(1, 100_001)})
    line = read(said)
    assert (line["rules"], line["rules_total"]) == (list(range(1, MOST_RULES + 1)), 100_000)


def test_a_line_to_read_is_one_line_whatever_it_quotes(said: Callable[[], str]) -> None:
    begin()
    log.warning("No \x1b[31mrule\n%s", "Löwe", extra={"revision": 7, "error": "two\nlines", "actor": None})
    time, _, line = said().partition(" ")
    assert time.endswith("Z")
    assert line == 'WARNING controller: No \\x1b[31mrule\\nLöwe [revision=7 error="two\\nlines"]\n'


def test_a_part_that_may_not_read_python_s_library_any_more_tells_a_fault_all_the_same() -> None:
    """Whoever has given up root may not be able to: a codec that is imported late is not there then."""
    code = f"import sys; sys.modules['encodings.unicode_escape'] = None\n{FAULT}"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    assert "ERROR api: A fault\\n [error=boom]\nValueError: boom\n" in told
    assert "Logging error" not in told


def test_what_was_raised_is_in_the_line(said: Callable[[], str]) -> None:
    begin(log_format=LogFormat.JSON)
    try:
        raise ValueError("no such thing")
    except ValueError:
        log.exception("This is a fault.")
    line = read(said)
    assert line["error"] == "no such thing"
    assert line["trace"].startswith("Traceback")
    assert line["trace"].endswith("ValueError: no such thing")


@pytest.mark.parametrize("form", LogFormat)
def test_lost_lines_are_told_in_a_line_like_others(
    said: Callable[[], str], monkeypatch: pytest.MonkeyPatch, form: LogFormat
) -> None:
    with opened("pipe") as outlet, open(outlet.write_end, "w", closefd=False) as stderr:
        outlet.fill()
        monkeypatch.setattr(sys, "stderr", stderr)
        begin(log_format=form)
        for _ in range(200):
            log.warning("Something %s has happened.", "long" * 900)
        text = b""
        while more := outlet.read():
            text += more
            sys.stderr.flush()
        outlet.leave()
        logging.getLogger().handlers[0].close()
    last = text.decode().splitlines()[-1]
    sentence = r"(\d+) lines were lost here: nobody read what `netlimit controller` said\."
    if form is LogFormat.JSON:
        line = json.loads(last)
        found = re.fullmatch(sentence, line["event"])
        assert (line["level"], line["part"], line["lost"]) == ("warning", "controller", int(found[1] if found else 0))
    else:
        assert re.fullmatch(rf"\S+ WARNING controller: {sentence} \[lost=\1\]", last)


def test_the_level_is_a_setting(said: Callable[[], str]) -> None:
    begin(log_level=LogLevel.WARNING)
    log.info("Nobody is to see this.")
    assert said() == ""


@pytest.mark.parametrize("form", LogFormat)
def test_secrets_are_hidden_wherever_they_stand(said: Callable[[], str], form: LogFormat) -> None:
    begin(
        log_format=form,
        bootstrap_token="first-secret",
        token="second-secret",
        limiter_token="third-secret",
        database_url="postgresql+psycopg://netlimit:p%40ss word@db/netlimit?sslpassword=key%20word",
        counters_url="redis://:redword@db/0",
    )
    try:
        raise ValueError(f"refused: first-secret, {TOKEN}, third-secret")
    except ValueError:
        log.exception(
            "GET /x?token=abcdefgh with {'Authorization': 'Bearer zyxwvu'} by %s to %s and %s",
            TOKEN,
            "postgresql://other:hushhush@db/x",
            [(b"authorization", b"Bearer qponml")],
            extra={
                "url": "redis://:dontsay@h",
                "password": "plain",
                "given": {"api_key": "k3y", "x": ["second-secret"]},
            },
        )
    log.error(
        "could not connect as netlimit with p@ss word or p%40ss word, password=uvwxyz; key word and redword are wrong"
    )
    text = said()
    for secret in (
        "first-secret",
        "second-secret",
        "third-secret",
        TOKEN,
        TOKEN[3:],
        "abcdefgh",
        "zyxwvu",
        "qponml",
        "hushhush",
    ):
        assert secret not in text
    for secret in ("dontsay", "plain", "k3y", "p@ss word", "p%40ss word", "uvwxyz", "key word", "redword"):
        assert secret not in text
    assert "other:***@db/x" in text
