"""What may stand where in a document of limits, and what is said of what may not: every wrong place at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from netlimit.errors import DocumentError, LimitError, Place
from netlimit.l7.limit import LARGEST_AMOUNT, UNITS, Algorithm, Refill
from netlimit.l7.markup import Listing, Mapping, Scalar, Value
from netlimit.l7.rules import Mode, OnFailure, OnLimit
from netlimit.l7.values import (
    QUOTED,
    find_near,
    guess,
    is_nothing,
    read_flag,
    read_limit,
    read_number,
    read_percent,
    read_text,
    read_time,
    read_word,
)

MOST_PLACES = 100
"""After so many wrong places no more are looked for."""


class Record(dict[str, Any]):
    """A map as it was read: its fields, and where it and each of them stand, those too that could not be read."""

    def __init__(self, line: int | None) -> None:
        super().__init__()
        self.line = line
        self.lines: dict[str, int | None] = {}


@dataclass(slots=True)
class Findings:
    """What there is to say of a document, by place."""

    wrong: list[Place] = field(default_factory=list)
    warnings: list[Place] = field(default_factory=list)

    def complain(self, path: str, sentence: str, line: int | None) -> None:
        """Something is wrong here. Raises DocumentError once there are too many such places."""
        self.wrong.append(Place(path, sentence, line))
        if len(self.wrong) >= MOST_PLACES:
            self.wrong.append(Place("", f"No more than {MOST_PLACES} wrong places are looked for."))
            raise DocumentError(self.wrong)

    def warn(self, path: str, sentence: str, line: int | None) -> None:
        """Something works here, but hardly as it was meant, or not elsewhere. So many warnings are enough, too."""
        if len(self.warnings) < MOST_PLACES:
            self.warnings.append(Place(path, sentence, line))


Read = Callable[[Value, str, Findings], Any]
"""Reads a value that stands at a path; None where there is something to complain of."""


@dataclass(frozen=True, slots=True)
class Fields:
    """A map: which keys it may have, and how the value of each is read."""

    noun: str
    """What such a map is called in a sentence."""
    known: dict[str, Read]

    def read(self, value: Value, path: str, findings: Findings) -> Record | None:
        """What is in it, by key; keys without a value are left out. None for what is no map."""
        if not isinstance(value, Mapping):
            sample = next(iter(self.known))
            findings.complain(path, f"A map is wanted here: {self.noun}, with `{sample}: …` and so on.", value.line)
            return None
        record = Record(value.line)
        for key, inner in value.items:
            name = self._find(key, record, path, findings)
            if name is None:
                continue
            here = join(path, name)
            if name in record.lines:
                findings.complain(here, f"`{name}` is there twice.", key.line)
                continue
            if is_nothing(inner):
                continue
            record.lines[name] = key.line
            read = self.known[name](inner, here, findings)
            if read is not None:
                record[name] = read
        return record

    def _find(self, key: Value, record: Record, path: str, findings: Findings) -> str | None:
        """Which field a key means."""
        if not isinstance(key, Scalar):
            findings.complain(path, "A map or a list is no key here; keys are words.", key.line)
            return None
        if key.text in self.known:
            return key.text
        name, here = key.text.lower(), join(path, key.text[:QUOTED])
        if name in self.known:
            findings.warn(here, f"`{key.text}` is taken for `{name}`; write that, others are strict.", key.line)
            return name
        near = find_near(name, self.known)
        findings.complain(here, self._word_unknown(key.text[:QUOTED], name, near), key.line)
        return None if near in record.lines else near  # what is wrong within is worth knowing, too

    def _word_unknown(self, written: str, name: str, near: str | None) -> str:
        unknown = f"`{written}` is not known in {self.noun}"
        homes = [other.noun for other in (DOCUMENT, DESCRIPTOR, RATE_LIMIT) if name in other.known]
        if homes:
            return f"{unknown}; it belongs into {homes[0]}."
        return f"{unknown}; did you mean `{near}`?" if near else f"{unknown}; docs/limits.md lists what is."


def one(read: Callable[[Scalar], Any]) -> Read:
    """Reads a single value; what is wrong with it is said of its place."""

    def read_value(value: Value, path: str, findings: Findings) -> Any:
        if not isinstance(value, Scalar):
            found = "map" if isinstance(value, Mapping) else "list"
            findings.complain(path, f"One value is wanted here, and not a {found}.", value.line)
            return None
        try:
            return read(value)
        except LimitError as error:
            findings.complain(path, str(error), value.line)
            return None

    return read_value


def many(fields: Fields) -> Read:
    """Reads a list of maps."""

    def read_list(value: Value, path: str, findings: Findings) -> Any:
        if not isinstance(value, Listing):
            findings.complain(path, f"A list is wanted here, of which each item is {fields.noun}.", value.line)
            return None
        return [fields.read(inner, f"{path}[{number}]", findings) for number, inner in enumerate(value.items)]

    return read_list


def either(read: Callable[[Scalar], Any], fields: Fields) -> Read:
    """Reads a single value, or a map."""
    single = one(read)

    def read_either(value: Value, path: str, findings: Findings) -> Any:
        return (fields.read if isinstance(value, Mapping) else single)(value, path, findings)

    return read_either


def keep(value: Value, path: str, findings: Findings) -> Any:
    """Reads what nobody here looks at, as it would be in JSON."""
    if isinstance(value, Mapping):
        return {key.text: keep(inner, path, findings) for key, inner in value.items if isinstance(key, Scalar)}
    if isinstance(value, Listing):
        return [keep(inner, path, findings) for inner in value.items]
    return guess(value)


def join(path: str, name: str) -> str:
    """The path of a member."""
    return f"{path}.{name}" if path else name


_AMOUNT = one(read_number(0, LARGEST_AMOUNT))
_SOME = one(read_number(1, LARGEST_AMOUNT))
_TEXT, _FLAG, _TIME_OF = one(read_text), one(read_flag), one(read_time)
_ALGORITHMS = [algorithm for algorithm in Algorithm if algorithm is not Algorithm.CONCURRENCY]

REPLACED = Fields("an entry of `replaces`", {"name": _TEXT})
CONCURRENCY = Fields("`concurrency`", {"limit": _AMOUNT, "lease": _TIME_OF})
ESCALATE = Fields("`escalate`", {"after": _SOME, "within": _TIME_OF, "block": _TIME_OF})
COUNTING: dict[str, Read] = {
    "algorithm": one(read_word(_ALGORITHMS)),
    "burst": _SOME,
    "refill": one(read_word(Refill)),
    "count_refused": _FLAG,
}
"""How requests are counted: keys of netlimit's own, which belong to `rate_limit`."""
ACTING: dict[str, Read] = {
    "concurrency": either(read_number(0, LARGEST_AMOUNT), CONCURRENCY),
    "mode": one(read_word(Mode)),
    "overshoot": one(read_percent),
    "priority": one(read_number(0, 100)),
    "on_limit": one(read_word(OnLimit)),
    "max_wait": _TIME_OF,
    "on_failure": one(read_word(OnFailure)),
    "emergency": one(read_limit),
    "escalate": ESCALATE.read,
}
"""What becomes of requests, and what else limits them: keys of netlimit's own, which belong to a descriptor."""
RATE_LIMIT = Fields(
    "`rate_limit`",
    {
        "unit": one(read_word(UNITS)),
        "requests_per_unit": _AMOUNT,
        "unit_multiplier": _SOME,
        "unlimited": _FLAG,
        "name": _TEXT,
        "replaces": many(REPLACED),
        **COUNTING,
        **ACTING,
    },
)
DESCRIPTOR = Fields(
    "a descriptor",
    {
        "key": _TEXT,
        "value": _TEXT,
        "rate_limit": RATE_LIMIT.read,
        **ACTING,
        **COUNTING,
        "shadow_mode": _FLAG,
        "quota_mode": _FLAG,
        "detailed_metric": _FLAG,
        "value_to_metric": _FLAG,
        "share_threshold": _FLAG,
        "metadata": keep,
    },
)
DESCRIPTOR.known["descriptors"] = many(DESCRIPTOR)
DOCUMENT = Fields("a document", {"domain": _TEXT, "descriptors": many(DESCRIPTOR)})


def settle(record: Record, path: str, findings: Findings) -> None:
    """Put keys of netlimit's own where they belong: they may stand in a descriptor or in its `rate_limit`."""
    rate = record.get("rate_limit")
    if "rate_limit" not in record.lines:
        for name in COUNTING.keys() & record.lines.keys():
            findings.complain(join(path, name), "It needs a `rate_limit` beside it.", record.lines[name])
    elif rate is not None:
        _move(record, rate, COUNTING, path, findings)
        _move(rate, record, ACTING, path, findings)


def _move(origin: Record, home: Record, names: Iterable[str], path: str, findings: Findings) -> None:
    for name in names:
        line = origin.lines.pop(name, None)
        if name in home.lines and line is not None:
            findings.complain(join(path, name), f"`{name}` is there twice, here and in `rate_limit`.", line)
        elif line is not None:
            home.lines[name] = line
        if name in origin:
            home.setdefault(name, origin.pop(name))
