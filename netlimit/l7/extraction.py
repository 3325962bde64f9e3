"""What is told of a request: one descriptor for every way in which rules look at requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

from netlimit.errors import LimitError
from netlimit.l7.identity import ClientAddress, Extractor, Scope, path
from netlimit.l7.methods import HEAD, find_heads, take_for_get
from netlimit.l7.mounts import Mounts
from netlimit.l7.roots import APART, add_root, list_readings
from netlimit.l7.rules import CLIENT_KEY, METHOD_KEY, PATH_KEY, Descriptor, Entry, Node, RuleSet
from netlimit.l7.targets import Ambiguous, find_doubt, is_plain

_Way = tuple[tuple[str, Extractor], ...]
"""Keys, and what extracts them."""

log = logging.getLogger(__name__)


class Extraction:
    """Makes the descriptors that the rules of a domain can find: of `remote_address`, of `path` and `user`, and so on.

    Values are told whole, however long a client makes them: a pattern may go on behind its `*`. What counters keep of
    them is short.
    A descriptor of which a value is missing is left out; a path that may mean several things, for what is in it
    (`find_meanings`) or for root paths, those of `mounts` too, has descriptors of each, and so has HEAD, which may mean
    GET. Raises LimitError if there is no such domain, or if its rules have keys that nothing extracts; rules that come
    later are heeded as far as that goes, and the rest is logged.
    """

    def __init__(
        self,
        rules: Callable[[], RuleSet],
        domain: str,
        extractors: Mapping[str, Extractor],
        mounts: Mounts | None = None,
    ) -> None:
        self._mounts = mounts
        self._rules = rules
        self._domain = domain
        self._extractors = extractors
        self._seen = rules()
        self._ways, faults = self._find_ways(self._seen)
        if faults:
            raise LimitError("limits", faults)

    def __call__(self, scope: Scope) -> list[Descriptor]:
        """The descriptors of a request."""
        rules = self._heed_rules()
        values: dict[str, str | None] = {}
        told = scope if self._mounts is None else self._mounts.take_roots(scope)
        whole = add_root(told)
        if whole["path"] is not scope["path"] and self._extractors.get(PATH_KEY) is path:
            values[PATH_KEY] = path(whole)
        descriptors = [*self._make_descriptors(self._ways, values, scope)]
        if not is_plain(scope["path"]) or told.get("root_path") or APART in told:
            descriptors += self._find_others(values, told)
        if values.get(METHOD_KEY) == HEAD:
            descriptors += [take_for_get(descriptors[place]) for place in find_heads(descriptors)]
        if told.get("root_path") or APART in told:
            below = {(~each.besides, _list_keys(each)): each for each in descriptors if each.besides < 0}
            if below:
                return [each for each in descriptors if not self._yields(rules, each, below)]
        return descriptors

    def find_doubt(self, scope: Scope) -> Ambiguous | None:
        """Why it cannot be told what the path of a request means, where limits look at it."""
        doubt = find_doubt(scope)
        if doubt is None:
            return None
        self._heed_rules()
        return doubt if any((PATH_KEY, path) in way for way in self._ways) else None

    def _heed_rules(self) -> RuleSet:
        rules = self._rules()
        if rules is not self._seen:
            self._seen = rules
            self._ways, faults = self._find_ways(rules)
            if faults:
                log.error("%s", faults)
        return rules

    def _yields(
        self, rules: RuleSet, descriptor: Descriptor, below: Mapping[tuple[int, tuple[str, ...]], Descriptor]
    ) -> bool:
        """Whether what a whole path finds is for any path: then that of the route is meant, which may be exempt."""
        other = below.get((descriptor.besides, _list_keys(descriptor)))
        match = rules.find(self._domain, descriptor.entries) if other is not None else None
        return other is not None and match is not None and rules.fits(self._domain, match.rule, other.entries)

    def _find_others(self, values: dict[str, str | None], scope: Scope) -> Iterator[Descriptor]:
        """The descriptors of what the path may mean besides."""
        ways = [way for way in self._ways if (PATH_KEY, path) in way]
        if not ways:  # to find out what a path means takes time
            return
        for besides, other in list_readings(scope):
            if besides == 0:
                continue
            values[PATH_KEY] = other
            for descriptor in self._make_descriptors(ways, values, scope):
                yield descriptor._replace(besides=besides)

    def _make_descriptors(
        self, ways: Iterable[_Way], values: dict[str, str | None], scope: Scope
    ) -> Iterator[Descriptor]:
        for way in ways:
            entries = []
            for key, extract in way:
                if key not in values:
                    values[key] = extract(scope)
                value = values[key]
                if value is None:
                    break
                entries.append(Entry(key, value))
            else:
                yield Descriptor(tuple(entries))

    def _find_ways(self, rules: RuleSet) -> tuple[list[_Way], str]:
        root = rules.domains.get(self._domain)
        if root is None:
            known = ", ".join(map(repr, rules.domains)) or "none"
            return [], f"There is no domain {self._domain!r} in the limits; there is {known}."
        keys = dict.fromkeys(_find_keys(root))
        unknown = sorted({key for way in keys for key in way} - self._extractors.keys())
        ways = [way for way in keys if not set(way) & {*unknown}]
        faults = ""
        if unknown:
            faults = (
                f"The limits of {self._domain!r} have the key {unknown[0]!r}, which nothing extracts; there are "
                f'{", ".join(self._extractors)}. More can be given: extract={{{unknown[0]!r}: header("X-Name")}}.'
            )
        return [tuple((key, self._extractors[key]) for key in way) for way in ways], faults


def _find_keys(node: Node, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The keys on the way to each rule."""
    if node.rule is not None and before:
        yield before
    for entry, child in node.exact.items():
        yield from _find_keys(child, (*before, entry.key))
    for pattern, child in node.wild:
        yield from _find_keys(child, (*before, pattern.key))
    for key, child in node.default.items():
        yield from _find_keys(child, (*before, key))


def _list_keys(descriptor: Descriptor) -> tuple[str, ...]:
    return tuple([entry.key for entry in descriptor.entries])


def choose_address(extractors: Mapping[str, Extractor]) -> Extractor:
    """What tells a client's own address, behind proxies too; of an extractor of another kind nobody knows it."""
    client = extractors.get(CLIENT_KEY)
    return client.find if isinstance(client, ClientAddress) else lambda scope: None
