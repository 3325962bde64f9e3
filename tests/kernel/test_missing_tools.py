"""Tools that are not there, may not be run, or hang: a sentence that names tool and package; what only advises is
told as unknown."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from netlimit.errors import KernelError
from netlimit.kernel import tools
from netlimit.kernel.survey import look_round


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is all of PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_a_tool_that_is_not_there_is_named_with_its_package(bare: Path) -> None:
    with pytest.raises(tools.ToolMissing, match="no `nft` on this host; install the package nftables"):
        tools.run("nft", "list")
    with pytest.raises(tools.ToolMissing, match="install the package iproute2"):
        tools.run("tc", "-batch", "-")


@pytest.mark.parametrize("kind", ["not executable", "a directory", "no program", "through a file"])
def test_a_tool_that_cannot_be_run_is_no_less_so(bare: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = bare / "nft"
    if kind == "a directory":
        tool.mkdir()
    elif kind == "through a file":
        tool.write_text("")
        monkeypatch.setenv("PATH", str(tool))
    else:
        tool.write_bytes(b"\x7fELF garbage" if kind == "no program" else b"#!/bin/sh\n")
        tool.chmod(0o755 if kind == "no program" else 0o644)
    with pytest.raises(tools.ToolMissing, match=r"`nft`.* install the package nftables"):
        tools.run("nft", "list")
    report = look_round(250, {}, thorough=False)
    assert any("nftables" in each and "`nft`" in each for each in report.unknown)


def test_who_may_not_read_a_directory_of_path_is_told_what_to_look_at(root: None, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    script = (
        "import os, sys; from netlimit.kernel import tools; os.setgid(65534); os.setuid(65534)\n"
        f"os.environ['PATH'] = {str(closed)!r}\n"
        "try: tools.run('nft')\n"
        "except tools.ToolMissing as error: print(error.reason)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "Permission denied" in done.stdout
    assert "nftables" in done.stdout


def test_a_tool_that_hangs_is_given_up(bare: Path) -> None:
    (bare / "nft").symlink_to("/bin/sleep")
    with pytest.raises(KernelError, match=r"did not end within 0\.2 seconds"):
        tools.run("nft", "30", patience=0.2)


def test_no_tool_is_waited_for_without_end(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bare / "ipset").write_text("#!/bin/sh\nexec /bin/sleep 30\n")
    (bare / "ipset").chmod(0o755)
    monkeypatch.setattr(tools, "LONGEST", 0.2)
    with pytest.raises(KernelError, match=r"did not end within 0\.2 seconds"):
        tools.run("ipset", "save")


def test_a_tool_that_prints_any_bytes_is_read(bare: Path) -> None:
    (bare / "nft").write_text("#!/bin/sh\nprintf 'a\\377b\\033'\nprintf '\\376' >&2\n")
    (bare / "nft").chmod(0o755)
    assert tools.run("nft") == (0, "a\\xffb\\x1b", "\\xfe")


def test_a_tool_that_cannot_be_started_now_is_not_missing(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bare / "nft").symlink_to("/bin/true")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))
    try:
        with pytest.raises(tools.NoAnswer, match=r"`nft` cannot be started at this moment \(Too many open files\)"):
            tools.run("nft")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def test_a_tool_that_a_signal_ends_has_not_answered(bare: Path) -> None:
    (bare / "nft").write_text("#!/bin/sh\nkill -9 $$\n")
    (bare / "nft").chmod(0o755)
    with pytest.raises(tools.NoAnswer, match="ended by a signal"):
        tools.run("nft")
