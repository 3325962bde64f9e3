"""Power that goes while netlimit is being installed, or soon after: the disk has what has reached it, and no more."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FORMER, LATER = "opt/netlimit/venv-20250101000000-1", "opt/netlimit/venv-20260101000000-1"
LOSING = """#!/bin/bash
/usr/bin/{program} "$@" || exit
case "${{@: -1}}" in
{cases}
esac
"""
"""A program that, where it has just been used for this, waits until the journal of the file system has that, which
ext4 writes long before it writes what is in new files; then the disk is kept as it is, as whoever boots finds it."""
LOST = {
    "settings": ("mv", "*/netlimit.toml"),
    "program": ("mv", "*/opt/netlimit/bin"),
    "unit": ("mv", "*/netlimit-controller.service"),
    "list": ("mv", "*/share/installed"),
    "former": ("rm", "*/venv-2025*"),
}
"""What is put in force, or removed, before the power goes."""


def run(*command: str | Path, **environment: str) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ | environment, timeout=120
    )
    assert not done.returncode, done.stderr


@contextmanager
def mounted(disk: Path, place: Path) -> Iterator[Path]:
    place.mkdir()
    run("mount", "-o", "loop,commit=1", disk, place)
    try:
        yield place
    finally:
        run("umount", place)


@pytest.fixture
def disk(root: None, tmp_path: Path) -> Path:
    disk = tmp_path / "disk"
    run("truncate", "--size", "48M", disk)
    run("mkfs.ext4", "-q", "-F", disk)
    return disk


def make_environment(place: Path) -> None:
    """With a program that is whole where what stands at its end is."""
    (place / "bin").mkdir(parents=True)
    for name in ("netlimit", "python"):
        (place / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.prefix}/bin/{name} "$@"\n')
        (place / "bin" / name).chmod(0o755)
    (place / "module.py").write_text("pass\n" * 100_000)


def lose_power(disk: Path, place: Path, stubs: Path) -> None:
    """Install another environment; the disk is kept as it is at each of those moments, and at the end."""
    stubs.mkdir()
    for program in ("mv", "rm"):
        cases = (
            f"{pattern}) sleep 2; cp --sparse=always {disk} {disk}.{name} ;;"
            for name, (used, pattern) in LOST.items()
            if used == program
        )
        (stubs / program).write_text(LOSING.format(program=program, cases="\n".join(cases)))
        (stubs / program).chmod(0o755)
    searched = f"{stubs}:{os.environ['PATH']}"
    run("scripts/install", "--root", place, "--venv", place / LATER, PATH=searched)
    shutil.copy(disk, disk.with_suffix(".end"))


def read_files(place: Path) -> dict[str, bytes]:
    files = (path for path in place.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(place)): path.read_bytes() for path in files if "lost+found" not in path.parts}


def test_what_is_in_force_when_power_goes_is_whole(disk: Path, tmp_path: Path) -> None:
    with mounted(disk, tmp_path / "place") as place:
        make_environment(place / FORMER)
        (place / "opt/netlimit/share").mkdir()
        (place / "opt/netlimit/share/installed").write_text("/etc/of-an-earlier-version\n")
        run("sync", "-f", place)
        make_environment(place / LATER)
        lose_power(disk, place, tmp_path / "stubs")
        written = read_files(place)
    for moment in (*LOST, "end"):
        with mounted(disk.with_suffix(f".{moment}"), tmp_path / moment) as found:
            files = read_files(found)
            link = found / "opt/netlimit/bin"
            program = f"opt/netlimit/{link.readlink().parent.name}" if link.is_symlink() else FORMER
        assert f"{program}/module.py" in files, moment
        in_force = [name for name in files if name in written and (program == LATER or LATER not in name)]
        assert [name for name in in_force if written[name] and not files[name]] == [], moment
    assert (program, files) == (LATER, written), "and all is there soon"
