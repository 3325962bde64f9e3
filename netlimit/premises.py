"""The host around a kernel, as far as rules depend on it: what it can do, its addresses and devices, who is safe."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from ipaddress import ip_address
from types import MappingProxyType
from typing import TYPE_CHECKING

from netlimit.addresses import read_plain
from netlimit.conflicts import Finding, HostReport, Spoiled, find_conflicts, is_told, read_given, read_publications
from netlimit.dying import list_led
from netlimit.errors import say_fault
from netlimit.kernel.base import QUEUEING, Addresses, Door, HostFacts, Kernel, Unanswered
from netlimit.limits import Facts, own_addresses, parse_safe
from netlimit.marks import USUAL
from netlimit.neighbours import Neighbours
from netlimit.numbers import PurposeKey
from netlimit.overdue import read_clock
from netlimit.publications import Publications, find_led
from netlimit.records import DISPENSABLE, HostStatus
from netlimit.rules import Target
from netlimit.safety import SafeSet, is_needed
from netlimit.several import say_more
from netlimit.tree import Queues, SavedRoot, Topology
from netlimit.tunnels import TUNNELS, Passage, follow_on
from netlimit.unchanged import Unchanged

if TYPE_CHECKING:  # for the types alone
    from netlimit.controller import Setup

log = logging.getLogger(__name__)
Roots = Mapping[str, SavedRoot]
CLOCK_SLACK = 2.0
"""Seconds by which the clock may run apart from one that nobody sets before it is taken as set."""
MOST_LOCAL = 300
"""So many networks are told that end on this host by its routes: some for each of its devices."""
_OF_HOST = ("capabilities", "hz", "own", "management", "networks", "local")
"""What others judge rules by that concern a gateway: it stays as it was told last until it is looked at (a controller
that begins while it is paused does not)."""
UNFOLLOWED = "The outer addresses of the far ends of some tunnels are not known, so that rules may hit them"


class Premises:
    """What was found out of one host. `probe` comes first."""

    def __init__(self, kernel: Kernel, setup: Setup) -> None:
        self._kernel = kernel
        self._setup = setup
        self._found: HostFacts | None = None
        self._seen = False
        self._told: Mapping[str, object] = {}
        self.unanswered: Mapping[str, str] = {}
        """Of which capabilities the last probe could not tell whether they are there, and why."""
        self._where = Addresses((), ())
        self._safe = SafeSet(setup.safe, setup.servers, setup.set_size)
        self.recalls = False
        self.elapsed: Callable[[], float] = time.monotonic
        """Seconds by a clock that nobody sets."""
        self.uptime: Callable[[], float] = read_clock
        """Seconds since the machine has started, by such a clock."""
        self._offset: float | None = None
        self._doors = set(setup.doors)
        self._topology = Topology()
        self._doubted = False
        self._translated: frozenset[int] = frozenset()
        self._foreign: Mapping[str, str] = {}
        self._barred: Mapping[str, str] = {}
        self._conflicts: tuple[str, ...] = ()
        self._surveyed = Unchanged[HostReport]()
        self.has_surveyed = False
        """Whether others have been looked for that get in the way of limits."""
        self.spoiled: Mapping[Spoiled, Finding] = {}
        self.published = self.given = Publications()
        self._led: frozenset[tuple[str, int]] = frozenset()
        self.led: Mapping[str, tuple[str, ...]] = {}
        """Where programs listen at what may lead to others, as sets have it; nothing before the first look."""
        self._unread: str | None = None
        self._unfollowed: str | None = None
        self._ends: Mapping[str, Passage] = {}
        self._peers: frozenset[str] = frozenset()
        self._neighbours = Neighbours(kernel, setup.mark_mask)
        self.refused: dict[PurposeKey, str] = {}
        """Limits whose buckets the kernel does not take, each with the reason; until the host can do something else."""
        self.unled: dict[str, str] = {}
        """Devices on which the program was missing that leads packets to classes, each with the reason; until it can be
        had."""
        self._mask: int | None = None

    @property
    def facts(self) -> Facts:
        """What compiling goes by."""
        assert self._found is not None, "probe comes first"
        rejecting = {f"reject marks {hook}": reason for hook, reason in self._neighbours.choice.reject.items()}
        return Facts(
            host=self._setup.host,
            mark_mask=self._mask or self.wanted_mask,
            set_size=self._setup.set_size,
            own=own_addresses(self._where.own),
            safe=parse_safe(tuple(self._safe.reasons)),
            needed=self._needed,
            management=self._management,
            peers=self._peers,
            capabilities={**self._capabilities, **rejecting},
            topology=self._topology,
            foreign=self._foreign,
            barred=self._barred,
            unled=dict(self.unled),
            hz=self._found.hz,
            translated=self._translated,
            refused=dict(self.refused),
        )

    @property
    def own(self) -> tuple[str, ...]:
        """The host's own addresses."""
        return self._where.own

    @property
    def edges(self) -> tuple[str, ...]:
        """Networks that end on the host, and those that it reaches without a gateway: at their edges is broadcast."""
        return (*self._local, *self._networks)

    @property
    def doors(self) -> frozenset[Door]:
        """Where this host is managed. One stays when sshd ends: the connections that it served go on."""
        return frozenset(self._doors)

    @property
    def wanted_mask(self) -> int:
        """The bits of the packet mark that shall be ours; those that are in force go on until they are changed."""
        return self._neighbours.choice.mask

    def keep_mask(self, mask: int | None) -> None:
        """Note the bits of the packet mark that are in force (None: none yet)."""
        self._mask = mask
        self._neighbours.keep(mask)

    def look_at_marks(self, patience: float = 0.0) -> bool:
        """Look who else uses packet marks; whether limits can be enforced now that could not, or no longer."""
        return self._neighbours.look(patience)

    def probe(self, reported: Iterable[HostStatus]) -> None:
        """Find out what the host can do, once; `reported` is what gateways have said before."""
        self.recall(reported)
        if self._found is None:
            self._found = self._settle(self._kernel.probe(), {})
        for name, reason in self._found.capabilities.items():
            if reason and name in DISPENSABLE:
                log.info("Not there, and not needed: %s. %s", name, reason)
            elif reason:
                log.warning("Missing: %s. %s", name, reason)

    def recall(self, reported: Iterable[HostStatus]) -> None:
        """Take in, once, what an earlier process has `reported`: who was safe a moment ago is so still, though this one
        has not seen him."""
        if not self.recalls:
            for status in reported:
                if status.host == self._setup.host:
                    self._told = {field: getattr(status, field) for field in _OF_HOST}
                    self._safe.recall(status.safe_reasons)
                    self._peers = _read_peers(status.peers)
            self.recalls = True

    def probe_again(self) -> bool:
        """Find out whether the host can do something else now than when it was probed."""
        before, known = self._found, {} if self._found is None else self._found.capabilities
        found = self._kernel.probe()
        self._found = self._settle(found, known)
        has_changed = before is None or before.capabilities != self._found.capabilities
        if self.unled and not found.capabilities.get("bpf"):
            self.unled.clear()
            has_changed = True
        if has_changed:
            self.refused.clear()
        return has_changed

    def _settle(self, found: HostFacts, known: Mapping[str, str | None]) -> HostFacts:
        """What to go by where there was no answer: what is known; else what the kernel already holds of ours shows
        that it can be done, and must not go for it. Where it holds nothing, nothing can be lost. Raises KernelError."""
        before = self.unanswered
        self.unanswered = {name: why for name, why in found.capabilities.items() if isinstance(why, Unanswered)}
        if self.unanswered and not before:
            log.warning("%s", self._tell_unanswered())
        held = self._find_held() if self.unanswered.keys() - known.keys() else {}
        settled = {name: known.get(name, None if held.get(name) else why) for name, why in self.unanswered.items()}
        return found._replace(capabilities={**found.capabilities, **settled})

    def _find_held(self) -> dict[str, bool]:
        """Whether the kernel holds something of ours that shows a capability, for those without an answer."""
        structure = self._kernel.structure()
        limits = bool(structure.sets or structure.chains)
        queues = bool(self._kernel.queues().trees)
        return {name: queues if name in QUEUEING else limits for name in self.unanswered}

    def _tell_unanswered(self) -> str:
        name, why = next(iter(self.unanswered.items()))
        more = say_more(self.unanswered)
        return (
            f"Whether this host can do {name}{more} could not be found out, for a reason that may pass "
            f"({why.rstrip('.')}): what the kernel holds stays in force, and it is tried again."
        )

    def look(self, saved: Roots, translated: frozenset[int] = frozenset()) -> None:
        """Read devices, routes, the root qdiscs of others, what they have on the ingress, and where somebody may
        translate; somebody may soon in the families of `translated`, for he did before."""
        topology, translating = self._kernel.topology(), self._kernel.translating() | translated
        barred = self._kernel.barred()
        self.find_foreign(self._kernel.queues(), saved)
        # Last: after a look that fails halfway, all has moved still.
        self._topology, self._translated, self._barred, self._doubted = topology, translating, barred, False

    def has_moved(self) -> bool:
        """Whether devices, routes, who may translate, or who is in the way on the ingress, are others than at the last
        look."""
        if self._doubted or self._kernel.topology() is not self._topology:
            return True
        return self._kernel.translating() != self._translated or self._kernel.barred() != self._barred

    def forget(self) -> None:
        """Devices and their qdiscs may be others than those that are known, by which rules stand until the next look:
        what it finds is compared with them."""
        self._doubted = True

    def find_foreign(self, queues: Queues, saved: Roots) -> bool:
        """Note the devices with a root qdisc of somebody else, but for those that may be taken over as they are now;
        whether they are others than before."""
        before = self._foreign
        self._foreign = {
            device: text
            for device, text in queues.foreign.items()
            if device not in saved or self._kernel.save_root(device) != saved[device]
        }
        return self._foreign != before

    def find_safe(
        self,
        clients: Mapping[str, float],
        now: float,
        reported: Iterable[HostStatus] | None = (),
        reached: Mapping[str, str] = MappingProxyType({}),
    ) -> set[str] | None:
        """Find out the host's own addresses, who is safe at `now` (Unix time; `clients` are those of the API, with the
        seconds since each was seen; `reached` is where the database was), the ports by which it is managed, and the
        addresses of other gateways, of what they have `reported` (None: nobody can be asked, and those that are known
        count). Returns the addresses that have joined or left; None if nothing has changed."""
        self._follow_clock(now)
        if not self._seen:
            self._safe.outlast_boot(now - self.uptime())
        where = self._read_addresses()
        own, safe, others = set(self._where.own), set(self._safe.reasons), (self._management, self._peers)
        needed = self._needed
        self._doors.update(where.doors)
        self._ends = self._follow_tunnels([*self._topology.gateways, *where.peers, *clients])
        self._safe.update(now, where.peers, self._topology.gateways, clients, where.own, reached, self._ends, clients)
        self._where, self._seen = where, True
        # Each for itself: an address that others take over may be safe for another reason from then on.
        changed = (own ^ {*self._where.own}) | (safe ^ {*self._safe.reasons}) | {*map(str, needed ^ self._needed)}
        known = self._peers if reported is None else find_peers(reported, self._setup.host)
        self._peers = known - {*where.own}
        return changed if changed or others != (self._management, self._peers) else None

    @property
    def _needed(self) -> frozenset[Target]:
        reasons = self._safe.reasons
        return frozenset(parse_safe(tuple(each for each in reasons if is_needed(reasons[each].text))))

    def _follow_clock(self, now: float) -> None:
        """A clock that is set, at whatever moment, makes nobody safe for less long, or longer."""
        offset = now - self.elapsed()
        moved = 0.0 if self._offset is None else offset - self._offset
        if abs(moved) > CLOCK_SLACK:
            self._safe.follow_clock(moved)
        self._offset = offset

    def _read_addresses(self) -> Addresses:
        """The addresses of the host, and who is logged in; those that are known, with a note, where they cannot be
        read."""
        try:
            where = self._kernel.addresses()
        except Exception as error:
            if self._unread is None:
                log.warning("The addresses of this host cannot be read.", exc_info=True)
            self._unread = (
                f"The addresses of this host, and who is logged in by SSH, cannot be read ({say_fault(error)}): those "
                "that were known before stay safe."
            )
            return self._where
        self._unread = None
        for note in where.notes:
            if note not in self._where.notes:
                log.warning("%s", note)
        return where

    def _follow_tunnels(self, reached: Iterable[str]) -> Mapping[str, Passage]:
        """The far ends of the tunnels by which somebody is `reached`; those that are known, with a note, where they
        cannot be read. Where there is no tunnel, nothing is read."""
        if not any(device.kind in TUNNELS for device in self._topology.every.values()):
            self._unfollowed = None
            return {}
        try:
            followed, problem = follow_on(self._kernel, reached, self._management, self._setup.keepers)
            ends = followed.ends
        except Exception as error:
            log.debug("Tunnels cannot be followed.", exc_info=True)
            ends, problem = self._ends, say_fault(error)
        told = f"{UNFOLLOWED} ({problem}): put them into NETLIMIT_SAFE." if problem else None
        if told is not None and self._unfollowed is None:
            log.warning("%s", told)
        self._unfollowed = told
        return ends

    def look_for_conflicts(self) -> None:
        """Look for what gets in the way of limits. It only advises: should the look fail, that is told."""
        before, self.has_surveyed = self._conflicts, True
        try:
            report = self._kernel.survey(thorough=False)
            found = find_conflicts(report, self._surveyed)
            self.published = self._surveyed.ask(read_publications, report)
            self.given = self._surveyed.ask(_read_given, report)
            self._find_led(report)
        except Exception as error:
            log.debug("The survey failed.", exc_info=True)
            self.spoiled, self.published, self.given = {}, Publications(), Publications()
            self._conflicts = (f"What gets in the way of limits on this host is not known: {say_fault(error)}.",)
        else:
            self.spoiled = {each.spoils: each for each in reversed(found) if each.spoils}
            self._conflicts = tuple(map(str, filter(is_told, found)))
        for conflict in self._conflicts:
            if conflict not in before:
                log.warning("%s", conflict)

    def _find_led(self, report: HostReport) -> None:
        """What led to others, and has one that listens, leads there still while not everything can be read."""
        led = find_led(report.listening, self.published)
        if report.unknown:
            led |= self._led & (report.listening or self._led)
        self._led = led
        self.led = list_led(self._led)

    def describe(self) -> dict[str, object]:
        """What a gateway says of its host: fields of HostStatus."""
        if self._found is None or not self._seen:
            return {**self._told, **self._describe_others()}
        return {
            "capabilities": self._capabilities,
            "hz": self._found.hz,
            "notes": self.notes,
            "own": self._where.own,
            "management": self._management,
            "networks": self._networks,
            "local": self._local,
            **self._describe_others(),
        }

    def _describe_others(self) -> dict[str, object]:
        """Whom a gateway knows; from a run before, too."""
        reasons = self._safe.reasons
        return {"safe": tuple(reasons), "safe_reasons": dict(reasons), "peers": tuple(sorted(self._peers))}

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be said of the host."""
        found = self._found
        if found is None:
            return ()
        told = [*filter(None, [self._unread, self._unfollowed]), *self._where.notes, *self._neighbours.choice.notes]
        if self.unanswered:
            told.append(self._tell_unanswered())
        if self._mask is not None and self._mask != self.wanted_mask:
            told.append(
                f"Others use bits of the packet mark {self._mask:#x}, which netlimit uses until it can move to "
                f"{self.wanted_mask:#x}: when all rules are applied, and the database answers."
            )
        elif self.wanted_mask != USUAL:
            told.append(f"netlimit uses the bits {self.wanted_mask:#x} of the packet mark.")
        return (*found.notes, *told, *self._safe.notes, *self._conflicts)

    @property
    def _capabilities(self) -> Mapping[str, str | None]:
        assert self._found is not None, "probe comes first"
        return {
            **self._found.capabilities,
            "marks": self._neighbours.choice.problem,
            "reject marks": next(iter(self._neighbours.choice.reject.values()), None),
        }

    @property
    def _networks(self) -> Mapping[str, tuple[str, ...]]:
        """Where packets leave without a gateway, and by default, by prefix."""
        return _find_networks(self._topology)

    @property
    def _local(self) -> tuple[str, ...]:
        """What ends here by routes and is no own address: the widest networks of them, where there are many."""
        own = own_addresses(self._where.own)
        others = (text for text in self._topology.local if text.partition("/")[0] not in own)
        return tuple(sorted(others, key=lambda text: int(text.partition("/")[2]))[:MOST_LOCAL])

    @property
    def _management(self) -> tuple[int, ...]:
        """The ports of which open connections pass."""
        return tuple(sorted({door.port for door in self._doors}))


def _read_given(report: HostReport) -> Publications:
    return read_given(report, read_publications(report))


@lru_cache(maxsize=2)
def _find_networks(topology: Topology) -> Mapping[str, tuple[str, ...]]:
    """The same, once for each reading: routes may be a million, and reports are many."""
    routes = (route for route in topology.routes if route.connected or route.prefix.endswith("/0"))
    return {route.prefix: route.devices for route in routes}


def find_peers(reported: Iterable[HostStatus], host: str) -> frozenset[str]:
    """The addresses of the other gateways of a database."""
    return _read_peers(text for status in reported if status.host != host for text in status.own)


def _read_peers(told: Iterable[str]) -> frozenset[str]:
    """Those that lead to one gateway, wherever it is asked for; what is no address tells nothing."""
    return frozenset(filter(None, map(_read_peer, told)))


def _read_peer(text: str) -> str | None:
    plain = read_plain(text)
    if plain is None or "/" in plain:
        return None
    address = ip_address(plain)
    nobody = address.is_loopback or address.is_link_local or address.is_multicast or address.is_unspecified
    return None if nobody else plain
