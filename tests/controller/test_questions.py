"""Questions of the API keep neither changes nor repairs waiting."""

import asyncio
from collections.abc import Mapping
from unittest.mock import patch

import pytest

from api.problems import Problem
from api.waiting import CLIENT, MOST_ASKING, Waiting
from netlimit.errors import KernelError
from netlimit.questions import LONGEST_REST, Questions
from netlimit.records import Request
from tests.controller.conftest import Site


def test_a_change_comes_before_all_questions_and_equal_ones_share_an_answer(site: Site) -> None:
    site.controller.tick()
    asked = [site.store.ask("gw", "plan", {}) for _ in range(40)]
    site.add(target="10.1.0.2", action="block")
    looks: list[list[str]] = []
    work_out = site.controller._work_out

    def look(question: Request) -> Mapping[str, object]:
        looks.append(site.send("10.1.0.2"))
        return work_out(question)

    with patch.object(site.controller, "_work_out", look):
        site.controller.tick()
    assert looks == [["drop"]]
    assert all(site.store.answered(each) is not None for each in asked)


def test_different_questions_are_answered_one_a_pass(site: Site) -> None:
    site.controller.tick()
    asked = [site.store.ask("gw", "counters", {"rules": [number]}) for number in range(3)]
    for count in range(1, 4):
        site.controller._questions._rested = 0.0
        site.controller.tick()
        assert sum(site.store.answered(each) is not None for each in asked) == count
        assert (site.controller._questions.due is None) == (count == 3)


def test_a_question_rests_as_long_as_its_work_took() -> None:
    questions, open_ones = Questions(), [Request(1, "plan", {}), Request(2, "offenders", {}), Request(3, "plan", {})]
    assert [each.id for each in questions.choose(open_ones, 10.0)] == [1, 3]
    questions.rest(10.0, 10.25)
    assert questions.due == 10.5
    assert questions.choose(open_ones[1:2], 10.4) == []
    assert [each.id for each in questions.choose(open_ones[1:2], 10.5)] == [2]
    questions.rest(10.5, 90.0)
    assert questions.due is None
    assert questions.choose(open_ones[:1], 90.0 + LONGEST_REST)


def test_who_stops_waiting_takes_his_question_with_him(site: Site) -> None:
    answers = asyncio.run(Waiting(site.store).ask(["gw"], "plan", {}, 0.05))
    assert answers == {}
    assert site.store.questions("gw") == []


def test_one_who_asks_too_much_at_once_is_told_to_wait(site: Site) -> None:
    async def ask(client: str, times: int) -> list[object]:
        CLIENT.set(client)
        asking = (asyncio.create_task(waiting.ask(["gw"], "plan", {}, 0.2)) for _ in range(times))
        return list(await asyncio.gather(*asking, return_exceptions=True))

    async def ask_both() -> None:
        greedy, modest = await asyncio.gather(ask("greedy", 2 * MOST_ASKING), ask("modest", 1))
        refused = [each for each in greedy if isinstance(each, Problem) and each.status == 429]
        assert (len(refused), modest) == (MOST_ASKING, [{}])
        assert await ask("greedy", 1) == [{}]

    waiting = Waiting(site.store)
    asyncio.run(ask_both())


def test_a_kernel_that_refuses_keeps_nobody_from_asking(site: Site) -> None:
    site.controller.tick()
    asked = site.store.ask("gw", "plan", {})
    refused = patch.object(site.controller, "sync", side_effect=KernelError("write", "no"))
    with refused, pytest.raises(KernelError):
        site.controller.tick()
    assert site.store.answered(asked) is not None
