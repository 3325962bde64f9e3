"""The limiter's rules: limits by domain and descriptor, and which of them a descriptor finds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

from netlimit.l7.decision import new
from netlimit.l7.limit import Limit
from netlimit.l7.patterns import Patterns

LONGEST_KEY = 200
"""Letters of a counter's key at most; of longer ones it has digests, so that nobody can fill the memory with them."""
_LONGEST_PART = 43
"""Letters of what stays as it is in such a key: addresses and their /64s do, so that it is known whose key it is."""
BROUGHT = "override:"
"""With this the names of rules begin whose limit a request has brought."""
_BROUGHT_REMEMBERED = 4096
ARRIVALS = "arrivals:"
"""With this the names of rules begin by whose limit requests are counted as they come, besides as they are served."""
CLIENT_KEY = "remote_address"
"""The key of an entry that tells whom a request comes from, as Envoy has it."""
PATH_KEY = "path"
"""The key of an entry that tells what a request is for."""
METHOD_KEY = "method"
"""The key of an entry that tells what is to be done with it."""
_AS_GET = 2**16
"""By so much the number of a reading is greater in which HEAD is taken for GET. No path has as many meanings."""


class Entry(NamedTuple):
    """A part of a descriptor: what is told of a request, such as `remote_address`, `10.1.2.3`."""

    key: str
    value: str = ""


class Descriptor(NamedTuple):
    """What is told of a request, from the general to the particular; finds one rule or none."""

    entries: tuple[Entry, ...]
    hits: int | None = None
    """What it weighs, if not what the whole request does; 0 looks and counts nothing."""
    limit: Limit | None = None
    """The limit that the asker wants instead of the rule's."""
    besides: int = 0
    """Of which reading of the path it is, where that may mean several things: 0 is the first. Of the path below the
    root path it is ~0, ~1 and so on: that is another name of the same. One without a path is of every reading, and so
    is one without a method, where HEAD has a reading as GET (`read_besides_as_get`)."""


class Mode(StrEnum):
    """How strictly a limit is kept."""

    HARD = "hard"
    """Never one over."""
    SOFT = "soft"
    """Up to `overshoot` percent over."""
    ELASTIC = "elastic"
    """Over it (up to `overshoot` percent, if given) while the machine or the upstream has room; low priority loses it
    first."""
    OBSERVE = "observe"
    """Counts, refuses nothing."""


class OnLimit(StrEnum):
    """What becomes of a request that is over the limit."""

    REJECT = "reject"
    """429."""
    QUEUE = "queue"
    """It waits for its turn, at most `max_wait` seconds; 429 if its turn is later."""
    DEFER = "defer"
    """202: it is kept, and replayed to the upstream at the permitted rate."""
    OBSERVE = "observe"
    """Nothing: it is counted, and passes."""


_OBSERVE_ALWAYS, _OBSERVE_OVER = Mode.OBSERVE, OnLimit.OBSERVE
"""Looked up once: that of a member of an Enum takes a while."""


class OnFailure(StrEnum):
    """What happens while the counters cannot be asked."""

    OPEN = "open"
    """This process counts by itself, up to the `emergency` limit."""
    CLOSED = "closed"
    """Refused."""


@dataclass(frozen=True, slots=True)
class Escalation:
    """A client that is refused `after` times `within` seconds is blocked in the kernel for `block` seconds."""

    after: int
    within: int
    block: int


@dataclass(frozen=True, slots=True)
class Rule:
    """A limit and what belongs to it. `domain` and `name` together are its identity."""

    domain: str
    name: str
    """From its path in the tree: keys and values, `auth_type=login,user`; unique in the domain."""
    limit: Limit | None = None
    """None: no limit on the rate."""
    concurrency: Limit | None = None
    """How many requests may be in flight at once (algorithm CONCURRENCY)."""
    mode: Mode = Mode.HARD
    overshoot: int | None = None
    """Percent over the limit that SOFT tolerates always, and ELASTIC while there is room (None: any number)."""
    priority: int = 50
    """For ELASTIC, 0 to 100: the lower, the earlier a request loses its room."""
    on_limit: OnLimit = OnLimit.REJECT
    max_wait: float = 30.0
    """Seconds that a request waits at most when it is queued."""
    on_failure: OnFailure = OnFailure.OPEN
    emergency: Limit | None = None
    """What passes here while the store is away and `on_failure` is open; None: the rule's own limit."""
    alias: str | None = None
    """The `name` of its `rate_limit`, by which others replace it."""
    replaces: tuple[str, ...] = ()
    unlimited: bool = False
    quota: bool = False
    """Lyft's `quota_mode`."""
    detailed_metric: bool = False
    value_to_metric: tuple[int, ...] = ()
    """Which entries of a descriptor (from 0) put their value into the metric's name even if the rule leaves it open."""
    escalate: Escalation | None = None

    @property
    def is_of_clients(self) -> bool:
        """Whether each of its counters is of one client's address, or of his block; not where a pattern may have all
        that it fits share one (`share_threshold`)."""
        return names_client(self.name) and "*" not in self.name

    @property
    def is_brought(self) -> bool:
        """Whether its limit is one that a request has brought."""
        return self.name.removeprefix(ARRIVALS).startswith(BROUGHT)

    @property
    def observes(self) -> bool:
        """Whether it refuses nothing."""
        return self.mode is _OBSERVE_ALWAYS or self.on_limit is _OBSERVE_OVER


def names_client(name: str) -> bool:
    """Whether `remote_address` is among the keys of a rule with this name."""
    return CLIENT_KEY in (step.partition("=")[0] for step in name.split(","))


@dataclass(frozen=True, slots=True)
class Node:
    """A place in a domain's tree: the rule of descriptors that end here, and where those that go on continue."""

    rule: Rule | None = None
    exact: dict[Entry, Node] = field(default_factory=dict)
    wild: Patterns[Node] = field(default_factory=Patterns)
    """In the order of the document."""
    default: dict[str, Node] = field(default_factory=dict)
    """By key, for entries whose rule names no value."""
    shared: bool = False
    """All values that the wildcard of this place matches share one counter (`share_threshold`)."""

    def walk(self) -> Iterator[Rule]:
        """Every rule from here on."""
        if self.rule is not None:
            yield self.rule
        for node in (*self.exact.values(), *(node for _, node in self.wild), *self.default.values()):
            yield from node.walk()


class Match(NamedTuple):
    """The rule that a descriptor finds, and the key of its counter."""

    rule: Rule
    key: str


def find_match(root: Node, entries: Sequence[Entry]) -> Match | None:
    """The rule for a descriptor: at each depth the exact value, then the first wildcard, then the key alone.

    A rule counts only for descriptors that are as long as its own path, as in Envoy's ratelimit.
    """
    node: Node | None = root
    free: list[str] = []  # what the rule leaves open tells its counters apart
    for entry in entries:
        assert node is not None
        following = node.exact.get(entry)
        if following is None and node.wild and (found := node.wild.find(entry)) is not None:
            pattern, following = found
            free.append(pattern.value if following.shared else entry.value)
        if following is None:
            key, value = entry
            following = node.default.get(key)
            free.append(value)
        if following is None:
            return None
        node = following
    if node is None or node.rule is None or node is root:
        return None
    return new(Match, (node.rule, make_key(free)))


def _leads(node: Node, entries: Sequence[Entry], rule: Rule) -> bool:
    if not entries:
        return node.rule is rule
    entry, *rest = entries
    ways = [node.exact.get(entry), node.default.get(entry.key)]
    ways += [following for pattern, following in node.wild if pattern.fits(entry)]
    return any(_leads(way, rest, rule) for way in ways if way is not None)


def make_key(values: Sequence[str]) -> str:
    """The key of a counter for these values."""
    key = values[0] if len(values) == 1 else join_key(values)
    return key if len(key) <= LONGEST_KEY else _shorten(values, join_key)


def _shorten(texts: Sequence[str], join: Callable[[Sequence[str]], str]) -> str:
    """One text for several that are too long together: those that are long go for digests, or else all of them."""
    if len(texts) > 1:
        parts = join([text if len(text) <= _LONGEST_PART else _digest(text, 16) for text in texts])
        if len(parts) <= LONGEST_KEY:
            return parts
    return _digest(join(texts), 64)


def _digest(text: str, size: int) -> str:
    return "#" + blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).hexdigest()


def join_key(values: Sequence[str]) -> str:
    """One text for several values, different for different ones: what joins them is escaped within them."""
    if len(values) == 1:
        return values[0]
    return "|".join(value.replace("\\", "\\\\").replace("|", "\\|") for value in values)


def name_counter(rule: Rule, key: str) -> str:
    """One text for the counter of a rule and a key: who is deferred for it waits in the line of this name."""
    return join_key((rule.domain, rule.name, key))


class RuleSet:
    """The rules of all domains. It never changes: another takes its place."""

    def __init__(self, domains: dict[str, Node]) -> None:
        self.domains = domains

    def find(self, domain: str, entries: Sequence[Entry]) -> Match | None:
        """The rule that a descriptor finds in a domain, or None."""
        root = self.domains.get(domain)
        return None if root is None else find_match(root, entries)

    def fits(self, domain: str, rule: Rule, entries: Sequence[Entry]) -> bool:
        """Whether a rule is one for such entries, whatever is nearer to them."""
        return domain in self.domains and _leads(self.domains[domain], entries, rule)

    def find_all(self, domain: str, descriptors: Sequence[Descriptor]) -> list[Match | None]:
        """What each descriptor of a request finds; the limit that comes with one, if it has one, is a rule of its
        own."""
        root = self.domains.get(domain)
        if root is None:
            return [None] * len(descriptors)
        return [
            find_match(root, entries) if limit is None else _bring(domain, entries, limit)
            for entries, _, limit, _ in descriptors
        ]

    def find_counting(self, domain: str, descriptors: Sequence[Descriptor]) -> Sequence[Match | None]:
        """What each descriptor of a request finds, as far as it counts."""
        return choose_counting(descriptors, self.find_all(domain, descriptors))

    def __iter__(self) -> Iterator[Rule]:
        for root in self.domains.values():
            yield from root.walk()


def _bring(domain: str, entries: Sequence[Entry], limit: Limit) -> Match:
    """The limit that a descriptor brings. It has counters of its own, for all of the descriptor."""
    names = [entry.key for entry in entries]
    keys = ",".join(names)
    if len(keys) > LONGEST_KEY:
        keys = _shorten(names, ",".join)
    return Match(_find_brought(domain, limit, keys), make_key([entry.value for entry in entries]))


@lru_cache(_BROUGHT_REMEMBERED)
def _find_brought(domain: str, limit: Limit, keys: str) -> Rule:
    """The same for the same limit, by which stores know again what they have found out about it."""
    return Rule(domain, f"{BROUGHT}{limit}:{keys}", limit)


def choose_counting(descriptors: Sequence[Descriptor], matches: Sequence[Match | None]) -> Sequence[Match | None]:
    """Of what the descriptors of a request find, that which counts: not the rules that others take the place of, and
    each counter once, however many readings of the path or the method find it."""
    for match in matches:
        if match is not None and match.rule.replaces:
            matches = _leave_out_replaced(descriptors, matches)
            break
    for each in descriptors:
        if each.besides:
            return _leave_out_repeated(descriptors, matches)
    return matches


def _leave_out_replaced(descriptors: Sequence[Descriptor], matches: Sequence[Match | None]) -> list[Match | None]:
    """The matches without those that are replaced in every reading that finds them: who writes a path so that it may
    mean two things, or HEAD, would else have a limit of the one replaced by what he finds with the other."""
    meanings = _list_meanings(descriptors)
    found = [
        (match, meaning)
        for each, match in zip(descriptors, matches, strict=True)
        if match is not None
        for meaning in _find_meanings(each, meanings)
    ]
    names: dict[int, set[str | None]] = {meaning: set() for meaning in meanings}
    for match, meaning in found:
        names[meaning].update(match.rule.replaces)
    replaced = {
        (_find_reading(meaning), match.rule.name) for match, meaning in found if match.rule.alias in names[meaning]
    }
    counting = {
        (match.rule.name, match.key)
        for match, meaning in found
        if (_find_reading(meaning), match.rule.name) not in replaced
    }
    return [match if match is not None and (match.rule.name, match.key) in counting else None for match in matches]


def _leave_out_repeated(descriptors: Sequence[Descriptor], matches: Sequence[Match | None]) -> list[Match | None]:
    """The matches without those of other readings whose counter an earlier one has found."""
    known: set[tuple[str, str]] = set()
    once: list[Match | None] = []
    for each, match in zip(descriptors, matches, strict=True):
        counter = None if match is None else (match.rule.name, match.key)
        once.append(None if each.besides and counter in known else match)
        if counter is not None:
            known.add(counter)
    return once


def read_besides_as_get(besides: int) -> int:
    """The number of the same reading of a path where HEAD is taken for GET."""
    return besides - _AS_GET if besides < 0 else besides + _AS_GET


def _list_meanings(descriptors: Sequence[Descriptor]) -> set[int]:
    """All that a request may mean: what its path does, and each of that with both methods where it has two."""
    told = {each.besides for each in descriptors}
    paths = set(map(_find_meaning_of_path, told))
    return paths if paths == told else paths | set(map(read_besides_as_get, paths))


def _find_meanings(descriptor: Descriptor, meanings: Collection[int]) -> Collection[int]:
    """Those of which a descriptor is, by what it tells."""
    if len(meanings) == 1:
        return meanings
    keys, besides = {entry.key for entry in descriptor.entries}, descriptor.besides
    if PATH_KEY in keys:
        meanings = [each for each in meanings if _find_meaning_of_path(each) == _find_meaning_of_path(besides)]
    if METHOD_KEY in keys:
        meanings = [each for each in meanings if _takes_for_get(each) == _takes_for_get(besides)]
    return meanings


def _find_reading(meaning: int) -> int:
    return ~meaning if meaning < 0 else meaning


def _takes_for_get(meaning: int) -> bool:
    return _find_reading(meaning) >= _AS_GET


def _find_meaning_of_path(meaning: int) -> int:
    reading = _find_reading(meaning) % _AS_GET
    return ~reading if meaning < 0 else reading
