"""Which rule a descriptor finds, and why, in sentences for an operator."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from netlimit.errors import LimitError
from netlimit.l7.rules import Entry, Match, Node, Rule, find_match
from netlimit.several import name_some

_ENTRY = re.compile(r"((?:\\.|[^\\,=])+)(?:=((?:\\.|[^\\,])*))?")
_ENTRIES = re.compile(f"{_ENTRY.pattern}(,{_ENTRY.pattern})*")
_NAMED = 5
"""So many of the entries that would have gone on are named."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a descriptor finds, if anything, and a sentence for each step on the way there."""

    match: Match | None
    steps: tuple[str, ...]


def parse_descriptor(text: str) -> tuple[Entry, ...]:
    """Read `key=value,key=value`; `\\` stands before a comma or an equals sign within them. Raises LimitError."""
    if not _ENTRIES.fullmatch(text):
        raise LimitError("descriptor", f'{text!r} is no descriptor; write for example "auth_type=login,user=ann".')
    return tuple(Entry(*map(_unescape, found.groups(default=""))) for found in _ENTRY.finditer(text))


def explain(root: Node, entries: Sequence[Entry]) -> Explanation:
    """Follow a descriptor through the tree of its domain."""
    steps = []
    node = root
    for entry in entries:
        following, sentence = _step(node, entry)
        steps.append(f"{_write(entry)}: {sentence}")
        if following is None:
            return Explanation(None, tuple(steps))
        node = following
    match = find_match(root, entries)
    if match is None:
        steps.append(_word_end(node))
    else:
        steps += _word_match(match)
    return Explanation(match, tuple(steps))


def _step(node: Node, entry: Entry) -> tuple[Node | None, str]:
    exact = node.exact.get(entry)
    if exact is not None:
        return exact, "there is this very value."
    if (found := node.wild.find(entry)) is not None:
        pattern, following = found
        shared = "which all of them share" if following.shared else "which each value has for itself"
        return following, f"the first pattern that fits is {pattern.value}, with a counter {shared}."
    if entry.key in node.default:
        return node.default[entry.key], "there is the key without a value; each value has a counter for itself."
    known = [_write(each) for each in node.exact] + [f"{pattern.key}={pattern.value}" for pattern, _ in node.wild]
    known += node.default
    if not known:
        return None, "nothing goes on here; the document has no descriptors below."
    return None, f"nothing here fits. There is {name_some(known, _NAMED)}."


def _word_end(node: Node) -> str:
    if node.exact or node.wild or node.default:
        return "No rule ends here: those below are for longer descriptors."
    return "Here is no limit: what is asked is admitted."


def _word_match(match: Match) -> list[str]:
    rule = match.rule
    counter = f"the one of {match.key!r}" if match.key else "one for all"
    words = [f"The rule is {rule.name}: {describe_rule(rule)}.", f"Its counter is {counter}."]
    if rule.replaces:
        words.append(f"In the same request it replaces the rules named {', '.join(rule.replaces)}.")
    return words


def describe_rule(rule: Rule) -> str:
    """A rule in a few words."""
    limits = [f"{rule.limit} by {rule.limit.algorithm}"] if rule.limit is not None else []
    limits += [str(rule.concurrency)] if rule.concurrency is not None else []
    said = " and ".join(limits) if limits else "unlimited"
    over = f", {rule.overshoot} % over" if rule.overshoot is not None else ""
    return f"{said} ({rule.mode}{over}; on the limit: {rule.on_limit}; without counters: {rule.on_failure})"


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


def _write(entry: Entry) -> str:
    return f"{entry.key}={entry.value}" if entry.value else entry.key
