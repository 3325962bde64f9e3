"""What may become of a file on a disk."""

from __future__ import annotations

from pathlib import Path


def flip(path: Path, within: bytes, at: int) -> None:
    """Turn the highest bit of a letter over, after which it is no UTF-8: the first in the file of such a text."""
    content = bytearray(path.read_bytes())
    content[content.index(within) + at] ^= 0x80
    path.write_bytes(content)
