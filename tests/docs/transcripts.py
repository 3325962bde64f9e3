"""What the pages show: commands with what they print, as they stand in the text.

A block fenced as `console` holds commands, each after `$ ` (anybody) or `# ` (root), and beneath it what it prints. A
line that ends in a backslash goes on in the next, and so does a here document. `…` stands for anything in a line, and
a line of it alone for any lines. The last cell of a row of a table may be a netlimit command too; what that prints is
not shown then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PROMPTS = ("$ ", "# ")
ANYTHING = "…"


@dataclass
class Transcript:
    """One command at a line of a page, and what it is said to print (None: not said)."""

    page: str
    line: int
    command: str
    printed: list[str] | None = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.command}"


@dataclass(frozen=True)
class Fence:
    """A fenced block: its language, the number of its first line, and its lines."""

    language: str
    line: int
    lines: list[str]


def read_fences(text: str) -> Iterator[Fence]:
    """Every fenced block of a page."""
    opened: Fence | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("```"):
            if opened:
                opened.lines.append(line)
        elif opened:
            yield opened
            opened = None
        else:
            opened = Fence(line[3:].strip(), number + 1, [])
    assert opened is None, f"the block of line {opened.line} does not end"


def read_page(path: Path) -> list[Transcript]:
    """The commands of a page, in their order."""
    text = path.read_text("utf-8")
    found = [transcript for fence in read_fences(text) for transcript in _read_block(path.name, fence)]
    for number, line in enumerate(text.splitlines(), 1):
        cell = re.search(r"\| `(netlimit [^`]+)` \|$", line)
        if cell:
            found.append(Transcript(path.name, number, cell[1], None))
    return sorted(found, key=lambda transcript: transcript.line)


def _read_block(page: str, fence: Fence) -> Iterator[Transcript]:
    if fence.language != "console":
        return
    current: Transcript | None = None
    until: str | None = None
    for number, line in enumerate(fence.lines, fence.line):
        if current and (until or current.command.endswith("\\")):
            current.command += "\n" + line
            until = None if line == until else until
        elif line.startswith(PROMPTS):
            if current:
                yield current
            current = Transcript(page, number, line[2:])
            here = re.search(r"<<'?(\w+)'?", line)
            until = here[1] if here else None
        else:
            assert current, f"{page}:{number}: a console block begins with a command"
            assert current.printed is not None
            current.printed.append(line)
    if current:
        yield current


def fits(wanted: list[str], printed: str) -> bool:
    """Whether a command printed what the page says."""
    lines = [line.rstrip() for line in wanted if line.strip()]
    pattern = "".join(r"(?:.*\n)*?" if line.strip() == ANYTHING else _as_pattern(line) + r"\n" for line in lines)
    actual = "".join(f"{line.rstrip()}\n" for line in printed.splitlines() if line.strip())
    return re.fullmatch(pattern, actual) is not None


def _as_pattern(line: str) -> str:
    return ".*".join(map(re.escape, line.split(ANYTHING)))
