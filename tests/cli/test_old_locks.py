"""What former versions left in /run/netlimit for network namespaces goes, but for what somebody holds."""

from __future__ import annotations

import fcntl
from pathlib import Path

from netlimit.cli.preparing import _remove_old_locks


def test_files_of_dead_namespaces_go(tmp_path: Path) -> None:
    for name in ("4026531840.controller", "4026531840.lock", "4026532999.controller", "window.json", "x.lock"):
        (tmp_path / name).touch()
    with (tmp_path / "4026532999.controller").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        _remove_old_locks(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {"4026532999.controller", "window.json", "x.lock"}
    _remove_old_locks(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"window.json", "x.lock"}
