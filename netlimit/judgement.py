"""What a change of rules needs force for, judged by all that is before it and after it, whoever makes it and how.

A rule that goes on as it was is never asked about again. Every other is judged as a new one would be: whether an edit,
a rollback or a backup brings it, or whether it is enabled. So is one whose end is past: it is in force again once a
clock is put back, and all the time at a gateway whose clock is behind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import NamedTuple, Protocol

from netlimit.closure import may_close
from netlimit.effort import MOST_STEPS, TooMuchToJudge, bounded, spend
from netlimit.errors import NetlimitError
from netlimit.lockout import FORCE, HARMLESS, Havens
from netlimit.openings import find_under, is_over
from netlimit.rules import Action, Direction, OnFailure, Rule, Selector

_DEAR = 3
"""To look for whom an `allow` spares takes as long as so many looks at a rule."""


class Change(NamedTuple):
    """What becomes of one rule; None where it is not there."""

    before: Rule | None
    after: Rule | None


class Standing(Protocol):
    """The rules that stay as they are, as far as they matter; each kind is looked up when it is needed."""

    def forced(self) -> Iterable[Rule]:
        """Those that were forced."""

    def allowing(self) -> Iterable[Rule]:
        """Those that allow."""

    def blocking(self) -> Iterable[Rule]:
        """Those that block."""

    def closing(self, places: Collection[str]) -> Iterable[Rule]:
        """Those that can close a gateway, alone or together: wide ones, and those for one of these targets."""

    def named(self) -> Collection[str]:
        """The gateways that they name."""

    def metering(self, now: datetime) -> Iterable[tuple[Rule, int]]:
        """Those in force that have a rate, and may have many buckets: one of each kind, rate and length of the target,
        with how many there are."""

    def metering_since(self, revision: int, now: datetime) -> Iterable[tuple[Rule, int]]:
        """The same of those that were made or changed after a revision."""


class Harm(NamedTuple):
    """What needs force: which of the changes it is, and why, as a sentence."""

    which: int
    sentence: str


class NeedsForce(NetlimitError):
    """A change that would lock somebody out, and was not forced."""

    def __init__(self, harms: Sequence[Harm]) -> None:
        super().__init__(harms[0].sentence)
        self.harms = harms


Judge = Callable[[Sequence[Change], Standing], Mapping[int, Rule]]
"""Looks at changes before they are made. Gives back the rules to keep in place of some (by index), for they are forced
with this change; raises NeedsForce."""


def find_harm(changes: Sequence[Change], standing: Standing, havens: Havens, now: datetime) -> list[Harm]:
    """All that needs force."""
    found: dict[int, str] = {}
    changes = [_foresee(change, now) for change in changes]
    for index, change in enumerate(changes):
        sentence = _find_own_harm(change, havens)
        if sentence:
            found[index] = sentence
    with bounded(MOST_STEPS):
        for search in (_find_closure, _find_exposure, _find_last_opening):
            try:
                harm = search(changes, standing, havens, now)
            except TooMuchToJudge as error:
                harm = Harm(_find_suspect(changes, havens), f"{error} Make fewer changes at once; {FORCE}")
            if harm is not None:
                found.setdefault(*harm)
    return [Harm(index, sentence) for index, sentence in sorted(found.items())]


def refuse(havens: Havens, now: datetime) -> Judge:
    """The judge of those who force nothing."""

    def judge(changes: Sequence[Change], standing: Standing) -> Mapping[int, Rule]:
        harms = find_harm(changes, standing, havens, now)
        if harms:
            raise NeedsForce(harms)
        return {}

    return judge


def force(havens: Havens, now: datetime, name: str) -> Judge:
    """The judge of an admin who forces what needs it: what he forces bears his name."""

    def judge(changes: Sequence[Change], standing: Standing) -> Mapping[int, Rule]:
        forced = {}
        for index, _ in find_harm(changes, standing, havens, now):
            after = changes[index].after
            if after is not None:
                forced[index] = mark_forced(after, name)
        return forced

    return judge


def mark_forced(rule: Rule, name: str) -> Rule:
    """A rule as somebody has forced it, unless it was forced before, or can hit nobody."""
    return rule if rule.forced_by or rule.action in HARMLESS else replace(rule, forced_by=name)


def goes_on(before: Rule | None, after: Rule) -> bool:
    """Whether a rule does nothing that it has not done all the time: at most for a shorter one."""
    if before is None or not before.enabled:
        return False
    return do_the_same(before, after) and after.forced_by in (None, before.forced_by) and _outlasts(before, after)


def comes_forced(before: Rule | None, after: Rule | None) -> bool:
    """Whether a rule comes into force that was forced, and is not so already; by whatever clock."""
    if after is None or after.forced_by is None or after.action in HARMLESS:
        return False
    return after.enabled and not goes_on(before, after)


def _foresee(change: Change, now: datetime) -> Change:
    """A change as it is judged: what it brings that is over already counts as though it were not, for that may come."""
    before, after = change
    if after is None or after.action in HARMLESS or not after.expired(now) or goes_on(before, after):
        return change
    return Change(before, replace(after, expires_at=None))


def _find_own_harm(change: Change, havens: Havens) -> str | None:
    """What a rule alone would do."""
    before, after = change
    if after is None or not after.enabled or goes_on(before, after):
        return None
    sentence = havens.refuse(after)
    if sentence is None and comes_forced(before, after):
        return (
            f"'{after}' was forced by {after.forced_by}, and comes before who is safe: only an admin can change it or "
            "bring it back (`force=true`, `--force`). It can be disabled, or removed."
        )
    return sentence


def _find_closure(changes: Sequence[Change], standing: Standing, havens: Havens, now: datetime) -> Harm | None:
    before = [change.before for change in changes if change.before is not None and change.before.in_force(now)]
    after = [change.after for change in changes if change.after is not None and change.after.in_force(now)]
    if not any(may_close(rule, havens.places) for rule in after):
        return None
    stays = list(standing.closing(havens.places))
    closed = havens.find_closure([*before, *stays], [*after, *stays])
    closed = closed or havens.find_own_closure([*before, *stays], [*after, *stays])
    if closed is None:
        return None
    rule, sentence = closed
    return Harm(next(index for index, change in enumerate(changes) if change.after == rule), sentence)


def _find_suspect(changes: Sequence[Change], havens: Havens) -> int:
    """The first change that can close something."""
    able = (number for number, (_, after) in enumerate(changes) if after and may_close(after, havens.places))
    return next(able, 0)


def _find_exposure(changes: Sequence[Change], standing: Standing, havens: Havens, now: datetime) -> Harm | None:
    """An `allow` that goes, or ends sooner, and has kept a rule that was forced from who is safe."""
    gone = [
        (index, before)
        for index, (before, after) in enumerate(changes)
        if before is not None and before.action is Action.ALLOW and before.in_force(now)
        and not (after is not None and _allows_as_much(after, before, now))
    ]  # fmt: skip
    if not gone:
        return None
    after = [change.after for change in changes if change.after is not None and change.after.in_force(now)]
    forced = [rule for rule in (*after, *standing.forced()) if rule.forced_by is not None and rule.in_force(now)]
    forced = [rule for rule in forced if havens.are_hit(rule)]  # of thousands of bans, few or none
    if not forced:
        return None
    allows = _Allows([*after, *standing.allowing()], now)
    for index, allow in gone:
        if not allows.hold(allow):
            spend(_DEAR * len(forced))
            sentence = next(filter(None, (havens.find_exposed(allow, rule) for rule in forced)), None)
            if sentence:
                return Harm(index, sentence)
    return None


def _find_last_opening(changes: Sequence[Change], standing: Standing, havens: Havens, now: datetime) -> Harm | None:
    """An `allow` that goes, is made smaller or ends sooner, or is blocked by longer prefixes, while all else of a
    gateway is closed."""
    before = [change.before for change in changes if change.before is not None and change.before.in_force(now)]
    after = [change.after for change in changes if change.after is not None and change.after.in_force(now)]
    went = [rule for rule in before if rule.action is Action.ALLOW]
    blocks = [
        rule for was, rule in changes
        if rule is not None and rule.action is Action.BLOCK and rule.in_force(now) and not goes_on(was, rule)
    ]  # fmt: skip
    if not went and not blocks:
        return None
    allows = [rule for rule in standing.allowing() if rule.in_force(now)]
    remain = _Allows([*allows, *after], now)
    gone = [rule for rule in went if not remain.hold(rule)]
    under = find_under(blocks, [*allows, *went])
    if not gone and not under:
        return None
    stays = {rule.id: rule for rule in (*standing.closing(havens.places), *allows)}
    rest = list(stays.values())
    changing = list(dict.fromkeys((*gone, *under)))
    if under:
        # There may be very many blocks. None of them matters unless one of these openings would be missed at all.
        if havens.find_lost(changing, changing, [*before, *rest], [*after, *rest]) is None:
            return None
        stays |= {rule.id: rule for rule in standing.blocking()}
        rest = list(stays.values())
    lost = havens.find_lost(changing, gone, [*before, *rest], [*after, *rest])
    if lost is None:
        return None
    allow, sentence = lost
    for index, (was, becomes) in enumerate(changes):
        if (was == allow and allow in gone) or (becomes is not None and is_over(becomes, allow)):
            return Harm(index, sentence)
    return None


_Key = tuple[Direction, Selector, int, int, int]


class _Allows:
    """Rules that allow, by what they allow: there can be many, and as many that go."""

    def __init__(self, rules: Iterable[Rule], now: datetime) -> None:
        self._now = now
        self._index: dict[_Key, list[Rule]] = {}
        for rule in rules:
            if rule.action is Action.ALLOW and rule.in_force(now):
                key = _find_key(rule, rule.selector, rule.target.prefixlen)
                self._index.setdefault(key, []).append(rule)
        self._lengths = sorted({length for _, _, _, length, _ in self._index})

    def hold(self, rule: Rule) -> bool:
        """Whether all that a rule allows is allowed by one of them as well, for as long."""
        return any(
            _allows_as_much(other, rule, self._now)
            for length in self._lengths
            if length <= rule.target.prefixlen
            for selector in {rule.selector, Selector()}
            for other in self._index.get(_find_key(rule, selector, length), ())
        )


def _find_key(rule: Rule, selector: Selector, length: int) -> _Key:
    """Of whatever allows something, as far as it must be the same: with the first bits of its target."""
    bits = int(rule.target.network_address) >> rule.target.max_prefixlen - length
    return rule.direction, selector, rule.family, length, bits


def do_the_same(one: Rule, other: Rule) -> bool:
    """Whether two rules differ in nothing but their names, how long they are in force, and whether they were forced."""
    told = replace(other, id=one.id, revision=one.revision, name=one.name, labels=one.labels, comment=one.comment)
    return replace(told, forced_by=one.forced_by, expires_at=one.expires_at, enabled=one.enabled) == one


def _outlasts(one: Rule, other: Rule) -> bool:
    """Whether a rule ends no sooner than another."""
    return one.expires_at is None or (other.expires_at is not None and other.expires_at <= one.expires_at)


def _allows_as_much(other: Rule, rule: Rule, now: datetime) -> bool:
    """Whether all that a rule allows is allowed by another as well, for as long."""
    return (
        other.action is Action.ALLOW
        and other.in_force(now)
        and other.direction is rule.direction
        and other.family == rule.family
        and rule.target.subnet_of(other.target)  # type: ignore[arg-type]  # both are of one family
        and other.selector in (rule.selector, Selector())
        and (not other.hosts or (bool(rule.hosts) and set(rule.hosts) <= set(other.hosts)))
        and _outlasts(other, rule)
        and other.on_failure in (rule.on_failure, OnFailure.CLOSED)
    )
