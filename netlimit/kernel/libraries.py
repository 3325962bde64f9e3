"""Where python-iptables finds the libraries that it calls: where root alone can have put them.

Its own search begins in the working directory, follows links that stand there, and asks a compiler and a linker, which
look there too. Who starts netlimit there as root would run what anybody has left.
"""

from __future__ import annotations

import ctypes
import re
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

from netlimit.kernel.tools import ask

_LDCONFIG = ("/sbin/ldconfig", "-p")
_KNOWN = re.compile(r"^\t(\S+) \(", re.MULTILINE)
_MAJOR = re.compile(r"\.so\.(\d+)")


def confine_search() -> None:
    """Have python-iptables, which nobody has imported yet, look for libraries as `find_library` does."""
    package = find_spec("iptc")
    if package is None or "iptc.util" in sys.modules:
        return  # who imports it says that it is missing
    spec = spec_from_file_location("iptc.util", _find_directory(package) / "util.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module).update(find_library=find_library, find_libc=_open_libc)
    sys.modules["iptc.util"] = module


def find_library(*names: str) -> tuple[ctypes.CDLL | None, int | None]:
    """Load the first of these libraries that is there, of the system's or of python-iptables itself; with the first
    number of its version (0 for none). None twice, where there is none. Raises KernelError, where nobody tells what the
    system has."""
    for name in names:
        for place in (*_list_installed(name), *_list_own(name)):
            try:
                library = ctypes.CDLL(place, mode=ctypes.RTLD_GLOBAL)
            except OSError:  # of another architecture, or gone
                continue
            found = _MAJOR.search(place)
            return library, int(found[1]) if found else 0
    return None, None


def _list_installed(name: str) -> Iterator[str]:
    """The sonames by which the dynamic linker, which looks into directories of the system alone, finds a library."""
    begin = name if ".so" in name else f"lib{name}.so"
    return (each for each in _list_known() if each == begin or each.startswith(f"{begin}."))


@cache
def _list_known() -> tuple[str, ...]:
    return tuple(_KNOWN.findall(ask(*_LDCONFIG)))


def _list_own(name: str) -> Iterator[str]:
    """What python-iptables has brought: beside its package."""
    package = find_spec("iptc")
    if package is not None:
        own = _find_directory(package).parent / f"lib{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
        if own.is_absolute() and own.is_file():
            yield str(own)


def _find_directory(package: ModuleSpec) -> Path:
    places = package.submodule_search_locations
    assert places
    return Path(places[0])


def _open_libc() -> ctypes.CDLL:
    return ctypes.CDLL("libc.so.6", mode=ctypes.RTLD_GLOBAL)
