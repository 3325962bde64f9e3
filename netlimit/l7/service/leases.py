"""Leases of requests in flight, as texts that a client holds and hands back."""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterable

from netlimit.l7.addresses import DOMAIN
from netlimit.l7.rules import Rule, RuleSet
from netlimit.l7.service.answers import Problem
from netlimit.l7.store import Ask

MOST = 1000
"""Leases in one call at most."""
_MEMBERS = 4


def write_lease(ask: Ask) -> str:
    """The text of a lease; whose it is stands in it, so nothing need be remembered until it comes back."""
    rule = ask.rule
    return urlsafe_b64encode(json.dumps([rule.domain, rule.name, ask.key, ask.lease]).encode()).decode()


class Leases:
    """Reads leases by the rules of the moment. `find_flight` knows IP rules by their names."""

    def __init__(
        self, rules: Callable[[], RuleSet], find_flight: Callable[[str], Rule | None] = lambda name: None
    ) -> None:
        self._rules = rules
        self._find_flight = find_flight
        self._read: RuleSet | None = None
        self._known: dict[tuple[str, str], Rule] = {}

    def read(self, leases: object) -> list[Ask]:
        """The asks of leases; one whose rule is no longer there has ended. Raises Problem 422."""
        if not isinstance(leases, list) or len(leases) > MOST:
            raise Problem(422, f"`leases` is a list of at most {MOST} leases, as a decision has them.", "leases")
        return list(self._find_asks(_read_lease(index, each) for index, each in enumerate(leases)))

    def _list_rules(self) -> dict[tuple[str, str], Rule]:
        rules = self._rules()
        if rules is not self._read:
            self._known = {(rule.domain, rule.name): rule for rule in rules if rule.concurrency is not None}
            self._read = rules
        return self._known

    def _find_asks(self, told: Iterable[tuple[str, str, str, str]]) -> Iterable[Ask]:
        known = self._list_rules()
        for domain, name, key, lease in told:
            rule = self._find_flight(name) if domain == DOMAIN else known.get((domain, name))
            if rule is not None and rule.concurrency is not None:
                yield Ask(rule, rule.concurrency, key, 1, lease=lease)


def _read_lease(index: int, text: object) -> tuple[str, str, str, str]:
    try:
        told = json.loads(urlsafe_b64decode(text)) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        told = None
    if isinstance(told, list) and len(told) == _MEMBERS and all(isinstance(each, str) for each in told):
        domain, name, key, lease = told
        return domain, name, key, lease
    raise Problem(422, f"`leases[{index}]` is no lease, as a decision has one.", f"leases[{index}]")
