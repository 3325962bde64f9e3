"""What stands for stderr waits for nobody who reads it, over real pipes, sockets and terminals."""

from __future__ import annotations

import fcntl
import io
import os
import re
import signal
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest

from netlimit.cli.backlog import HELD_BYTES
from netlimit.cli.patience import ImpatientStream, make_impatient
from tests.unread import OUTLETS, Outlet, opened

NOBODY = 65534
LINES = [f"line {number:06} {'x' * (number % 150)}" for number in range(20_000)]
"""More than is held and what any outlet takes."""


ONLY_PIPE = pytest.mark.parametrize("outlet", ["pipe"], indirect=True)


@pytest.fixture(params=OUTLETS)
def outlet(request: pytest.FixtureRequest) -> Iterator[Outlet]:
    with opened(request.param) as outlet:
        yield outlet


@pytest.fixture
def stream(outlet: Outlet) -> Iterator[ImpatientStream]:
    stream = replace(outlet)
    yield stream
    outlet.leave()  # or else it would be waited for
    stream.close()


def replace(outlet: Outlet) -> ImpatientStream:
    """What stands for a stream to an outlet, which stays open."""
    stream = make_impatient(open(outlet.write_end, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    assert isinstance(stream, ImpatientStream)
    return stream


def read_all(stream: ImpatientStream, outlet: Outlet) -> list[str]:
    """What comes as long as somebody reads, and all is sent."""
    found = b""
    while more := outlet.read():
        found += more
        stream.flush()
    return found.decode().splitlines()


def count_lost(said: list[str]) -> int:
    found = (
        re.fullmatch(r"(\d+) lines? (?:was|were) lost here: nobody read what netlimit said\.", line) for line in said
    )
    return sum(int(match[1]) for match in found if match)


def cook(terminal: Outlet) -> None:
    """Have a terminal make two characters of a line's end, as most do."""
    mode = termios.tcgetattr(terminal.write_end)
    mode[1] |= termios.OPOST | termios.ONLCR
    termios.tcsetattr(terminal.write_end, termios.TCSANOW, mode)


def in_a_copy(do: Callable[[], None]) -> int:
    """Do something in a fork; its exit status, or minus SIGALRM if it does not come to an end."""
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        try:
            do()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_who_comes_back_reads_all_in_order(stream: ImpatientStream, outlet: Outlet) -> None:
    dots = outlet.fill()
    lines = LINES[:1500]
    for line in lines:
        stream.write(f"{line}\n")
    first, *rest = read_all(stream, outlet)
    assert [first, *rest] == ["." * dots + lines[0], *lines[1:]]


def test_lines_longer_than_the_room_are_sent_once(stream: ImpatientStream, outlet: Outlet) -> None:
    lines = [f"{number}:{'ä' * 30_000}:{number}" for number in range(4)]
    stream.write("".join(f"{line}\n" for line in lines))
    assert read_all(stream, outlet) == lines


def test_too_many_are_lost_and_counted(stream: ImpatientStream, outlet: Outlet) -> None:
    for line in LINES:
        stream.write(f"{line}\n")
    said = read_all(stream, outlet)
    assert LINES[: len(said) - 1] == said[:-1]
    assert count_lost(said[-1:]) == len(LINES) - len(said) + 1
    stream.write("again\n")
    assert read_all(stream, outlet) == ["again"]


def test_the_count_stands_where_lines_are_missing(stream: ImpatientStream, outlet: Outlet) -> None:
    for line in LINES:
        stream.write(f"{line}\n")
    said = outlet.read()
    while stream.flush() or (more := outlet.read()):
        said += more
        if len(said) > HELD_BYTES // 2 + 70_000:
            break
    stream.write("after the loss\n")
    lines = said.decode().splitlines() + read_all(stream, outlet)
    assert lines[-1] == "after the loss"
    assert count_lost(lines[-2:-1]) > 0


@ONLY_PIPE
def test_no_more_is_held_than_may_be(stream: ImpatientStream, outlet: Outlet) -> None:
    dots = outlet.fill()
    for line in LINES:
        stream.write(f"{line}\n")
    said = "\n".join(read_all(stream, outlet)[:-1])
    assert HELD_BYTES - 200 < len(said) - dots <= HELD_BYTES


@ONLY_PIPE
def test_a_line_is_one_whatever_it_is_written_in(stream: ImpatientStream, outlet: Outlet) -> None:
    stream.write("in ")
    assert outlet.read() == b""
    stream.write("two\nand ")
    stream.write("three\n")
    assert outlet.read() == b"in two\nand three\n"


@ONLY_PIPE
def test_what_ends_without_an_end_of_line_is_told_all_the_same(stream: ImpatientStream, outlet: Outlet) -> None:
    stream.write("the last word")
    stream.close()
    assert outlet.read() == b"the last word\n"


def test_at_the_end_a_reader_gets_what_is_held(stream: ImpatientStream, outlet: Outlet) -> None:
    dots = outlet.fill()
    for line in LINES[:40]:
        stream.write(f"{line}\n")
    found = outlet.read()
    stream.close()
    found += outlet.read()
    assert found.decode() == "." * dots + "".join(f"{line}\n" for line in LINES[:40])
    stream.write("nobody is to wait for this\n")
    assert outlet.read() == b""


def test_a_reader_who_is_gone_is_no_error(stream: ImpatientStream, outlet: Outlet) -> None:
    outlet.leave()
    for line in LINES[:10]:
        assert stream.write(f"{line}\n") == len(line) + 1
    stream.flush()
    stream.close()


def test_a_reader_who_was_gone_hears_how_much_he_has_missed(tmp_path: Path) -> None:
    place = tmp_path / "log"
    os.mkfifo(place)
    outlet = Outlet(os.open(place, os.O_RDWR), os.open(place, os.O_RDONLY | os.O_NONBLOCK))
    stream = replace(outlet)
    os.dup2(own := os.open(place, os.O_WRONLY | os.O_NONBLOCK), outlet.write_end)
    os.close(own)
    outlet.leave()
    for line in LINES[:10]:
        stream.write(f"{line}\n")
    outlet.read_end = os.open(place, os.O_RDONLY | os.O_NONBLOCK)
    stream.write("here again\n")
    said = read_all(stream, outlet)
    assert (count_lost(said[:1]), said[1:]) == (10, ["here again"])
    stream.close()
    outlet.leave()
    os.close(outlet.write_end)


def test_a_forked_copy_speaks_for_itself(stream: ImpatientStream, outlet: Outlet) -> None:
    dots = outlet.fill()
    stream.write("the first's\n")
    assert len(outlet.read()) == dots

    def speak() -> None:
        os.closerange(3, outlet.write_end)
        os.closerange(outlet.write_end + 1, 256)
        stream.write("the copy's\n")
        stream.flush()

    assert in_a_copy(speak) == 0
    assert outlet.read() == b"the copy's\n"
    stream.flush()
    assert outlet.read() == b"the first's\n"


def test_a_forked_copy_may_begin_anew(stream: ImpatientStream, outlet: Outlet) -> None:
    outlet.fill()
    stream.write("the first's\n")

    def begin_anew() -> None:
        anew = make_impatient(stream)
        assert isinstance(anew, ImpatientStream)
        stream.close()
        for line in LINES:
            anew.write(f"{line}\n")

    assert in_a_copy(begin_anew) == 0


@pytest.mark.parametrize(
    ("outlet", "cooked"), [("pipe", False), ("terminal", False), ("terminal", True)], indirect=["outlet"]
)
def test_an_outlet_of_another_user_stops_nobody(root: None, outlet: Outlet, cooked: bool) -> None:
    """It cannot be opened anew."""
    if cooked:
        cook(outlet)

    def write_as_nobody() -> None:
        os.setuid(NOBODY)
        stream = replace(outlet)
        for line in LINES:
            stream.write(f"{line}\n")

    assert in_a_copy(write_as_nobody) == 0
    said = outlet.read().decode().splitlines()
    assert said[:-1] == LINES[: len(said) - 1]
    assert len(said) > 10


def test_others_who_share_the_descriptor_may_wait(stream: ImpatientStream, outlet: Outlet) -> None:
    stream.write("a line\n")
    assert not fcntl.fcntl(outlet.write_end, fcntl.F_GETFL) & os.O_NONBLOCK


def test_a_file_and_what_has_no_descriptor_are_left_as_they_are(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        assert make_impatient(file) is file
    assert make_impatient(file) is file
    memory: TextIO = io.StringIO()
    assert make_impatient(memory) is memory
