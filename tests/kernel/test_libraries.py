"""What python-iptables loads into root's commands is nothing that others have put where these are started."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from itertools import product
from pathlib import Path

import pytest

from netlimit.kernel import libraries
from tests.warm import ROOT

NAMES = ("ip4tc", "ip6tc", "iptc", "xtables", "xtwrapper")
ENDS = ("", ".so", str(sysconfig.get_config_var("EXT_SUFFIX")))
LOADING = "from netlimit.kernel import libiptc; libiptc.load(); print(libiptc._iptc().__name__)"
HOSTILE = """
#include <stdlib.h>
__attribute__((constructor)) static void begin(void) { system("echo loaded >>$PROOF"); }
"""
PROGRAM = "#!/bin/sh\necho ran >>$PROOF\nexit 1\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory of everybody's."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def load(place: Path, proof: Path) -> str:
    """Load the library in a process that is started there; what somebody else's code has said of itself."""
    path = f"{place}:{os.environ['PATH']}"
    environment = {**os.environ, "PROOF": str(proof), "PYTHONPATH": str(ROOT), "PATH": path, "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LOADING],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "iptc\n"), done.stderr
    return proof.read_text() if proof.exists() else ""


def list_names() -> list[str]:
    return [f"{begin}{name}{end}" for begin, name, end in product(("", "lib"), NAMES, ENDS)]


def test_no_link_is_followed(place: Path, tmp_path: Path) -> None:
    source, hostile = tmp_path / "hostile.c", tmp_path / "hostile.so"
    source.write_text(HOSTILE)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", hostile, source], check=True)
    for name in list_names():
        (place / name).symlink_to(hostile)
    assert load(place, tmp_path / "proof") == ""


def test_no_link_keeps_root_waiting(place: Path, tmp_path: Path) -> None:
    for name in list_names():
        (place / name).symlink_to(name)
    assert load(place, tmp_path / "proof") == ""


def test_no_compiler_is_asked(place: Path, tmp_path: Path) -> None:
    for name in ("gcc", "cc", "ld", "objdump", "ldconfig"):
        (place / name).write_text(PROGRAM)
        (place / name).chmod(0o755)
    assert load(place, tmp_path / "proof") == ""


def test_what_is_not_there_is_not_found() -> None:
    assert libraries.find_library("netlimit-has-no-such-library") == (None, None)


def test_the_first_that_is_there_is_loaded_with_its_version() -> None:
    library, major = libraries.find_library("netlimit-has-no-such-library", "xtables")
    assert library is not None
    assert major is not None
    assert major >= 12
