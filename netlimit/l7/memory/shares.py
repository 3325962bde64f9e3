"""Whose the keys of a counter are, and who has more of its room than others leave to him.

Where the counters of a rule are told apart by the client and by something else, such as a path, one client makes as
many keys as he likes. So when there is no more room, no network keeps more than an equal share, or what others leave
of theirs. Whatever its clients bring beyond that is counted together, in a counter of their own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from ipaddress import IPv6Address
from itertools import islice
from typing import Any

from netlimit.l7.rules import ARRIVALS, BROUGHT, CLIENT_KEY
from netlimit.translation import find_translators

SHARE = 64
"""Of the room, so many-th may be of one network, however many others there are."""
LEAST = 16
"""So many keys may be of one network always."""
SAMPLE = 2**13
"""So many keys at least are looked at to find who has how many."""
Weigh = Callable[[Any], int]
"""How much of the room what is held for a key takes."""
_STRANGE = ("64:ff9b:", "::")
"""So begin addresses that translators give to hosts of IPv4: their neighbours are others' hosts."""


class Shares:
    """What networks have of a counter's room."""

    def __init__(self, place: int) -> None:
        """`place` is the client's, among the parts of a key."""
        self._place = place
        self._greedy: frozenset[str] = frozenset()
        self._crowds: set[str] = set()

    @property
    def any_greedy(self) -> bool:
        """Whether the further keys of some are counted together."""
        return bool(self._greedy)

    def forget(self, holds: Callable[[str], bool]) -> None:
        """Count together the further keys of those alone of whom something is counted together yet: were one of these
        keys counted by itself, it would begin anew. `holds` tells whether something is counted for a crowd."""
        self._crowds = {crowd for crowd in self._crowds if holds(crowd)}
        self._greedy = frozenset(find_network(crowd.removeprefix(_CROWD)) for crowd in self._crowds)

    def find_crowd(self, key: str) -> str | None:
        """What a new key is to be counted with; None if that is nothing."""
        client = self._find_client(key)
        if find_network(client) not in self._greedy:
            return None
        crowd = _name_crowd(client)
        self._crowds.add(crowd)
        return crowd

    def name_crowd(self, key: str) -> str:
        """What a key may have been counted with."""
        return _name_crowd(self._find_client(key))

    def watch(self, keys: Iterable[str], number: int, room: int) -> bool:
        """Find who has more than an equal share of a quarter of the `room`, and more than he may always have; whether
        there are some. `keys` are all that are held, and `number` how many those are."""
        step = max(1, number // SAMPLE)
        sizes = Counter(find_network(self._find_client(key)) for key in islice(keys, 0, None, step))
        level = max(find_level([size * step for size in sizes.values()], room // 4), room // SHARE, LEAST)
        self._greedy |= {network for network, size in sizes.items() if size * step > level}
        return self.any_greedy

    def cut(self, held: Mapping[str, Any], room: int, weigh: Weigh = lambda _: 1) -> dict[str, list[str]]:
        """Find who has more than his share, for `room` to be enough for all, and which of his keys are to be counted
        with what. `held` are all keys, the oldest first: those stay."""
        step = max(1, len(held) // SAMPLE)
        sizes: Counter[str] = Counter()
        for key, value in islice(held.items(), 0, None, step):
            sizes[find_network(self._find_client(key))] += weigh(value) * step
        level = max(find_level(sizes.values(), room), 2 * room // SHARE, LEAST)
        self._greedy |= {network for network, size in sizes.items() if size > level}
        excess = self._find_excess(held, level, weigh) if self._greedy else {}
        self._crowds |= excess.keys()
        return excess

    def _find_excess(self, held: Mapping[str, Any], level: int, weigh: Weigh) -> dict[str, list[str]]:
        """By crowd. Nobody is answered meanwhile: for each key as little is done as can be."""
        if self._place or "" in self._greedy:
            clients = [*map(self._find_client, held)]
        else:
            clients = [key.partition("|")[0] for key in held]
        found = ((client, find_network(client)) for client in set(clients))
        greedy = {client: network for client, network in found if network in self._greedy}
        left = dict.fromkeys(self._greedy, level)
        excess: defaultdict[str, list[str]] = defaultdict(list)
        for (key, value), client in zip(held.items(), clients, strict=True):
            if client in greedy:
                network = greedy[client]
                left[network] -= weigh(value)
                if left[network] < 0 and not _is_crowd(key):
                    excess[network if ":" in client else client].append(key)
        return {_CROWD + name: keys for name, keys in excess.items()}

    def _find_client(self, key: str) -> str:
        """Empty where the key is a digest that does not tell it."""
        if _is_crowd(key):
            return key.removeprefix(_CROWD)
        if not self._place:
            client, more, _ = key.partition("|")
            return client if more else ""
        if "\\" in key:  # which escapes what joins the parts, and itself
            key = key.replace("\\\\", " ").replace("\\|", " ")
        parts = key.split("|", self._place + 1)
        return parts[self._place] if len(parts) > self._place else ""


_CROWD = "\0crowd of "


def _name_crowd(client: str) -> str:
    """IPv6 clients are counted with their neighbours: one has as many addresses as he likes."""
    return _CROWD + (find_network(client) if ":" in client else client)


def _is_crowd(key: str) -> bool:
    return key.startswith(_CROWD)


def find_network(client: str) -> str:
    """As `netlimit.l7.identity.find_network`, nearly, and of whatever text: it is called for all keys at once."""
    if client.startswith("fe80:"):
        return "fe80:"
    if ":" in client and not client.startswith(_STRANGE) and ("/" in client or not _is_translated(client)):
        return ":".join(client.split(":", 3)[:3])
    return client.rpartition(".")[0] or client


def _is_translated(client: str) -> bool:
    """Whether it is what a translator with a prefix of one's own gives to a host of IPv4. Mostly there is none."""
    own = find_translators().own
    if not own:
        return False
    try:
        place = IPv6Address(client)
    except ValueError:
        return False
    return any(each.translates(place) for each in own)


def find_level(sizes: Iterable[int], room: int) -> int:
    """What each may have at most for all to have room. What one does not need the others share."""
    ordered = sorted(sizes)
    for position, size in enumerate(ordered):
        level = room // (len(ordered) - position)
        if size > level:
            return level
        room -= size
    return max(ordered, default=0)


def find_shares(rule: str) -> Shares | None:
    """The shares of a counter, by the name of its rule; None where its keys tell no client, or nothing besides."""
    rule = rule.removeprefix(ARRIVALS)
    if rule.startswith(BROUGHT):
        free = rule.removeprefix(BROUGHT).partition(":")[2].split(",")
    else:
        plain = rule.replace("\\\\", " ").replace("\\,", " ").replace("\\=", " ")
        steps = [step.partition("=") for step in plain.split(",")]
        free = [key for key, _, value in steps if not value or "*" in value]  # an exact value is no part of the key
    return Shares(free.index(CLIENT_KEY)) if CLIENT_KEY in free and len(free) > 1 else None
