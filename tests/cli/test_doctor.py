"""What `netlimit doctor` finds of netlimit's own parts, in a process of the test's own."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from netlimit.cli import doctor
from netlimit.faults import find_faults
from netlimit.kernel.none import NoKernel
from netlimit.rules import parse_rule
from netlimit.settings import Settings
from netlimit.store import Store

GB = 2**30


@pytest.mark.parametrize(("total", "told"), [(2 * GB, False), (GB, True), (GB // 2, True), (None, False)])
def test_what_buckets_may_come_to_is_measured_by_the_memory_of_this_host(
    total: int | None, told: bool, sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemFree: 1 kB\nMemTotal: {total // 1024} kB\n" if total else "nothing\n")
    monkeypatch.setattr(doctor, "MEMINFO", meminfo)
    now = datetime.now(UTC)
    wide = [{"target": f"{n}.16.0.0/12", "per": "host", "rate": f"{n} packets/day"} for n in (20, 21)]
    rules = [parse_rule(fields, now) for fields in (*wide, {**wide[0], "target": "30.0.0.0/12", "hosts": ["gw2"]})]
    store = Store(sqlite_url)
    store.add(rules, "test", now)
    store.close()
    settings = Settings(database_url=sqlite_url, host="gw1")
    found = find_faults(doctor._survey_service(settings, NoKernel(tmp_path)))
    sentences = [str(each) for each in found if each.name == "memory for buckets"]
    assert bool(sentences) == told
    if total and told:
        assert sentences[0].startswith(f"This host has {'1 GB' if total == GB else '512 MB'} in all. The buckets of")
        assert "256 MB of kernel memory" in sentences[0]
