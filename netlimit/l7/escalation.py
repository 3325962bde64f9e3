"""Clients that keep being refused, and are to be blocked where their packets arrive.

On the path of a decision a dictionary is updated; what follows from it happens elsewhere.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hmac import compare_digest
from typing import Protocol

from netlimit.errors import NetlimitError
from netlimit.l7.identity import find_culprit, find_network, read_address
from netlimit.l7.rules import Rule

log = logging.getLogger(__name__)

MOST_CLIENTS = 2**16
"""So many clients of one limit are counted at once; those who come after them are not, until its window ends."""
MOST_WAITING = 1000
"""So many clients wait for their block at most."""
MOST_BLOCKS = 60
"""So many clients are blocked in a minute at most: a limit that is wrong must not shut everybody out."""
SHARE = 8
"""Of all these so many-th are at most of one IPv6 /48: who has one has 65,536 blocks to come from."""
TOKEN_FIELD = b"x-netlimit-token"
"""The header field in which who asks shows the token, in small letters."""
MOST_ASKERS = 4096
"""So many who ask are remembered at most."""
CLEAR_SECONDS = 60.0
"""How often blocks are looked for that are over."""
PARTED_SECONDS = 600.0
"""For so long at least are addresses counted one by one of an IPv6 /64 that must not be blocked as one."""
_MINUTE = 60.0
_LOOK_SECONDS = 1.0


class Blocks(Protocol):
    """Where clients are blocked. Both raise NetlimitError."""

    def block(self, client: str, seconds: int, reason: str) -> object:
        """Block a client (an address, or an IPv6 /64) for so long, or longer if it is blocked already; False if it must
        not be."""
        ...

    def clear(self) -> None:
        """Forget blocks that are over."""
        ...


@dataclass(slots=True)
class _Window:
    """How often clients were refused by one limit in this window and the one before."""

    began: float
    seconds: int
    current: dict[str, int] = field(default_factory=dict)
    previous: dict[str, int] = field(default_factory=dict)
    networks: Counter[str] = field(default_factory=Counter)
    """How many IPv6 clients of each /48 are counted in this one, or of a /64 of which each address is one."""
    told: bool = False

    def move(self, now: float) -> None:
        """Begin anew if the window is over."""
        past = self.count_past(now)
        if past > 0:
            self.previous = self.current if past == 1 else {}
            self.current = {}
            self.networks.clear()
            self.began += past * self.seconds
            self.told = False

    def count_past(self, now: float) -> int:
        """How many windows have gone by since this one began."""
        return int((now - self.began) // self.seconds)

    def weigh(self, client: str, now: float) -> float:
        """How much of what the window before has counted still lies within the last `seconds`."""
        return self.previous.get(client, 0) * (1 - (now - self.began) / self.seconds)


class Refusals:
    """Counts refusals by limit and client, as a sliding window counter does: those of the window before weigh as much
    as the last `within` seconds still cover of it. All that comes from one IPv6 /64 is one client, as it is for limits
    on `remote_address`, unless it must not be blocked as one: then each of its addresses is one, for what others there
    do is none of its fault. For one thread, `take` for any.

    `now` is in seconds and never jumps.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic, most_clients: int = MOST_CLIENTS) -> None:
        self._now = now
        self._most_clients = most_clients
        self._windows: dict[tuple[str, str], _Window] = {}
        self._offenders: dict[str, Rule] = {}
        self._taken: deque[tuple[float, str]] = deque(maxlen=MOST_BLOCKS)
        self._spared: dict[str, float] = {}
        self._parted: dict[str, float] = {}
        """Until when addresses of a /64 are counted one by one."""
        self._lock = threading.Lock()
        self.waiting = threading.Event()
        """Set when somebody has joined those that are to be blocked."""

    def note(self, rule: Rule, told: str) -> None:
        """A limit has refused a request of a client, whose address, or IPv6 /64, is `told`; else nothing is counted."""
        escalate, client = rule.escalate, find_culprit(told)
        if escalate is None or client is None:
            return
        now, group, share = self._now(), _find_group(client), SHARE
        if self._parted and now < self._parted.get(client, now):
            group, share = client, SHARE * SHARE
            client = read_address(told)
            if client is None:  # only the /64 is told
                return
        if self._spared and now - self._spared.get(client, -_MINUTE) < _MINUTE:
            return
        place = (rule.domain, rule.name)
        window = self._windows.get(place)
        if window is None or window.seconds != escalate.within:
            window = self._begin(place, now, escalate.within)
        window.move(now)
        before = window.current.get(client)
        if before is None and not self._admit(rule, window, group, share):
            return
        number = window.current[client] = (before or 0) + 1
        if number + window.weigh(client, now) >= escalate.after:
            window.current[client] = 0
            window.previous.pop(client, None)
            with self._lock:
                if self._may_wait(client):
                    self._offenders[client] = rule
            self.waiting.set()

    def take(self) -> tuple[str, Rule] | None:
        """The next client that is to be blocked, and the limit that has refused it; None if there is none, or too many
        were taken in the last minute."""
        now = self._now()
        with self._lock:
            while self._taken and now - self._taken[0][0] >= _MINUTE:
                self._taken.popleft()
            if not self._offenders or len(self._taken) == MOST_BLOCKS:
                return None
            greedy = {each for each, number in Counter(network for _, network in self._taken).items()
                      if each and number >= MOST_BLOCKS // SHARE}  # fmt: skip
            client = next((each for each in self._offenders if _find_group(each) not in greedy), None)
            if client is None:
                return None
            self._taken.append((now, _find_group(client)))
            return client, self._offenders.pop(client)

    def spare(self, client: str) -> None:
        """Note that the client that was taken last must not be blocked: its place is for another, and refusals of it
        count for nothing for a minute. Addresses of a /64 are too many to be tried beyond their share, each time."""
        now = self._now()
        with self._lock:
            if self._taken and find_culprit(client) not in self._parted:
                self._taken.pop()
            lately = {each: at for each, at in self._spared.items() if now - at < _MINUTE}
            self._spared = {**lately, client: now} if len(lately) < MOST_WAITING else lately

    def part(self, client: str, seconds: float) -> None:
        """Note that the /64 that was taken last must not be blocked as one: its place is for another, and for so long
        its addresses are counted one by one."""
        now = self._now()
        with self._lock:
            if self._taken:
                self._taken.pop()
            lately = {each: until for each, until in self._parted.items() if now < until}
            if len(lately) < MOST_WAITING:
                lately[client] = now + seconds
            self._parted = lately

    def _may_wait(self, client: str) -> bool:
        """Whether there is room for one more that is to be blocked."""
        group = _find_group(client)
        if len(self._offenders) >= MOST_WAITING:
            return client in self._offenders
        return not group or sum(_find_group(each) == group for each in self._offenders) < MOST_WAITING // SHARE

    def _begin(self, place: tuple[str, str], now: float, seconds: int) -> _Window:
        """A window for a limit that has none; those in which nothing counts any more are forgotten."""
        self._windows = {each: window for each, window in self._windows.items() if window.count_past(now) < 2}
        window = self._windows[place] = _Window(now, seconds)
        return window

    def _admit(self, rule: Rule, window: _Window, group: str, share: int) -> bool:
        """Whether somebody new is counted, of a group that has so many-th of all places."""
        if group and window.networks[group] >= max(1, self._most_clients // share):
            return False
        if len(window.current) < self._most_clients:
            if group:
                window.networks[group] += 1
            return True
        if not window.told:
            window.told = True
            log.warning("%s refuses more than %d clients at once; no more are counted.", rule.name, self._most_clients)
        return False


def _find_group(client: str) -> str:
    """The /48 of an IPv6 client; nothing for an IPv4 one, whose addresses are not its to choose."""
    return find_network(client.partition("/")[0]) if ":" in client else ""


class Askers:
    """Who has asked this limiter: proxies and applications, each of which speaks for many. One that is not told apart
    from its clients (it is no trusted proxy, say) is refused as if it were the only one, and to block it would lock all
    of them out. `note` is for one thread, `in` for any.

    Whoever reaches the limiter may ask, and tell of any client whatever he likes. So only who shows the `token` has
    clients blocked by what he asks; where there is none, nobody has."""

    def __init__(self, token: str = "") -> None:
        self._known: set[str] = set()
        self._token = token.encode("utf-8", "surrogateescape")

    def vouch(self, fields: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether who asks with these header fields (gRPC: metadata) has shown the token."""
        if not self._token:
            return False
        return any(name == TOKEN_FIELD and compare_digest(value, self._token) for name, value in fields)

    def note(self, peer: str) -> None:
        """Somebody at this address has asked."""
        if peer not in self._known and len(self._known) < MOST_ASKERS:
            self._known |= {peer, read_address(peer) or peer}

    def __contains__(self, address: object) -> bool:
        return address in self._known

    def __iter__(self) -> Iterator[str]:
        """Their addresses."""
        return (each for each in tuple(self._known) if read_address(each) == each)


class Escalator:
    """Blocks whom limits keep refusing, in a thread of its own."""

    def __init__(self, refusals: Refusals, blocks: Blocks, is_absent: Callable[[], bool] = lambda: False) -> None:
        """`is_absent` says whether there is no database, and none is expected."""
        self._refusals = refusals
        self._blocks = blocks
        self._is_absent = is_absent
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="escalation", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._refusals.waiting.set()
        self._thread.join()

    def block_all(self) -> None:
        """Block everybody who is to be blocked now. One that cannot be is told of in the log, and counted anew."""
        while (taken := self._refusals.take()) is not None and not self._stopping.is_set():
            client, rule = taken
            assert rule.escalate is not None
            try:
                blocked = self._blocks.block(client, rule.escalate.block, describe(client, rule))
                if blocked is False and "/" in client:  # somebody who is safe lives there, who is not all of it
                    self._part(client, max(PARTED_SECONDS, 2 * rule.escalate.within))
                elif blocked is False:
                    self._refusals.spare(client)
            except NetlimitError as error:
                log.error("%s cannot be blocked: %s", client, error)
            except Exception:  # whatever it is: it must not end the thread
                log.exception("%s cannot be blocked; this is a fault of netlimit's own.", client)

    def _part(self, client: str, seconds: float) -> None:
        log.warning("The addresses in %s are counted one by one for %d minutes.", client, seconds // _MINUTE)
        self._refusals.part(client, seconds)

    def _run(self) -> None:
        due = 0.0
        while not self._stopping.is_set():
            self._refusals.waiting.wait(_LOOK_SECONDS)
            self._refusals.waiting.clear()
            self.block_all()
            if time.monotonic() >= due:
                due = time.monotonic() + CLEAR_SECONDS
                self._clear()

    def _clear(self) -> None:
        try:
            self._blocks.clear()
        except NetlimitError as error:
            if not self._is_absent():
                log.error("Blocks that are over stay for now: %s", error)


def describe(client: str, rule: Rule) -> str:
    """Why a client is blocked, in a sentence."""
    escalate = rule.escalate
    assert escalate is not None
    return (
        f"{client} was refused {escalate.after} times within {escalate.within} s by the limit {rule.name} of the "
        f"domain {rule.domain}."
    )
