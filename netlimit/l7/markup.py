"""YAML and JSON as values that know their lines, read within bounds: of size, of depth, of what aliases may repeat."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import yaml

from netlimit.errors import LimitError

LARGEST = 2 * 2**20
"""The most bytes of a document."""
DEEPEST = 64
"""So deep may maps and lists lie in one another: deeper ones would cost the parser its time, or its stack."""
MOST_VALUES = 200_000
"""The most values in a document, those that aliases repeat counted each time."""

_TABS = re.compile(r"^( *\t[ \t]*)(?=\S)", re.MULTILINE)
_TEXT_TAGS = ("!", "tag:yaml.org,2002:str")
_TAGS = ("!", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


@dataclass(frozen=True, slots=True)
class Scalar:
    """A text, as it is written. A plain one, without quotation marks, may be meant as a number, a flag, or nothing."""

    text: str
    plain: bool = False
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Mapping:
    """Keys and values, in their order."""

    items: list[tuple[Value, Value]]
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """Values, in their order."""

    items: list[Value]
    line: int | None = None


Value = Scalar | Mapping | Listing


class NoMarkup(LimitError):
    """The text is neither YAML nor JSON, or goes beyond the bounds; `line` counts from 1."""

    def __init__(self, sentence: str, line: int | None = None) -> None:
        super().__init__("", sentence)
        self.line = line


def decode(content: bytes) -> str:
    """Read UTF-8, with or without a byte order mark. Raises NoMarkup for what is none, or too large."""
    if len(content) > LARGEST:
        raise NoMarkup(f"The document has {len(content)} bytes; {LARGEST} are the most.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise NoMarkup(f"Byte {error.start} is not UTF-8.", content.count(b"\n", 0, error.start) + 1) from None


def read_yaml(text: str) -> Value:
    """Read one YAML document. Raises NoMarkup."""
    try:
        return _Composer(yaml.parse(text, Loader=yaml.CSafeLoader)).read_document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        raise NoMarkup(f"The YAML cannot be read: {error.problem or error.context}.", line) from None
    except yaml.YAMLError as error:
        raise NoMarkup(f"The YAML cannot be read: {str(error).splitlines()[0]}.") from None
    except UnicodeEncodeError:
        raise NoMarkup("The text has half a surrogate pair, which cannot be kept.") from None


def read_json(text: str) -> Value:
    """Read JSON. Its values have no lines: programs write it, and readers find their way by paths. Raises NoMarkup."""
    if sum(map(text.count, ",[{")) > MOST_VALUES:
        raise NoMarkup(f"The document has more than {MOST_VALUES} values.")
    try:
        return _convert(_JSON.decode(text), 0)
    except json.JSONDecodeError as error:
        raise NoMarkup(f"The JSON cannot be read: {error.msg}, in column {error.colno}.", error.lineno) from None
    except RecursionError:
        raise _too_deep(None) from None


def find_tabs(text: str) -> list[int]:
    """The lines that are indented with tabs, which YAML does not allow."""
    return [text.count("\n", 0, match.start()) + 1 for match in _TABS.finditer(text)]


def expand_tabs(text: str) -> str:
    """The same text, indented with two spaces for each tab: so much that what follows a `- ` stands below it."""
    return _TABS.sub(lambda match: match[1].replace("\t", "  "), text)


@dataclass(frozen=True, slots=True)
class _Anchored:
    """A value that aliases may repeat: how many values it is, and how deep."""

    value: Value
    size: int
    height: int


class _Composer:
    """Makes values of the events of YAML."""

    def __init__(self, events: Iterable[yaml.Event]) -> None:
        self._events = iter(events)
        self._size = 0
        self._anchors: dict[str, _Anchored | None] = {}

    def read_document(self) -> Value:
        """The one document that there is; nothing is an empty text."""
        value: Value = Scalar("", plain=True)
        documents = 0
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise NoMarkup("There is a second YAML document; a text has one domain.", _find_line(event))
            elif isinstance(event, yaml.NodeEvent):
                value, _ = self._read(event, 0)
        return value

    def _read(self, event: yaml.NodeEvent, depth: int) -> tuple[Value, int]:
        """The value that begins with an event, and how many levels it has."""
        line = _find_line(event)
        self._count(1, line)
        if isinstance(event, yaml.AliasEvent):
            return self._repeat(str(event.anchor), depth, line)
        if depth >= DEEPEST:
            raise _too_deep(line)
        before = self._size
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        value, height = self._read_content(event, depth, line)
        if event.anchor is not None:
            self._anchors[event.anchor] = _Anchored(value, self._size - before, height)
        return value, height

    def _read_content(self, event: yaml.NodeEvent, depth: int, line: int) -> tuple[Value, int]:
        if isinstance(event, yaml.ScalarEvent):
            if event.tag is not None and event.tag not in _TEXT_TAGS:
                raise _no_tag(event.tag, line)
            return Scalar(event.value, event.implicit[0], line), 1
        assert isinstance(event, yaml.CollectionStartEvent)
        if event.tag is not None and event.tag not in _TAGS:
            raise _no_tag(event.tag, line)
        inner = list(self._read_inner(depth))
        values = [value for value, _ in inner]
        height = 1 + max((height for _, height in inner), default=0)
        if isinstance(event, yaml.SequenceStartEvent):
            return Listing(values, line), height
        return Mapping(_merge(list(zip(values[::2], values[1::2], strict=True))), line), height

    def _read_inner(self, depth: int) -> Iterator[tuple[Value, int]]:
        for event in self._events:
            if not isinstance(event, yaml.NodeEvent):  # the end of the map or list
                return
            yield self._read(event, depth + 1)

    def _repeat(self, name: str, depth: int, line: int) -> tuple[Value, int]:
        anchored = self._anchors.get(name)
        if anchored is None:
            where = "stands within what it repeats" if name in self._anchors else "repeats nothing"
            raise NoMarkup(f"The alias *{name} {where}.", line)
        self._count(anchored.size, line)
        if depth + anchored.height > DEEPEST:
            raise _too_deep(line)
        return anchored.value, anchored.height

    def _count(self, values: int, line: int) -> None:
        self._size += values
        if self._size > MOST_VALUES:
            raise NoMarkup(f"The document has more than {MOST_VALUES} values, with all that aliases repeat.", line)


def _find_line(event: yaml.Event) -> int:
    assert event.start_mark is not None
    return event.start_mark.line + 1


def _merge(items: list[tuple[Value, Value]]) -> list[tuple[Value, Value]]:
    """Put in what `<<` names: the map's own keys come before those."""
    merged = [value for key, value in items if _is_merge(key)]
    if not merged:
        return items
    items = [(key, value) for key, value in items if not _is_merge(key)]
    known = {key.text for key, _ in items if isinstance(key, Scalar)}
    for value in merged:
        for each in value.items if isinstance(value, Listing) else [value]:
            if not isinstance(each, Mapping):
                raise NoMarkup("`<<` takes a map, or a list of maps.", each.line)
            added = [(key, inner) for key, inner in each.items if isinstance(key, Scalar) and key.text not in known]
            known.update(key.text for key, _ in added)
            items += added
    return items


def _is_merge(key: Value) -> bool:
    return isinstance(key, Scalar) and key.plain and key.text == "<<"


class _Pairs(list[tuple[str, object]]):
    """The members of a JSON object, those that are there twice too."""


def _convert(read: object, depth: int) -> Value:
    """What the decoder of JSON makes of a text, as a value."""
    if depth >= DEEPEST:
        raise _too_deep(None)
    if isinstance(read, _Pairs):
        return Mapping([(Scalar(key), _convert(value, depth + 1)) for key, value in read])
    if isinstance(read, list):
        return Listing([_convert(value, depth + 1) for value in read])
    if isinstance(read, str):
        return Scalar(read)
    return read if isinstance(read, Scalar) else Scalar("" if read is None else str(read).lower(), plain=True)


def _refuse_constant(text: str) -> Scalar:
    raise NoMarkup(f"{text} is no number in JSON.")


_JSON = json.JSONDecoder(
    object_pairs_hook=_Pairs,
    parse_int=lambda text: Scalar(text, plain=True),
    parse_float=lambda text: Scalar(text, plain=True),
    parse_constant=_refuse_constant,
)


def _too_deep(line: int | None) -> NoMarkup:
    return NoMarkup(f"Maps and lists lie more than {DEEPEST} deep in one another.", line)


def _no_tag(tag: str, line: int) -> NoMarkup:
    return NoMarkup(f"The tag {tag[:40]!r} means nothing here; leave it out.", line)
