"""How a URL of Redis is parted: the login, the hosts, and what follows."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import urlsplit

_END_OF_HOSTS = re.compile(r"[/?#]")


class Parts(NamedTuple):
    """Of `scheme://login@hosts/rest`; the hosts stand between commas: Python's own reading knows no lists of them."""

    scheme: str
    login: str
    hosts: tuple[str, ...]
    rest: str


def part_url(text: str) -> Parts:
    """Take a URL apart; what it holds is not looked at."""
    scheme, _, rest = text.partition("://") if "://" in text else ("", "", text)
    where = _END_OF_HOSTS.split(rest, maxsplit=1)[0]
    login, _, hosts = where.rpartition("@")
    return Parts(scheme, login, tuple(hosts.split(",")), rest.removeprefix(where))


def name_hosts(text: str) -> tuple[str, ...]:
    """The names and addresses of the servers; none for memory, for a socket, and for what is no URL."""
    parts = part_url(text)
    if not parts.scheme.startswith("redis"):
        return ()
    try:
        return tuple(name for each in parts.hosts if (name := urlsplit(f"//{each}").hostname))
    except ValueError:
        return ()


def leave_out_login(text: str) -> str:
    """A URL that names the same servers, and nothing more of it: neither login nor ports nor options; memory where it
    names none."""
    names = [f"[{name}]" if ":" in name else name for name in name_hosts(text)]
    is_login_clear = "@" not in part_url(text).rest  # else a part of it may have been taken for a host
    return f"redis://{','.join(names)}" if names and is_login_clear else "memory://"
