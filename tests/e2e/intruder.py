"""Somebody with the rights of one of our users who exchanges every name that he may, in the directories that he knows,
until he is ended: `python intruder.py USER GROUP OTHERS DIRECTORY…`. He puts there links, hard links, FIFOs,
directories and links to devices (devices themselves only root can make), and then what was there before: else he would
soon have nothing left to exchange."""

from __future__ import annotations

import os
import random
import sys
import time
from contextlib import suppress
from pathlib import Path

SECONDS = 120.0
REST_SECONDS = 0.001
"""In between, what belongs there is there: root comes further."""
MARK = ".aside"
FILES = [
    *(f"{name}{ending}" for name in ("netlimit.db", "applied.db") for ending in ("", "-journal", "-wal", "-shm")),
    *(
        "admin.token",
        "guard.lock",
        "controller",
        "controller.lock",
        "prepare.lock",
        "capabilities.new",
        "ssh-ports.new",
    ),
    *("netlimit", "netlimit-controller", "netlimit.toml", "xtables.lock"),
]
"""What is made there, if it is not there already."""


def exchange(path: Path, others: list[Path]) -> None:
    """Put something else in the place of a name for a moment."""
    aside, target = path.with_name(f"{path.name}{MARK}"), random.choice(others)
    plants = (
        lambda: path.symlink_to(target),
        lambda: path.hardlink_to(target),
        lambda: os.mkfifo(path, 0o666),
        lambda: path.symlink_to(others[0] / "made"),
        lambda: path.symlink_to(random.choice(("/dev/tty", "/dev/zero", "/dev/ptmx"))),
        lambda: path.mkdir(0o777),
    )
    plant = random.choice(plants)
    with suppress(OSError):
        path.rename(aside)
    with suppress(OSError):
        plant()
    time.sleep(random.random() * REST_SECONDS)
    with suppress(OSError):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    with suppress(OSError):
        aside.rename(path)


def list_names(directory: Path) -> list[Path]:
    found = []
    with suppress(OSError):
        found = [path for path in directory.iterdir() if not path.name.endswith(MARK)]
    return list({*found, *(directory / name for name in FILES)})


def main(user: str, group: str, others: str, *directories: str) -> None:
    """Go on for two minutes at most."""
    os.setgroups([])
    os.setgid(int(group))
    os.setuid(int(user))
    os.umask(0)
    targets = [Path(others), *sorted(Path(others).iterdir()), Path("/etc/passwd"), Path("/etc")]
    end = time.monotonic() + SECONDS
    print("begun", flush=True)
    while time.monotonic() < end:
        names = [path for each in directories if os.access(each, os.W_OK | os.X_OK) for path in list_names(Path(each))]
        random.shuffle(names)
        for path in names:
            exchange(path, targets)
            time.sleep(random.random() * REST_SECONDS)
        time.sleep(REST_SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
