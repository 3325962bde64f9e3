"""Writes tables through `iptables-legacy-restore --noflush`, for hosts on which python-iptables cannot say a rule.

The child reads the table when it has read the line that names it, and writes it back at COMMIT: all or nothing. What
it refuses, it refuses with the number of the line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from netlimit.errors import KernelError
from netlimit.kernel.legacy import find_tool
from netlimit.kernel.tables import Layout, TableChanged, digest_tables, read_layout
from netlimit.kernel.tools import Dialogue, run
from netlimit.plan import SwitchTable
from netlimit.state import CHAIN_PREFIX

_SECONDS = 60
_PLAIN = re.compile(r"[\w.,:/!+@%=*-]+", re.ASCII)
_BLAME = re.compile(r"^Error occurred at line: (\d+)$|^\S+: line (\d+) failed$", re.MULTILINE)
_NAMED = re.compile(r"^ip6?tables(?:-legacy)?(?:-restore)? v\S+ \(\w+\): ", re.MULTILINE)
_CHATTER = re.compile(r"^(?:Error occurred at line: .*|Try `.*|\s*)$\n?", re.MULTILINE)


def commit(step: SwitchTable) -> None:
    """Give a table its new contents in one commit. Raises KernelError, and TableChanged if somebody who does not take
    the lock changed it meanwhile."""
    with _started(step.family) as child:
        before = read_layout(step.family, step.table, CHAIN_PREFIX)
        child.tell(f"*{step.table}\n")
        child.tell("# the table has been read\n")
        held = digest_tables(step.family)
        if read_layout(step.family, step.table, CHAIN_PREFIX) != before:
            raise TableChanged(str(step))
        lines = [*_list_lines(step, before), "COMMIT"]
        refused = _finish(child, lines)
        if refused is None:
            return
        number, reason = refused
        if digest_tables(step.family) != held:
            raise TableChanged(str(step))
        raise KernelError(str(step), _explain(number - 2, lines, reason))


def try_rule(family: int, table: str, words: str) -> None:
    """Add one rule, told in words, in a chain of our own and take both away again. Raises KernelError."""
    name = f"{CHAIN_PREFIX}PROBE"
    for lines in ([f":{name} - [0:0]", f"-A {name} {words}"], [f"-F {name}", f"-X {name}"]):
        with _started(family) as child:
            refused = _finish(child, [f"*{table}", *lines, "COMMIT"])
        if refused is not None:
            raise KernelError(f"try {words}", refused[1] or "the kernel refuses it")


def ask_rules(family: int, table: str, questions: Iterable[str]) -> str:
    """What is printed when each of these is asked (`-S CHAIN 3`), one after the other; nothing is written. Raises
    KernelError."""
    with _another_lock() as lock:
        done = run(
            *(find_tool(family, "restore"), "--noflush", "--test"),
            script=_join([f"*{table}", *questions, "COMMIT"]),
            patience=_SECONDS,
            kept=lock,
            XTABLES_LOCKFILE=f"/proc/self/fd/{lock}",
        )
    if done.status:
        raise KernelError(f"read the table {table}", _read_refusal(done.errors)[1] or "the tool refuses to tell")
    return done.output


def is_plain(word: str) -> bool:
    """Whether the tool can be told a word as it is."""
    return _PLAIN.fullmatch(word) is not None


def _list_lines(step: SwitchTable, layout: Layout) -> Iterator[str]:
    """What the child is told between the name of the table and COMMIT."""
    gone = [name for name in step.gone if name in layout.chains]
    for name in step.chains:
        yield f":{name} - [0:0]"  # one that exists is emptied
    for name in gone:
        yield f"-F {name}"
    for name, rules in step.chains.items():
        yield from (f"-A {name} {_tell(rule.told)}" for rule in rules)
    for name, rules in step.hooks.items():
        yield from (f"-D {name} {position + 1}" for position in reversed(layout.jumps.get(name, ())))
        yield from (f"-I {name} {_tell(rule.told)}" for rule in reversed(rules))
    for name in gone:
        if name not in layout.held:
            yield f"-X {name}"


def _tell(words: tuple[str, ...]) -> str:
    return " ".join(word if is_plain(word) else _quote(word) for word in words)


def _quote(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _explain(number: int, lines: list[str], reason: str) -> str:
    """What was refused: `number` is the line's, from 1, among those told."""
    line = lines[number - 1] if 0 < number <= len(lines) else "COMMIT"
    if line == "COMMIT":
        return reason or "the kernel refuses the table as a whole; its log (dmesg) may tell why"
    return f"{reason or 'it refuses this'} (in: {line})"


@contextmanager
def _started(family: int) -> Iterator[Dialogue]:
    """A running restore. It is not told to wait for its lock (`--wait`): for that it sets an alarm, which it leaves on
    when it has the lock, and then takes a pause of a second for the end of what it is told."""
    tool = find_tool(family, "restore")
    with (
        _another_lock() as lock,
        Dialogue(tool, "--noflush", patience=_SECONDS, kept=lock, XTABLES_LOCKFILE=f"/proc/self/fd/{lock}") as child,
    ):
        yield child


@contextmanager
def _another_lock() -> Iterator[int]:
    """A restore takes the lock of iptables itself, which this process holds: it is shown another."""
    lock = os.memfd_create("nl-lock")
    try:
        yield lock
    finally:
        os.close(lock)


def _finish(child: Dialogue, lines: Iterable[str]) -> tuple[int, str] | None:
    """Tell it the last lines; answer with the number of the line that it refuses (0: none in particular), and why."""
    done = child.finish(_join(lines))
    return _read_refusal(done.errors) if done.status else None


def _read_refusal(said: str) -> tuple[int, str]:
    """The number of the line that is blamed (0: none), and the words for it."""
    blamed = _BLAME.search(said)
    number = int(blamed[1] or blamed[2]) if blamed else 0
    return number, _CHATTER.sub("", _NAMED.sub("", _BLAME.sub("", said))).strip()


def _join(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
