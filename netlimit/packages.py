"""Where the packages are that stand beside `netlimit` in a checkout, and below it where it is installed: `api` and
`migrations` are names that a program of somebody else's may well have, too."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).parent


def find_package(name: str) -> Path:
    """The directory of `api` or `migrations`."""
    below = _HERE / name
    return below if below.is_dir() else _HERE.parent / name


def import_beside(name: str) -> ModuleType:
    """A module of `api` or `migrations`, by its name in a checkout (`api.app`)."""
    package, _, _ = name.partition(".")
    if (_HERE / package).is_dir():
        return import_module(f"netlimit.{name}")
    if package not in sys.modules:  # by its place: another package of this name may come first on the path
        place = find_package(package)
        spec = spec_from_file_location(package, place / "__init__.py", submodule_search_locations=[str(place)])
        assert spec is not None
        assert spec.loader is not None
        sys.modules[package] = module = module_from_spec(spec)
        spec.loader.exec_module(module)
    return import_module(name)
