"""The tools of legacy iptables: by the names that say so, or by the plain ones on a host that has no others."""

from __future__ import annotations

import shutil
from functools import lru_cache
from typing import Literal

from netlimit.errors import KernelError
from netlimit.kernel.tools import NoAnswer, run

_SECONDS = 10


def find_tool(family: int, verb: Literal["save", "restore"]) -> str:
    """The program that saves or restores legacy tables; the one that is to be installed where there is none. Raises
    NoAnswer where those that are there do not tell at this moment which they are."""
    base = "iptables" if family == 4 else "ip6tables"
    usual, plain = f"{base}-legacy-{verb}", f"{base}-{verb}"
    return plain if shutil.which(usual) is None and shutil.which(plain) and _is_legacy(plain) else usual


def read_version(family: int) -> str:
    """The version of the tools, such as "1.8.11"."""
    try:
        words = _ask_version(find_tool(family, "save")).split()
    except NoAnswer:
        words = []
    return next((word.removeprefix("v") for word in words if word.startswith("v")), "of a version that it does not say")


@lru_cache(maxsize=8)
def _is_legacy(program: str) -> bool:
    return "(legacy)" in _ask_version(program)


def _ask_version(program: str) -> str:
    try:
        return run(program, "--version", patience=_SECONDS).output
    except NoAnswer:  # one that is remembered would count for ever
        raise
    except KernelError:
        return ""
