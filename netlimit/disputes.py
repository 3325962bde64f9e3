"""What is not in the kernel as it was applied, because somebody undoes it or the kernel refuses to have it put right:
the rules concerned are not applied until peace is made."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from netlimit.compile import Compilation
from netlimit.drift import PLACES
from netlimit.limits import Fragment
from netlimit.plan import Plan, SwitchTable, WriteIngress, WriteSets, WriteTree
from netlimit.records import Exceptional, State
from netlimit.state import SET_PREFIX, Structure

_SET = re.compile(rf"\b{SET_PREFIX}[\w-]+")
_SHAPED = frozenset({"queues", "ingress"})
_BLIND = "kernel"
_NONE: set[str] = set()
_Place = tuple[int, str]
"""A table: address family and name."""


class Disputes:
    """The rules that may not be enforced for the time being, by the kind of thing that is disputed."""

    def __init__(self) -> None:
        self._reasons: dict[str, tuple[State, str]] = {}
        self._rules: dict[str, set[int]] = {}

    def note_fight(self, kind: str, rules: Iterable[int]) -> None:
        """Somebody undoes things of this kind over and over, and these rules with them."""
        if kind == PLACES:
            said = (
                "Another program puts rules of its own before the jumps of netlimit over and over: what they accept "
                "passes for up to 2 seconds, until these stand first again. `netlimit status` says more."
            )
            self._note(kind, said, rules, State.DEGRADED)
            return
        reason = (
            f"Another program undoes the {kind} of netlimit over and over; until it stops, this rule is not enforced "
            "all of the time. `netlimit doctor` names programs that do this."
        )
        self._note(kind, reason, rules)

    def note_refusal(self, kind: str, reason: str, rules: Iterable[int]) -> None:
        """Somebody has changed things of this kind, and they cannot be put right."""
        said = (
            f"Another program has changed the {kind} of netlimit, and they cannot be put right: {reason.rstrip('.')}."
        )
        self._note(kind, said, rules)

    def note_blindness(self, reason: str, rules: Iterable[int]) -> None:
        """For a while the kernel has refused to be read, or to be written: what is there, nobody knows."""
        said = (
            "Whether it holds is not known, and nothing is put right: the kernel cannot be looked at or written to. "
            f"{reason.rstrip('.')}."
        )
        self._note(_BLIND, said, rules, State.DEGRADED)

    def see(self) -> None:
        """The kernel holds what it is to hold."""
        self.end([_BLIND])

    def end(self, kinds: Iterable[str]) -> None:
        """Everything of these kinds is as it was applied, and stays so."""
        for kind in kinds:
            self._reasons.pop(kind, None)
            self._rules.pop(kind, None)

    def judge(self) -> dict[int, Exceptional]:
        """How the rules concerned stand."""
        return {
            rule_id: Exceptional(rule_id, *self._reasons[kind])
            for kind in sorted(self._rules, key=self._is_wrong)  # what is known to be wrong comes last
            for rule_id in self._rules[kind]
        }

    def _is_wrong(self, kind: str) -> bool:
        return self._reasons[kind][0] is State.ERROR

    def _note(self, kind: str, reason: str, rules: Iterable[int], state: State = State.ERROR) -> None:
        self._reasons[kind] = state, reason
        self._rules.setdefault(kind, set()).update(rules)


def find_concerned(kind: str, plan: Plan | None, compilation: Compilation) -> set[int]:
    """The rules that were not enforced while things of a kind were as this repair found them; where that cannot be
    told (`plan` is None, or speaks of nothing that is a rule's own), all that go by such things."""
    if kind in _SHAPED:
        every = set(compilation.shaping.classes())
        return (_find_shaped(plan, compilation) if plan else set()) or every
    every = {rule_id for rule_id in compilation.fragments if rule_id not in compilation.problems}
    if plan is None:
        return every
    found = _find_switched(plan, compilation) if kind in ("chains", PLACES) else _find_written(plan, compilation)
    return (found & every) or every


def _find_shaped(plan: Plan, compilation: Compilation) -> set[int]:
    devices = {step.device for step in plan.steps if isinstance(step, WriteTree)}
    if any(isinstance(step, WriteIngress) for step in plan.steps):
        return set()
    return {rule for rule, held in compilation.shaping.classes().items() if any(place[0] in devices for place in held)}


def _find_written(plan: Plan, compilation: Compilation) -> set[int]:
    """Whose sets, or entries in them, were written."""
    made, keys = set[str](), dict[str, set[str]]()
    for step in plan.steps:
        if isinstance(step, WriteSets):
            made.update(each.name for each in step.create)
            for name, held in (*step.add.items(), *step.remove.items()):
                keys.setdefault(name, set()).update(held)
    return {
        rule_id
        for rule_id, fragment in compilation.fragments.items()
        if any(
            name in made or not keys.get(name, _NONE).isdisjoint(fragment.keys) for name in compilation.sets_of(rule_id)
        )
    }


def _find_switched(plan: Plan, compilation: Compilation) -> set[int]:
    """Whose sets are asked for in the tables that were written; a rule of which no chain asks by a set is taken to be
    in all of its family."""
    places = {(step.family, str(step.table)) for step in plan.steps if isinstance(step, SwitchTable)}
    asked = _find_places(compilation.structure)
    found = set()
    for rule_id, fragment in compilation.fragments.items():
        where = {place for name in compilation.sets_of(rule_id) for place in asked.get(name, ())}
        if where & places or (not where and _find_families(fragment) & {family for family, _ in places}):
            found.add(rule_id)
    return found


def _find_families(fragment: Fragment) -> set[int]:
    return {6 if ":" in key else 4 for key in fragment.keys}


def _find_places(structure: Structure) -> Mapping[str, set[_Place]]:
    """The tables in which each set is asked for."""
    places: dict[str, set[_Place]] = {}
    for chain, rules in structure.chains.items():
        for rule in rules:
            for name in _SET.findall(rule.text):
                places.setdefault(name, set()).add((chain.family, str(chain.table)))
    return places
