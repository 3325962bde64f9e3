"""What a request weighs, by a function of the application's own: whatever its path may mean, and its method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any
from urllib.parse import quote

from netlimit.l7.limit import read_weight
from netlimit.l7.methods import HEAD, read_method
from netlimit.l7.roots import list_readings

Scope = MutableMapping[str, Any]
Weigh = Callable[[Scope], int]
"""The weight of a request: a whole number from 0."""


def find_weight(weigh: Weigh, scope: Scope) -> int:
    """The largest weight of all that a request may be for: else whoever writes `/export%0a`, which is led to the same
    endpoint, would pay for something else. Raises LimitError for what is no weight."""
    return max([read_weight(weigh(each), "A request") for each in _list_readings(scope)])


def _list_readings(scope: Scope) -> Iterator[Scope]:
    """A request as it is, and as each of those that servers and applications may take it for: with the path that they
    read (`list_readings`), and as the GET that is run for a HEAD."""
    as_get = read_method(scope.get("method", "")) == HEAD
    for each in _list_paths(scope):
        yield each
        if as_get:
            yield {**each, "method": "GET"}


def _list_paths(scope: Scope) -> Iterator[Scope]:
    yield scope
    meanings = dict.fromkeys(path for _, path in list_readings(scope))
    meanings.pop(scope["path"], None)
    for path in meanings:
        yield {**scope, "path": path, "raw_path": quote(path, errors="replace").encode()}
