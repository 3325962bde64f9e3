"""Sets, spoken to by `ipset restore` and read by `ipset save`: one process for any number of entries. Which there are
the kernel says."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Literal

from netlimit.errors import KernelError
from netlimit.kernel.base import Reading
from netlimit.kernel.ipset_headers import SetHeader, read_headers
from netlimit.kernel.tools import is_word, run
from netlimit.plan import WriteSets
from netlimit.state import (
    LONGEST_TIMEOUT,
    OFFENDER_PREFIX,
    PEER_PREFIX,
    SEEN_PREFIX,
    SET_PREFIX,
    SLOT_ROOM,
    Entry,
    IpSet,
)

_TEMPORARY = SET_PREFIX + "swap{}"
_SHARED = re.compile(rf"{SET_PREFIX}(?:safe|exempt|blocked|off|seen|peer|open|led)([46])(?:-.*)?")
_OWN = re.compile(rf"{SET_PREFIX}[abdlq][46]-.*")
_BUSY = "in use by a kernel component"
_MISSING = "set with the given name does not exist"
_KINDS: dict[str, Literal["net", "ip", "ip,port,ip"]] = {"hash:net": "net", "hash:ip,port,ip": "ip,port,ip"}
_PROMPT = "ipset> "
_WRITTEN = frozenset({"timeout", "packets", "bytes", "skbmark", "skbprio"})
"""What we write of an entry."""
_FEW, _SMALL = 2, 4096
"""Of more sets than these, those with fewer entries are read by one process: starting one takes longer than reading
them."""
_ROLLING = (OFFENDER_PREFIX, SEEN_PREFIX)
_SMALLEST_HASH, _LARGEST_HASH = 64, 65_536
_ASKED_OF_ALL, _ROOMY = (f"{SET_PREFIX}exempt", f"{SET_PREFIX}blocked"), 8
"""Sets into which a look is taken for every packet, that hardly any is in: with so many slots for an entry, it finds
nothing at once."""


def read_sets() -> dict[str, IpSet]:
    """Every set of ours, without its entries."""
    return part_sets()[0]


def part_sets() -> tuple[dict[str, IpSet], dict[str, str]]:
    """Every set of ours, without its entries; and those of somebody else that have names of ours, with a sentence for
    the operator. Nothing is done to these."""
    headers = _list_headers()
    ours = {header.name: _describe(header) for header in headers if not header.is_foreign}
    return ours, {header.name: _tell_foreign(header) for header in headers if header.is_foreign}


def _tell_foreign(header: SetHeader) -> str:
    return (
        f"There is a set {header.name} that is none of netlimit's ({header.kind}, IPv{header.family}), which is left "
        f"alone. Names that begin with {SET_PREFIX} are netlimit's: give it another (`ipset rename {header.name} …`), "
        "or remove it."
    )


def find_occupied() -> dict[str, str]:
    """What cannot be done for sets of somebody else, by capability: one for each name, which a rule may need; and all
    of a family, where the name is that of a set that its rules share. Raises KernelError."""
    found = {}
    for name, reason in part_sets()[1].items():
        shared = _SHARED.fullmatch(name)
        if shared:
            found["iptables" if shared[1] == "4" else "ip6tables"] = reason
        elif _OWN.fullmatch(name):
            found[name] = reason
    return found


def count_entries(names: Iterable[str]) -> dict[str, int]:
    """How many entries sets have."""
    wanted = set(names)
    return {header.name: header.entries for header in _list_headers() if header.name in wanted} if wanted else {}


def read_entries(names: Iterable[str]) -> dict[str, dict[str, Reading]]:
    """The entries of those of some sets that are there, with their counters."""
    names = list(names)
    counts = count_entries(names) if len(names) > _FEW else {}
    small = [name for name in names if counts.get(name, _SMALL) < _SMALL]
    found = _read_together(small)
    return found | _read_one_by_one(name for name in names if name not in found)


def _read_together(names: list[str]) -> dict[str, dict[str, Reading]]:
    """The entries of many sets from one process, at about the same moment; none where this ipset does not take one
    command after the other, or a set has gone meanwhile."""
    done = run("ipset", "-", script="".join(f"save {name}\n" for name in names)) if names else None
    if done is None or done.status or done.errors:
        return {}
    printed: dict[str, list[str]] = {}
    for line in done.output.split("\n"):
        words = line.removeprefix(_PROMPT).split(" ", 2)
        if words[0] == "create" and len(words) > 1:
            printed.setdefault(words[1], [])
        elif words[0] == "add" and words[1] in printed:
            printed[words[1]].append(line)
    now = int(time.time())
    return {name: _parse_entries(name, "\n".join(printed[name]), now) for name in names if name in printed}


def _read_one_by_one(names: Iterable[str]) -> dict[str, dict[str, Reading]]:
    found = {}
    for name in names:
        done = run("ipset", "save", name)
        if not done.status:
            found[name] = _parse_entries(name, done.output, int(time.time()))
        elif _MISSING not in done.errors:
            raise KernelError(f"ipset save {name}", _explain(done.errors.strip()))
    return found


def write_sets(step: WriteSets, busy: frozenset[str] = frozenset()) -> frozenset[str]:
    """Write them in one go; `busy` are sets that stand there still because rules of others use them: what is in one is
    forgotten before it is used again. Returns the sets that could not be destroyed for that reason. Raises KernelError
    with the line that was refused; those before it stay."""
    held = read_sets() if step.create or step.destroy or step.remove else {}
    script = "\n".join(_render(step, held, busy, int(time.time())))
    if script:
        _run("restore", "-exist", script=script + "\n", step=step)
    return _destroy([name for name in step.destroy if name in held], step)


def count_users() -> dict[str, int]:
    """How many rules and sets use each of our sets that is used at all."""
    return {header.name: header.users for header in _list_headers() if header.users and not header.is_foreign}


def flush_sets(names: Iterable[str]) -> None:
    """Empty them. Raises KernelError."""
    _run("restore", "-exist", script="".join(f"flush {name}\n" for name in names))


def find_unused() -> frozenset[str]:
    """The sets of ours that no rule uses, and no other set."""
    return frozenset(header.name for header in _list_headers() if not header.users and not header.is_foreign)


def find_fills() -> Iterator[tuple[str, int, int]]:
    """Our sets that refuse more when they are full: what they hold, and for how many they have room. Those that forget
    some then are not among them."""
    for header in _list_headers():
        if header.is_foreign:
            continue
        if header.name.startswith(PEER_PREFIX):
            yield header.name, header.entries, header.slots * SLOT_ROOM
        elif not header.name.startswith(_ROLLING):
            yield header.name, header.entries, header.size


def _destroy(names: list[str], step: WriteSets) -> frozenset[str]:
    """All at once, or, where one is refused, those behind it one by one: one that somebody uses keeps no other."""
    script = "".join(f"destroy {name}\n" for name in names)
    if not names or not run("ipset", "restore", "-exist", script=script).status:
        return frozenset()
    busy = set()
    left = read_sets()
    for name in names:
        done = run("ipset", "destroy", name) if name in left else None
        if done is None or not done.status:
            continue
        if _BUSY not in done.errors:
            raise KernelError(str(step), _explain(done.errors.strip()))
        busy.add(name)
    return frozenset(busy)


def _render(step: WriteSets, held: dict[str, IpSet], busy: frozenset[str], now: int) -> Iterator[str]:
    replaced = {ipset.name for ipset in step.create if held.get(ipset.name, ipset) != ipset}
    for ipset in step.create:
        if ipset.name in replaced:
            yield from _replace(ipset, held, step, now)
        else:
            if ipset.name in busy:
                yield f"flush {ipset.name}"
            yield _create(ipset, len(step.add.get(ipset.name, ())))
    for name, entries in step.add.items():
        if name not in replaced:
            for key, entry in entries.items():
                yield from _add(name, key, entry, now)
    for name, keys in step.remove.items():
        if name in held:
            yield from (f"del {name} {key}" for key in keys if is_word(key, name))


def _replace(ipset: IpSet, held: dict[str, IpSet], step: WriteSets, now: int) -> Iterator[str]:
    """A set of another kind stands under the name: fill one beside it and change places. One that was left by a process
    that was killed has gone as drift before, unless somebody uses it."""
    found = held[ipset.name]
    temporary = next(name for name in map(_TEMPORARY.format, count()) if name not in held)
    if (found.kind, found.family) != (ipset.kind, ipset.family):
        # Such sets cannot change places. No chain of ours names one: who made it cannot have made it for us.
        yield f"destroy {ipset.name}"
        yield _create(ipset, len(step.add.get(ipset.name, ())))
        yield from (
            line for key, entry in step.add.get(ipset.name, {}).items() for line in _add(ipset.name, key, entry, now)
        )
        return
    yield _create(replace(ipset, name=temporary), len(step.add.get(ipset.name, ())))
    for key, entry in step.add.get(ipset.name, {}).items():
        yield from _add(temporary, key, entry, now)
    yield f"swap {temporary} {ipset.name}"
    yield f"destroy {temporary}"


def _create(ipset: IpSet, expected: int) -> str:
    """Most sets stay small, and a hash grows by itself: a set of ours takes 2 kB rather than 9 then. Of a large one two
    entries share a slot: with a slot each, the slots are more than caches hold, and a packet costs some 3 % more."""
    if ipset.slots:
        return f"create {ipset}"
    wanted = max(_ROOMY * expected, 1024) if ipset.name.startswith(_ASKED_OF_ALL) else expected // 2
    return f"create {ipset} hashsize {min(max(wanted, _SMALLEST_HASH), _LARGEST_HASH)}"


def _add(name: str, key: str, entry: Entry, now: int) -> Iterator[str]:
    left = entry.expires - now
    if (entry.expires and left <= 0) or not is_word(key, name):
        return
    mark = f" skbmark {entry.mark:#x}/{entry.mask:#x}" if entry.mask else ""
    prio = f" skbprio {entry.prio >> 16:x}:{entry.prio & 0xFFFF:x}" if entry.prio else ""
    # An entry that is there would keep its counters, which may be those of another rule.
    counters = "packets 0 bytes 0"
    yield f"add {name} {key} timeout {min(left, LONGEST_TIMEOUT) if entry.expires else 0} {counters}{mark}{prio}"


def _list_headers() -> list[SetHeader]:
    try:
        return read_headers()
    except OSError as error:
        raise KernelError("read the sets", _explain(error.strerror or str(error))) from None


def _describe(header: SetHeader) -> IpSet:
    return IpSet(
        name=header.name,
        family=header.family,
        kind=_KINDS.get(header.kind, "ip"),
        marks=header.marks,
        # Every set of ours counts, and has no comments: this one is of somebody else, and never what is wanted.
        timeout=header.timeout if header.counters and not header.comments else -1,
        size=header.size,
        # ipset does not print forceadd
        rolling=header.name.startswith(_ROLLING),
        netmask=header.netmask,
        slots=header.slots if header.name.startswith((PEER_PREFIX, *_ROLLING)) else 0,
    )


def _parse_entries(name: str, output: str, now: int) -> dict[str, Reading]:
    """Of `add NAME KEY timeout 0 packets 0 bytes 0 [skbmark 0x1/0xff] [skbprio 1:2]`, line by line; a foreign set of
    our name may lack any of it, and what others have written may have more (`nomatch`, `skbqueue 3`): that makes it
    another entry. What is no line of an entry is passed over: comments can hold anything, ends of lines too.

    Of 100,000 entries few differ: those that do not end share one object, and those that never counted one reading.
    """
    line = rf"^add {re.escape(name)} (\S+)(?: (timeout \d+) packets (\d+) bytes (\d+))?(.*)$"
    found: dict[str, Reading] = {}
    alike: dict[tuple[str, str], Reading] = {}
    for match in re.finditer(line, output, re.MULTILINE):
        key, ends, packets, size, rest = match.groups("")
        same = alike.get((ends, rest))
        if same is None:
            with suppress(ValueError, IndexError):
                found[key] = _read_reading(f"{ends} {rest}".split(), packets, size, now)
                if packets:
                    alike[ends, rest] = Reading(found[key].entry, 0, 0)
        elif packets == size == "0":
            found[key] = same
        else:
            found[key] = Reading(same.entry, int(packets), int(size))
    return found


def _read_reading(words: list[str], packets: str, size: str, now: int) -> Reading:
    options, foreign = _part_options(words)
    entry = _read_entry(options, now)._replace(foreign=foreign)
    return Reading(entry, int(packets or options.get("packets", "0")), int(size or options.get("bytes", "0")))


def _part_options(words: list[str]) -> tuple[dict[str, str], str]:
    """What we write of an entry, each with its value; and all else, as it stands there."""
    options, foreign = dict[str, str](), list[str]()
    rest = iter(words)
    for word in rest:
        if word in _WRITTEN:
            options[word] = next(rest, "")
        else:
            foreign.append(word)
    return options, " ".join(foreign)


def _read_entry(options: dict[str, str], now: int) -> Entry:
    left = int(options.get("timeout", 0))
    mark, mask = 0, 0
    if "skbmark" in options:
        value, _, under = options["skbmark"].partition("/")
        mark, mask = int(value, 16), int(under or "0xffffffff", 16)
    major, _, minor = options.get("skbprio", "0:0").partition(":")
    return Entry(mark, mask, now + left if left else 0, int(major, 16) << 16 | int(minor or "0", 16))


def _run(*words: str, script: str | None = None, step: WriteSets | None = None) -> str:
    done = run("ipset", *words, script=script)
    if done.status:
        raise KernelError(str(step) if step else " ".join(("ipset", *words)), _explain(done.errors.strip()))
    return done.output


def _explain(reason: str) -> str:
    if "Hash is full" in reason:
        return f"{reason}. The set is full; name larger subnets, or raise NETLIMIT_SET_SIZE."
    if "Operation not permitted" in reason or "must be root" in reason.lower():
        return f"{reason}. Run netlimit as root, or with CAP_NET_ADMIN."
    return reason
