"""Whose request is worked on next, and what becomes of those in line."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from starlette.requests import ClientDisconnect

from api import turns
from api.problems import Problem
from api.turns import MOST, MOST_IN_LINE, MOST_OF_ONE, Kind, Rank, Turn, Turns


@pytest.fixture(autouse=True)
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MOST_OF_ONE, Kind.LOOK, 1)


def look(line: Turns, owner: str, rank: Rank = Rank.KNOWN) -> Turn:
    turn = Turn(line, owner, rank, Kind.LOOK)
    line.line_up(turn)
    return turn


def list_served(line: Turns, waiting: list[Turn]) -> list[object]:
    """Whose turn comes when, each being over before the next."""
    order = []
    while served := [turn for turn in waiting if turn.counted]:
        turn = served[0]
        waiting.remove(turn)
        order.append(turn.owner)
        line.leave(turn)
    return order


def test_one_has_so_many_and_others_have_theirs() -> None:
    line = Turns()
    greedy = [look(line, "greedy") for _ in range(20)]
    assert sum(bool(turn.counted) for turn in greedy) == MOST_OF_ONE[Kind.LOOK]
    assert look(line, "modest").counted
    line.leave(greedy[0])
    assert greedy[1].counted


def test_changes_wait_for_nobody_who_looks() -> None:
    line = Turns()
    assert len([look(line, "greedy") for _ in range(20)]) == 20
    change = Turn(line, "greedy", Rank.KNOWN, Kind.CHANGE)
    line.line_up(change)
    assert change.counted


def test_nobody_takes_the_turns_of_admins() -> None:
    line = Turns()
    others = [look(line, f"known {number}") for number in range(50)]
    others += [look(line, f"203.0.113.{number}", Rank.UNKNOWN) for number in range(50)]
    assert sum(bool(turn.counted) for turn in others) == MOST[Rank.KNOWN][Kind.LOOK] + MOST[Rank.UNKNOWN][Kind.LOOK]
    assert look(line, "admin", Rank.ADMIN).counted


def test_whose_turn_is_longest_ago_is_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MOST[Rank.KNOWN], Kind.LOOK, 1)
    line = Turns()
    waiting = [look(line, owner) for owner in ("a", "a", "a", "b", "b", "c")]
    assert list_served(line, waiting) == ["a", "b", "c", "a", "b", "a"]


def test_what_is_begun_comes_to_its_end_first() -> None:
    async def serve() -> None:
        line = Turns()
        begun, others = Turn(line, "a", Rank.KNOWN, Kind.LOOK), []
        await begun.take()
        begun.lay_down()
        others = [look(line, "a") for _ in range(3)]
        again = asyncio.create_task(begun.take())
        await asyncio.sleep(0)
        line.leave(others[0])
        await again
        assert not others[1].counted
        begun.lay_down()
        assert others[1].counted

    asyncio.run(serve())


def test_all_together_are_fewer_than_the_threads() -> None:
    assert sum(most for of_rank in MOST.values() for most in of_rank.values()) <= 36


def cancel(task: asyncio.Task[None], turn: Turn) -> None:
    task.cancel()


def go_away(task: asyncio.Task[None], turn: Turn) -> None:
    turn.leave()


@pytest.mark.parametrize(("end", "error"), [(cancel, asyncio.CancelledError), (go_away, ClientDisconnect)])
@pytest.mark.parametrize("served", [False, True])
def test_who_goes_away_keeps_no_turn(
    end: Callable[[asyncio.Task[None], Turn], None], error: type[BaseException], served: bool
) -> None:
    async def serve() -> None:
        line = Turns()
        first, second, third = (Turn(line, "a", Rank.KNOWN, Kind.LOOK) for _ in range(3))
        await first.take()
        going = asyncio.create_task(second.take())
        staying = asyncio.create_task(third.take())
        await asyncio.sleep(0)
        if served:  # its turn comes in the same moment
            first.lay_down()
        end(going, second)
        (outcome,) = await asyncio.gather(going, return_exceptions=True)
        assert isinstance(outcome, error) or (served and end is go_away)
        second.lay_down()
        first.lay_down()
        async with asyncio.timeout(60):
            await staying
        third.lay_down()
        assert not line._lines
        assert not line._working
        assert not line._served

    asyncio.run(serve())


def test_who_waits_too_long_is_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(turns.PATIENCE_SECONDS, Kind.LOOK, 0.05)

    async def serve() -> None:
        line = Turns()
        first, second = (Turn(line, "a", Rank.KNOWN, Kind.LOOK) for _ in range(2))
        await first.take()
        with pytest.raises(Problem) as refused:
            await second.take()
        assert (refused.value.status, refused.value.headers) == (429, {"Retry-After": "1"})
        first.lay_down()
        assert look(line, "a").counted

    asyncio.run(serve())


def test_a_line_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "REFUSAL_SECONDS", 0.01)

    async def serve() -> None:
        line = Turns()
        assert len([look(line, "a") for _ in range(MOST_OF_ONE[Kind.LOOK] + MOST_IN_LINE)]) > MOST_IN_LINE
        with pytest.raises(Problem) as refused:
            await Turn(line, "a", Rank.KNOWN, Kind.LOOK).take()
        assert refused.value.status == 429
        assert look(line, "b").counted

    asyncio.run(serve())


def test_a_large_body_is_no_small_change() -> None:
    turn = Turn(Turns(), "a", Rank.KNOWN, Kind.CHANGE)
    turn.read(1000)
    assert turn.kind is Kind.CHANGE
    turn.read(10**6)
    assert turn.kind is Kind.BULK


@pytest.mark.parametrize(("rank", "at_once"), [(Rank.KNOWN, 1), (Rank.ADMIN, MOST_OF_ONE[Kind.CHANGE])])
def test_what_changes_much_without_a_body_is_done_one_at_a_time_but_for_admins(rank: Rank, at_once: int) -> None:
    line = Turns()
    asked = [Turn(line, "somebody", rank, Kind.CHANGE) for _ in range(20)]
    for turn in asked:
        token = turns.TURN.set(turn)
        turns.ask_much()
        turns.TURN.reset(token)
        line.line_up(turn)
    assert sum(bool(turn.counted) for turn in asked) == at_once
