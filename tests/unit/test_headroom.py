"""How much memory is left, as control groups of both kinds tell it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from api.headroom import find_headroom

MB = 2**20


def make(path: Path, **files: object) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.fixture
def process(tmp_path: Path) -> Path:
    make(tmp_path / "self", cgroup="1:name=systemd:/else\n0::/system.slice/api.service", statm="1 1")
    return tmp_path / "self"


def test_the_tightest_group_counts_and_what_can_be_given_up_does_not(tmp_path: Path, process: Path) -> None:
    root = tmp_path / "fs"
    group = root / "system.slice/api.service"
    make(group, memory__max=256 * MB, memory__current=200 * MB, memory__stat=f"anon 1\ninactive_file {30 * MB}")
    make(group.parent, memory__max="max", memory__current=900 * MB, memory__stat="")
    assert find_headroom(root, process) == 86 * MB
    make(group.parent, memory__max=1000 * MB, memory__current=990 * MB, memory__stat="anon 1")
    assert find_headroom(root, process) == 10 * MB


def test_groups_of_the_first_kind(tmp_path: Path) -> None:
    make(tmp_path / "self", cgroup="5:cpu:/x\n4:memory:/a\n0::/", statm="1 1")
    group = tmp_path / "fs/memory/a"
    make(group, memory__limit_in_bytes=256 * MB, memory__usage_in_bytes=100 * MB, memory__stat="total_inactive_file 0")
    make(group.parent, memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=1, memory__stat="")
    assert find_headroom(tmp_path / "fs", tmp_path / "self") == 156 * MB


@pytest.mark.parametrize("cgroup", ["", "0::/gone", "garbage\n1:2", "\udcff"])
def test_what_cannot_be_read_limits_nothing(tmp_path: Path, cgroup: str) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(cgroup, errors="surrogateescape")
    assert find_headroom(tmp_path, tmp_path / "self") is None


def test_a_limit_of_the_address_space_counts_too() -> None:
    code = (
        "import resource; from api.headroom import find_headroom;"
        "resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30)); print(0 < find_headroom() < 2**30)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
