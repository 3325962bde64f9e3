"""What a request is for, its path and its host, in the one form in which they mean the same to whoever serves it.

Every adapter compares these: whoever writes `//login`, `/%6Cogin` or `/login#1` meets the limit of `/login`.
"""

from __future__ import annotations

import codecs
import posixpath
import re
from collections.abc import Mapping, MutableMapping
from functools import lru_cache
from ipaddress import ip_address
from typing import Any
from urllib.parse import quote

_CROOKED = b"%", b"?", b"#", b";", b"\\", b"//", b"/.", b".php/"
"""What a path has that is not plain as it stands; or what is not to be sent as it is."""
_NOT_SENT = re.compile(rb"[^!-~]|%(?![0-9A-Fa-f]{2})")
"""What no target of a request has in it (RFC 3986, 2.1; RFC 9112, 3.2). Other letters that are not allowed there
(`|`, `[`, `{`) browsers send, and servers read in one way."""
MOST_PARTS, LONGEST = 128, 2048
"""So many parts and letters has a path at most of which servers may make several paths: to find these takes time for
each."""
MOST_MEANINGS = 8
"""So many paths servers may make of one at most: each has limits, and counters that are asked."""
_NO_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_KEPT = 2
_AUTHORITY = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*")
_AUTHORITY_END = re.compile(rb"[/?#\\,]")
"""What ends one, to URLs of browsers (WHATWG) as well; and a comma, where several fields have been made one."""
_HOST = re.compile(r"[/\\]{2,}[^/\\]*")
_HOST_SENT = re.compile(rb"//[^/]*")
_SLASHES = re.compile(r"/{2,}")
_PARAMETERS = re.compile(r";[^/]*")
_PARAMETERS_SENT = re.compile(rb";[^/]*")
codecs.lookup("unicode_escape")  # while its file may be read: the API has given up root when it decodes its first path


class Ambiguous(ValueError):
    """A path that may mean more than is looked at: it is refused, for a limit of any of that may be evaded by it."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(
            reason
            or f"The path has more than {MOST_PARTS} parts, or {LONGEST} letters, or servers make more than "
            f"{MOST_MEANINGS} paths of it, by `;`, `\\`, `.`, `..` or the like: write it without these."
        )


class Unencoded(Ambiguous):
    """A path as none may be sent: where such a one ends, and what a `%` means in it, each server finds by itself."""

    def __init__(self) -> None:
        super().__init__(
            "The path has bytes that are not ASCII in it, blanks, control characters, or a `%` without two hexadecimal "
            "digits, which servers read in many ways: encode it (RFC 3986, section 2.1), `%C3%A9` for a letter, `%25` "
            "for `%`."
        )


def plain_path(target: bytes) -> str:
    """The path of a request target (RFC 9112): decoded, without query and fragment, and without `.`, `..` and empty
    parts. That of `http://host`, and of nothing, is `/`. Raises Ambiguous."""
    return read_paths(target)[0]


def read_written(path: bytes) -> tuple[str, ...]:
    """The same of what an operator has written, in letters as they are: `/café`. Raises Ambiguous."""
    return _read_sent(_read_origin(path).partition(b"?")[0])


@lru_cache(maxsize=_KEPT)  # each is asked for twice, one call after the other; and others choose how long they are
def read_paths(target: bytes) -> tuple[str, ...]:
    """The plain path of a request target, and what else it may mean to servers, each once (see `find_meanings`).
    Raises Ambiguous."""
    if target.startswith(b"/") and not any(each in target for each in _CROOKED) and not _NOT_SENT.search(target):
        return (target.decode("ascii"),)
    if target == b"*":  # of the whole server
        return ("*",)
    sent = _read_origin(target).partition(b"?")[0]
    if _NOT_SENT.search(sent):
        raise Unencoded
    return _read_sent(sent)


def _read_sent(sent: bytes) -> tuple[str, ...]:
    path = decode(sent)
    if is_ambiguous(path):
        raise Ambiguous
    meanings = tuple(dict.fromkeys(find_meanings(path, sent)))
    if len(meanings) > MOST_MEANINGS:
        raise Ambiguous
    return meanings


def take_path(scope: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A request as ASGI describes it, with its path alone in `path` and `raw_path`, for those who limit and for those
    who serve it: servers may leave the authority of `http://host/login` there, and what is behind a `#`, of which
    applications make different paths."""
    path, raw = scope["path"], scope.get("raw_path") or b""
    if path in ("", "*") or (path.startswith("/") and b"#" not in raw):
        return scope
    sent = raw if decode(raw) == path else quote(path, safe="/:", errors="replace").encode()
    origin = _read_origin(sent)
    if not origin.startswith(b"/"):
        origin = b"/" + origin
    taken = {**scope, "path": decode(origin), "raw_path": origin}
    root = scope.get("root_path") or ""
    if root and not root.startswith("/") and taken["path"].startswith(f"/{root}"):  # goes on at the same place
        taken["root_path"] = f"/{root}"
    return taken


def find_sent(scope: Mapping[str, Any]) -> bytes:
    """The path of such a request as it was sent; nothing where it is just the same, or another is served, or nobody
    knows."""
    raw: bytes = scope.get("raw_path") or b""
    return raw if b"%" in raw and decode(raw) == scope["path"] else b""


def find_doubt(scope: Mapping[str, Any]) -> Ambiguous | None:
    """Why it cannot be told what the path of such a request means, as far as that is known; None of most. Servers
    answer by themselves what may not be sent, or say in `raw_path` how it came."""
    if _NOT_SENT.search((scope.get("raw_path") or b"").partition(b"?")[0]):
        return Unencoded()
    return Ambiguous() if is_ambiguous(scope["path"]) else None


def _read_origin(target: bytes) -> bytes:
    """A request target without authority and fragment."""
    authority = _AUTHORITY.match(target)
    return (target[authority.end() :] if authority else target).partition(b"#")[0]


def decode(text: bytes) -> str:
    """A text with its escapes (`%2e`) resolved (RFC 3986, 2.1); what is none stays as it is (in hosts, and in rules).

    Others write thousands into one path: it is read as one with escapes of Python's, which takes a tenth of the time.
    """
    known = rb"\x25".join(_NO_ESCAPE.split(text.replace(b"\\", b"\\\\")))
    return known.replace(b"%", rb"\x").decode("unicode_escape").encode("latin-1").decode("utf-8", "replace")


def is_plain(path: str) -> bool:
    """Whether a decoded path means one thing alone, as most do; looked at before all else, for it takes no time."""
    return "//" not in path and not _is_crooked(path)


def is_ambiguous(path: str) -> bool:
    """Whether a decoded path may mean several things, and has more parts or letters than are looked at."""
    return _is_crooked(path) and (len(path) > LONGEST or sum(map(path.count, "/\\;")) > MOST_PARTS)


def _is_crooked(path: str) -> bool:
    """Whether a decoded path may mean more than itself, with and without its empty parts; which is soon found."""
    found = "/." in path or ";" in path or "\\" in path or "\n" in path or ".php/" in path
    return found or path.startswith("//")


def find_meanings(path: str, sent: bytes = b"") -> tuple[str, ...]:
    """The plain form of a path that has been decoded, and of all that it may mean besides: the request may be for any.

    Where there are `..` in it, that is the path to which a server comes that does not know what they mean; and with
    `//`, too, the one to which it leads where a `..` takes an empty part away (RFC 3986, 5.2.4: Jetty, browsers). Where
    `.` or `..` are at its end, it is the path without a `/` there, as Tomcat reads it. Where there are `.` or empty
    parts, it is the path with them as well: a route may take each part as a parameter, `.` too (`_list_unresolved`).
    Where there are `;`, it is the path without them and what follows in each part, as Java's servers read it: also
    where a proxy has resolved `..` before, and where they have been cut off of what was `sent`, before it was decoded,
    if that is given. A newline at the end is not seen where routes are regular expressions that end in `$` (Starlette,
    PCRE), and a `\\` is a `/` to who reads a URL as browsers do (WHATWG URL, 4.4). What follows `//` at the beginning
    is a host to those who read it against a base (RFC 3986, 4.2), and the path is what comes behind it, where the host
    ends at the first `/` or `\\`, or at the first `/` of what was sent (`urlsplit` of Python, `parse_url` of PHP). A
    script of PHP is run for what stands behind it as well, which some applications take for the path (PATH_INFO: RFC
    3875, 4.1.5).
    """
    readings = [path]
    if found := _HOST.match(path):
        readings.append(path[found.end() :].replace("\\", "/"))
        readings += _cut_host(path, sent)
    if path.endswith("\n"):
        readings.append(path[:-1])
    script, found_info, info = path.partition(".php/")
    if found_info:
        readings += [f"{script}.php", f"/{info}"]
    if "\\" in path:
        readings.append(path.replace("\\", "/").removesuffix("\n"))
    if ";" in path:
        readings.append(_PARAMETERS.sub("", path))
        if "/.." in f"/{path}":
            readings.append(_PARAMETERS.sub("", resolve(path)))
        if b"%" in sent:
            readings.append(decode(_PARAMETERS_SENT.sub(b"", sent)))
    return tuple([meaning for each in readings for meaning in _list_dotted(each)])


def _cut_host(path: str, sent: bytes) -> list[str]:
    """A decoded path without the host before it, of which a `%2f` is a part as it was sent, and a `\\`."""
    whole = sent or path.encode("utf-8", "surrogatepass")
    found = _HOST_SENT.match(whole)
    if found is None or not (b"%" in found[0] or b"\\" in found[0]):
        return []
    rest = whole[found.end() :]
    return [decode(rest) if sent else rest.decode("utf-8", "surrogatepass")]


def _list_dotted(path: str) -> list[str]:
    """What a decoded path may mean, as far as `.` and `..` go."""
    found = [resolve(path)]
    if "/.." in f"/{path}":
        found.append(_merge(path))
        if "//" in path:
            found.append(resolve(_remove_dots(path)))
    if path.endswith(("/.", "/..")):
        found.append(found[0].rstrip("/") or "/")
    return found + _list_unresolved(path if path.startswith("/") else f"/{path}")


def _list_unresolved(path: str) -> list[str]:
    """A decoded path as it is to a router that takes `.`, `..` and empty parts as it takes others (Starlette, Django,
    Express), so that a `*` fits where they are its parameters; and where there are both, without one kind as well:
    Litestar and Rails make one `/` of several alone, Envoy and URLs of browsers resolve dots alone."""
    if "/." in path and "//" in path:
        return [path, _SLASHES.sub("/", path), _remove_dots(path)]
    return [path]


def resolve(path: str) -> str:
    """A decoded path without `.`, `..` and empty parts."""
    plain = posixpath.normpath(f"/{path.lstrip('/')}")
    return f"{plain}/" if plain != "/" and path.endswith(("/", "/.", "/..")) else plain


def _remove_dots(path: str) -> str:
    """A decoded path without `.` and `..`, each of which takes one part away, an empty one as well."""
    parts: list[str] = []
    for part in path.split("/"):
        if part == ".." and len(parts) > 1:  # the first is what stands before the path
            parts.pop()
        elif part not in (".", ".."):
            parts.append(part)
    return "/".join(parts) + "/" * path.endswith(("/.", "/.."))


def _merge(path: str) -> str:
    """A decoded path without `.` and empty parts."""
    merged = f"/{path}"
    for unsaid in ("//", "/./"):
        while unsaid in merged:
            merged = merged.replace(unsaid, "/")
    return merged.removesuffix(".") if merged.endswith("/.") else merged


def plain_host(host: bytes) -> str:
    """The host of a `Host` field (RFC 9110, 7.2): in small letters, without port, without the dots at its end, and
    without what no authority has in it (RFC 3986, 3.2). An IPv6 address stands in brackets, in its usual form."""
    first = _AUTHORITY_END.split(host, maxsplit=1)[0]
    name = decode(first).strip().lower().rpartition("@")[2]
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
