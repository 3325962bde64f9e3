"""A document of limits: the rules of one domain, in the format of Lyft's ratelimit and what it lacks.

https://github.com/envoyproxy/ratelimit describes the format; `docs/limits.md` says what is ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import yaml

from netlimit.errors import DocumentError, Place, UnreadableDocument
from netlimit.l7 import markup
from netlimit.l7.descriptor import Descriptor
from netlimit.l7.fields import DOCUMENT, Findings, Record, settle
from netlimit.l7.markup import NoMarkup, Value
from netlimit.l7.patterns import Pattern, Patterns, make_pattern
from netlimit.l7.rules import CLIENT_KEY, Entry, Node, Rule, names_client
from netlimit.l7.values import LONGEST_TEXT

_ESCAPED = str.maketrans({"\\": "\\\\", ",": "\\,", "=": "\\="})


@dataclass(frozen=True, slots=True)
class Document:
    """What a text says: the domain and its tree. `fields` are the same as data, as JSON has it, under the names that
    are documented; `warnings` are slips that were understood, and things that have no effect."""

    domain: str
    root: Node
    fields: dict[str, Any]
    warnings: tuple[Place, ...]


def parse_document(text: str, is_json: bool = False) -> Document:
    """Read a document. Raises DocumentError, which names every wrong place, as UnreadableDocument for what is no YAML
    or JSON at all."""
    findings = Findings()
    try:
        value = markup.read_json(text) if is_json else _read_yaml(text, findings)
    except NoMarkup as error:
        raise UnreadableDocument([*findings.wrong, Place("", str(error), error.line)]) from None
    record = DOCUMENT.read(value, "", findings)
    root = _Tree(record, findings).make() if record is not None else Node()
    if record is None or findings.wrong:
        raise DocumentError(sorted(findings.wrong, key=lambda place: place.line or math.inf))
    return Document(record["domain"], root, record, tuple(findings.warnings))


class _Dumper(yaml.CSafeDumper):
    """Writes records as maps."""


_Dumper.add_representer(Record, yaml.representer.SafeRepresenter.represent_dict)


def write_yaml(document: Document) -> str:
    """The document anew, as YAML: without its comments."""
    text: str = yaml.dump(document.fields, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def _read_yaml(text: str, findings: Findings) -> Value:
    """Tabs are complained of, and then taken for spaces: what is wrong beside them is of interest, too."""
    try:
        return markup.read_yaml(text)
    except NoMarkup:
        tabs = markup.find_tabs(text)
        if not tabs:
            raise
    sentence = "It is indented with tabs, which YAML does not allow; use spaces."
    findings.complain("", f"{sentence} So are {len(tabs) - 1} more lines." if tabs[1:] else sentence, tabs[0])
    return markup.read_yaml(markup.expand_tabs(text))


class _Way(NamedTuple):
    """How a place in the tree is reached: the name of its rule, how deep it lies, and which entries metrics tell of."""

    name: str = ""
    depth: int = 0
    told: tuple[int, ...] = ()
    crowd: str = ""
    """The pattern of addresses that have one counter all together (`share_threshold`), if there is one."""

    def go(self, entry: Entry, told: bool, shared: bool) -> _Way:
        """The way one step further."""
        step = "=".join(part.translate(_ESCAPED) for part in entry if part)
        name = f"{self.name},{step}" if self.name else step
        crowd = entry.value if shared and entry.key == CLIENT_KEY else self.crowd
        return _Way(name, self.depth + 1, (*self.told, self.depth) if told else self.told, crowd)

    def find_obstacle(self) -> str:
        """Why a refusal here says nothing of any one client, as the end of a sentence; empty where it does."""
        if not names_client(self.name):
            return f"no key on the way here is `{CLIENT_KEY}`, which it blocks."
        if self.crowd:
            return (
                f"all clients that `{CLIENT_KEY}: {self.crowd}` stands for share one counter (`share_threshold`), and "
                "one would be blocked for what others have used."
            )
        return ""


class _Tree:
    """Makes the tree of what was read."""

    def __init__(self, record: Record, findings: Findings) -> None:
        self._record = record
        self._findings = findings
        self._domain: str = record.get("domain", "")

    def make(self) -> Node:
        """The place where all descriptors begin."""
        if "domain" not in self._record.lines or self._record.get("domain") == "":
            self._findings.complain("domain", "It is missing; a document begins with it: `domain: auth`.", None)
        root = self._make_node(None, self._record.get("descriptors", ()), "descriptors", _Way())
        self._check_names(root)
        return root

    def _make_node(
        self, rule: Rule | None, records: Iterable[Record | None], path: str, way: _Way, shared: bool = False
    ) -> Node:
        exact: dict[Entry, Node] = {}
        default: dict[str, Node] = {}
        wild: list[tuple[Pattern, Node]] = []
        seen: dict[Entry, int] = {}
        for number, record in enumerate(records):
            if record is None:
                continue
            settle(record, f"{path}[{number}]", self._findings)
            descriptor = Descriptor(record, f"{path}[{number}]", self._findings)
            entry = descriptor.find_entry()
            if entry is None:
                continue
            if seen.setdefault(entry, number) != number:
                descriptor.complain("key", f"{path}[{seen[entry]}] has the same key and value; make one of them.")
                continue
            told, shares = (record.get(flag, False) for flag in ("value_to_metric", "share_threshold"))
            node = self._make_descriptor(descriptor, way.go(entry, told, shares))
            if not entry.value:
                default[entry.key] = node
            elif "*" in entry.value:
                wild.append((make_pattern(*entry), node))
            else:
                exact[entry] = node
        return Node(rule, exact, Patterns(wild), default, shared)

    def _make_descriptor(self, descriptor: Descriptor, way: _Way) -> Node:
        if len(way.name) > LONGEST_TEXT:
            descriptor.complain("key", f"The keys and values on the way here have more than {LONGEST_TEXT} letters.")
            return Node()
        record = descriptor.record
        rule = descriptor.make_rule(self._domain, way.name, way.told)
        if rule is not None and rule.escalate is not None and (obstacle := way.find_obstacle()):
            descriptor.warn("escalate", f"It has no effect: {obstacle}")
            rule = replace(rule, escalate=None)
        shared = record.get("share_threshold", False)
        return self._make_node(rule, record.get("descriptors", ()), f"{descriptor.path}.descriptors", way, shared)

    def _check_names(self, root: Node) -> None:
        """What replaces something that is not there was meant to replace something else."""
        rules = list(root.walk())
        names = {rule.alias for rule in rules}
        for rule in rules:
            for name in rule.replaces:
                if name not in names:
                    self._findings.warn("", f"The rule {rule.name} replaces {name!r}, a name that no rule has.", None)
