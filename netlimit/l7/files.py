"""Documents of limits in files: one file, or those of a folder, read again when they change."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Container
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from time import monotonic
from typing import NamedTuple

from netlimit.errors import LimitError
from netlimit.l7 import markup
from netlimit.l7.document import Document, parse_document

SUFFIXES = (".yaml", ".yml", ".json")
"""How files in a folder end that are read, also in capitals; those that begin with a dot are not."""
MOST_FILES = 1000
REST = 0.5
"""Seconds for which nothing must change before it is read: who writes a file may not have come to its end."""
PATIENCE = 5.0
"""Seconds for which files wait for others that change: what is moved from one to another comes at once. Then they wait
no longer for a file that never rests."""
_LONGEST_TROUBLE = 1000
_RESTLESS = "It changes again and again; it is read once it has rested for half a second."
_EMPTY = (
    "There is no file of limits any more. What they said stays in force; "
    "for no limits at all write a file without descriptors, or start the limiter anew."
)


class Mark(NamedTuple):
    """By what a file is known to be another one, or to have other content."""

    device: int
    inode: int
    size: int
    written: int
    changed: int


Marks = dict[Path, Mark | str]
"""Files, each with its mark; or why it has none."""


class Files:
    """The documents of a file or a folder: `good` are the last that could be read, `troubles` what is wrong, both by
    path. Links are followed wherever they lead by then: Kubernetes exchanges all files at once by one.

    Where there is nothing to read any more, all stays as it was: a volume that is not mounted looks like an empty
    folder, and so does a missing file that something has mounted as one.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = monotonic) -> None:
        self.good: dict[Path, Document] = {}
        self.troubles: dict[Path, str] = {}
        self._path = path
        self._clock = clock
        self._read: Marks = {}
        self._is_folder: bool | None = None
        self._seen: Marks | None = None
        self._moved: dict[Path, float] = {}
        """When each of the files changed that have not rested since."""
        self._unrest: float | None = None
        """Since when there are some."""

    def refresh(self) -> None:
        """Read what has changed. While the folder itself cannot be read, or is empty, all stays as it was."""
        try:
            marks = look(self._path, self.good)
            self._heed_kind(self._path not in marks)
        except (OSError, LimitError) as error:
            self._read = {}  # what is back may look as it did before
            self.troubles[self._path] = _word(self._path, error)
            return
        if self._path not in marks:
            self.troubles.pop(self._path, None)
        restless = self._find_restless(marks)
        if restless and self._is_patient():
            return
        if self.good and not marks and not restless:
            self.troubles[self._path] = f"{self._path}: {_EMPTY}"
            return
        self._take_all({path: mark for path, mark in marks.items() if path not in restless}, restless)

    def _take_all(self, marks: Marks, restless: Collection[Path]) -> None:
        """Read those that have changed. A restless one, though it is gone just now, keeps what it had."""
        for known in (self.good, self.troubles):
            for gone in [path for path in known if path not in marks and path not in restless]:
                del known[gone]
        changed = {path: mark for path, mark in marks.items() if self._read.get(path) != mark}
        missed = {path for path, mark in changed.items() if not self._take(path, mark)}
        self._read = {path: mark for path, mark in marks.items() if path not in missed}
        for path in self._moved:
            self.troubles[path] = self._word_trouble(path, LimitError("", _RESTLESS))

    def _heed_kind(self, is_folder: bool) -> None:
        """Raises LimitError for a file in the place of a folder, or the other way round."""
        if self._is_folder is None:
            self._is_folder = is_folder
        if is_folder != self._is_folder:
            was, now = ("a file", "a folder") if is_folder else ("a folder", "a file")
            stays = "What it said before stays in force; if that is meant, start the limiter anew."
            raise LimitError("", f"It was {was}, and is {now} now. {stays}")

    def _find_restless(self, marks: Marks) -> Collection[Path]:
        """The files at which somebody may be at work; at the very beginning there is nothing to wait with."""
        now = self._clock()
        if self._seen is not None:
            for path in marks.keys() | self._seen.keys():
                if marks.get(path) != self._seen.get(path):
                    self._moved[path] = now
        self._seen = marks
        self._moved = {path: moved for path, moved in self._moved.items() if now - moved < REST}
        if not self._moved:
            self._unrest = None
        elif self._unrest is None:
            self._unrest = now
        return self._moved

    def _is_patient(self) -> bool:
        """Whether those that rest go on waiting for the others."""
        return self._unrest is not None and self._clock() - self._unrest < PATIENCE

    def _take(self, path: Path, mark: Mark | str) -> bool:
        """Read a file; whether that is done with, be it good or bad: one that cannot be opened now may be later."""
        try:
            self.good[path] = read_file(path, mark)
            self.troubles.pop(path, None)
        except (OSError, LimitError) as error:
            self.troubles[path] = self._word_trouble(path, error)
            return not isinstance(error, OSError)
        return True

    def _word_trouble(self, path: Path, error: OSError | LimitError) -> str:
        stays = " What it said before stays in force." if path in self.good else ""
        return _word(path, error) + stays


def look(path: Path, known: Container[Path] = ()) -> Marks:
    """The files that there are; of folders in a folder, those that are known as files. Raises OSError where there is
    nothing at all, LimitError where there is too much."""
    if not path.is_dir():
        return {path: _mark(path.stat())}
    found = sorted(each.name for each in os.scandir(path) if each.name.lower().endswith(SUFFIXES))
    names = [path / name for name in found if not name.startswith(".")]
    if len(names) > MOST_FILES:
        raise LimitError("", f"There are {len(names)} files of limits; {MOST_FILES} are the most.")
    marks: Marks = {}
    for name in names:
        try:
            state = name.stat()
            if not S_ISDIR(state.st_mode):
                marks[name] = _mark(state)
            elif name in known:
                marks[name] = "It is a folder."
        except OSError as error:
            marks[name] = f"{error.strerror}."
    return marks


def read_file(path: Path, mark: Mark | str) -> Document:
    """The document in a file that was looked at. Raises DocumentError, LimitError for what is no text, and OSError."""
    if isinstance(mark, str):
        raise LimitError("", mark)
    with path.open("rb") as file:
        content = file.read(markup.LARGEST + 1)
    return parse_document(markup.decode(content), is_json(path))


def is_json(path: Path) -> bool:
    """Whether a document is in JSON by the name of its file; else it is in YAML."""
    return path.suffix.lower() == ".json"


def list_troubles(path: Path, error: OSError | LimitError) -> list[str]:
    """What is wrong with a file, a line for each place."""
    if isinstance(error, OSError):
        return [f"{path}: {error.strerror}."]
    return [f"{path}: {line}" for line in str(error).splitlines()]


def _mark(state: os.stat_result) -> Mark | str:
    if not S_ISREG(state.st_mode):  # who opens a pipe waits
        return "It is no file."
    return Mark(state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)


def _word(path: Path, error: OSError | LimitError) -> str:
    return " ".join(list_troubles(path, error))[:_LONGEST_TROUBLE]
