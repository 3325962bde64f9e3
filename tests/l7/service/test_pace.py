"""Requests that come at once, and what is to be done meanwhile."""

from __future__ import annotations

import asyncio

from netlimit.l7.service.pace import IN_A_ROUND, MORE_IN_A_ROUND, Pace


def test_a_crowd_begins_in_order_and_leaves_room_between() -> None:
    async def main() -> None:
        loop, pace = asyncio.get_running_loop(), Pace()
        begun: list[int] = []
        seen: list[int] = []

        def look() -> None:
            seen.append(len(begun))
            if len(begun) < 3 * IN_A_ROUND:
                loop.call_soon(look)

        for number in range(3 * IN_A_ROUND):
            pace.begin(begun.append, number)
        assert begun == [*range(IN_A_ROUND)], "the first need not wait"
        look()
        while len(begun) < 3 * IN_A_ROUND:
            await asyncio.sleep(0)
        assert begun == [*range(3 * IN_A_ROUND)]
        assert {IN_A_ROUND, 2 * IN_A_ROUND} <= {*seen}, "others had a turn in each round"
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        pace.begin(begun.append, -1)
        assert begun[-1] == -1, "a single one begins at once"

    asyncio.run(main())


def test_what_is_sent_ahead_comes_after_all_else_and_comes() -> None:
    async def main() -> None:
        pace = Pace()
        begun: list[str] = []
        for _ in range(1000):
            pace.follow(lambda: begun.append("ahead"))
        for _ in range(3 * IN_A_ROUND):
            pace.begin(begun.append, "fresh")
        rounds = []
        while begun or not rounds:
            rounds.append([*begun])
            begun.clear()
            await asyncio.sleep(0)
        assert sum(map(len, rounds)) == 1000 + 3 * IN_A_ROUND
        counts = [(each.count("fresh"), each.count("ahead")) for each in rounds]
        assert counts[:4] == [(IN_A_ROUND - 1, 0), (IN_A_ROUND, 1), (IN_A_ROUND, 1), (1, MORE_IN_A_ROUND)]
        assert {ahead for _, ahead in counts[4:-1]} == {MORE_IN_A_ROUND}

    asyncio.run(main())
