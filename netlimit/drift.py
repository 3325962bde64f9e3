"""Drift: what others changed of ours. What is told of it, and whether somebody does it over and over."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple

from netlimit.plan import Plan, SwitchTable, WriteIngress, WriteSets, WriteTree
from netlimit.tree import INGRESS_DEVICE

CALM_SECONDS = 60.0
MOST_REPAIRS = 5
"""More repairs of one kind within `CALM_SECONDS` are a fight: another program undoes them."""
FIRST_REST, LAST_REST = 2.0, 60.0
"""Seconds between two repairs in a fight; each is twice as long as the one before. Jumps that are to stand first again
are cheap to move, and who adds rules of his own there means no harm: they rest for no longer than at first, or than so
many times as long as it takes."""
PLACES_COST = 10
PLACES = "places"
"""The kind of drift that is only one of order: all of ours is there, and our jumps do not stand first."""
MOST_PARTS = 8192
"""When more are remembered, those of devices that are gone are forgotten: containers make ever new ones."""
MOST_FOUND = 1000
"""The most characters that are kept of what was found."""


def find_kinds(plan: Plan) -> set[str]:
    """What a repair is about: "chains", or "places" where all of them are there and do not stand first; "sets", or
    "entries" where sets themselves are there; "queues", "ingress"."""
    kinds = set()
    for step in plan.steps:
        match step:
            case SwitchTable():
                kinds.add(PLACES if step.only_moves else "chains")
            case WriteTree():
                kinds.add("queues")
            case WriteIngress():
                kinds.add("ingress")
            case WriteSets():
                kinds.add("sets" if step.create or step.destroy else "entries")
    return kinds - {"entries"} if "sets" in kinds else kinds


class Part(NamedTuple):
    """What a device has of ours, by its kind: "queues", or the program on its "ingress"."""

    kind: str
    device: str


def find_lost(plan: Plan, kept: Set[Part]) -> set[str]:
    """The kinds of things that a repair brings back because devices had lost them that are others than before: queues
    where none of the devices had `kept` them, and programs, of which it is not told which devices had them."""
    written = _find_parts(plan)
    queued = {part for part in written if part.kind == "queues"}
    lost = {"queues"} if queued and queued.isdisjoint(kept) else set()
    return lost | ({"ingress"} if written - queued - kept else set())


def _find_parts(plan: Plan) -> set[Part]:
    """What the steps of a plan write, on which devices. Only one that changes the program names devices, all of them:
    that one has written the program of a new device does not mean that it has queues as well."""
    parts = set()
    for step in plan.steps:
        match step:
            case WriteTree() if step.device != INGRESS_DEVICE:
                parts.add(Part("queues", step.device))
            case WriteIngress() if step.ingress:
                parts |= {Part("ingress", device) for device in step.ingress.devices}
    return parts


def describe(plan: Plan) -> str:
    """What a repair does, cut to a length that a log bears."""
    text = str(plan)
    return text if len(text) <= MOST_FOUND else f"{text[:MOST_FOUND]} …"


@dataclass(frozen=True, slots=True)
class Fight:
    """A kind of thing that is undone over and over: how often it was repaired since that began, and how long it is left
    alone now."""

    kind: str
    repairs: int
    rest: float

    def __str__(self) -> str:
        if self.kind == PLACES:
            return (
                f"Another program puts rules of its own before the jumps of netlimit over and over: {self.repairs} "
                f"times so far. They are moved back {self.rest:.0f} s after the last time, and until then what those "
                "rules accept is not limited. Have it use a chain of its own, or add behind (`iptables -A`)."
            )
        return (
            f"Another program undoes the {self.kind} of netlimit over and over: {self.repairs} repairs so far. The "
            f"next comes {self.rest:.0f} s after the last, and until then limits may be missing. `netlimit doctor` "
            "names programs that do this; stop it, or have it leave alone what is called NL- and nl-."
        )


class Repairs:
    """What was repaired since this controller began. Times are seconds of a clock that nobody sets."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._times: dict[str, deque[float]] = {}
        self._fights: dict[str, Fight] = {}
        self._indices: dict[Part, int] = {}

    @property
    def fights(self) -> list[Fight]:
        """The fights that go on."""
        return list(self._fights.values())

    def note(self, kind: str, now: float, took: float = 0.0, *, blames: bool = True) -> Fight | None:
        """A thing of this kind was put right, in `took` seconds; the fight, if it has become one or goes on. With
        `blames`, a program of others had undone it."""
        self.counts[kind] += 1
        if not blames:
            return None
        times = self._times.setdefault(kind, deque())
        times.append(now)
        while times[0] < now - CALM_SECONDS:
            times.popleft()
        before = self._fights.get(kind)
        if before is not None:
            rest = max(FIRST_REST, PLACES_COST * took) if kind == PLACES else 2 * before.rest
            self._fights[kind] = Fight(kind, before.repairs + 1, min(LAST_REST, rest))
        elif len(times) > MOST_REPAIRS:
            self._fights[kind] = Fight(kind, len(times), FIRST_REST)
        return self._fights.get(kind)

    def find_kept(self, devices: Mapping[str, int]) -> set[Part]:
        """What these devices (names and indices) had of ours when it was written: a new one has nothing, what the one
        before it had went with that, and no program has undone it."""
        return {part for part, index in self._indices.items() if devices.get(part.device) == index}

    def know(self, plan: Plan, devices: Mapping[str, int]) -> None:
        """The plan was carried out: those of these devices that it names have what it writes there."""
        self._indices |= {part: devices[part.device] for part in _find_parts(plan) if part.device in devices}
        if len(self._indices) > MOST_PARTS:
            self._indices = {part: index for part, index in self._indices.items() if part.device in devices}

    def is_fight(self, kind: str) -> bool:
        """Whether there is a fight over things of this kind."""
        return kind in self._fights

    def rest(self, kind: str, now: float) -> float:
        """Seconds for which a thing of this kind is to be left alone."""
        fight = self._fights.get(kind)
        return max(0.0, self._times[kind][-1] + fight.rest - now) if fight else 0.0

    def calm(self, now: float) -> list[str]:
        """The kinds over which a fight has ended now: a minute has passed after the rest, and nothing was undone."""
        ended = [
            kind for kind, fight in self._fights.items() if now - self._times[kind][-1] > CALM_SECONDS + fight.rest
        ]
        for kind in ended:
            del self._fights[kind]
        return ended


BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Histogram:
    """How long passes took, as Prometheus counts: by upper bound in seconds, how many took no longer."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(map(str, BOUNDS), 0) | {"+Inf": 0}
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Take one in."""
        for bound in self._counts:
            self._counts[bound] += seconds <= float(bound)
        self._sum += seconds

    def read(self) -> Mapping[str, float]:
        """The counts by bound, and their "sum"."""
        return {**self._counts, "sum": round(self._sum, 6)}
