"""Wherever commands print to, and in whatever locale: they do their work, and no traceback is shown."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.running import PROGRAM, Netlimit, settings_in
from tests.warm import ROOT

COMMANDS = [
    ("--help",),
    ("rule", "list"),
    ("rule", "export"),
    ("rule", "show", "umlaut"),
    ("status", "--json"),
    ("token", "list"),
    ("rule", "show", "nobody"),
]
ASCII = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


def run_in_shell(netlimit: Netlimit, line: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash, in which `netlimit` is the command."""
    program = f'netlimit() {{ {shlex.join(PROGRAM)} "$@"; }}; set -o pipefail; {line}'
    environment = {**netlimit.environment, **settings}
    done = subprocess.run(
        ["bash", "-c", program], capture_output=True, text=True, check=False, cwd=ROOT, env=environment
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr
    return done


@pytest.fixture(scope="module")
def filled(make_directory: Callable[[], Path]) -> Iterator[Netlimit]:
    served = Netlimit(settings_in(make_directory()))
    server = served.serve()
    rules = "\n".join(f'{{"target": "10.1.{n >> 8}.{n & 255}", "action": "block"}}' for n in range(3000))
    served.do("rule", "import", "-", "--no-wait", given=rules)
    served.do(
        "rule", "add", "10.9.9.9", "--action", "block", "--name", "umlaut", "--comment", "München … 猫", "--no-wait"
    )
    yield served
    server.end()


def test_output_may_be_closed_cut_off_full_or_ascii(filled: Netlimit) -> None:
    for command in COMMANDS:
        line = f"netlimit {shlex.join(command)}"
        status = run_in_shell(filled, line).returncode
        for redirection in (">&-", ">&- 2>&- <&-"):
            assert run_in_shell(filled, f"{line} {redirection}").returncode == status, (command, redirection)
        assert run_in_shell(filled, line, **ASCII).returncode == status, command
        run_in_shell(filled, f"{line} | head -1")
        if not status:
            full = run_in_shell(filled, f"{line} > /dev/full")
            assert full.returncode == 1, command
            assert full.stderr.startswith("netlimit: ")
            assert full.stderr.endswith("No space left on device.\n")


def test_what_is_printed_never_goes_into_a_file_that_took_the_place_of_the_output(filled: Netlimit) -> None:
    """The database would be the first file that is opened."""
    run_in_shell(filled, "netlimit token list --json >&- 2>&- <&-")
    run_in_shell(filled, "netlimit token create closed --role viewer >&- <&-")
    assert "closed" in filled.do("token", "list")


def test_what_is_no_text_in_a_locale_is_told(filled: Netlimit) -> None:
    done = run_in_shell(filled, "netlimit rule show ü", **ASCII)
    assert (done.returncode, done.stderr.startswith("netlimit: What was typed is no text here")) == (1, True)


@pytest.mark.parametrize("option", ["--name", "--comment"])
def test_what_is_no_utf_8_is_told_and_not_taken_for_a_silent_api(filled: Netlimit, option: str) -> None:
    line = rf"""netlimit rule add 10.9.9.1 --rate '5 packets/s' {option} "$(printf '\377')" """
    done = run_in_shell(filled, line, LC_ALL="C.UTF-8")
    assert done.returncode == 1
    assert done.stderr.startswith("netlimit: What was typed is no text here; write it in UTF-8"), done.stderr
