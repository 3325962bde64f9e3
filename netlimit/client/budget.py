"""Outbound budgets: how much may be asked of others, whatever they would allow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from ipaddress import ip_address
from typing import NamedTuple

import httpx

from netlimit.errors import LimitError
from netlimit.l7.limit import Algorithm, Limit, parse_limit
from netlimit.l7.rules import Rule, join_key
from netlimit.l7.store import Ask

DOMAIN = "netlimit.client"
"""The domain of the counters, which are apart from those of any limiter in the same store."""


def _one(request: httpx.Request) -> int:
    return 1


class Budget:
    """A limit for what is sent.

    `limit` is a Limit of any algorithm but concurrency (`httpx.Limits` bounds requests in flight), or a text such as
    "100/minute": then never more than 100 in any 60 seconds, by a sliding log. `weigh` tells what a request costs, 0 if
    nothing. `name` tells budgets of the same host, algorithm and unit apart.

    Raises LimitError for what is no limit.
    """

    def __init__(self, limit: Limit | str, weigh: Callable[[httpx.Request], int] = _one, name: str = "") -> None:
        if isinstance(limit, str):
            limit = replace(parse_limit(limit, Algorithm.SLIDING_WINDOW_LOG), count_refused=False)
        if limit.algorithm is Algorithm.CONCURRENCY:
            raise LimitError("algorithm", "A budget is so much in so long; httpx.Limits bounds requests in flight.")
        if limit.count_refused and limit.algorithm is Algorithm.SLIDING_WINDOW_LOG:
            limit = replace(limit, count_refused=False)  # what waits for its turn takes up no room
        self.limit = limit
        self.weigh = weigh
        self.name = name


Budgets = Mapping[str, Budget | Limit | str | Sequence[Budget | Limit | str]]
"""Budgets by host: a name, or a pattern such as "*.example.com", whose hosts share them; "*" is every host."""


class Account(NamedTuple):
    """A budget, whose it is, and its counter."""

    hosts: str
    budget: Budget
    rule: Rule


class Charge(NamedTuple):
    """What a request costs of an account."""

    account: Account
    hits: int

    @property
    def rule(self) -> Rule:
        """The one that counts it."""
        return self.account.rule

    @property
    def ask(self) -> Ask:
        """The question whether there is room for it."""
        return Ask(self.rule, self.account.budget.limit, "", self.hits)

    @property
    def is_exact(self) -> bool:
        """Whether never more than the limit go in any such time, whenever that begins."""
        return self.account.budget.limit.algorithm is Algorithm.SLIDING_WINDOW_LOG

    def __str__(self) -> str:
        times = "" if self.hits == 1 else f", of which the request takes {self.hits}"
        return f"The budget of {self.account.budget.limit} for {self.account.hosts}{times}"


class Ledger:
    """All accounts. Raises LimitError for what is no host, and if two budgets would share a counter."""

    def __init__(self, budgets: Budgets) -> None:
        self._accounts = sorted(_open_accounts(budgets), key=lambda account: account.budget.limit.seconds)
        names = [account.rule.name for account in self._accounts]
        for name in names:
            if names.count(name) > 1:
                raise LimitError("name", f"Two budgets would share the counter {name!r}: give one of them a name.")

    def find_charges(self, request: httpx.Request) -> tuple[Charge, ...]:
        """What a request costs: of every budget whose hosts it goes to, that of the shortest unit first.

        Raises LimitError for a negative weight.
        """
        return tuple(
            Charge(account, weight)
            for account in self._accounts
            if _concerns(account, request.url) and (weight := _weigh(account, request))
        )


def _open_accounts(budgets: Budgets) -> Iterator[Account]:
    for written, some in budgets.items():
        hosts = _read_hosts(written)
        if not hosts or "/" in hosts or hosts.count(":") == 1 or (":" in hosts and {*"[]"} & {*hosts}):
            sentence = 'is no host, and its budget would bind nobody; write "api.example.com", "*.example.com" or "*".'
            raise LimitError("hosts", f"{written!r} {sentence}")
        for each in [some] if isinstance(some, Budget | Limit | str) else some:
            budget = each if isinstance(each, Budget) else Budget(each)
            limit = budget.limit
            name = join_key([hosts, budget.name, limit.algorithm, f"{limit.seconds}s"])
            yield Account(hosts, budget, Rule(DOMAIN, name, limit))


def _read_hosts(written: str) -> str:
    """A host or a pattern as hosts are compared; an IPv6 address may stand in brackets, as in a URL."""
    name = written.lower()
    return _plain_host(name[1:-1] if name[:1] == "[" and name[-1:] == "]" and ":" in name else name)


def _plain_host(name: str) -> str:
    """A host without the dot at its end, which makes it no other; an IPv6 address in its usual form."""
    if ":" not in name:
        return name.rstrip(".")
    try:
        return str(ip_address(name))
    except ValueError:
        return name


def _concerns(account: Account, url: httpx.URL) -> bool:
    """Whether it is a budget for this host, of which international names may be written either way."""
    return any(fnmatchcase(_plain_host(name), account.hosts) for name in (url.host, url.raw_host.decode("ascii")))


def _weigh(account: Account, request: httpx.Request) -> int:
    weight = account.budget.weigh(request)
    if weight < 0:
        raise LimitError("weigh", f"A request to {account.hosts} weighs {weight}; what costs nothing weighs 0.")
    return weight
