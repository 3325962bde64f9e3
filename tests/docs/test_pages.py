"""Every command in README and docs is run for real, and prints what the page says."""

from __future__ import annotations

import re
import tomllib
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import click
import pytest
import typer

from netlimit.cli.main import app
from netlimit.l7.document import parse_document
from netlimit.settings import Settings
from scripts.testbed.streams import ROOT
from tests.docs.commands import SPECIAL
from tests.docs.console import Console, Printed
from tests.docs.transcripts import Transcript, fits, read_fences, read_page

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"console", "python", "text", "toml", "yaml"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_print_what_the_page_says(page: Path, console: Console) -> None:
    wrong = []
    for in_table, group in groupby(read_page(page), lambda each: each.printed is None):
        some = [each for each in group if each.command not in SPECIAL]
        printed = (
            console.run_together([each.command for each in some])
            if in_table
            else (console.run(each.command) for each in some)
        )
        wrong += [mistake for each, real in zip(some, printed, strict=True) if (mistake := _find_mistake(each, real))]
    assert not wrong, "\n\n".join(wrong)


def test_scripts_do_what_the_pages_say(root: None) -> None:
    shown = [each for page in PAGES for each in read_page(page) if each.command in SPECIAL]
    assert {each.command for each in shown} == set(SPECIAL)
    with ThreadPoolExecutor() as pool:
        running = {command: pool.submit(run) for command, run in SPECIAL.items()}
    printed = {command: ended.result() for command, ended in running.items()}
    for each in shown:
        assert not each.printed or fits(each.printed, printed[each.command]), f"{each}\n{printed[each.command]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_is_checked(page: Path) -> None:
    text = page.read_text("utf-8")
    fences = list(read_fences(text))
    assert {fence.language for fence in fences} <= LANGUAGES
    for fence in fences:
        assert fence.language != "text" or not any(line.startswith("$ ") for line in fence.lines)
        if fence.language == "toml":
            Settings(**tomllib.loads("\n".join(fence.lines)))
        if fence.language == "yaml":
            assert not parse_document("\n".join(fence.lines)).warnings


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_in_sentences_exist(page: Path) -> None:
    """`netlimit status`, in passing, is a command that there is."""
    known = set(_walk(typer.main.get_command(app)))
    for words in re.findall(r"(?<!`)`netlimit ((?:[a-z]+ ?)+)", page.read_text("utf-8")):
        named = words.split()
        assert any(tuple(named[: len(path)]) == path for path in known), f"there is no `netlimit {words}`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for link, _, heading in re.findall(r"\]\(([^)#: ]*)(#([^)]+))?\)", page.read_text("utf-8")):
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not heading or heading in _find_anchors(target.read_text("utf-8")), f"{link}#{heading}"


def test_every_setting_is_told_and_no_other() -> None:
    told = re.findall(r"^\| ((?:`[A-Z_]+`(?:, )?)+) \|", (ROOT / "docs/operations.md").read_text("utf-8"), re.MULTILINE)
    names = [name.lower() for cell in told for name in re.findall(r"[A-Z_]+", cell)]
    assert sorted(names) == sorted(Settings.model_fields)


def test_a_transcript_fits_only_what_was_printed() -> None:
    assert fits(["one …", "…", "last"], "one two\nthree\nfour\nlast\n")
    assert fits(["one", "…"], "one\n")
    assert not fits(["one"], "one\ntwo\n")
    assert not fits(["one", "…", "last"], "one\nlast one\n")
    assert not fits(["a.c"], "abc\n")


def _find_mistake(transcript: Transcript, printed: Printed) -> str | None:
    wanted = transcript.printed
    refusal = any(line.startswith("netlimit: ") for line in wanted or ())
    if (printed.status != 0) != refusal:
        return f"{transcript}\nends with {printed.status} and prints\n{printed.text}"
    if wanted is not None and not fits(wanted, printed.text):
        return f"{transcript}\nprints\n{printed.text}"
    return None


def _find_anchors(page: str) -> set[str]:
    """What the headings of a page are called in links."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _walk(command: click.Command, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(command, click.Group):
        return [path]
    return [found for name, each in command.commands.items() for found in _walk(each, (*path, name))]
