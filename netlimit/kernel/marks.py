"""Who else uses packet marks on this host: routing rules, iptables of both kinds, nftables, and the policies of IPsec.

Nothing of it is a matter of life and death: what cannot be read is told as unknown. To know whether something has
changed costs a few dumps that the kernel answers in microseconds; only then a process of its own asks the tools.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from netlimit.errors import KernelError, say_fault
from netlimit.kernel import iptables_marks, nft_marks, rtnetlink
from netlimit.kernel.iptables_marks import NO_MARKING, Marking
from netlimit.kernel.lookups import read_attributes, read_rules
from netlimit.kernel.tools import ask, own_module
from netlimit.marks import EVERY, Bits, MarkUse, Read, Use, Write
from netlimit.spool import open_spool

if TYPE_CHECKING:  # the process that looks needs none of it
    from netlimit.kernel.iptables import TableReader

_FRA_FWMARK, _FRA_FWMASK = 10, 16
NFNL, _GET_GENERATION = 12, 10 << 8 | 16
_HEADER = struct.Struct("=IHHII")
_PATIENCE = 60
"""Seconds that a look may take, and each tool in it."""
_MEMORY = 1 << 30
_MOMENT = 0.005
_SHARE, _LONGEST_REST = 5, 120.0
"""A look that took t seconds is followed by that many times t of rest, but not by more than that many seconds."""
Lines = dict[int, Marking]
_NETLINK_XFRM, _GET_ASSOCIATION, _GET_POLICY = 6, 18, 21
_ASSOCIATION_SIZE, _POLICY_SIZE = 224, 168
"""struct xfrm_usersa_info and struct xfrm_userpolicy_info (linux/xfrm.h), behind which attributes begin."""
_XFRMA_MARK, _XFRMA_SET_MARK, _XFRMA_SET_MARK_MASK = 21, 29, 30


class MarkReader:
    """Knows who uses marks; looks again, in a process of its own, only when something has changed. However much others
    have loaded, nobody waits for the end of it."""

    def __init__(self, tables: TableReader) -> None:
        self._tables = tables
        self._stamp: object = None
        self._found = MarkUse()
        self._look: _Look | None = None
        self._rests_until = 0.0

    def read(self, patience: float = 0.0) -> MarkUse:
        """What the last look that has ended has found, the same object as before if that is the same. While nothing is
        known yet, or what is known is old, up to `patience` seconds are waited for."""
        lines, unread = self._read_lines()
        stamp = lines, unread, _attempt(read_rules), _attempt(read_generation), _attempt(_read_policies)
        end = time.monotonic() + patience
        while stamp != self._stamp:
            if self._look is None and not patience and time.monotonic() < self._rests_until:
                break
            if self._look is None:
                self._look = _Look(stamp, lines, unread)
            self._finish(self._look)
            if time.monotonic() >= end:
                break
            time.sleep(_MOMENT)
        return self._found

    def _finish(self, look: _Look) -> None:
        found = look.result()
        if found is None:
            return
        self._found = self._found if found == self._found else found
        self._stamp, self._look = look.stamp, None
        self._rests_until = time.monotonic() + min(_SHARE * look.took, _LONGEST_REST)

    def _read_lines(self) -> tuple[Lines, tuple[str, ...]]:
        lines: Lines = {}
        unread = []
        for family in (4, 6):
            try:
                lines[family] = self._tables.read_marks(family)
            except (KernelError, OSError) as error:
                lines[family] = NO_MARKING
                unread.append(f"the legacy tables of IPv{family} cannot be read ({say_fault(error)})")
        return lines, tuple(unread)


class _Look:
    """One look at everything, in another process: to read 50,000 rules of nftables takes seconds."""

    def __init__(self, stamp: object, lines: Lines, unread: tuple[str, ...]) -> None:
        self.stamp = stamp
        self.took = 0.0
        self._began = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None
        self._failed = ""
        with open_spool() as given:
            pickle.dump((lines, unread), given)
            given.seek(0)
            self._answer = open_spool()  # it is closed when the answer is read
            try:
                command = own_module("netlimit.kernel.marks")
                self._process = subprocess.Popen(
                    command, stdin=given, stdout=self._answer, stderr=subprocess.DEVNULL, start_new_session=True
                )
            except OSError as error:
                self._failed = say_fault(error)

    def result(self) -> MarkUse | None:
        """What was found; None while it goes on."""
        process, spent = self._process, time.monotonic() - self._began
        if process is not None and process.poll() is None:
            if spent < _PATIENCE:
                return None
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._failed = f"that did not end within {_PATIENCE} seconds"
        self.took = spent
        with self._answer:
            self._answer.seek(0)
            try:
                found = None if self._failed else pickle.load(self._answer)  # noqa: S301 - of our own process
            except Exception as error:
                self._failed = say_fault(error)
        if self._failed or not isinstance(found, MarkUse):
            return MarkUse(unread=(f"to look for them has failed ({self._failed})",))
        return found


def main() -> None:
    """Look, for a process that does not wait for it."""
    with suppress(OSError):  # where system calls are filtered
        os.nice(10)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    lines, unread = pickle.load(sys.stdin.buffer)  # noqa: S301 - of the process that has started this one
    uses, lost = _gather(lines, unread)
    alike = {replace(use, owner=""): use for use in reversed(uses)}
    pickle.dump(MarkUse(tuple(reversed(alike.values())), lost), sys.stdout.buffer)


def _gather(lines: Lines, unread: tuple[str, ...]) -> tuple[tuple[Use, ...], tuple[str, ...]]:
    uses: list[Use] = []
    lost = list(unread)
    parts: dict[str, Callable[[], Iterator[Use]]] = {
        "the legacy tables": lambda: _read_legacy(lines),
        "the routing rules": _find_rules,
        "nftables": _find_nft,
        "IPsec": _find_ipsec,
    }
    for name, part in parts.items():
        try:
            uses += part()
        except Exception as error:  # what only advises may fail in any way
            lost.append(f"{name} cannot be read ({say_fault(error)})")
    return tuple(uses), tuple(lost)


def _attempt(look: Callable[[], object]) -> object:
    """What a look finds, or the kind of error that it ends with."""
    try:
        return look()
    except (OSError, ValueError, struct.error) as error:
        return type(error).__name__, str(error)


def _read_legacy(lines: Lines) -> Iterator[Use]:
    yield from iptables_marks.read_marks(*lines[4], "iptables")
    yield from iptables_marks.read_marks(*lines[6], "ip6tables")


# -- routing rules


def read_routing_marks() -> Iterator[tuple[int, int]]:
    """The marks for which routing rules ask, each with the mask. Raises OSError."""
    for body in read_rules():
        attributes = read_attributes(body)
        if _FRA_FWMARK in attributes:
            mark = struct.unpack("=I", attributes[_FRA_FWMARK])[0]
            yield mark, struct.unpack("=I", attributes.get(_FRA_FWMASK, b"\xff\xff\xff\xff"))[0]


def _find_rules() -> Iterator[Use]:
    for mark, mask in read_routing_marks():
        yield Read(f"A routing rule (ip rule, fwmark {mark:#x})", mark & mask, claims=mask if mask != EVERY else 0)


# -- nftables


def read_generation() -> int | None:
    """The number of changes to nftables so far; None where the kernel has none."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NFNL) as sock:
        sock.settimeout(1)
        sock.send(_HEADER.pack(_HEADER.size + 4, _GET_GENERATION, 1, 1, 0) + bytes(4))
        answer = sock.recv(4096)
    if _HEADER.unpack_from(answer)[1] == 2:
        number = -struct.unpack_from("=i", answer, _HEADER.size)[0]
        if number == errno.EINVAL:  # the kernel has no nftables, or nobody has used it
            return None
        raise OSError(number, "the generation of nftables")
    return int(struct.unpack(">I", rtnetlink.decode(answer, _HEADER.size + 4)[1])[0])


def _find_nft() -> Iterator[Use]:
    if read_generation() is None:
        return
    ruleset = json.loads(ask("nft", "-j", "list", "ruleset", patience=_PATIENCE))
    uses, extended = nft_marks.read_marks(ruleset)
    yield from uses
    for tool, family in (("iptables", "ip"), ("ip6tables", "ip6")):
        if family in extended:
            text = ask(f"{tool}-nft-save", patience=_PATIENCE)
            rules = split_tables(text, nft_marks.count_rules(ruleset, family))
            yield from iptables_marks.read_marks(rules, extended[family], f"{tool}-nft")


def split_tables(text: str, counts: Mapping[str, int]) -> list[str]:
    """The rules of an `iptables-nft-save`, each behind its table; `counts` are how many each table has. Names in them
    are printed as they are, and can hold ends of lines. Raises ValueError where there are other lines than those."""
    rules: list[str] = []
    left = dict(counts)
    lines = [*text.split("\n"), ""]
    start = 0
    while start < len(lines):
        table = lines[start]
        start += 1
        if not table or table.startswith("#"):
            continue
        while lines[start].startswith(":"):
            start += 1
        end = start + left.pop(table[1:], len(lines))
        if not table.startswith("*") or lines[end : end + 1] != ["COMMIT"]:
            raise ValueError("rules of others hold ends of lines, or are changed meanwhile")
        rules += (f"{table[1:]} {line}" for line in lines[start:end])
        start = end + 1
    return rules


# -- IPsec


def _read_policies() -> frozenset[tuple[int, int]]:
    """The marks (value, mask) that policies ask for."""
    return _read_xfrm(_GET_POLICY, _POLICY_SIZE, _XFRMA_MARK)


def _find_ipsec() -> Iterator[Use]:
    """Policies and associations ask for marks, and associations may write one on what leaves them."""
    for mark, mask in sorted(_read_policies() | _read_xfrm(_GET_ASSOCIATION, _ASSOCIATION_SIZE, _XFRMA_MARK)):
        yield Read(f"IPsec (ip xfrm, mark {mark:#x}/{mask:#x})", mark & mask)
    for mark, mask in sorted(_read_xfrm(_GET_ASSOCIATION, _ASSOCIATION_SIZE, _XFRMA_SET_MARK)):
        yield Write(f"IPsec (ip xfrm, output-mark {mark:#x}/{mask:#x})", Bits(mark, packet=EVERY & ~mask))


def _read_xfrm(kind: int, size: int, attribute: int) -> frozenset[tuple[int, int]]:
    try:
        bodies = rtnetlink.dump(kind, b"", _NETLINK_XFRM)
    except OSError as error:
        if error.errno in (errno.EPROTONOSUPPORT, errno.EINVAL, errno.EOPNOTSUPP):  # a kernel without IPsec
            return frozenset()
        raise
    return frozenset(mark for body in bodies for mark in _take_mark(rtnetlink.decode(body, size), attribute))


def _take_mark(attributes: dict[int, bytes], attribute: int) -> Iterator[tuple[int, int]]:
    value = attributes.get(attribute)
    if value is None:
        return
    mask = attributes.get(_XFRMA_SET_MARK_MASK, b"\xff\xff\xff\xff") if attribute == _XFRMA_SET_MARK else value[4:8]
    yield struct.unpack("=I", value[:4])[0], struct.unpack("=I", mask)[0]


if __name__ == "__main__":
    main()
