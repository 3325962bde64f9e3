"""How busy the machine is, as elastic limits see it."""

from __future__ import annotations

from pathlib import Path

import pytest

from netlimit.l7.pressure import Pressure, read_pressure


def test_this_machine_tells_how_busy_it_is() -> None:
    assert 0 <= read_pressure() <= 1


def test_the_worst_of_the_kernels_pressures_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlimit.l7.pressure._PSI", tmp_path)
    for resource, stalled in (("cpu", "12.50"), ("memory", "0.00"), ("io", "40.10")):
        (tmp_path / resource).write_text(
            f"some avg10={stalled} avg60=99.00 avg300=99.00 total=1\nfull avg10=99.00 avg60=0.00 avg300=0.00 total=0\n"
        )
    assert read_pressure() == pytest.approx(0.401)


def test_without_them_the_load_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlimit.l7.pressure._PSI", tmp_path / "none")
    monkeypatch.setattr("os.getloadavg", lambda: (1.5, 9.0, 9.0))
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    assert read_pressure() == 0.25
    monkeypatch.setattr("os.getloadavg", lambda: (60.0, 9.0, 9.0))
    assert read_pressure() == 1


def test_it_is_read_once_a_second() -> None:
    now, values = 0.0, iter([0.1, 0.9])
    pressure = Pressure(lambda: next(values), lambda: now)
    assert [pressure.value for _ in range(3)] == [0.1] * 3
    now = 0.99
    assert pressure.has_room(50)
    now = 1.0
    assert not pressure.has_room(50)


def test_the_application_knows_better() -> None:
    pressure = Pressure(lambda: 0.0)
    pressure.signal(1.0)
    assert not pressure.has_room(100)
    pressure.signal(0.0)
    assert (pressure.has_room(1), pressure.has_room(0)) == (True, False)
    for absurd in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="from 0 \\(idle\\) to 1"):
            pressure.signal(absurd)
