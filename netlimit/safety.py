"""The safe set: what no rule may touch, why, and for how long after the reason has gone.

It grows by itself: who is logged in by SSH, who has spoken to the API with a token that is good, the default gateways,
the far ends of the tunnels by which these are reached, and the hosts of the database and of the counter store. Nobody
joins who has not proved who he is, or whom the settings do not name. And nobody fills it: of each kind of reason so
many addresses are in it, the surest reasons come first, and the settings leave room for them.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from ipaddress import ip_address, ip_network
from itertools import islice
from typing import NamedTuple

from netlimit.clientele import MOST, MOST_OF_BLOCK, MOST_SESSIONS_OF_BLOCK, Blocks
from netlimit.records import SafeReason
from netlimit.tunnels import FAR_END, Passage

log = logging.getLogger(__name__)

SETTINGS, SESSION, CLIENT, GATEWAY = "settings", "SSH session", "API client", "default gateway"
DATABASE, COUNTERS = "database host", "counter store (Redis) host"
REMEMBERED_SECONDS = 1800.0
"""How long an address stays safe after its reason has gone, so that who comes back is not locked out."""
LOOK_UP_SECONDS = 180.0
"""How often the hosts of servers are looked up."""
AGAIN_SECONDS = 5.0
"""And where one has never been found."""
FIRST_LOOK_UP_SECONDS = 1.0
"""How long the first look-up is waited for, at most."""
MOST_GATEWAYS, MOST_SESSIONS, MOST_REACHED = 64, 256, 64
"""So many addresses are safe as default gateways, by SSH sessions, and because the database was reached there."""
MOST_SERVERS = 512
"""So many are safe as the hosts of servers that settings name."""
MOST_OF_NAME = 64
"""So many of those by one name: an answer of a resolver may hold any number."""
ROOM = 65536
"""So many networks of an address family are safe at most."""
MOST_ENDS, MOST_ENDS_OF_ONE = 64, 4
"""So many are safe as the far ends of tunnels, and so many of those because of one address that is reached through
them: who comes by a tunnel chooses its far end."""
RESERVE, RESERVE_SHARE = MOST_GATEWAYS + MOST_SESSIONS + MOST_ENDS + MOST_REACHED + MOST_SERVERS + MOST, 4
"""What the settings leave to the others: room for all of them, or this share of a small set."""
_NEEDED = frozenset({GATEWAY, DATABASE, COUNTERS})
_NOWHERE: Mapping[int, int] = {}
_NO_SERVERS: Mapping[str, str] = {}
_NO_ENDS: Mapping[str, Passage] = {}
_JUST_NOW: Mapping[str, float] = {}
_SERVERS = "addresses of the hosts of servers"
_ENDS = "far ends of tunnels"


class _Kind(NamedTuple):
    """Who comes by one kind of reason: those who are there, how many are safe at most, the reasons of those who were
    there before, and how many of one block of IPv6 addresses there may be."""

    what: str
    there: Iterable[str]
    most: int
    reasons: tuple[str, ...]
    of_block: Mapping[int, int] = _NOWHERE


class SafeSet:
    """What is safe on one gateway, by network, each with its reason. Not thread-safe."""

    def __init__(self, settings: Iterable[str], servers: Mapping[str, str] | None = None, room: int = ROOM) -> None:
        """`settings` are networks that always are; `servers` are names of hosts, with their reason. Of each address
        family there is `room` for so many networks; beside those of the settings, which leave a part of it, for half
        as many."""
        self._settings = tuple(settings)
        self._room = min(room, ROOM)
        self._left_out: dict[str, float] = {}
        self._here: frozenset[str] = frozenset()
        self._were_here: dict[str, float] = {}
        self.reasons = self._settled
        self._lookup = Lookup(servers or {})

    def recall(self, reasons: Mapping[str, SafeReason]) -> None:
        """Take in what an earlier process knew; `update` then forgets what is too old."""
        self.reasons = {**{network: why for network, why in reasons.items() if why.seen}, **self._settled}

    def outlast_boot(self, booted: float) -> None:
        """Who was safe when the machine went down is so as if he had been seen when it was `booted` (Unix time): how
        long it was down is not known while its clock is wrong, and until then nobody could come back. Of who has been
        seen since, nothing changes, so this may be said at any start of a process."""
        self.reasons = {
            network: SafeReason(why.text, max(why.seen, booted)) if why.seen else why
            for network, why in self.reasons.items()
        }

    def follow_clock(self, moved: float) -> None:
        """The clock was set on by so many seconds (less than 0: back): what was seen a moment ago was so still."""
        self.reasons = {
            network: SafeReason(why.text, why.seen + moved if why.seen else why.seen)
            for network, why in self.reasons.items()
        }
        self._were_here = {each: at + moved for each, at in self._were_here.items()}
        self._left_out = {each: at + moved for each, at in self._left_out.items()}

    def update(
        self,
        now: float,
        sessions: Iterable[str],
        gateways: Iterable[str],
        clients: Iterable[str],
        own: Iterable[str] = (),
        reached: Mapping[str, str] = _NO_SERVERS,
        ends: Mapping[str, Passage] = _NO_ENDS,
        ages: Mapping[str, float] = _JUST_NOW,
    ) -> None:
        """Note who is there at `now` (Unix time), where the database was `reached` ("" without a network; each with the
        address that the server there says it has), and the outer addresses of the far `ends` of tunnels by which
        somebody of these is. Of several reasons the first counts. Since `clients` were seen there are as many seconds
        as `ages` says.

        The host's `own` addresses are never safe, whatever the reason: all that others send to it would be spared. One
        that is another host's now is as any other; but who spoke to the API from it may have been this host itself.
        """
        here = frozenset(str(ip_address(each)) for each in own)
        for network in self._settings:
            if _strip(network) in here - self._here:
                log.warning("NETLIMIT_SAFE names %s, an address of this host's own, which is never safe.", network)
        self._here = here
        self._were_here = {**_keep_recent(self._were_here, now), **dict.fromkeys(here, now)}
        recent = _keep_recent({network: why.seen for network, why in self.reasons.items() if why.seen}, now)
        known = {network: SafeReason(self.reasons[network].text, seen) for network, seen in recent.items()}
        if not reached:
            # Where it was it may still be, and no rule that was to spare it there must keep it from being found.
            known = {network: why for network, why in self.reasons.items() if why.text == DATABASE} | known
        # Who has been there before comes first.
        databases = _find_databases(reached, here)
        ways, logged_in, found = (
            sorted(many, key=lambda each: each not in known) for many in (gateways, sessions, databases)
        )
        servers = self._lookup.addresses()
        lately = (each for each in clients if ages.get(each, 0.0) < REMEMBERED_SECONDS)
        asking = [each for each in lately if each not in self._were_here]
        through = {each: ends[each].describe() for each in sorted(ends, key=lambda each: each not in known)}
        present = {
            **through,
            **servers,
            **dict.fromkeys(found, DATABASE),
            **dict.fromkeys(ways, GATEWAY),
            **dict.fromkeys(asking, CLIENT),
            **dict.fromkeys(logged_in, SESSION),
        }
        seen = {network: SafeReason(reason, now) for network, reason in present.items()}
        seen |= {
            each: _date_client(now - ages.get(each, 0.0), known.get(each)) for each in asking if present[each] == CLIENT
        }
        # Who is needed, too, stays what he was else for as long as others do.
        needed = {network for network, why in seen.items() if is_needed(why.text)}
        seen |= {network: why for network, why in known.items() if network in needed and not is_needed(why.text)}
        self._left_out = _keep_recent(self._left_out, now)
        choice = _Choice({**known, **seen}, self._settled, here, self._room)
        before = sorted(known, key=lambda each: -known[each].seen)
        for kind in (
            _Kind("default gateways", ways, MOST_GATEWAYS, (GATEWAY,)),
            _Kind("SSH sessions", logged_in, MOST_SESSIONS, (SESSION,), MOST_SESSIONS_OF_BLOCK),
            _Kind(_ENDS, _take_some_of_each(through, known, before), MOST_ENDS, ()),
            _Kind("hosts where the database was reached", found, MOST_REACHED, ()),
            _Kind(_SERVERS, servers, MOST_SERVERS, (DATABASE, COUNTERS)),
            _Kind("clients of the API", asking, MOST, (CLIENT,), MOST_OF_BLOCK),
        ):
            former = (each for each in before if known[each].text in kind.reasons)
            if not choice.take([*kind.there, *former], kind.most, kind.of_block):
                self._leave_out(kind.what, now)
        if self._lookup.crowded:
            self._leave_out(_SERVERS, now)
        if choice.unsettled:
            self._leave_out("networks of NETLIMIT_SAFE", now)
        self.reasons = choice.chosen

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be said of who is left out."""
        return tuple(_say_left_out(what) for what in self._left_out)

    def _leave_out(self, what: str, now: float) -> None:
        if what not in self._left_out:
            log.warning("%s", _say_left_out(what))
        self._left_out[what] = now

    @property
    def _settled(self) -> dict[str, SafeReason]:
        return {each: SafeReason(SETTINGS) for each in self._settings if _strip(each) not in self._here}


class _Choice:
    """Who of all that might be safe is, those first that come first."""

    def __init__(
        self, reasons: Mapping[str, SafeReason], settled: Mapping[str, SafeReason], here: frozenset[str], room: int
    ) -> None:
        self._reasons, self._here = reasons, here
        self._held: Counter[int] = Counter()
        self._rooms = dict.fromkeys((4, 6), room - min(room // RESERVE_SHARE, RESERVE))
        self.chosen: dict[str, SafeReason] = {}
        self.unsettled = False
        """Whether there is no room for all that the settings name."""
        for network, why in settled.items():
            if self._has_room(network):
                self.chosen[network] = why
            else:
                self.unsettled = True
        self._rooms = {family: min(room, self._held[family] + max(1, room // 2)) for family in self._rooms}

    def take(self, networks: Iterable[str], most: int, of_block: Mapping[int, int]) -> bool:
        """Choose of these, `most` at most, and so many `of_block`. Whether all are chosen."""
        blocks, taken, all_taken = Blocks(of_block), 0, True
        for network in networks:
            if network in self.chosen or _strip(network) in self._here:
                continue
            free = taken < most and blocks.take(network) and self._has_room(network)
            if free:
                self.chosen[network] = self._reasons[network]
                taken += 1
            all_taken = all_taken and free
        return all_taken

    def _has_room(self, network: str) -> bool:
        """Count a network of its family, if there is room. Everything (/0) takes two places in a set."""
        parsed = ip_network(network)
        places = 1 if parsed.prefixlen else 2
        if self._held[parsed.version] + places > self._rooms[parsed.version]:
            return False
        self._held[parsed.version] += places
        return True


def is_needed(reason: str) -> bool:
    """Whether who is safe for this reason is so only because the host itself talks with him. What is forwarded is
    touched by rules: else whoever feigned his address would pass them, and who is blocked would reach him."""
    return reason in _NEEDED or reason.startswith(FAR_END)


def _date_client(moment: float, before: SafeReason | None) -> SafeReason:
    """A client of the API counts from the `moment` at which he was seen, whoever names him later, unless he was there
    for another reason since, or is from the start of the machine."""
    stays = before is not None and before.seen > moment and not is_needed(before.text)
    return before if before is not None and stays else SafeReason(CLIENT, moment)


def _find_databases(reached: Mapping[str, str], here: frozenset[str]) -> Iterator[str]:
    """The hosts of the database. What a server says of itself counts only where the connection ends on this host,
    which leads it on: to a container, or by a proxy. Elsewhere it may be one behind somebody's translation, whose
    address here is a stranger's."""
    for address, said in reached.items():
        if address and not ip_address(address).is_loopback:
            yield address
            if str(ip_address(address)) not in here:
                continue
        if said:
            yield said


def _take_some_of_each(
    through: Mapping[str, str], known: Mapping[str, SafeReason], before: Iterable[str]
) -> Iterator[str]:
    """The far ends of tunnels, those that are there (`through`, each with its reason) and then those of `before`; few
    of those that have led to one address."""
    former = {each: known[each].text for each in before if known[each].text.startswith(FAR_END)}
    counts: Counter[str] = Counter()
    for outer, reason in {**through, **{each: text for each, text in former.items() if each not in through}}.items():
        _, _, inner = reason.rpartition(", by which ")
        counts[inner] += 1
        if counts[inner] <= MOST_ENDS_OF_ONE:
            yield outer


def _say_left_out(what: str) -> str:
    return f"There are more {what} than can be in the safe set: some are left out, and rules may hit them."


def _strip(network: str) -> str:
    """One address without the length of its prefix."""
    parsed = ip_network(network)
    return str(parsed.network_address) if parsed.prefixlen == parsed.max_prefixlen else network


class Lookup:
    """The addresses of hosts by name, looked up in a thread: a resolver that does not answer holds up nobody. What was
    found stays until something else is."""

    def __init__(self, names: Mapping[str, str], resolve: Callable[[str], Iterable[str]] | None = None) -> None:
        """`names` are hosts, each with what it is (the reason that its addresses have)."""
        self._names = {name.partition("%")[0] if _is_address(name) else name: what for name, what in names.items()}
        self._resolve = resolve or _resolve
        self._found: dict[str, tuple[str, ...]] = {name: (name,) for name in self._names if _is_address(name)}
        self._thread: threading.Thread | None = None
        self._due = 0.0
        self._missed, self._again = False, AGAIN_SECONDS
        self.crowded = False
        """Whether there were more addresses by one name than count."""

    def addresses(self) -> dict[str, str]:
        """Every address with what it is, at most so many of one name, and first those that need no look-up; those of
        this host itself are left out."""
        names = [name for name in self._names if not _is_address(name)]
        if names and time.monotonic() >= self._due and not (self._thread and self._thread.is_alive()):
            first, self._due = self._thread is None, time.monotonic() + LOOK_UP_SECONDS
            self._missed = False
            self._thread = threading.Thread(target=self._look_up, args=(names,), daemon=True)
            self._thread.start()
            if first:
                self._thread.join(FIRST_LOOK_UP_SECONDS)
        chosen: dict[str, str] = {}
        self.crowded = False
        for name in sorted(self._names, key=lambda each: not _is_address(each)):
            far = [each for each in self._found.get(name, ()) if not ip_address(each).is_loopback]
            self.crowded = self.crowded or len(far) > MOST_OF_NAME
            chosen |= dict.fromkeys(islice(far, MOST_OF_NAME), self._names[name])
        return chosen

    def _look_up(self, names: list[str]) -> None:
        for name in names:
            try:
                self._found[name] = tuple(self._resolve(name))
            except (OSError, UnicodeError) as error:
                log.warning("The %s %s cannot be looked up: %s.", self._names[name], name, error)
                self._missed = self._missed or name not in self._found
        if self._missed:  # as at a boot, before there is a resolver: of one that was found once, that may stand
            self._due = time.monotonic() + self._again
            self._again = min(2 * self._again, LOOK_UP_SECONDS)


def name_servers(databases: Iterable[str], counters: Iterable[str]) -> dict[str, str]:
    """The hosts of the database and of the counter store, by name or address, each with what it is."""
    return {**dict.fromkeys(counters, COUNTERS), **dict.fromkeys(databases, DATABASE)}


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _resolve(name: str) -> Iterable[str]:
    """In the order in which they are tried. Raises OSError."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return dict.fromkeys(str(where[0]).partition("%")[0] for *_, where in found)


def _keep_recent(moments: Mapping[str, float], now: float) -> dict[str, float]:
    """Those that are remembered. A clock that was ahead, as a machine's may be until it hears of the time, must not
    make anybody be so for longer: what is to come counts as now."""
    return {each: min(at, now) for each, at in moments.items() if now - at < REMEMBERED_SECONDS}
