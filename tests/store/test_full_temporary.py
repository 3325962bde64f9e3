"""Where temporary files go, anybody can see to it that there is no room."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MANY = 5000
"""Rules: SQLite keeps in a file how a statement is undone that has written more than 64 KiB."""
_CHANGE = """
import os, sys
from datetime import UTC, datetime
from netlimit.rules import parse_rule
from netlimit.store import Store
now = datetime.now(UTC)
store = Store(sys.argv[1])
store.upgrade()
texts = [{"target": f"10.{n >> 8}.{n & 255}.0/24", "action": "block"} for n in range(int(sys.argv[2]))]
store.add([parse_rule(each, now) for each in texts], "test", now)
print(store.revision())
"""


def test_a_large_change_needs_none(tmp_path: Path, root: None) -> None:
    full = tmp_path / "full"
    full.mkdir()
    mount = f'mount -t tmpfs -o size=16k none {full} && {{ cat /dev/zero > {full}/fill; exec "$@"; }}'
    change = (sys.executable, "-c", _CHANGE, f"sqlite:///{tmp_path}/netlimit.db", str(MANY))
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, "sh", *change],
        env={**os.environ, "SQLITE_TMPDIR": str(full)}, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "1\n", done
