"""What controller, API and store tell each other about the state of things. Plain values, no behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from netlimit.origins import Origin
from netlimit.rules import Rule

DISPENSABLE = frozenset({"fq_codel", "python-iptables"})
"""Capabilities in the place of which there is another: a host without them is no worse for the rules."""


class State(StrEnum):
    """How a rule stands on a gateway, from best to worst."""

    APPLIED = "applied"
    EXPIRED = "expired"
    DISABLED = "disabled"
    PENDING = "pending"
    DEGRADED = "degraded"
    ERROR = "error"


L7 = "l7"
"""The layer of what the limiter enforces."""


@dataclass(frozen=True, slots=True)
class Exceptional:
    """A rule that is not simply applied on a gateway, and why. `layer` is what enforces it there, None for the back end
    of the gateway."""

    rule_id: int
    state: State
    message: str
    layer: str | None = None


@dataclass(frozen=True, slots=True)
class Changes:
    """What changed in the rules after some revision: rules as they are now, ids of those removed. `stamp` tells the
    revision from others of its number."""

    revision: int
    rules: tuple[Rule, ...]
    removed: tuple[int, ...]
    stamp: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Counts:
    """Packets and bytes that a rule matched and dropped: IP bytes, but Ethernet bytes for what is shaped, whose dropped
    bytes are not counted. `delayed` says how often shaped packets had to wait for their class."""

    matched_packets: int = 0
    matched_bytes: int = 0
    dropped_packets: int = 0
    dropped_bytes: int = 0
    delayed: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.matched_packets + other.matched_packets,
            self.matched_bytes + other.matched_bytes,
            self.dropped_packets + other.dropped_packets,
            self.dropped_bytes + other.dropped_bytes,
            self.delayed + other.delayed,
        )


@dataclass(frozen=True, slots=True)
class RuleCounters:
    """A rule's counters on one gateway: `total` since `since`; `raw` is the kernel's last reading behind it. Queued is
    what waited in its classes when they were read."""

    rule_id: int
    total: Counts
    raw: Counts
    since: datetime
    as_of: datetime
    queued_packets: int = 0
    queued_bytes: int = 0


class SafeReason(NamedTuple):
    """Why a network is in the safe set, in words ("SSH session"), and when that was last so (Unix time; 0: always)."""

    text: str
    seen: float = 0.0


@dataclass(frozen=True, slots=True)
class HostStatus:
    """What a gateway's controller reports of itself.

    `capabilities` maps a capability to None, or to the reason why it is missing. `own` are the gateway's addresses
    and `safe` the safe set in force, both as text; `safe_reasons` says why each is in it. Open connections to the TCP
    ports in `management` pass whatever the rules say. `hz` is the kernel's clock tick; `drift` the repairs since it
    began, `repairs` the same by kind. `applying` is a histogram of the seconds that passes took: by upper bound
    ("0.1", "+Inf") how many passes, not more than that, and their "sum". Of rules: `desired` are in force here by the
    database, `enforced` are, in the kernel or by limiters, `degraded` not for all they speak of; `lifted` have
    `on_failure: open` and are out of force because the database is gone. `drifted` counts things found changed and not
    yet put right. `faults` are errors that nobody expected, since the controller began. `networks` are the prefixes
    that are reached without a gateway, and of default routes, each with its devices; none: they are not known.
    `reporter` is another word for each run of a controller, and None for a pass alone. `peers` are the addresses of the
    other gateways of the database; `local` is what ends on this one besides `own` by its routes, as networks: local,
    broadcast or anycast. `seen_at` is by the database's clock, and so is `silence`: how long ago that was when this was
    read. `stamp` is that of `applied_revision`, where who reports knows it: a database in which that is another
    revision, for it has taken the place of the one that was asked, keeps that none is applied; and so it is where it is
    `refused`: there it says why this gateway does not go by the database into which it reports.
    """

    host: str
    backend: str
    applied_revision: int = 0
    paused: bool = False
    hz: int = 250
    capabilities: Mapping[str, str | None] = field(default_factory=dict)
    own: tuple[str, ...] = ()
    safe: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    drift: int = 0
    last_error: str | None = None
    seen_at: datetime | None = None
    repairs: Mapping[str, int] = field(default_factory=dict)
    applying: Mapping[str, float] = field(default_factory=dict)
    desired: int = 0
    enforced: int = 0
    degraded: int = 0
    drifted: int = 0
    lifted: int = 0
    safe_reasons: Mapping[str, SafeReason] = field(default_factory=dict)
    management: tuple[int, ...] = ()
    faults: int = 0
    networks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    reporter: str | None = None
    peers: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    refused: str | None = None
    silence: timedelta | None = field(default=None, compare=False)
    stamp: int | None = field(default=None, compare=False)


class Reception(NamedTuple):
    """What the database says to a report: when it came, by its clock, and who had reported before, if it is known."""

    at: datetime
    before: str | None


@dataclass(frozen=True, slots=True)
class Repair:
    """Something of ours that others had changed in the kernel, and that was put right at `at`: its kind ("chains",
    "places", "sets", "entries", "queues", "ingress"; "writer": who hung while he wrote was ended), what was found, and
    how many seconds putting it right took."""

    kind: str
    found: str
    took: float
    at: datetime


@dataclass(frozen=True, slots=True)
class Actor:
    """Who changes something: the name of a token or a local user, the address it came from, and the request's id.

    `token` is the id of the token, and `role` what it was when the request was let in: nothing is kept for a token that
    has ended since, or is of another role. Both are None for whoever is on this host.
    """

    name: str
    address: str | None = None
    request: str | None = None
    token: int | None = None
    role: str | None = None


LIMITER = Actor("limiter")
"""Who blocks clients that keep being refused: by itself, and as often as they ask for it."""


@dataclass(frozen=True, slots=True)
class Revision:
    """A change of rules that can be undone: `action` is "add", "replace", "remove" or "rollback", `rules` how many it
    touched, `returned_to` the revision that a rollback brought back."""

    revision: int
    at: datetime
    actor: str
    address: str | None
    request: str | None
    action: str
    rules: int
    returned_to: int | None


@dataclass(frozen=True, slots=True)
class Difference:
    """A rule that two revisions do not have in common; None where it was not there."""

    rule_id: int
    before: Rule | None
    after: Rule | None

    @property
    def kind(self) -> str:
        """What has become of it: "added", "removed" or "changed"."""
        return "added" if self.before is None else "removed" if self.after is None else "changed"


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two revisions differ: how many rules of each kind, and a page of them by id."""

    added: int
    removed: int
    changed: int
    page: tuple[Difference, ...]
    more: bool
    """Whether others come after the page."""


class Outcome(StrEnum):
    """How a window of confirmation ended."""

    CONFIRMED = "confirmed"
    EXPIRED = "expired"
    ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True)
class Window:
    """A window of confirmation: unless it is confirmed within `seconds`, the rules of revision `base` come back, and
    the gateways in `paused` are torn down again. `forces`: who has opened it may force, so that what was forced comes
    back into force. Once it has an outcome, `revision` is the one that it left. `newest` is the one at which
    it was opened, than which `base` may be older; only who has opened it knows that."""

    base: int
    opened_at: datetime
    seconds: int
    actor: str
    paused: tuple[str, ...] = ()
    outcome: Outcome | None = None
    ended_at: datetime | None = None
    revision: int | None = None
    forces: bool = False
    newest: int | None = field(default=None, compare=False)

    @property
    def deadline(self) -> datetime:
        """When it ends by itself."""
        return self.opened_at + timedelta(seconds=self.seconds)

    def left(self, now: datetime) -> float:
        """Seconds until the deadline, by the database's clock: never more than the window is long, whatever has become
        of that."""
        return min(max((self.deadline - now).total_seconds(), 0.0), float(self.seconds))

    def is_forgotten(self, last: Window | None) -> bool:
        """Whether a database of which `last` is the last window knows nothing of this one any more: it was restored,
        or a standby that lagged has taken its place. How `last` has ended says nothing of this one then."""
        return last is None or last.opened_at < self.opened_at

    def warn(self, undone: str) -> str:
        """What somebody should know who does something while it is open."""
        return f"{self._introduce()}: unless it is confirmed, {undone} is undone."

    def warn_of_rest(self, left: str) -> str:
        """The same of what it leaves as it is."""
        return f"{self._introduce()}: it undoes changes of rules alone, and {left} stay as they are now."

    def _introduce(self) -> str:
        return f"A window of confirmation is open until {self.deadline:%Y-%m-%d %H:%M:%S} UTC, opened by {self.actor}"


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause of a gateway, by a teardown or a window's end: the random word by which it is told from others, and when
    it began, by the clock of who has begun it."""

    word: str
    at: datetime


@dataclass(frozen=True, slots=True)
class Request:
    """A question of the API that only a controller can answer: `kind` is "plan", "preview", "counters" or
    "offenders"."""

    id: int
    kind: str
    argument: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Assigned:
    """The rules that the limiters of a gateway enforce in its kernel's place, each with its revision. Whenever they
    change they have another `serial`, which tells them from all others; 0 is of none."""

    serial: int = 0
    rules: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LimiterReport:
    """A limiter that runs on a gateway: which `process` it is, the serial of the assigned rules that it has `loaded`,
    since when it runs, and when it said so last."""

    host: str
    process: str
    loaded: int
    since: datetime
    seen_at: datetime


@dataclass(frozen=True, slots=True)
class Duties:
    """What a limiter enforces for its gateway, as it is in the database at one moment.

    `assigned` are the rules that are its own to enforce; None: the very ones that it knows. `rules` are those of the
    gateway that have changed since the revision that was asked about, and `removed` those that are gone; if that is
    None, `rules` are all of them. `own` and `safe` are the gateway's addresses and its safe set. While nothing is
    assigned, or the gateway is paused, there is nothing else either, and the revision is -1. `stamp` tells the revision
    from others of its number. `origin` tells which database it is, and `is_gone_by` whether the controller of the
    gateway has said lately that it goes by it.
    """

    assigned: Assigned | None = Assigned()
    revision: int = -1
    rules: tuple[Rule, ...] = ()
    removed: tuple[int, ...] | None = None
    own: tuple[str, ...] = ()
    safe: tuple[str, ...] = ()
    stamp: int = field(default=0, compare=False)
    origin: Origin = field(default=Origin(None, 0), compare=False)
    is_gone_by: bool = field(default=False, compare=False)
