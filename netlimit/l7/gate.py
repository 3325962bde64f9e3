"""Asks the IP rules about the client of a request, before any other rule is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from netlimit.l7.decision import Decision
from netlimit.l7.identity import find_block, find_network, read_address
from netlimit.l7.limit import Limit
from netlimit.l7.rules import CLIENT_KEY, Descriptor, Rule
from netlimit.l7.store import Ask, Store, name_lease

if TYPE_CHECKING:  # an application that has no IP rules need not import what they are made of
    from netlimit.l7.addresses import AddressRules, Hit

SIZE_KEYS = ("content_length", "content-length")
"""The entry that tells how many bytes of body it has."""
_DIGITS = 15
"""So many has a length at most, without zeros before it; one that has more is larger than all that there is."""
Client = str | tuple[str, ...] | None
"""Whom a request comes from: his own address, or all that are told as it, since descriptors have blocks of them."""


class Charge(StrEnum):
    """What a request is charged for."""

    REQUEST = "request"
    """One hit a request (rates in packets and connections)."""
    FLIGHT = "flight"
    """One lease while the request is in flight (connections at once)."""
    BODY = "body"
    """The bytes of its body."""


class Passage(NamedTuple):
    """What IP rules say of a request."""

    allowed: bool = True
    blocked: bool = False
    """Whether it is refused because the client is blocked: 403 rather than 429."""
    rule: Rule | None = None
    """The one that refuses, with its limit, what the counter says, and whose it is."""
    limit: Limit | None = None
    decision: Decision | None = None
    key: str = ""
    leases: tuple[Ask, ...] = ()
    """What an allowed request holds while it is in flight."""


_NOTHING = Limit(0, 1)
_NEVER = Decision(False, 0, inf, inf)


class Gate:
    """The IP rules in front of a store of counters. For tasks of one event loop."""

    def __init__(self, rules: Callable[[], AddressRules], store: Store) -> None:
        self._rules = rules
        self._store = store

    def find_flight(self, name: str) -> Rule | None:
        """The rule of this name that limits requests in flight."""
        return self._rules().flights.get(name)

    async def ask(self, address: str, size: int = 0, hits: int = 1) -> Passage:
        """Count a request of a client, with so many bytes of body, and say whether it may pass. It counts as one,
        whatever its weight; 0 hits look only. A limit is asked only if those before it let the request pass.

        Raises CountersUnavailable when the store cannot be asked.
        """
        standing = self._rules().find_limits(address)
        counted = hits > 0
        for tally in (standing.allowed, standing.blocked):
            if tally is not None and counted:
                tally.note(size, refused=tally is standing.blocked)
        if standing.blocked is not None:
            return Passage(False, True, standing.rule, _NOTHING, _NEVER)
        held: list[Ask] = []
        for hit in standing.hits:
            ask = self._make_ask(hit, size, counted)
            if ask is None:
                hit.tally.note(size, refused=False)
                continue
            try:
                (decision,) = await self._store.decide([ask])
            except BaseException:  # who asked does not wait any more, say
                await self._store.release(held)
                raise
            if counted:
                hit.tally.note(size, refused=not decision.admitted)
            if decision.admitted and ask.lease and counted:
                held.append(ask)
            elif not decision.admitted and not hit.observes:
                if held:
                    await self._store.release(held)
                return Passage(False, False, hit.match.rule, hit.limit, decision, hit.match.key)
        return Passage(leases=tuple(held))

    @property
    def guards(self) -> bool:
        """Whether there is any IP rule to ask."""
        return not self._rules().empty

    def _make_ask(self, hit: Hit, size: int, counted: bool) -> Ask | None:
        """The question of a limit; None if the request has no body to be charged for. A body that no bucket could hold
        takes all that is in a full one."""
        rule, key = hit.match
        if hit.charge is Charge.FLIGHT:
            return Ask(rule, hit.limit, key, int(counted), lease=name_lease())
        if hit.charge is Charge.REQUEST or not counted:
            return Ask(rule, hit.limit, key, int(counted))
        return Ask(rule, hit.limit, key, min(size, hit.limit.capacity)) if size else None


def find_client(descriptor: Descriptor) -> str | None:
    """Whom a request comes from, if a descriptor tells it."""
    return next((entry.value for entry in descriptor.entries if entry.key == CLIENT_KEY), None)


def find_addresses(client: Client, descriptors: Iterable[Descriptor]) -> Sequence[str]:
    """The addresses that IP rules are asked about."""
    if isinstance(client, str):
        return (client,)
    return client or sorted({told for told in map(find_client, descriptors) if told is not None})


def find_client_network(client: Client, descriptors: Iterable[Descriptor]) -> str:
    """The network of a client, by his own address, or else by what descriptors tell; empty where nobody knows."""
    told = (client,) if isinstance(client, str) else client or map(find_client, descriptors)
    addresses = (read_address(each.partition("/")[0]) for each in told if each is not None)
    address = next(filter(None, addresses), None)
    return "" if address is None else find_network(address)


def tells(descriptor: Descriptor, address: str) -> bool:
    """Whether a descriptor tells of a client with this address, by itself or by its block."""
    forms = (address, find_block(address))
    return any(entry.key == CLIENT_KEY and entry.value in forms for entry in descriptor.entries)


def find_size(descriptors: Iterable[Descriptor]) -> int:
    """How many bytes of body a request has, if a descriptor tells it; of one that nobody could send, more than any
    bucket holds."""
    told = (entry.value for descriptor in descriptors for entry in descriptor.entries if entry.key in SIZE_KEYS)
    digits = next((text.lstrip("0") for text in told if text.isascii() and text.isdecimal()), "")
    return 10**_DIGITS if len(digits) > _DIGITS else int(digits or "0")
