"""Sets, spoken to by `ipset restore` and read by `ipset save`: one process for any number of entries."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from itertools import pairwise

from netlimit.errors import KernelError
from netlimit.kernel.base import Reading
from netlimit.plan import WriteSets
from netlimit.state import LONGEST_TIMEOUT, OFFENDER_PREFIX, SEEN_PREFIX, SET_PREFIX, Entry, IpSet

_TEMPORARY = f"{SET_PREFIX}swap"


def read_sets() -> dict[str, IpSet]:
    """Every set of ours, without its entries."""
    sets = {}
    # Not `-o save`, which would print every entry too.
    for block in _run("list", "-t").split("\n\n"):
        name, kind, header = (_field(block, field) for field in ("Name", "Type", "Header"))
        if name.startswith(SET_PREFIX):
            sets[name] = _parse_set(name, kind, header.split())
    return sets


def read_entries(name: str) -> dict[str, Reading]:
    """The entries of a set with their counters."""
    now = int(time.time())
    alike: dict[tuple[str, ...], Entry] = {}
    return dict(_parse_entry(line.split(), now, alike) for line in _run("save", name).splitlines()[1:])


def write_sets(step: WriteSets) -> None:
    """Write them in one go. Raises KernelError with the line that was refused; those before it stay."""
    held = read_sets() if step.create or step.destroy or step.remove else {}
    script = "\n".join(_render(step, held, int(time.time())))
    if script:
        _run("restore", "-exist", script=script + "\n", step=step)


def _render(step: WriteSets, held: dict[str, IpSet], now: int) -> Iterator[str]:
    replaced = {ipset.name for ipset in step.create if held.get(ipset.name, ipset) != ipset}
    if replaced and _TEMPORARY in held:  # left by a process that was killed
        yield f"destroy {_TEMPORARY}"
    for ipset in step.create:
        if ipset.name in replaced:
            yield from _replace(ipset, held[ipset.name], step, now)
        else:
            yield f"create {ipset}"
    for name, entries in step.add.items():
        if name not in replaced:
            for key, entry in entries.items():
                yield from _add(name, key, entry, now)
    for name, keys in step.remove.items():
        if name in held:
            yield from (f"del {name} {key}" for key in keys)
    yield from (f"destroy {name}" for name in step.destroy if name in held)


def _replace(ipset: IpSet, found: IpSet, step: WriteSets, now: int) -> Iterator[str]:
    """A set of another kind stands under the name: fill one beside it and change places."""
    if (found.kind, found.family) != (ipset.kind, ipset.family):
        # Such sets cannot change places. No chain of ours names one: who made it cannot have made it for us.
        yield f"destroy {ipset.name}"
        yield f"create {ipset}"
        yield from (
            line for key, entry in step.add.get(ipset.name, {}).items() for line in _add(ipset.name, key, entry, now)
        )
        return
    yield f"create {str(ipset).replace(ipset.name, _TEMPORARY, 1)}"
    for key, entry in step.add.get(ipset.name, {}).items():
        yield from _add(_TEMPORARY, key, entry, now)
    yield f"swap {_TEMPORARY} {ipset.name}"
    yield f"destroy {_TEMPORARY}"


def _add(name: str, key: str, entry: Entry, now: int) -> Iterator[str]:
    left = entry.expires - now
    if entry.expires and left <= 0:
        return
    mark = f" skbmark {entry.mark:#x}/{entry.mask:#x}" if entry.mask else ""
    prio = f" skbprio {entry.prio >> 16:x}:{entry.prio & 0xFFFF:x}" if entry.prio else ""
    # An entry that is there would keep its counters, which may be those of another rule.
    counters = "packets 0 bytes 0"
    yield f"add {name} {key} timeout {min(left, LONGEST_TIMEOUT) if entry.expires else 0} {counters}{mark}{prio}"


def _field(block: str, field: str) -> str:
    match = re.search(rf"^{field}: (.*)$", block, re.MULTILINE)
    return match[1] if match else ""


def _parse_set(name: str, kind: str, words: list[str]) -> IpSet:
    options = dict(pairwise(words))
    return IpSet(
        name=name,
        family=6 if options.get("family") == "inet6" else 4,
        kind="net" if kind == "hash:net" else "ip",
        marks="skbinfo" in words,
        timeout=int(options.get("timeout", -1)),
        size=int(options.get("maxelem", 0)),
        # ipset does not print forceadd
        rolling=name.startswith((OFFENDER_PREFIX, SEEN_PREFIX)),
        netmask=int(options.get("netmask", 0)),
    )


def _parse_entry(words: list[str], now: int, alike: dict[tuple[str, ...], Entry]) -> tuple[str, Reading]:
    """`add NAME KEY timeout 0 packets 0 bytes 0 [skbmark 0x1/0xff] [skbprio 1:2]`; a foreign set of our name may lack
    any of it.

    Of 100,000 entries few differ: those that do not end share one object.
    """
    if words[3:4] == ["timeout"] and words[5:6] == ["packets"] and words[7:8] == ["bytes"]:
        kind = (words[4], *words[9:])
        entry = alike.get(kind)
        if entry is None:
            entry = _read_entry(dict(zip(words[3::2], words[4::2], strict=False)), now)
            alike[kind] = entry
        return words[2], Reading(entry, int(words[6]), int(words[8]))
    options = dict(zip(words[3::2], words[4::2], strict=False))
    entry = _read_entry(options, now)
    return words[2], Reading(entry, int(options.get("packets", 0)), int(options.get("bytes", 0)))


def _read_entry(options: dict[str, str], now: int) -> Entry:
    left = int(options.get("timeout", 0))
    mark, mask = 0, 0
    if "skbmark" in options:
        value, _, under = options["skbmark"].partition("/")
        mark, mask = int(value, 16), int(under or "0xffffffff", 16)
    major, _, minor = options.get("skbprio", "0:0").partition(":")
    return Entry(mark, mask, now + left if left else 0, int(major, 16) << 16 | int(minor or "0", 16))


def _run(*words: str, script: str | None = None, step: WriteSets | None = None) -> str:
    command = ["ipset", *words]
    try:
        done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise KernelError(" ".join(command), "there is no `ipset` on this host; install the package ipset") from None
    if done.returncode:
        raise KernelError(str(step) if step else " ".join(command), _explain(done.stderr.strip()))
    return done.stdout


def _explain(reason: str) -> str:
    if "Hash is full" in reason:
        return f"{reason}. The set is full; name larger subnets, or raise NETLIMIT_SET_SIZE."
    if "Operation not permitted" in reason or "must be root" in reason.lower():
        return f"{reason}. Run netlimit as root, or with CAP_NET_ADMIN."
    return reason
