"""Root paths: what servers and mounts say that they have put before the routes of an application."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

from netlimit.l7.targets import find_meanings, find_sent

APART = "netlimit.root_paths"
"""Where the scope of a request has further root paths, those of applications that it may come to."""
MOUNTED = "netlimit.mounted"
"""Where it has the paths at which applications are mounted in others."""


Scope = Mapping[str, Any]
"""A connection as ASGI describes it."""


def find_root(scope: Scope) -> str:
    """The root path of a request as ASGI describes it, without a `/` at its end; nothing where there is none."""
    return (scope.get("root_path") or "").rstrip("/")


def find_below(scope: Scope) -> tuple[str, ...]:
    """What the path of a request may mean to those who take its root path away, each in its plain form: from where it
    is (Starlette, Django), from whatever begins so (Quart makes `/login` of `/apilogin`), or with all that is before it
    (Litestar makes that of `/x/api/login`). Nothing where it is not there."""
    return _find_below(find_root(scope), scope)


def list_readings(scope: Scope) -> Iterator[tuple[int, str]]:
    """All that the path of a request may mean, in plain form, each with the number that descriptors have of it: the
    whole, of which the first is what it says; and what is below a root path, of which ~n is another name of the n-th.
    Applications differ about what is in a path (`find_meanings`), and about where a root path is: whatever is below
    one has the root path before it as well, as rules of whole paths name it."""
    whole = add_root(scope)
    told = tuple(dict.fromkeys(find_meanings(whole["path"], find_sent(whole))))
    renames, root, below = is_below(whole), find_root(scope), list(find_below(whole))
    if whole is not scope:
        below += find_below(scope)
    elif is_of_client(scope) and not _begins(scope, root):
        below += told
    apart = [(each, _list_apart(each, scope, told)) for each in _list_roots(scope)]
    alone = dict.fromkeys(told if renames else (*told, *below))
    alone.update(dict.fromkeys(each for place in apart for each in place[1]))
    yield from enumerate(alone)
    number = len(alone)
    for prefix, names in [(root, below), *apart] if root else apart:
        known = told if renames and prefix == root else ()
        for each in dict.fromkeys(names):
            place = prefix + each
            if place in known:  # which are as many as a path may mean
                yield ~known.index(place), each
            elif place.startswith("/") and place not in alone:
                yield number, place
                yield ~number, each
                number += 1


def add_root(scope: Scope) -> Scope:
    """A request with its root path before its path, as ASGI describes it. Some servers hand on the path as it was sent
    (Hypercorn), or a proxy has taken the root path away; applications serve what comes so as if it were there."""
    root, path = find_root(scope), scope["path"]
    if not (root.startswith("/") and path.startswith("/")) or _begins(scope, root) or is_of_client(scope):
        return scope
    return {**scope, "path": root + path, "raw_path": quote(root).encode() + (scope.get("raw_path") or b"")}


def find_strays(scope: Scope) -> tuple[str, ...]:
    """What a path may mean below a root path that does not stand at its beginning, or that a client has chosen, each in
    its plain form: who has chosen the path may have written the root path into it."""
    found = () if is_below(scope) else find_below(scope)
    roots = [each for each in _list_roots(scope) if not _begins(scope, each)]
    return (*found, *[meaning for root in roots for meaning in _find_below(root, scope)])


def _list_roots(scope: Scope) -> list[str]:
    """Further root paths, of applications that a request may come to."""
    return [find_root({"root_path": each}) for each in scope.get(APART, ())]


def _list_apart(root: str, scope: Scope, told: tuple[str, ...]) -> tuple[str, ...]:
    """What such an application may make of a path: it serves what comes without its root path, too."""
    return (*_find_below(root, scope), *(() if _begins(scope, root) else told))


def _begins(scope: Scope, root: str) -> bool:
    """Whether a path is that of a root, or one below it."""
    path = scope["path"]
    return path.startswith(root) and path[len(root) :][:1] in ("", "/")


def _find_below(root: str, scope: Scope) -> tuple[str, ...]:
    """What a path may mean without such a root path; and, where it does not begin with it, below what is mounted: to
    Starlette, all of that path is one below the root path, and what it calls with both together may look for these
    anywhere (Litestar makes `/login` of `/sub/api/sublogin`)."""
    below = _take_away(root, scope)
    if not below or _begins(scope, root):
        return below
    return (*below, *[at + each for at in scope.get(MOUNTED, ()) for each in _take_away(root + at, scope)])


def _take_away(root: str, scope: Scope) -> tuple[str, ...]:
    if not root or root not in scope["path"]:
        return ()
    before, found, rest = find_sent(scope).partition(root.encode())
    return find_meanings(scope["path"].partition(root)[2], rest if found else before)


def is_below(scope: Scope) -> bool:
    """Whether a request is for what is below its root path, whoever reads it, and that is the operator's."""
    return _begins(scope, find_root(scope)) and not is_of_client(scope)


def is_of_client(scope: Scope) -> bool:
    """Whether the client may have chosen the root path: Daphne takes it from a field of any request."""
    return bool(scope.get("root_path")) and "daphne.http_protocol" in sys.modules
