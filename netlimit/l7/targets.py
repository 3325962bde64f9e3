"""What a request is for, its path and its host, in the one form in which they mean the same to whoever serves it.

Every adapter compares these: whoever writes `//login`, `/%6Cogin` or `/login#1` meets the limit of `/login`.
"""

from __future__ import annotations

import posixpath
import re
from ipaddress import ip_address
from urllib.parse import unquote_to_bytes

_CROOKED = re.compile(rb"[%?#\x80-\xff]|/[/.]")
"""What a path has that is not plain as it stands."""
_AUTHORITY = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*")
_UNMERGED = re.compile(r"/(?:\.?/)+|/\.$")


def plain_path(target: bytes) -> str:
    """The path of a request target (RFC 9112): decoded, without query and fragment, and without `.`, `..` and empty
    parts. That of `http://host`, and of nothing, is `/`."""
    return read_paths(target)[0]


def read_paths(target: bytes) -> tuple[str, ...]:
    """The plain path of a request target, and where there are `..` in it the path to which a server comes that does not
    know what they mean: the request may be for either."""
    if target.startswith(b"/") and not _CROOKED.search(target):
        return (target.decode("ascii"),)
    if target == b"*":  # of the whole server
        return ("*",)
    authority = _AUTHORITY.match(target)
    path = target[authority.end() :] if authority else target
    for end in (b"#", b"?"):
        path = path.partition(end)[0]
    return find_meanings(unquote_to_bytes(path).decode("utf-8", "replace"))


def find_meanings(path: str) -> tuple[str, ...]:
    """The same of a path that has been decoded."""
    plain, merged = resolve(path), _merge(path)
    return (plain,) if "/.." not in merged or merged == plain else (plain, merged)


def resolve(path: str) -> str:
    """A decoded path without `.`, `..` and empty parts."""
    plain = posixpath.normpath(f"/{path.lstrip('/')}")
    return f"{plain}/" if plain != "/" and path.endswith(("/", "/.", "/..")) else plain


def _merge(path: str) -> str:
    """A decoded path without `.` and empty parts."""
    return _UNMERGED.sub("/", f"/{path}")


def plain_host(host: bytes) -> str:
    """The host of a `Host` field (RFC 9110, 7.2): in small letters, without port, without the dots at its end. An IPv6
    address stands in brackets, in its usual form."""
    first = host.partition(b",")[0]  # where several fields have been made one
    name = unquote_to_bytes(first).decode("utf-8", "replace").strip().lower().rpartition("@")[2]
    if name.startswith("["):
        return _plain_address(name[1:].partition("]")[0])
    if name.count(":") > 1:
        return _plain_address(name)
    return name.partition(":")[0].rstrip(".")


def _plain_address(text: str) -> str:
    try:
        return f"[{ip_address(text)}]"
    except ValueError:
        return f"[{text}]"
