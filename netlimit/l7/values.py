"""Single values of a document of limits: texts, numbers, flags, words, times."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches

from netlimit.errors import LimitError
from netlimit.l7.limit import parse_limit
from netlimit.l7.markup import Scalar, Value

LONGEST_TEXT = 1000
LONGEST_TIME = 10 * 366 * 86_400
"""The longest time that a document may name, in seconds: as long as a rule of the kernel may last."""
NOTHING = ("", "~", "null", "Null", "NULL")
"""What is written for no value."""

_FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NUMBER = re.compile(r"0|[1-9][0-9_]{0,19}")
_TIME = re.compile(r"(\d{1,10}(?:\.\d{1,6})?)\s*([a-z]*)", re.IGNORECASE)
_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_CONTROL = re.compile(r"[\0-\x1f\x7f\ud800-\udfff]")
QUOTED = 40
"""So many letters of what is wrong are repeated."""


def read_text(scalar: Scalar) -> str:
    """A text, exactly as it is written: `on` and `08` are what they look like."""
    if len(scalar.text) > LONGEST_TEXT:
        raise LimitError("", f"It has {len(scalar.text)} letters; {LONGEST_TEXT} are the most.")
    if found := _CONTROL.search(scalar.text):
        raise LimitError("", f"It has the character {found[0]!r}, which no key or value may have.")
    return scalar.text


def read_number(least: int, most: int) -> Callable[[Scalar], int]:
    """Reads whole numbers from least to most."""

    def read(scalar: Scalar) -> int:
        found = _NUMBER.fullmatch(scalar.text)
        number = int(found[0].replace("_", "")) if found and scalar.plain else -1
        if not least <= number <= most:
            raise LimitError("", f"{_quote(scalar)} is no whole number from {least} to {most}.")
        return number

    return read


def read_percent(scalar: Scalar) -> int:
    """A whole number of percent, with the sign or without."""
    return read_number(0, 1000)(Scalar(scalar.text.removesuffix("%").rstrip(), True))


def read_flag(scalar: Scalar) -> bool:
    """True or false, in the words that YAML has for them."""
    flag = _FLAGS.get(scalar.text.lower()) if scalar.plain else None
    if flag is None:
        raise LimitError("", f"{_quote(scalar)} is neither true nor false.")
    return flag


def read_word(words: Iterable[str]) -> Callable[[Scalar], str]:
    """Reads one of some words; capitals make no difference."""
    known = tuple(words)

    def read(scalar: Scalar) -> str:
        word = scalar.text.lower()
        if word not in known:
            near = find_near(word, known)
            meant = f"; did you mean `{near}`?" if near else "."
            raise LimitError("", f"{_quote(scalar)} is none of {', '.join(known)}{meant}")
        return word

    return read


def read_time(scalar: Scalar) -> str | int:
    """How long something takes: seconds, or a text with a unit."""
    parse_time(scalar.text)
    return int(scalar.text) if scalar.plain and _NUMBER.fullmatch(scalar.text) else scalar.text


def read_limit(scalar: Scalar) -> str:
    """A limit in one text."""
    parse_limit(read_text(scalar))
    return scalar.text


def parse_time(text: str | int) -> float:
    """The seconds that "90s", "10m", "500ms" or "1.5" are. Raises LimitError."""
    found = _TIME.fullmatch(str(text).strip())
    unit = _SECONDS.get(found[2].lower()) if found else None
    seconds = float(found[1]) * unit if found and unit else math.inf
    if not 0 < seconds <= LONGEST_TIME:
        raise LimitError(
            "", f'{str(text)[:QUOTED]!r} is no length of time; write seconds, or "500ms", "90s", "10m", "2h", "7d".'
        )
    return seconds


def is_nothing(value: Value) -> bool:
    """Whether there is a key without a value."""
    return isinstance(value, Scalar) and value.plain and value.text in NOTHING


def guess(scalar: Scalar) -> str | int | bool | None:
    """What a value would be in JSON."""
    if is_nothing(scalar):
        return None
    if scalar.plain and _NUMBER.fullmatch(scalar.text):
        return int(scalar.text.replace("_", ""))
    return _FLAGS.get(scalar.text.lower(), scalar.text) if scalar.plain else scalar.text


def find_near(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant."""
    return next(iter(get_close_matches(word[:QUOTED], known, 1)), None)


def _quote(scalar: Scalar) -> str:
    text = scalar.text if len(scalar.text) <= QUOTED else scalar.text[:QUOTED] + "…"
    return text if scalar.plain and text else repr(text)
