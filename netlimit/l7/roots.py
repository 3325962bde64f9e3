"""Root paths: what servers and mounts say that they have put before the routes of an application."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from netlimit.l7.targets import find_meanings, find_sent


def find_root(scope: Mapping[str, Any]) -> str:
    """The root path of a request as ASGI describes it, without a `/` at its end; nothing where there is none."""
    return (scope.get("root_path") or "").rstrip("/")


def find_below(scope: Mapping[str, Any]) -> tuple[str, ...]:
    """What the path of a request may mean to those who take its root path away, each in its plain form: from where it
    is (Starlette, Django), from whatever begins so (Quart makes `/login` of `/apilogin`), or with all that is before it
    (Litestar makes that of `/x/api/login`). Nothing where it is not there."""
    root = find_root(scope)
    if not root or root not in scope["path"]:
        return ()
    before, found, rest = find_sent(scope).partition(root.encode())
    return find_meanings(scope["path"].partition(root)[2], rest if found else before)


def is_below(scope: Mapping[str, Any]) -> bool:
    """Whether a request is for what is below its root path, whoever reads it, and that is the operator's."""
    root, path = find_root(scope), scope["path"]
    return path.startswith(root) and path[len(root) :][:1] in ("", "/") and not is_of_client(scope)


def is_of_client(scope: Mapping[str, Any]) -> bool:
    """Whether the client may have chosen the root path: Daphne takes it from a field of any request."""
    return bool(scope.get("root_path")) and "daphne.http_protocol" in sys.modules
