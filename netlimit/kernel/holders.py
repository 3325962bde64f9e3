"""Who holds a claim, and whether he hangs: the process whose socket the kernel names, and the processor time that it
and what it has started take.

The kernel tells of a group's socket its port (/proc/net/netfilter/nfnetlink_log), of the port its inode
(/proc/net/netlink), and of each process what it has open: all but the first only to who has the same user and as many
rights, or is root. So a process is ended for what the kernel says of it, and never for what it says of itself.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from netlimit.errors import KernelError
from netlimit.kernel import membership
from netlimit.kernel.claim import Claim
from netlimit.plain import decode, decode_name, read_text

STOPPED_SECONDS = 10.0
"""Who is stopped (SIGSTOP, a debugger) for so long with a claim hangs."""
IDLE_SECONDS = 75.0
"""So does who computes nothing, nor what it has started, for so long. A tool that hangs is given up before."""

LOGS = "/proc/thread-self/net/netfilter/nfnetlink_log"
"""Shown to root alone (`netlimit.kernel.proc_files`)."""
_SOCKETS = "/proc/thread-self/net/netlink"
_NETFILTER = 12
_LONGEST_NAME = 100
_STOPPED = frozenset("Tt")

log = logging.getLogger(__name__)


class _Standing(NamedTuple):
    """A process as /proc/PID/stat tells of it: its state, its parent, clock ticks of processor time that it took, and
    of its children that have ended, and when it started."""

    state: str
    parent: int
    ticks: int
    started: int


@dataclass
class _Suspect:
    """A holder, seen with the same claim since `since`: `moved_at` is when it computed last, `ran_at` when it was last
    not stopped."""

    inode: str
    started: int
    ticks: int
    moved_at: float
    ran_at: float


class HolderWatch:
    """Finds who hangs with a claim, by looking again and again."""

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        self._told = False
        self._suspects: dict[int, _Suspect] = {}

    def end_hanging(self) -> str | None:
        """End the process that hangs with the claim; the sentence that tells it, None where there is none. Never
        raises."""
        try:
            return self._look(time.monotonic())
        except (OSError, ValueError, IndexError, KernelError) as error:
            self._tell_unseen(error)
            return None

    def _tell_unseen(self, error: Exception) -> None:
        log.debug("Who holds the claim cannot be found: %s", error)
        if isinstance(error, PermissionError) and error.filename == LOGS and not self._told:
            self._told = True
            log.warning(
                "Who writes to the kernel cannot be seen, and is not ended if he hangs: only root may read %s at this "
                "moment; `netlimit prepare`, as root, lets the controller read it.",
                LOGS,
            )

    def _look(self, now: float) -> str | None:
        inode = find_inode(self._claim)
        pids = set(find_openers(inode)) - {os.getpid()} if inode else set[int]()
        standings = read_standings() if pids else {}
        self._suspects = {pid: each for pid, each in self._suspects.items() if pid in pids}
        for pid in pids & standings.keys():
            assert inode is not None
            why, name = self._judge(pid, inode, standings, now), _name(pid)
            if why and _kill(pid, inode, standings[pid].started):
                return f"Process {pid} ({name}) {why} while it was the one who writes to the kernel: it was killed."
        return None

    def _judge(self, pid: int, inode: str, standings: Mapping[int, _Standing], now: float) -> str | None:
        """Why a holder is taken to hang; None if it is not, or not yet."""
        found, ticks = standings[pid], sum_ticks(pid, standings)
        known = self._suspects.get(pid)
        if known is None or (known.inode, known.started) != (inode, found.started):
            self._suspects[pid] = _Suspect(inode, found.started, ticks, now, now)
            return None
        if ticks != known.ticks:
            known.ticks, known.moved_at = ticks, now
        if found.state not in _STOPPED:
            known.ran_at = now
        if now - known.ran_at >= STOPPED_SECONDS:
            return f"was stopped for {now - known.ran_at:.0f} seconds"
        if now - known.moved_at >= IDLE_SECONDS:
            return f"did nothing for {now - known.moved_at:.0f} seconds"
        return None


def find_inode(claim: Claim) -> str | None:
    """The inode of the socket that holds a claim; None if nobody does, or it is not told. Raises OSError."""
    port = _find_port(claim)
    if port is None:
        return next(map(decode, membership.find_members(claim, "look who writes")), None)
    rows = (line.split() for line in read_text(_SOCKETS).splitlines()[1:])
    return next((row[-1] for row in rows if int(row[1]) == _NETFILTER and int(row[2]) == port), None)


def _find_port(claim: Claim) -> int | None:
    """The port of the netlink socket that has bound the group of a claim."""
    try:
        rows = [line.split() for line in read_text(LOGS).splitlines()]
    except FileNotFoundError:  # no NFLOG
        return None
    return next((int(row[1]) for row in rows if int(row[0]) == claim), None)


def find_openers(inode: str) -> Iterator[int]:
    """The processes that have a socket open, as far as this one may look."""
    wanted = f"socket:[{inode}]"
    for pid in _list_processes():
        with suppress(OSError):
            place = f"/proc/{pid}/fd"
            if any(_read_link(f"{place}/{number}") == wanted for number in os.listdir(place)):
                yield pid


def _read_link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed meanwhile
        return ""


def read_standings() -> dict[int, _Standing]:
    """How every process stands."""
    found = {}
    for pid in _list_processes():
        with suppress(OSError):
            found[pid] = _read_standing(pid)
    return found


def _read_standing(pid: int) -> _Standing:
    # The name before may have any bytes, brackets and spaces too.
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return _Standing(decode(fields[0]), int(fields[1]), sum(map(int, fields[11:15])), int(fields[19]))


def sum_ticks(pid: int, standings: Mapping[int, _Standing]) -> int:
    """The processor time of a process and of all that it has started: a pass waits for tools that work."""
    below: dict[int, list[int]] = {}
    for each, standing in standings.items():
        below.setdefault(standing.parent, []).append(each)
    ticks, waiting, seen = 0, [pid], {pid}
    while waiting:
        each = waiting.pop()
        ticks += standings[each].ticks
        fresh = set(below.get(each, ())) - seen
        seen |= fresh
        waiting.extend(fresh)
    return ticks


def _list_processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _kill(pid: int, inode: str, started: int) -> bool:
    """Kill a process that is still the one that was looked at, holds the claim, and is of this user or anybody's whom
    root may end; whether that was done."""
    descriptor = os.pidfd_open(pid)  # from here on nobody else can get its number unnoticed
    try:
        same = _read_standing(pid).started == started and pid in find_openers(inode)
        if not same or os.geteuid() not in (0, os.stat(f"/proc/{pid}").st_uid):
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    finally:
        os.close(descriptor)
    return True


def _name(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()[:_LONGEST_NAME].split(b"\0")
    except OSError:
        words = []
    return " ".join(map(decode_name, filter(None, words))) or "it has no name"
