"""Whoever may log in fills every file system that he may write to, while a window of confirmation is open: what nobody
has confirmed is undone in time all the same."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from netlimit.records import Outcome
from scripts.testbed.namespaces import Lab
from tests import warm
from tests.e2e.gateway import HOST
from tests.e2e.test_confirmation import CUT, HARMLESS, Site

SOON = 15.0
"""Seconds within which the operator is let in again: the database is waited for three, and some machines are slow."""
STAYS = 10.0
"""Seconds for which he stays so: the controller does the guard's part three after the end, and reports every five."""
CROWDED = "tests.e2e.crowded"
NOBODY = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--bounding-set=-all")


@pytest.fixture(scope="module")
def directory(root: None) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="netlimit-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def places(directory: Path) -> Iterator[tuple[Path, Path]]:
    """A disk, and what processes have for /dev/shm: small ones, to which everybody may write."""
    places = directory / "disk", directory / "memory"
    for place, size in zip(places, ("12m", "2m"), strict=True):
        place.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=1777", "none", place], check=True)
    yield places
    for place in places:
        subprocess.run(["umount", "--lazy", place], check=True)


@pytest.fixture(scope="module")
def place(lab: Lab, places: tuple[Path, Path], directory: Path) -> Iterator[Site]:
    """Database and copy are on the disk, and the log is not."""
    place = Site(lab, places[0])
    place.log = place.guard.log = directory / "log"
    place.log.touch()
    yield place
    place.end()
    place.close()
    place.guard.close()


@pytest.fixture
def site(place: Site) -> Site:
    """A gateway with one rule in the kernel, on which nothing runs."""
    place.end()
    place.store.pause(HOST, False)
    place.erase(*(kept.rule for kept in place.store.select()[0]))
    place.write(HARMLESS)
    place.do("apply")
    return place


@contextmanager
def filled(places: tuple[Path, ...]) -> Iterator[None]:
    """Nothing can be written there meanwhile."""
    for place in places:
        subprocess.run([*NOBODY, "sh", "-c", f"cat /dev/zero > {place}/fill"], check=False, stderr=subprocess.DEVNULL)
        assert not shutil.disk_usage(place).free
    try:
        yield
    finally:
        for place in places:
            (place / "fill").unlink()


def wait_for_the_operator(site: Site) -> None:
    began = time.monotonic()
    site.wait(lambda: site.reachable, "the operator")
    assert time.monotonic() - began < SOON


def is_recorded(site: Site) -> bool:
    return site.outcome is Outcome.EXPIRED and site.holds(HARMLESS)


@pytest.mark.parametrize("controller", ["alive", "killed"])
def test_a_guard_needs_no_room(site: Site, places: tuple[Path, Path], controller: str) -> None:
    site.start()
    site.guard.launch("-m", CROWDED, str(places[1]), "guard")
    site.wait(lambda: HOST in site.store.guards(), "a guard")
    window = site.open()
    site.cut()
    if controller == "killed":
        site.stop(signal.SIGKILL)
    with filled(places):
        told = len(site.log.read_text().splitlines())
        site.wait(lambda: window.left(datetime.now(UTC)) == 0, "the window to be over")
        wait_for_the_operator(site)
        stays = time.monotonic() + STAYS
        while time.monotonic() < stays:
            assert site.reachable  # nobody puts back what was undone
            time.sleep(0.2)
        lines = site.log.read_text().splitlines()[told:]
        assert len(lines) < 20, lines
    site.wait(lambda: is_recorded(site), "the rollback to be recorded")
    assert site.reachable


def test_nor_does_one_that_was_started_for_the_window(site: Site, places: tuple[Path, Path]) -> None:
    site.write(CUT)
    done = warm.run(CROWDED, str(places[1]), "apply", "--confirm", "15s", **site._place)
    assert done.returncode == 0, done
    window = site.store.window()
    assert window is not None
    with filled(places):
        assert not site.reachable
        site.wait(lambda: window.left(datetime.now(UTC)) == 0, "the window to be over")
        wait_for_the_operator(site)
    site.wait(lambda: not site.guarded, "the guard to end")
    assert is_recorded(site)
    assert site.reachable
