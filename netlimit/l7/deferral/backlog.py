"""What keeps deferred requests, in SQLite or in Redis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import add
from types import MappingProxyType
from typing import ClassVar, NamedTuple, Protocol

from netlimit.errors import NetlimitError, SettingsError
from netlimit.l7.deferral.clock import Now
from netlimit.l7.deferral.request import Deferred, Reply, Report, State


class Load(NamedTuple):
    """How much there is already when a request comes: of all, of its key, of its network, and of these two together."""

    requests: int
    bytes: int
    of_key: int
    bytes_of_key: int
    of_network: int
    bytes_of_network: int
    of_both: int
    bytes_of_both: int

    def plus(self, other: Load) -> Load:
        """The two together."""
        return Load(*map(add, self, other))


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much is kept, and for how long. Of one network no more is kept than it leaves free, so that there is room for
    another."""

    most: int = 10_000
    """Requests that wait, of all together, and those of which the end is remembered."""
    most_of_one: int = 1000
    """Requests that wait, of one key; where several clients share it, those of one network are no more than it leaves
    free, by number and by bytes."""
    most_bytes: int = 256 * 2**20
    """Bytes of all that wait together, and of the answers that are remembered: each of `most` of these may have an
    equal part, and the larger ones take the room of several."""
    most_bytes_of_one: int = 25 * 2**20
    """Bytes of those of one key."""
    lease: float = 120.0
    """Seconds for which a claimed request is nobody else's, unless the claim is renewed."""
    keep: float = 86_400.0
    """Seconds for which it can be read what has become of a request."""

    def have_room(self, load: Load, size: int, shared: bool) -> bool:
        """Whether one more request may come, of so many bytes. `shared`: several clients have its key."""
        of_both, bytes_of_both = (load.of_both, load.bytes_of_both) if shared else (0, 0)
        return (
            of_both < self.most_of_one - load.of_key
            and bytes_of_both + size <= self.most_bytes_of_one - load.bytes_of_key
            and load.of_network < self.most - load.requests
            and load.bytes_of_network + size <= self.most_bytes - load.bytes
        )


NOBODY: Mapping[str, int] = MappingProxyType({})


class Unkept(NetlimitError):
    """A request cannot be kept; its client is answered with this status."""

    status: ClassVar[int]


class BacklogFull(Unkept):
    """No more requests are kept now: those that are, or are being read, would be too many or too large, of one key, one
    network or all."""

    status = 429

    def __init__(self) -> None:
        super().__init__("The request is over its limit, and as many are kept or being read as may be.")


class BacklogUnavailable(Unkept):
    """What keeps the requests cannot be asked now; the sentence says why."""

    status = 503

    _sentence: ClassVar[str] = "The backlog of deferred requests cannot be asked"

    def __init__(self, reason: object) -> None:
        super().__init__(f"{self._sentence}: {reason}.")


class BacklogUnwritten(BacklogUnavailable):
    """Nothing can be written to what keeps the requests, for want of room above all: what was to be kept is not."""

    _sentence = "Nothing can be written to the backlog of deferred requests"

    def __init__(self, reason: object, remedy: str = "", lasts: bool = True) -> None:
        """`remedy` is a sentence for the operator; clients are not told. Unless it `lasts`, a smaller one has room."""
        super().__init__(reason)
        self.remedy = remedy
        self.lasts = lasts


class Claim(NamedTuple):
    """A request that is to be tried now, by whoever has claimed it and nobody else."""

    request: Deferred
    tries: int
    """With this one."""


class Backlog(Protocol):
    """Requests that wait to be replayed. What has been put is not lost when a process dies.

    Requests of one key are claimed one at a time, in the order in which they came; but who stands aside, and with him
    those of his line who stand under the same other limits (`others`), are passed by the rest meanwhile. A claim ends
    by itself after a lease in which it is not renewed, so that the requests of a worker that died are tried again: each
    request is tried at least once. Every method raises BacklogUnavailable.
    """

    @property
    def bounds(self) -> Bounds:
        """How much is kept."""
        ...

    @property
    def now(self) -> Now:
        """The clock by which requests wait."""
        ...

    @property
    def lease(self) -> float:
        """Seconds for which a claim lasts."""
        ...

    def serve(self, domain: str) -> None:
        """Keep those of one domain alone: others have other rules, and another application. Raises SettingsError where
        it serves another already."""
        ...

    async def weigh(self, key: str, network: str) -> Load:
        """How much waits when a request of this key and network comes."""
        ...

    async def put(self, request: Deferred) -> None:
        """Keep a request for good. Raises BacklogFull, and BacklogUnwritten where it is certain that it is not kept."""
        ...

    async def withdraw(self, request: Deferred) -> bool:
        """Take back a request that has just been put, unless it has been claimed; whether it is kept no more."""
        ...

    async def is_waiting(self, key: str) -> bool:
        """Whether requests of a key wait."""
        ...

    async def comes_behind(self, key: str, others: str) -> bool:
        """Whether one that comes now is to wait behind others of its line. Those who stand aside let it pass, unless it
        stands under the same other limits."""
        ...

    async def claim(self, now: float, places: Mapping[str, int] = NOBODY, most: int = 1) -> Claim | None:
        """A request whose turn it is, or None. It counts as tried, for else one that kills its worker would be tried
        for ever.

        `places` are what networks have by now, of which each may have `most`; who has fewest goes first.
        """
        ...

    async def renew(self, request: Deferred, now: float) -> None:
        """Let a claim last a whole lease from now."""
        ...

    async def postpone(self, request: Deferred, until: float, tried: bool, aside: bool = False) -> None:
        """Give a claim back; the request is to be claimed again from `until` on. Not `tried`: it had to wait still.
        Until then others of its line wait, too, unless it stands `aside`; afterwards it has its place again."""
        ...

    async def move(self, request: Deferred, moved: Deferred) -> bool:
        """Put a request that is claimed into another line, as `moved` has it, and keep the rest of its head so; there
        is room for it. The claim goes on. Whether it has been done: not where the claim has been lost."""
        ...

    async def finish(self, request: Deferred, state: State, now: float, reply: Reply | None, reason: str) -> None:
        """A request's end, which is remembered for a while; body and head are forgotten."""
        ...

    async def find(self, identity: str) -> Report | None:
        """What has become of a request; None for one that is not known."""
        ...

    async def check(self) -> None:
        """Raise BacklogUnwritten if a request could not be put now, as far as that is known without one."""
        ...

    async def sweep(self, now: float) -> None:
        """Forget what has ended long ago, and more than can be remembered."""
        ...

    async def aclose(self) -> None:
        """Let go of files and connections."""
        ...


def check_domain(served: str | None, domain: str) -> None:
    """Raise SettingsError where another domain is served already."""
    if served not in (None, domain):
        raise SettingsError(
            "DEFERRED_URL",
            f"Deferred requests of the domain {served!r} are kept here already, and would be replayed to another "
            f"application: give the domain {domain!r} a Deferral, and a file, of its own.",
        )
