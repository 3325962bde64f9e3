"""Requests that a rule with `on_limit: defer` concerns: all of their limits count them, or none does.

What is kept waits, perhaps for hours, and is charged when it is replayed, so that its limits hold where it is served.
That alone would have a client keep as much as he likes within a limit of his own that rejects. So those that reject
count such requests besides as they come, passed or kept, by counters of their own: *arrivals*. Where several clients
may have one counter, arrivals are counted of each network by itself: what is kept takes nothing from others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from netlimit.l7.decision import Decision, Unanswered
from netlimit.l7.limit import Algorithm
from netlimit.l7.rules import ARRIVALS, OnLimit, Rule
from netlimit.l7.store import Ask


def can_charge_in_part(asks: Sequence[Ask]) -> bool:
    """Whether a refused request could use something up: another limit, or a log that counts refusals, too."""
    return len(asks) > 1 or any(_logs_refusals(ask) for ask in asks)


def counts_arrivals(ask: Ask) -> bool:
    """Whether a limit counts requests as they come, too."""
    return rejects(ask.rule) and not ask.lease


def rejects(rule: Rule) -> bool:
    """Whether what is over a rule's limit is not to be kept."""
    return rule.on_limit is not OnLimit.DEFER and not rule.observes


def make_arrival(ask: Ask, network: str) -> Ask:
    """The question to the counter of arrivals, for a client of this network."""
    key = ask.key if ask.rule.is_of_clients else f"{ask.key}|{network}"
    return ask._replace(rule=replace(ask.rule, name=f"{ARRIVALS}{ask.rule.name}"), key=key, longest=inf)


def make_look(ask: Ask) -> Ask:
    """The same question, by which nothing is counted."""
    return ask._replace(hits=0)


def weigh(ask: Ask, look: Decision) -> Decision:
    """What a counter would say of a request, by what it says to a look, which asks for one hit and for no turn. When a
    heavy one will be admitted is only estimated."""
    limit, hits = ask.limit, ask.hits
    if isinstance(look, Unanswered) or not hits:
        return look
    if hits > limit.capacity + ask.slack:
        return look._replace(admitted=False, retry_after=inf)
    if hits > look.remaining and look.admitted and not ask.slack and hits > 1:
        missing = (hits - look.remaining) * limit.seconds / limit.amount
        return look._replace(admitted=False, retry_after=min(look.reset_after, missing))
    if limit.algorithm is Algorithm.LEAKY_BUCKET and look.reset_after > ask.longest:
        return look._replace(admitted=False, retry_after=max(look.retry_after, look.reset_after - ask.longest))
    return look


def is_to_be_told(ask: Ask, waiting: bool) -> bool:
    """Whether a counter that refuses a request is to be asked in earnest, too: it tells better when there is room, and
    may count refusals. Not those of what is `waiting`, or is going to wait: it is counted once, when it is served."""
    return not ask.lease and not (_logs_refusals(ask) and (waiting or not rejects(ask.rule)))


def _logs_refusals(ask: Ask) -> bool:
    return ask.limit.algorithm is Algorithm.SLIDING_WINDOW_LOG and ask.limit.count_refused
