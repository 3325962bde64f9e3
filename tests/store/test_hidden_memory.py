"""A process that cannot see how much memory there is, as in a unit with `ProcSubset=pid`: what it asks of a SQLite file
comes to its end, and what it asks next as well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from netlimit.store import burden
from tests.warm import ROOT

LONG = (
    "WITH RECURSIVE each(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM each WHERE n < 4000000) SELECT count(*) FROM each"
)
HIDDEN = f"""
import sys
from pathlib import Path
from netlimit.store.connection import connect
assert not Path("/proc/meminfo").exists()
connection = connect(Path(sys.argv[1]), patience=1)
for _ in range(2):
    print(connection.cursor().execute({LONG!r}).fetchone())
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("CREATE TABLE IF NOT EXISTS written (n)")
    connection.execute("COMMIT")
"""
CROWDED = f"""
import resource, sys
from pathlib import Path
from netlimit.store.connection import connect
connection = connect(Path(sys.argv[1]), patience=1)
print(connection.cursor().execute({LONG!r}).fetchone())
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
try:
    open("/proc/self/statm")
except OSError:
    print(connection.cursor().execute({LONG!r}).fetchone())
"""
HIDE = 'mount -t proc -o subset=pid proc /proc && exec "$@"'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "store.db"
    path.touch()
    return path


@pytest.mark.usefixtures("root")
def test_a_long_statement_ends_where_only_processes_are_to_be_seen(path: Path) -> None:
    hidden = ("unshare", "--mount", "--propagation", "private", "sh", "-c", HIDE, "sh")
    command = (*hidden, sys.executable, "-c", HIDDEN, str(path))
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert (found.stdout, found.stderr) == ("(4000000,)\n" * 2, "")


def test_who_cannot_see_what_is_free_takes_a_part_of_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(burden, "MEMINFO", tmp_path / "meminfo")
    assert 2**26 < burden.find_free() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:       12 kB\n")
    assert burden.find_free() == 12 * 1024


def test_who_has_no_room_for_another_open_file_is_not_kept_from_what_he_asks(path: Path) -> None:
    """Though he cannot see how much memory he has."""
    found = subprocess.run(
        (sys.executable, "-c", CROWDED, str(path)), capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert (found.stdout, found.stderr) == ("(4000000,)\n" * 2, "")
