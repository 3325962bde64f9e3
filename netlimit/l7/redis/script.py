"""Lua scripts: one decision each, for any number of keys, by the server's clock."""

from __future__ import annotations

from hashlib import sha1
from importlib.resources import files

CLOCK = "local time = redis.call('TIME') local now = time[1] * 1000000 + time[2]\n"
"""What every script begins with: `now` is in microseconds since 1970, a whole number in a double until 2255."""


class Script:
    """A script as it is sent: by its hash, and by its source to a server that does not know it yet."""

    def __init__(self, source: str, arguments: int, width: int, lists: bool = False) -> None:
        self.source = source
        self.arguments = arguments
        """How many it takes for each key."""
        self.width = width
        """How many numbers it replies for each key."""
        self.lists = lists
        """Whether it writes an entry for each hit."""
        text = source.encode()
        self.by_hash = pack(b"EVALSHA", sha1(text, usedforsecurity=False).hexdigest().encode())
        self.by_source = pack(b"EVAL", text)


def read_script(name: str, arguments: int, width: int, lists: bool = False) -> Script:
    """The script of a file beside this one."""
    return Script(CLOCK + files(__package__).joinpath(f"{name}.lua").read_text("utf-8"), arguments, width, lists)


def pack(*words: bytes | int) -> bytes:
    """Words of a command as Redis reads them."""
    texts = [word if isinstance(word, bytes) else b"%d" % word for word in words]
    return b"".join(b"$%d\r\n%b\r\n" % (len(text), text) for text in texts)
