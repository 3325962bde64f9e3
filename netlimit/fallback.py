"""Rules that the kernel of a host cannot enforce, and that its limiter enforces on HTTP requests instead.

A rule is enforced by one layer. Who takes it over begins before the other lets go: a rule leaves the kernel once the
limiters that run have loaded it, and leaves them once the kernel holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from netlimit.limits import Facts, compile_rule, find_problem
from netlimit.records import L7, Assigned, Exceptional, LimiterReport, State
from netlimit.rules import HOST, PEER, Action, Direction, Protocol, Rule

SILENCE = timedelta(seconds=6)
"""A limiter says every two seconds that it runs; one that has not for so long is taken for dead."""


def find_obstacle(rule: Rule) -> str | None:
    """Why a rule has no meaning for HTTP requests, to stand behind "the limiter cannot either: "; None if it has one.

    The limiter knows of a request whom it comes from, and nothing else that a rule can name.
    """
    where = rule.selector
    if rule.action is Action.SHAPE:
        return "it queues bytes, and a request is let through or refused as a whole"
    if rule.direction is Direction.TO:
        return "it is about what is sent to its target, and of a request the limiter knows only whom it comes from"
    if where.protocol not in (Protocol.ANY, Protocol.TCP):
        return f"it is about {where.protocol}, and requests come by TCP"
    if where.ports or where.source_ports:
        return "it names ports, and the limiter is not told to which one a request came"
    if where.interface:
        return "it names an interface, and the limiter is not told by which one a request came"
    return None


def is_contested(rule: Rule, facts: Facts) -> bool:
    """Whether a rule that has fallen back is an exception to others that the kernel can hold: they hit its target all
    the same, for of this one there is nothing in the kernel."""
    if rule.action is Action.ALLOW:
        iptables = "iptables" if rule.family == 4 else "ip6tables"
        return not any(facts.capabilities.get(name) for name in (iptables, "ipset"))
    if rule.per not in (HOST, PEER) or rule.action is Action.OBSERVE:
        return False
    return find_problem(compile_rule(replace(rule, action=Action.DROP), facts).purpose, facts) is None


class Fallback:
    """What the limiters of one host enforce, and whether they do. For one controller.

    What they have loaded once they go on with, though they have not loaded yet what has come since. Passes come often,
    and rules can be many: what was found of all of them holds until something has changed.
    """

    def __init__(self, host: str, assigned: Assigned | None = None) -> None:
        self._host = host
        self._able: dict[int, int] = {}
        self._contested: set[int] = set()
        self._obstacles: dict[int, str] = {}
        self._confirmed: dict[int, int] = {}
        self._confirmed_serial = 0
        self._running = False
        self._problems: Mapping[int, str] = {}
        self._judged: dict[int, Exceptional] | None = None
        assigned = assigned or Assigned()
        self.serial = assigned.serial
        """By which it is seen whether somebody else has given or taken rules meanwhile."""
        self.assigned = dict(assigned.rules)
        """The rules that are the limiters' to enforce, each with its revision: what the database says."""

    def note(self, rule: Rule, facts: Facts) -> None:
        """Take note of a rule that the kernel cannot enforce."""
        self.forget(rule.id)
        if is_contested(rule, facts):
            self._contested.add(rule.id)
        self._judged = None
        obstacle = find_obstacle(rule)
        if obstacle is None:
            self._able[rule.id] = rule.revision
        else:
            self._obstacles[rule.id] = obstacle

    def forget(self, rule_id: int) -> None:
        """The kernel enforces it, or nobody has to."""
        self._able.pop(rule_id, None)
        self._contested.discard(rule_id)
        self._obstacles.pop(rule_id, None)

    def find_new(self, problems: Mapping[int, str]) -> dict[int, int]:
        """Of the rules that the kernel cannot enforce, those that are to be given to the limiters, with their
        revisions."""
        if self._judged is not None and problems == self._problems:
            return {}
        able = ((rule_id, self._able[rule_id]) for rule_id in problems if rule_id in self._able)
        return {rule_id: revision for rule_id, revision in able if self.assigned.get(rule_id) != revision}

    def find_old(self, problems: Mapping[int, str]) -> set[int]:
        """The rules that the limiters need not enforce any more."""
        return {rule_id for rule_id in self.assigned if rule_id not in problems or rule_id not in self._able}

    def note_assigned(self, serial: int, given: Mapping[int, int], taken: Iterable[int]) -> None:
        """The database has it now."""
        self.serial = serial
        self.assigned |= given
        for rule_id in taken:
            self.assigned.pop(rule_id, None)
        for rule_id in (*given, *taken):
            self._confirmed.pop(rule_id, None)

    def look(self, limiters: Iterable[LimiterReport], now: datetime) -> bool:
        """Take note of what limiters of this host have said; whether nobody is to be waited for: all that run have
        loaded everything, or none runs."""
        running = [each for each in limiters if abs(now - each.seen_at) <= SILENCE]  # a clock may have been set back
        loaded = all(each.loaded == self.serial for each in running)
        if bool(running) != self._running:
            self._running, self._judged = bool(running), None
        if not running:
            self._confirmed, self._confirmed_serial = {}, 0
        elif loaded and self._confirmed_serial != self.serial:
            self._confirmed, self._confirmed_serial, self._judged = dict(self.assigned), self.serial, None
        return loaded

    @property
    def answers(self) -> bool:
        """Whether a limiter runs here."""
        return self._running

    def holds(self, rule_id: int) -> bool:
        """Whether the limiters enforce a rule in the kernel's place."""
        revision = self._able.get(rule_id)
        return revision is not None and self._confirmed.get(rule_id) == revision

    def tell(self, problems: Mapping[int, str]) -> list[str]:
        """In a sentence, how many of the rules that the kernel cannot enforce are the limiter's, loaded or not."""
        number = sum(rule_id in self._able for rule_id in problems)
        if not number:
            return []
        these, them = ("1 rule falls", "it") if number == 1 else (f"{number} rules fall", "them")
        return [f"{these} back to the limiter, on HTTP requests: the kernel of this host cannot enforce {them}."]

    def judge(self, problems: Mapping[int, str]) -> dict[int, Exceptional]:
        """How rules stand that the kernel cannot enforce, for these reasons."""
        if self._judged is None or problems != self._problems:
            self._judged = {rule_id: self._judge(rule_id, problem) for rule_id, problem in problems.items()}
            self._problems = problems
        return self._judged

    def _judge(self, rule_id: int, problem: str) -> Exceptional:
        if rule_id not in self._able:
            return Exceptional(rule_id, State.ERROR, say_obstacle(problem, self._obstacles.get(rule_id)))
        if self.holds(rule_id):
            contested = rule_id in self._contested
            return Exceptional(rule_id, judge_taken(contested), say_taken(problem, contested), L7)
        return Exceptional(rule_id, State.ERROR, say_lack(problem, self._host, self._running))


def say_obstacle(problem: str, obstacle: str | None) -> str:
    """Why neither kernel nor limiter enforces a rule. What keeps a rule from shaping can come and go with devices and
    routes, and nobody expects it of a limiter: then there is no obstacle to tell of."""
    return f"{problem} The limiter cannot either: {obstacle}." if obstacle else problem


def judge_taken(contested: bool) -> State:
    """How a rule stands that the limiter enforces."""
    return State.DEGRADED if contested else State.APPLIED


def say_taken(problem: str, contested: bool) -> str:
    """Why the limiter enforces a rule, and what that does not do."""
    but = " What the kernel enforces on its target still goes before it." if contested else ""
    return f"{problem} The limiter enforces it instead, on HTTP requests.{but}"


def say_lack(problem: str, host: str, running: bool) -> str:
    """Why no limiter enforces a rule that one could."""
    lack = (
        "the one that runs has not loaded it yet"
        if running
        else f"none answers on {host}: start one there, with `netlimit limiter`"
    )
    return f"{problem} A limiter could enforce it on HTTP requests, but {lack}."
