"""Many requests share one client: no budget is overspent, nobody is forgotten, and the server is listened to."""

from __future__ import annotations

from math import ceil

import httpx
from hypothesis import given
from hypothesis import strategies as st

from netlimit.client import BudgetExhausted, QuotaExhausted, Retry
from netlimit.client.advice import Advice, Quota
from netlimit.client.holds import KEPT, Holds, locate
from netlimit.l7.limit import parse_limit
from netlimit.l7.memory.counter import SECOND, Clock
from netlimit.l7.memory.store import make_counter
from tests.l7.client.crowd import Crowd

REQUEST = httpx.Request("GET", "https://api.example.com/things")
EPSILON = 1e-6
RATES = ["1/second", "3/second", "5/10 seconds", "7/minute", "20/minute", "30/hour"]
BUDGETS = st.lists(st.sampled_from(RATES), min_size=1, max_size=3, unique_by=lambda text: text.partition("/")[2])
ARRIVALS = st.lists(st.floats(0, 30), min_size=1, max_size=40)


class Server:
    """Counts requests, tells what remains, and refuses the rest."""

    def __init__(self, limit: str, told: bool) -> None:
        self.now = 0.0
        self.counter = make_counter(parse_limit(limit), Clock(lambda: round(self.now * SECOND), 0))
        self.told = told
        self.refused = 0

    def __call__(self, now: float) -> httpx.Response:
        self.now = now
        decision = self.counter.hit("")
        headers = {"RateLimit": f'"all";r={decision.remaining};t={ceil(decision.reset_after)}'} if self.told else {}
        if decision.admitted:
            return httpx.Response(200, headers=headers)
        self.refused += 1
        return httpx.Response(429, headers={"Retry-After": str(ceil(decision.retry_after)), **headers})


def never_more(sent: list[float], limit: str) -> bool:
    parsed = parse_limit(limit)
    later = sent[parsed.amount :]
    return all(end - start >= parsed.seconds - EPSILON for start, end in zip(sent, later, strict=False))


@given(BUDGETS, ARRIVALS, st.sampled_from([5.0, 60.0, 4000.0]), st.sampled_from([0.0, 0.3]))
def test_no_budget_is_overspent_and_nobody_forgotten(
    budgets: list[str], arrivals: list[float], patience: float, latency: float
) -> None:
    crowd = Crowd({"*.example.com": budgets}, Retry(patience=patience), lambda now: httpx.Response(200), latency)
    for at in sorted(arrivals):
        crowd.come(at, REQUEST)
    crowd.run()
    assert all(never_more(crowd.sent, budget) for budget in budgets)
    for person in crowd.people:
        assert isinstance(person.ended, httpx.Response | BudgetExhausted)
        assert len(person.sent) == isinstance(person.ended, httpx.Response)
        assert all(person.came <= at <= person.came + patience + EPSILON for at in person.sent)
    served = [person.sent for person in crowd.people if person.sent]
    assert served == sorted(served)  # first come, first served
    assert not any(crowd.lines.values())


@given(
    BUDGETS, ARRIVALS, st.sampled_from(["3/second", "10/minute"]), st.booleans(), st.sampled_from([0.0, 0.3])
)  # fmt: skip
def test_the_server_is_listened_to(
    budgets: list[str], arrivals: list[float], limit: str, told: bool, latency: float
) -> None:
    server = Server(limit, told)
    retry = Retry(attempts=3, patience=4000)
    crowd = Crowd({"*": budgets}, retry, server, latency)
    for at in sorted(arrivals):
        crowd.come(at, REQUEST)
    crowd.run()
    assert all(never_more(crowd.sent, budget) for budget in budgets)
    for person in crowd.people:
        assert isinstance(person.ended, httpx.Response | BudgetExhausted | QuotaExhausted)
        assert len(person.sent) <= 3
        assert all(after - before >= latency for before, after in zip(person.sent, person.sent[1:], strict=False))
    assert server.refused <= len(arrivals) * 3


def test_who_stands_in_line_hears_what_the_server_says() -> None:
    def answer(now: float) -> httpx.Response:
        return httpx.Response(200, headers={"RateLimit": '"all";r=0;t=60'} if now == 0 else {})

    crowd = Crowd({"*": ["1/10 seconds", "3/day"]}, Retry(patience=100), answer, latency=1.0)
    for _ in range(3):
        crowd.come(0.0, REQUEST)
    crowd.run()
    assert crowd.sent == [0.0, 61.0, 71.0]


@given(st.lists(st.floats(0, 20), min_size=1, max_size=60), st.sampled_from(["3/second", "10/minute"]))
def test_one_at_a_time_is_never_refused(pauses: list[float], limit: str) -> None:
    server = Server(limit, told=True)
    crowd = Crowd({}, Retry(patience=100), server)
    for pause in pauses:
        crowd.come(crowd.now + pause, REQUEST)
        crowd.run()
    assert server.refused == 0
    assert all(len(person.sent) == 1 for person in crowd.people)


def test_what_was_sent_earlier_knows_less() -> None:
    holds, place = Holds(), locate(REQUEST)

    def note(left: int, since: float) -> None:
        holds.note(place, 200, Advice(None, (Quota("all", "", left, 30.0),)), since, now=3.0)

    note(0, since=2.0)
    note(8, since=1.0)
    assert holds.wait(place, 4.0) == 29.0
    note(9, since=2.5)
    assert holds.wait(place, 4.0) == 0.0


def test_what_servers_say_takes_bounded_room() -> None:
    holds = Holds()
    for number in range(KEPT * 2):
        request = httpx.Request("GET", f"https://api.example.com/{number}", headers={"Authorization": f"{number}"})
        quotas = tuple(Quota(f"{policy}", f"{number}", 0, 1e9) for policy in range(3))
        holds.note(locate(request), 503, Advice(1e9, quotas), since=0.0, now=0.0)
    assert len(holds) <= 2 * KEPT
    assert holds.wait(locate(request), 0.0) == 600.0
