"""What a tool lists is waited for by nobody who enforces."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from netlimit.errors import KernelError
from netlimit.kernel.tools import Listing, ToolMissing

GATED = 'while [ ! -e "$0" ]; do sleep 0.02; done; cat "$0"; rm "$0"'


def test_what_takes_long_is_given_the_next_time(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    listing = Listing("sh", "-c", GATED, str(gate), longest=60)
    with pytest.raises(KernelError, match="has much to list"):
        listing.read(0.05)
    gate.write_text("first")
    assert listing.read(10) == "first"
    assert listing.read(0.05) == "first", "while it lists anew"
    gate.write_bytes(b"second \xff")
    assert listing.read(10) == "second \\xff"


def test_what_never_ends_is_given_up_and_tried_again(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    listing = Listing("sh", "-c", GATED, str(gate), longest=0.2)
    with pytest.raises(KernelError, match="did not end within"):
        listing.read(0.3)
    gate.write_text("at last")
    assert listing.read(10) == "at last"


def test_what_fails_and_what_is_not_there_say_so() -> None:
    with pytest.raises(KernelError, match="no such table"):
        Listing("sh", "-c", "echo no such table >&2; exit 3", longest=1).read(10)
    with pytest.raises(ToolMissing, match="no `no-such-tool` on this host"):
        Listing("no-such-tool", longest=1).read(10)


def test_what_nobody_will_hear_does_not_go_on() -> None:
    listing = Listing("sleep", "100", longest=100)
    with pytest.raises(KernelError, match="has not ended yet"):
        listing.read(0.01)
    process = listing._process
    assert process is not None
    del listing
    assert process.returncode == -signal.SIGKILL


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for temporary files that somebody has filled."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", tmp_path], check=True)
    try:
        with suppress(OSError), (tmp_path / "filler").open("wb", buffering=0) as filler:
            while filler.write(b"x" * 4096):
                pass
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        yield tmp_path
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.usefixtures("root", "full")
def test_where_there_is_no_room_for_files_a_listing_is_whole() -> None:
    careless = Listing("sh", "-c", "seq 10000 2>/dev/null; exit 0", longest=60)  # as nft and iptables-nft-save are
    assert careless.read(60).splitlines()[-1:] == ["10000"]


def test_a_survey_does_not_wait_for_a_large_ruleset(root: None, tmp_path: Path) -> None:
    slow = tmp_path / "nft"
    slow.write_text("#!/bin/sh\nexec sleep 8\n")
    slow.chmod(0o755)
    code = (
        "import time; from netlimit.kernel.linux import LinuxKernel; kernel = LinuxKernel(); began = time.monotonic(); "
        "report = kernel.survey(thorough=False); print(time.monotonic() - began, report.unknown)"
    )
    began = time.monotonic()
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", code],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    spent, unknown = done.stdout.split(" ", 1)
    assert "the rules of nftables (it has much to list, and has not ended yet)" in unknown
    assert float(spent) < 7 or time.monotonic() - began > 20, "but on a machine that was busy with other things"
