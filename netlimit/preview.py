"""What a rule would do here if it were kept: compiled atop of all rules in force, explained, and forgotten.

It is compiled beside what the controller has compiled, never in it: the cost is that of compiling every rule once, and
nothing is changed, neither in the controller nor in store or kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from netlimit.account import tell
from netlimit.compile import Compilation
from netlimit.errors import NetlimitError
from netlimit.fallback import find_obstacle, is_contested, judge_taken, say_lack, say_obstacle, say_taken
from netlimit.limits import Facts
from netlimit.plan import Plan, diff
from netlimit.precedence import compare
from netlimit.records import L7
from netlimit.rules import Action, Rule, parse_rule
from netlimit.state import LONGEST_TIMEOUT, Entries, State
from netlimit.tree import SavedRoot
from netlimit.wording import title

if TYPE_CHECKING:  # for the types alone: the store is handed over
    from netlimit.store import Store


@dataclass(frozen=True, slots=True)
class Preview:
    """What would become of a rule on one gateway: `state` as of a kept one ("applied", "degraded", "error", "disabled",
    "expired"), the layer that would enforce it and what there is to say of that, the changes in words and as a plan,
    and what other rules have to do with it."""

    state: str
    enforced_by: str | None
    message: str | None
    words: tuple[str, ...]
    relations: tuple[str, ...]
    plan: Plan

    def document(self) -> dict[str, object]:
        """As the controller answers it."""
        return {
            "state": self.state,
            "enforced_by": self.enforced_by,
            "message": self.message,
            "words": list(self.words),
            "relations": list(self.relations),
            "text": str(self.plan),
            "steps": list(self.plan.lines()),
        }


@dataclass(frozen=True, slots=True)
class Ground:
    """What a draft is compiled atop of: the rules of the gateway, and what its controller knows.

    `entries` are those of lanes, by which hosts keep their classes; `saved` the root qdiscs to put back. `limited` says
    whether a limiter runs here, which can enforce what the kernel cannot.
    """

    host: str
    backend: str
    facts: Facts
    rules: tuple[Rule, ...]
    numbering: Mapping[tuple[str, str], int]
    entries: Entries
    saved: Mapping[str, SavedRoot]
    limited: bool = False


def answer(argument: Mapping[str, Any], ground: Ground, now: datetime) -> dict[str, object]:
    """Answer the API: `argument` has the fields of the `rule`, and the `id` of the one that it would replace."""
    draft = parse_rule(argument["rule"], now)
    return preview(replace(draft, id=int(argument.get("id") or 0)), ground, now).document()


def preview(draft: Rule, ground: Ground, now: datetime) -> Preview:
    """Find out what `draft` would do; with an id it takes the place of that rule, else it is a new one."""
    forced = [rule for rule in ground.rules if rule.in_force(now, ground.host)]
    before = next((rule for rule in forced if rule.id == draft.id), None) if draft.id else None
    number = draft.id or max((rule.id for rule in ground.rules), default=0) + 1
    compilation = Compilation(ground.facts, ground.numbering)
    for rule in forced:
        compilation.put(_cut(rule, now))
    compilation.shaping.adopt(ground.entries)
    base = _take_picture(compilation)
    compilation.settle()
    problems = compilation.problems
    in_force = draft.in_force(now, ground.host)
    if in_force:
        compilation.put(_cut(replace(draft, id=number), now))
    else:
        compilation.drop(number)
    desired = compilation.state
    plan = diff(desired, base, compilation.transition(base.structure), put_back=ground.saved)
    known = {rule.id: rule for rule in forced} | {number: draft}

    def find(asked: Collection[int]) -> dict[int, Rule]:
        return {rule_id: known[rule_id] for rule_id in asked if rule_id in known}

    held = before is not None and before.id not in problems
    words = tell(plan, compilation, base, find, [before] if before is not None and held else [])
    others = [rule for rule in forced if rule.id != number]
    return Preview(
        *_judge(draft, number, compilation, ground, now),
        words=(*words, *_say_problems(problems, compilation.problems, number, known)),
        relations=(*_say_exempt(draft, ground.facts), *compare(draft, others, ground.facts)) if in_force else (),
        plan=plan,
    )


def _judge(
    draft: Rule, number: int, compilation: Compilation, ground: Ground, now: datetime
) -> tuple[str, str | None, str | None]:
    """State, layer and message, as a kept rule would have them."""
    if not draft.enabled:
        return "disabled", None, "It is switched off."
    if draft.expired(now):
        return "expired", None, "Its time is over already."
    if not draft.in_force(now, ground.host):
        return "applied", None, f"It does not concern {ground.host}, which is none of its `hosts`."
    problem = compilation.problems.get(number)
    if problem is not None:
        return _judge_fallback(draft, problem, ground)
    layer = "tc" if draft.action is Action.SHAPE else ground.backend
    miss = compilation.misses.get(number)
    if miss is not None:
        return ("degraded" if miss.partly else "error"), layer, miss.text
    note = compilation.shaping.notes.get(number)
    return ("degraded" if note and note.degraded else "applied"), layer, note.text if note else None


def _judge_fallback(draft: Rule, problem: str, ground: Ground) -> tuple[str, str | None, str]:
    """The same for a rule that the kernel cannot enforce."""
    obstacle = find_obstacle(draft)
    if obstacle is not None:
        return "error", None, say_obstacle(problem, obstacle if draft.action is not Action.SHAPE else None)
    if not ground.limited:
        return "error", None, say_lack(problem, ground.host, running=False)
    contested = is_contested(draft, ground.facts)
    return judge_taken(contested).value, L7, say_taken(problem, contested)


def _take_picture(compilation: Compilation) -> State:
    """The state as it is now; what the compilation holds goes on to change."""
    state = compilation.state
    trees = {
        name: replace(tree, classes=dict(tree.classes), children=dict(tree.children))
        for name, tree in state.trees.items()
    }
    return replace(state, entries={name: dict(held) for name, held in state.entries.items()}, trees=trees)


def _cut(rule: Rule, now: datetime) -> Rule:
    """The kernel cannot hold an end that is too far away: until it is near, there is none."""
    far = rule.expires_at is not None and rule.expires_at - now > timedelta(seconds=LONGEST_TIMEOUT)
    return replace(rule, expires_at=None) if far else rule


def _say_problems(
    before: Mapping[int, str], after: Mapping[int, str], number: int, known: Mapping[int, Rule]
) -> Iterable[str]:
    """What others lose or gain by it."""
    for rule_id in sorted(after.keys() - before.keys() - {number}):
        yield f"{_call(known[rule_id])} could not be enforced any more: {after[rule_id]}"
    for rule_id in sorted(before.keys() - after.keys() - {number}):
        yield f"{_call(known[rule_id])} could be enforced then."


def _say_exempt(draft: Rule, facts: Facts) -> Iterable[str]:
    """Of what the rule speaks of, what it would not touch all the same."""
    if draft.action is Action.ALLOW or facts.overrides(draft):
        return
    safe = [net for net in facts.safe if net.version == draft.family and net.overlaps(draft.target)]
    trusted = [net for net in safe if net not in facts.needed]
    if any(draft.target.subnet_of(net) for net in trusted):  # type: ignore[arg-type]  # both are of one family
        yield "All of its target is in the safe set, which no rule touches unless it was forced."
        return
    if trusted:
        yield f"{', '.join(map(str, trusted[:5]))} {'is' if len(trusted) == 1 else 'are'} safe, and not touched by it."
    needed = [net for net in safe if net in facts.needed]
    if needed:
        yield f"It does not touch what this host itself exchanges with {', '.join(map(str, needed[:5]))}."


def _call(rule: Rule) -> str:
    text = title(rule)
    return text[:1].upper() + text[1:]


# -- what the store tells of rules as they were and are


def find_rules(store: Store, rule_ids: Collection[int]) -> dict[int, Rule]:
    """The rules of some ids."""
    return {kept.rule.id: kept.rule for kept in store.find_some([str(rule_id) for rule_id in rule_ids]).values()}


def find_former(store: Store, host: str) -> tuple[int, list[Rule]]:
    """The revision that a gateway applied last, and the rules that have changed or gone since, as they were; none when
    that is not known any more."""
    applied = next((each.applied_revision for each in store.hosts() if each.host == host), 0)
    try:
        changed = store.difference(applied, store.revision()) if applied else []
    except NetlimitError:  # so old a revision is not known any more
        changed = []
    before = [each.before for each in changed if each.before is not None]
    return applied, [rule for rule in before if rule.enabled and (not rule.hosts or host in rule.hosts)]
