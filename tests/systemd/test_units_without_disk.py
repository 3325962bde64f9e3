"""A gateway that boots while the disk of its database is away, and that disk when it comes."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.systemd.gateway import OTHER, ask, forget_kernel, ping, run, wait, wait_for_ports

UNITS = ("netlimit-controller", "netlimit-guard", "netlimit-api")
PLACE, DISK = Path("/var/lib/netlimit"), Path("/var/lib/netlimit.disk")
FSTAB = Path("/etc/fstab")


def take_away(how: str) -> None:
    """What was in the directory of the database is on the disk, which does not come by itself."""
    DISK.mkdir()
    PLACE.rename(DISK / "netlimit")
    if how == "nofail":
        PLACE.mkdir(0o2770)
        shutil.chown(PLACE, group="netlimit")
        with FSTAB.open("a") as file:
            file.write(f"LABEL=away {PLACE} ext4 nofail 0 2\n")
        run("systemctl", "daemon-reload")
    else:
        PLACE.symlink_to("/mnt/netlimit")


def bring_back(how: str) -> None:
    """By a mount; or else by a directory in the place of the link, at which nothing is mounted."""
    if how == "nofail":
        run("mount", "--bind", str(DISK / "netlimit"), str(PLACE))
    else:
        PLACE.unlink()
        (DISK / "netlimit").rename(PLACE)


@pytest.fixture(params=["nofail", "link"])
def away(request: pytest.FixtureRequest, blocked: str) -> Iterator[str]:
    """As the machine is switched on: nothing runs, and the kernel holds nothing."""
    wait("test -e /var/lib/netlimit-controller/applied.db", "the copy for the boot")
    time.sleep(5)
    written = FSTAB.read_text() if FSTAB.exists() else ""
    run("systemctl", "stop", *UNITS, "netlimit-limiter")
    forget_kernel()
    take_away(request.param)
    yield request.param
    run("systemctl", "stop", *UNITS)
    if f" {PLACE} " in Path("/proc/self/mounts").read_text():
        run("umount", str(PLACE))
    if (DISK / "netlimit").exists():
        PLACE.unlink() if PLACE.is_symlink() else PLACE.rmdir()
        (DISK / "netlimit").rename(PLACE)
    DISK.rmdir()
    FSTAB.write_text(written)
    run("systemctl", "daemon-reload")
    run("systemctl", "start", *UNITS)
    wait_for_ports("api")
    run("netlimit", "rule", "remove", "back", check=False)


def test_what_was_applied_last_comes_back_and_the_disk_is_used_once_it_is_there(
    client: str, blocked: str, away: str
) -> None:
    assert ping(client, blocked) == 5
    run("systemctl", "restart", "netlimit-restore")
    assert ping(client, blocked) == 0
    since = time.strftime("%F %T")
    run("systemctl", "start", "netlimit-controller", "netlimit-guard")
    for unit in ("controller", "guard"):
        log = f"journalctl --no-pager --unit netlimit-{unit} --since '{since}'"
        wait(f"{log} | grep 'There is no database'", f"a {unit} that asks for the database")
        assert ask(unit, "NRestarts") == "0", unit
    bring_back(away)
    run("systemctl", "start", "netlimit-api")
    wait_for_ports("api")
    wait("netlimit status | grep -w live", "a controller that has told the database")
    said = run("netlimit", "rule", "add", OTHER, "--action", "block", "--name", "back", "--wait", "60")
    assert "applied" in said
    assert [ping(client, each) for each in (blocked, OTHER)] == [0, 0]
    for unit in ("controller", "guard"):
        assert int(ask(unit, "NRestarts")) == (away == "link"), f"{unit} may write a mount, not what is made later"
