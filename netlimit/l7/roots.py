"""Root paths: what servers and mounts say that they have put before the routes of an application."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from netlimit.l7.targets import find_meanings, find_sent

APART = "netlimit.root_paths"
"""Where the scope of a request has further root paths, those of applications that it may come to."""


Scope = Mapping[str, Any]
"""A connection as ASGI describes it."""


def find_root(scope: Scope) -> str:
    """The root path of a request as ASGI describes it, without a `/` at its end; nothing where there is none."""
    return (scope.get("root_path") or "").rstrip("/")


def find_below(scope: Scope) -> tuple[str, ...]:
    """What the path of a request may mean to those who take its root path away, each in its plain form: from where it
    is (Starlette, Django), from whatever begins so (Quart makes `/login` of `/apilogin`), or with all that is before it
    (Litestar makes that of `/x/api/login`). Nothing where it is not there."""
    return _take_away(find_root(scope), scope)


def find_apart(scope: Scope) -> tuple[str, ...]:
    """The same where other root paths are taken away, of applications that a request may come to."""
    roots = (find_root({"root_path": each}) for each in scope.get(APART, ()))
    return tuple([meaning for root in roots for meaning in _take_away(root, scope)])


def add_root(scope: Scope) -> Scope:
    """A request with its root path before its path, as ASGI describes it. Some servers hand on the path as it was sent
    (Hypercorn), or a proxy has taken the root path away; applications serve what comes so as if it were there."""
    root, path = find_root(scope), scope["path"]
    if not (root.startswith("/") and path.startswith("/")) or root in path or is_of_client(scope):
        return scope
    return {**scope, "path": root + path, "raw_path": quote(root).encode() + (scope.get("raw_path") or b"")}


def _take_away(root: str, scope: Scope) -> tuple[str, ...]:
    if not root or root not in scope["path"]:
        return ()
    before, found, rest = find_sent(scope).partition(root.encode())
    return find_meanings(scope["path"].partition(root)[2], rest if found else before)


def is_below(scope: Scope) -> bool:
    """Whether a request is for what is below its root path, whoever reads it, and that is the operator's."""
    root, path = find_root(scope), scope["path"]
    return path.startswith(root) and path[len(root) :][:1] in ("", "/") and not is_of_client(scope)


def is_of_client(scope: Scope) -> bool:
    """Whether the client may have chosen the root path: Daphne takes it from a field of any request."""
    return bool(scope.get("root_path")) and "daphne.http_protocol" in sys.modules
