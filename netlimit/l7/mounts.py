"""Applications around which the middleware stands, and what is mounted in them: they may give themselves a root path,
of which nothing is told before they are called."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from netlimit.l7.roots import APART, MOUNTED, find_root

_Scope = TypeVar("_Scope", bound=Mapping[str, Any])
_WITHIN = "app", "_app"
"""How middlewares name what they are around: Starlette's and most others', and RateLimit."""
_DEEPEST = 32
"""So many applications within one another are looked at."""


class Mounts:
    """The root paths that an application, what it wraps and what is mounted in it give themselves, and where that is
    mounted. They are looked for with the first request, and asked for their root paths with each."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._sole: Any = None
        """That which each request comes to, and which puts its own root path in place of any (FastAPI)."""
        self._rooted: list[Any] | None = None
        self._mounted: tuple[str, ...] = ()

    def take_roots(self, scope: _Scope) -> _Scope:
        """A request with the root path that the application puts in place of the server's. Those that it may have by
        others, if it comes to them, stand beside that, and so does where they are mounted."""
        if self._rooted is None:
            self._rooted = self._look()
        if not self._rooted and not (self._mounted and scope.get("root_path")):
            return scope
        own = _read_root(self._sole) or scope.get("root_path") or ""
        given = dict.fromkeys(filter(None, map(_read_root, self._rooted)))
        given.pop(own, None)
        if given or own != scope.get("root_path", "") or (self._mounted and own):
            return cast(_Scope, {**scope, "root_path": own, APART: tuple(given), MOUNTED: self._mounted})
        return scope

    def _look(self) -> list[Any]:
        innermost = [*_list_wrapped(self._app)][-1]
        self._sole = innermost if _puts_its_own(innermost) else None
        found = [*_list_within(self._app, set())]
        self._mounted = tuple(dict.fromkeys(path for each in found for path in _list_mounts(each)))
        return [each for each in found if _has_root(each)]


def _list_wrapped(app: Any) -> Iterator[Any]:
    """An application, and what it wraps."""
    for _ in range(_DEEPEST):
        yield app
        app = next((found for name in _WITHIN if (found := getattr(app, name, None)) is not None), None)
        if app is None:
            return


def _list_within(app: Any, known: set[int]) -> Iterator[Any]:
    """The same, and what is mounted in any of these; each once, though it be mounted in several places, or in itself.
    `known` are those that have been told."""
    for each in _list_wrapped(app):
        if id(each) in known:
            return
        known.add(id(each))
        yield each
        for route in _list_routes(each):
            if (mounted := getattr(route, "app", None)) is not None:
                yield from _list_within(mounted, known)


def _list_routes(app: Any) -> Sequence[Any]:
    routes = getattr(app, "routes", None)
    return routes if isinstance(routes, Sequence) else ()


def _list_mounts(app: Any) -> Iterator[str]:
    """The paths at which an application has mounted others (Starlette's `Mount`), those without parameters."""
    for route in _list_routes(app):
        path = getattr(route, "path", "")
        if hasattr(route, "routes") and isinstance(path, str) and path.startswith("/") and "{" not in path:
            yield path.rstrip("/")


def _has_root(app: Any) -> bool:
    """Whether an application has a root path, or may be given one; Flask and Quart, which know what package they were
    imported from, call the directory of that so."""
    return isinstance(getattr(app, "root_path", None), str) and not hasattr(app, "import_name")


def _read_root(app: Any) -> str:
    root = getattr(app, "root_path", "")
    return root if isinstance(root, str) and find_root({"root_path": root}).startswith("/") else ""


def _puts_its_own(app: Any) -> bool:
    fastapi = sys.modules.get("fastapi")
    return fastapi is not None and isinstance(app, fastapi.FastAPI)
