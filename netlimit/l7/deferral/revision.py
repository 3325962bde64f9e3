"""What a request that waits is under, once the rules have become others than those under which it came."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from netlimit.l7.deferral.deferral import find_lines
from netlimit.l7.deferral.request import Deferred, make_idempotency_key
from netlimit.l7.deferral.upstream import make_scope
from netlimit.l7.extraction import Extraction
from netlimit.l7.identity import EXTRACTORS, ClientAddress, Extractor, Scope
from netlimit.l7.rules import Descriptor, RuleSet, name_counter

_TOLD, _ADDRESS = "netlimit.told", "netlimit.address"
"""Where the scope of a request that is replayed has what was told of it when it came, and its client's address."""
_OF_REQUESTS = frozenset({"path", "host", "method"})
"""What their own extractors make of the request alone, which is kept whole."""

log = logging.getLogger(__name__)


def remember(extractors: Mapping[str, Extractor]) -> dict[str, Extractor]:
    """The same extractors, which tell of a request that is replayed what they told when it came, if they were asked
    then: whom it comes from may not be found any more, or be found by what its client has written."""
    return {
        key: extract if key in _OF_REQUESTS and extract is EXTRACTORS[key] else _remember(key, extract)
        for key, extract in extractors.items()
    }


def _remember(key: str, extract: Extractor) -> Extractor:
    silent = False

    def find(scope: Scope) -> str | None:
        nonlocal silent
        told: Mapping[str, str] | None = scope.get(_TOLD)
        if told is None:
            return extract(scope)
        if key in told:
            return told[key]
        if isinstance(extract, ClientAddress) and scope[_ADDRESS] is not None:
            return extract({"client": (scope[_ADDRESS], 0), "headers": []})
        try:
            return extract(scope)
        except Exception:  # what other middlewares have put into the scope is not there any more
            if not silent:
                log.exception("%r cannot be told of deferred requests: limits by it do not hold for them.", key)
            silent = True
            return None

    return find


class Revision:
    """Has requests that wait come under the rules of the moment. `extraction` is that of new requests, by extractors
    that `remember`."""

    def __init__(self, rules: Callable[[], RuleSet], extraction: Extraction) -> None:
        self._rules = rules
        self._extraction = extraction

    def revise(self, request: Deferred) -> Deferred:
        """The request with what the rules of the moment ask of it, and in the line where it belongs by them: that in
        which it waits, unless its limit is gone and another defers it."""
        told: dict[str, str] = {}
        for descriptor in request.descriptors:
            for key, value in descriptor.entries:
                told.setdefault(key, value)
        found = self._extraction(_make_scope(request, told))
        known = {key for descriptor in found for key, _ in descriptor.entries}
        # What is asked no more is kept: by the next rules it may be again.
        rest = [each for each in request.descriptors if not known.issuperset(_list_keys(each))]
        descriptors = (*found, *rest)
        matches = self._rules().find_counting(request.domain, descriptors)
        lines = find_lines(matches)
        stays = any(match is not None and name_counter(*match) == request.key for match in matches)
        if stays or not lines:
            return replace(request, descriptors=descriptors)
        key, others, shared = lines[0]
        return replace(request, descriptors=descriptors, key=key, others=others, shared=shared)


def _make_scope(request: Deferred, told: Mapping[str, str]) -> dict[str, Any]:
    scope = make_scope(request)
    own = (b"idempotency-key", make_idempotency_key(request.id).encode())  # its client has not sent it
    headers = [pair for pair in scope["headers"] if pair != own]
    return scope | {"headers": headers, _TOLD: told, _ADDRESS: request.address}


def _list_keys(descriptor: Descriptor) -> set[str]:
    return {entry.key for entry in descriptor.entries}
