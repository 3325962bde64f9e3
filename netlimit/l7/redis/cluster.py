"""A Redis Cluster: which node has which counters, and a link to each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from redis.asyncio.connection import AbstractConnection
from redis.crc import key_slot

from netlimit.l7.breaker import Breaker, State, worst
from netlimit.l7.redis.link import Link, Question

HOPS = 5
"""So often a question follows what nodes say of a slot that is moving."""


class Address(NamedTuple):
    """Where a node listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Cluster:
    """The links of one event loop to the nodes of a cluster.

    The map of slots is asked of any node that is known: at the first question, and again, without anybody waiting for
    it, as long as a node does not answer. What moves in between the nodes tell themselves.
    """

    def __init__(
        self, seeds: Sequence[Address], connect: Callable[[Address], AbstractConnection], timeout: float, rest: float
    ) -> None:
        self._seeds = seeds
        self._connect = connect
        self._timeout = timeout
        self._rest = rest
        self._slots: dict[int, Address] = {}
        self._links: dict[Address, Link] = {}
        self._early: list[Question] = []
        self._next_map = 0.0
        self._mapping: asyncio.Task[None] | None = None

    @property
    def state(self) -> State:
        """The worst that is thought of any node, and of all while the map is missing."""
        if not self._slots and self._next_map:
            return State.OPEN
        return worst(link.state for link in self._links.values())

    @property
    def losses(self) -> int:
        """How many connections have been closed by a node while nothing was asked."""
        return sum(link.losses for link in self._links.values())

    def ask(self, question: Question) -> None:
        """Send a question to the node that has its counter."""
        address = self._slots.get(key_slot(question.name))
        if address is None:
            self._ask_early(question)
            return
        link = self._find_link(address)
        if link.state is not State.CLOSED:
            self._map_again()
        link.ask(question)

    async def aclose(self) -> None:
        """Close all links; who still waits is told so."""
        if self._mapping is not None:
            self._mapping.cancel()
            await asyncio.wait([self._mapping])
        self._send_early()
        for link in self._links.values():
            await link.aclose()

    def _ask_early(self, question: Question) -> None:
        self._map_again()
        if self._mapping is None:
            self._fail(question)
        else:
            self._early.append(question)

    def _send_early(self) -> None:
        """Send what has waited for the map. What it does not lead anywhere fails."""
        early, self._early = self._early, []
        for question in early:
            address = self._slots.get(key_slot(question.name))
            if address is not None:
                self._find_link(address).ask(question)
            else:
                self._fail(question)

    def _fail(self, question: Question) -> None:
        question.fail(", ".join(map(str, self._seeds)), "no node answers, or none has the counter's slot")

    def _map_again(self) -> None:
        """Ask for the map, unless that is being done or was done a moment ago."""
        loop = asyncio.get_running_loop()
        if self._mapping is None and loop.time() >= self._next_map:
            self._mapping = loop.create_task(self._draw_map())

    def _find_link(self, address: Address) -> Link:
        link = self._links.get(address)
        if link is None:
            link = Link(partial(self._connect, address), str(address), Breaker(self._rest), self._redirect)
            self._links[address] = link
        return link

    def _redirect(self, question: Question, error: str) -> bool:
        """Follow "MOVED 3999 127.0.0.1:6381", which is for good, or "ASK …", which is for this question."""
        moved = error.startswith("MOVED ")
        if not (moved or error.startswith("ASK ")) or question.hops >= HOPS:
            return False
        _, slot, place = error.split()
        host, _, port = place.rpartition(":")
        address = Address(host or self._slots[int(slot)].host, int(port))  # a node need not know its own host's name
        if moved:
            self._slots[int(slot)] = address
        self._find_link(address).ask(question._replace(hops=question.hops + 1, asking=not moved))
        return True

    async def _draw_map(self) -> None:
        try:
            slots = await self._ask_for_slots()
            if slots:
                self._slots = slots
            self._send_early()
            await self._drop_links()
        finally:
            self._mapping = None
            self._next_map = asyncio.get_running_loop().time() + self._rest

    async def _ask_for_slots(self) -> dict[int, Address]:
        """The map of the first node that answers; empty if none does in time."""
        known = dict.fromkeys((*self._seeds, *self._links))
        asking = [asyncio.create_task(self._ask_node(address)) for address in known]
        try:
            for answer in asyncio.as_completed(asking, timeout=self._timeout):
                with suppress(Exception):  # whatever is wrong with one node, another may answer
                    if slots := await answer:
                        return slots
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        return {}

    async def _ask_node(self, address: Address) -> dict[int, Address]:
        connection = self._connect(address)
        try:
            await connection.send_command("CLUSTER", "SLOTS")
            return _read_slots(await connection.read_response(), address)
        finally:
            await connection.disconnect(nowait=True)

    async def _drop_links(self) -> None:
        """Close the links to nodes that have no slots any more."""
        serving = set(self._slots.values())
        for address in [address for address in self._links if address not in serving]:
            await self._links.pop(address).aclose()


def _read_slots(reply: Sequence[Any], asked: Address) -> dict[int, Address]:
    """Where each slot is, by CLUSTER SLOTS: ranges with their master first. A node that does not know its own host's
    name leaves it out."""
    slots: dict[int, Address] = {}
    for first, last, (host, port, *_), *_ in reply:
        address = Address(host.decode() if host else asked.host, port)
        slots.update(dict.fromkeys(range(first, last + 1), address))
    return slots
