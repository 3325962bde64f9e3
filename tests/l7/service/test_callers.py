"""Which connections go where there are many: looked for among the open files, as gRPC's are."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from netlimit.l7.service.callers import Callers


class House:
    """Connections to a port, both ends of which are here."""

    def __init__(self, family: socket.AddressFamily, host: str, number: int) -> None:
        self.door = socket.create_server((host, 0), family=family)
        self.port = self.door.getsockname()[1]
        self.outside = [socket.create_connection((host, self.port)) for _ in range(number)]
        self.inside = [self.door.accept()[0] for _ in range(number)]

    def find_gone(self) -> list[int]:
        gone = []
        for number, each in enumerate(self.outside):
            each.setblocking(False)
            with suppress(BlockingIOError):
                if not each.recv(1):
                    gone.append(number)
        return gone

    def name(self, number: int) -> str:
        host, port = self.outside[number].getsockname()[:2]
        return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"

    def close(self) -> None:
        for each in (self.door, *self.outside, *self.inside):
            each.close()


@pytest.fixture(params=[(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")], ids=["IPv4", "IPv6"])
def house(request: pytest.FixtureRequest) -> Iterator[House]:
    house = House(*request.param, 8)
    yield house
    house.close()


def watch(callers: Callers, port: int) -> None:
    async def main() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await callers.watch(port)

    asyncio.run(main())


def test_those_that_never_asked_go_first(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlimit.l7.service.callers.PATIENCE", 0)
    callers = Callers(8)
    for number in (0, 1, 2, 3, 5, 6):
        callers.note(house.name(number), known=False)
    watch(callers, house.port)
    assert house.find_gone() == [4, 7]
    assert len(callers.troubles) == 1


def test_then_those_that_have_not_asked_for_longest_and_the_known_last(house: House) -> None:
    callers = Callers(8)
    callers.note(house.name(0), known=True)
    for number in (5, 3, 0, 1, 2, 4, 6, 7):
        callers.note(house.name(number), known=False)
    callers.note(house.name(5), known=False)
    watch(callers, house.port)
    assert house.find_gone() == [1, 3]


def test_where_there_are_few_none_goes(house: House) -> None:
    callers = Callers(11)
    watch(callers, house.port)
    assert house.find_gone() == []
    assert callers.troubles == []
