"""What can go wrong, as sentences for an operator: what was asked, what is wrong, what would work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class NetlimitError(Exception):
    """The base of every error that netlimit raises on purpose; `str()` is a sentence."""


class RuleError(NetlimitError):
    """A rule that cannot be kept: `field` names the part of it that is wrong."""

    def __init__(self, field: str, sentence: str) -> None:
        super().__init__(sentence)
        self.field = field


class LimitError(NetlimitError):
    """A limit of the L7 limiter that cannot be kept: `field` names the part of it that is wrong."""

    def __init__(self, field: str, sentence: str) -> None:
        super().__init__(sentence)
        self.field = field


class Place(NamedTuple):
    """A place in a document, and what is to be said of it: `field` is its path (`descriptors[0].rate_limit.unit`),
    empty for the whole document; `line` counts from 1, and is None where nobody counts lines."""

    field: str
    sentence: str
    line: int | None = None

    def __str__(self) -> str:
        where = ", ".join(filter(None, (f"line {self.line}" if self.line else "", self.field)))
        return f"{where}: {self.sentence}" if where else self.sentence


class DocumentError(LimitError):
    """A document with limits of the L7 limiter that cannot be kept: `places` are all that is wrong, in its order."""

    def __init__(self, places: Sequence[Place]) -> None:
        super().__init__(places[0].field, "\n".join(map(str, places)))
        self.places = tuple(places)


class UnreadableDocument(DocumentError):
    """A text that is neither YAML nor JSON, or goes beyond what is read."""


class CountersUnavailable(NetlimitError):
    """The limiter's counters cannot be asked now; the sentence says where they are and what is wrong."""


class KernelError(NetlimitError):
    """The kernel, or the tool that speaks to it, refused a step.

    `step` is the step as a plan prints it, `reason` what the kernel said.
    """

    def __init__(self, step: str, reason: str) -> None:
        super().__init__(f"The kernel refused '{step}': {reason}")
        self.step = step
        self.reason = reason


class Occupied(KernelError):
    """Somebody else had what a step needs, for as long as it could be waited for."""


class LeadMissing(KernelError):
    """The program that leads packets to the classes of a device cannot be had, and they hold nothing without it."""


def say_fault(error: BaseException) -> str:
    """An error as part of a sentence; one that nobody expected with its kind, for its words may say little."""
    said = str(error).rstrip(".")
    kind = type(error).__name__
    return said if isinstance(error, NetlimitError) else f"{kind}: {said}" if said else kind


class StoreError(NetlimitError):
    """The database cannot do what was asked; the sentence says what would help. It names the database, and may quote
    its driver: `public` is what can be said to whoever asks from elsewhere, without its host, file or user."""

    public = "The database cannot do this now."

    def __init__(self, message: str = "", public: str | None = None) -> None:
        super().__init__(message)
        if public is not None:
            self.public = public


class Unavailable(StoreError):
    """The database cannot be reached, or takes nothing now, for reasons that may pass without anybody's doing here."""


class Busy(StoreError):
    """Somebody else holds a lock on the database of this name for longer than it was waited for; it can be tried
    again."""

    public = "The database was busy for too long; try again."

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class Slow(StoreError):
    """The database of this name answers, but has kept who asks waiting for longer, in all, than he may wait."""

    public = "The database answers too slowly."

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class SettingsError(NetlimitError):
    """A setting that cannot be used: `setting` is its name as an environment variable, `file` the settings file that is
    at fault (None: the environment is)."""

    def __init__(self, setting: str, sentence: str, file: Path | None = None) -> None:
        super().__init__(sentence)
        self.setting = setting
        self.file = file
