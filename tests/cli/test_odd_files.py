"""Files that are none, or are too large, where a command wants one: a sentence at once."""

from __future__ import annotations

import os
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from netlimit.errors import NetlimitError, SettingsError
from netlimit.reading import MOST, read_whole
from netlimit.settings import load_settings
from netlimit.store import Store
from tests.awake import Awake

SECONDS = 2.0


@pytest.fixture(params=["fifo", "directory", "device", "sparse", "empty", "text", "other database"])
def odd(request: pytest.FixtureRequest, tmp_path: Path, fresh_file: Path) -> Path:
    path = tmp_path / "odd"
    if request.param == "fifo":
        os.mkfifo(path)
    elif request.param == "directory":
        path.mkdir()
    elif request.param == "device":
        return Path("/dev/zero")
    elif request.param == "other database":
        path.write_bytes(fresh_file.read_bytes())
    else:
        path.write_bytes(b"no backup\n" if request.param == "text" else b"")
        if request.param == "sparse":
            os.truncate(path, 3 * 2**30)
    return path


def test_restore(odd: Path, sqlite_url: str) -> None:
    store = Store(sqlite_url)
    with (
        Awake() as awake,
        pytest.raises((NetlimitError, OSError), match=r"no backup|no file|directory") as caught,
    ):
        store.restore(odd, "test", datetime.now(UTC))
    assert awake.seconds < SECONDS
    assert str(odd) in str(caught.value)
    store.close()


def test_a_file_of_gigabytes_that_begins_as_a_backup_does(sqlite_url: str, tmp_path: Path) -> None:
    store = Store(sqlite_url)
    path = tmp_path / "backup"
    store.back_up(path, datetime.now(UTC))
    os.truncate(path, 3 * 2**30)
    with pytest.raises(NetlimitError, match="not as long as it says"):
        store.restore(path, "test", datetime.now(UTC))
    store.close()


def test_settings(odd: Path, request: pytest.FixtureRequest) -> None:
    if odd.is_file() and odd.stat().st_size == 0:
        load_settings(odd)  # nothing is set
        return
    with Awake() as awake, pytest.raises(SettingsError, match="settings file"):
        load_settings(odd)
    assert awake.seconds < SECONDS


def test_a_file_for_a_command(odd: Path) -> None:
    if odd.is_file() and odd.stat().st_size < MOST:
        assert read_whole(odd) == odd.read_bytes()
        return
    with Awake() as awake, pytest.raises(OSError, match=r"larger|pipe that nobody|directory") as caught:
        read_whole(odd)
    assert caught.value.filename == str(odd)
    assert awake.seconds < SECONDS


def test_a_pipe_that_somebody_writes_to_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)

    def write() -> None:
        with path.open("wb") as pipe:
            time.sleep(0.2)
            pipe.write(b"x" * 100_000)

    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # as the shell does for <(…): the writer is there already
    writer = threading.Thread(target=write)
    writer.start()
    time.sleep(0.1)
    assert read_whole(path) == b"x" * 100_000
    writer.join()
    os.close(reading)
