"""What this host can do, found out by trying, each with the reason where it cannot."""

from __future__ import annotations

import ctypes
import gzip
import json
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from netlimit.kernel import ingress, iptables, tc
from netlimit.kernel.base import HostFacts
from netlimit.plan import WriteTree
from netlimit.tree import FIRST_CHILD, FIRST_ROOT, INGRESS_DEVICE, QueueClass, Tree, classid

FINDINGS = Path("/run/netlimit/capabilities.json")
"""What root has found out for a controller that may not make namespaces to try it in."""

_CLONE_NEWNET = 0x40000000
_PROBE_SECONDS = 30
_USUAL_HZ = 250
_USUAL_MASKS = (0xFF000000, 0x00FF0000, 0x0000FF00, 0x000000FF)
_INSTALL = "apt-get install iptables ipset"

TRIALS: dict[str, tuple[str, str]] = {
    "raw": ("raw", "-j RETURN"),
    "mangle": ("mangle", "-j MARK --set-xmark 0x0/0x1"),
    "security": ("security", "-j RETURN"),
    "hashlimit": (
        "mangle",
        "-m hashlimit --hashlimit-above 10/sec --hashlimit-burst 5 --hashlimit-mode srcip --hashlimit-name nl-probe "
        "--hashlimit-htable-size 16 --hashlimit-htable-max 16 --hashlimit-htable-expire 10000 -j RETURN",
    ),
    "connlimit": ("mangle", "-m connlimit --connlimit-above 1 --connlimit-mask 32 --connlimit-saddr -j RETURN"),
    "conntrack": ("mangle", "-m conntrack --ctstate NEW -j RETURN"),
    "socket": ("raw", "-m socket -j RETURN"),
    "multiport": ("mangle", "-p tcp -m multiport --dports 80 -j RETURN"),
    "ipset": ("mangle", "-j SET --map-set nl-probe src --map-mark"),
    "reject": ("filter", "-p tcp -j REJECT --reject-with tcp-reset"),
}
"""A rule for every capability: table, and what iptables is told. What IPv6 can do has a 6 behind its name."""

QUEUES = {
    "htb": "htb default 1",
    "tbf": "tbf rate 1mbit burst 10kb limit 10kb",
    "fq_codel": "fq_codel limit 100 flows 64",
}
"""A queue for every capability, as tc is told. Without fq_codel a pfifo does."""

NAMES = (
    "iptables",
    "ip6tables",
    *TRIALS,
    *(f"{name}6" for name in TRIALS if name != "ipset"),
    *QUEUES,
    "bpf",
    "ifb",
)


def probe(mark_mask: int) -> HostFacts:
    """Find out what the host can do. Rules are tried in a network namespace that is gone afterwards."""
    capabilities = _try_rules()
    capabilities["marks"] = _find_overlap(mark_mask)
    return HostFacts(capabilities, read_hz(), tuple(_notes()))


def read_hz() -> int:
    """The kernel's clock tick, from its configuration; 250 where none is to be found."""
    for path in (Path("/proc/config.gz"), Path(f"/boot/config-{platform.release()}")):
        try:
            text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
        except OSError:
            continue
        match = re.search(r"^CONFIG_HZ=(\d+)$", text, re.MULTILINE)
        if match:
            return int(match[1])
    return _USUAL_HZ


def _try_rules() -> dict[str, str | None]:
    if os.geteuid() != 0 or FINDINGS.exists():  # what root enforces, the controller must be able to keep
        return _recall()
    if threading.active_count() == 1:  # what a copy of this process would hold of other threads, nobody would let go
        return _try_in_child()
    done = subprocess.run(
        [sys.executable, "-m", "netlimit.kernel.capabilities"],
        capture_output=True,
        text=True,
        timeout=_PROBE_SECONDS,
        check=False,
    )
    try:
        found: dict[str, str | None] = json.loads(done.stdout)
    except ValueError:
        reason = f"the probe of this host failed: {done.stderr.strip()[-300:] or done.returncode}"
        return dict.fromkeys(NAMES, reason)
    return found


def _recall() -> dict[str, str | None]:
    try:
        found: dict[str, str | None] = json.loads(FINDINGS.read_text("utf-8"))
    except (OSError, ValueError) as error:
        reason = (
            f"netlimit needs root, or that root has run `netlimit prepare` before, which left no {FINDINGS}: {error}."
        )
        return dict.fromkeys(NAMES, reason)
    return found


def find_out_as(give_up: Callable[[], None]) -> dict[str, str | None]:
    """What a process can do that has given up rights by calling `give_up`. As root; leaves no trace on the host."""
    iptables.load()  # who has given up rights may not be able to read it
    return _try_in_child(give_up)


def _try_in_child(give_up: Callable[[], None] = lambda: None) -> dict[str, str | None]:
    """Try every rule in a copy of this process, which need not load everything again."""
    context = multiprocessing.get_context("fork")
    answer, asked = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(asked, give_up))
    process.start()
    asked.close()
    try:
        ended = "ended without an answer" if answer.poll(_PROBE_SECONDS) else f"took more than {_PROBE_SECONDS} seconds"
        found: dict[str, str | None] = answer.recv() if answer.poll() else {}
    except EOFError:
        found = {}
    process.kill()
    process.join()
    return found or dict.fromkeys(NAMES, f"the probe of this host {ended}")


def _answer(asked: Connection, give_up: Callable[[], None]) -> None:
    asked.send(_probe_here(give_up))


def _probe_here(give_up: Callable[[], None] = lambda: None) -> dict[str, str | None]:
    """Try every rule in a namespace of this process's own."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        reason = f"no network namespace can be made to probe in: {os.strerror(ctypes.get_errno())}"
        return dict.fromkeys(NAMES, reason)
    give_up()
    found: dict[str, str | None] = {"iptables": _try_tool(4), "ip6tables": _try_tool(6)}
    missing = _try_set()
    for family, tool, suffix in ((4, "iptables", ""), (6, "ip6tables", "6")):
        for name, (table, words) in TRIALS.items():
            if name == "ipset":
                found[name] = found["iptables"] or missing or _try_rule(4, name, table, words)
            else:
                found[name + suffix] = found[tool] or _try_rule(family, name, table, words)
    return found | _try_queues()


def _try_tool(family: int) -> str | None:
    program = "iptables" if family == 4 else "ip6tables"
    try:
        iptables.read_tables(family)
        iptables.try_rule(family, "filter", "-j RETURN")
    except Exception as error:
        module = f"{program.removesuffix('s')}_filter"
        return f"{program} (legacy) does not work on this host: {error}. Try `{_INSTALL}` and `modprobe {module}`."
    return None


def _try_set() -> str | None:
    command = ["ipset", "create", "nl-probe", "hash:net", "skbinfo", "counters", "timeout", "0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return f"there is no ipset on this host. Try `{_INSTALL}`."
    return f"{done.stderr.strip()}. Try `modprobe ip_set_hash_net`." if done.returncode else None


def _try_rule(family: int, name: str, table: str, words: str) -> str | None:
    six = "6" if family == 6 else ""
    try:
        iptables.try_rule(family, table, words.replace("mask 32", "mask 128") if six else words)
    except Exception as error:
        module = {
            "raw": f"ip{six}table_raw",
            "mangle": f"ip{six}table_mangle",
            "security": f"ip{six}table_security",
            "ipset": "xt_set",
            "reject": f"ip{six}t_REJECT",
        }.get(name, f"xt_{name}")
        return f"This host has no {name} for ip{six}tables: {error}. Try `modprobe {module}`."
    return None


def _try_queues() -> dict[str, str | None]:
    found = {name: _try_queue(name, words) for name, words in QUEUES.items()}
    root, top = Tree(FIRST_ROOT), classid(FIRST_ROOT, 1)
    holder = QueueClass(classid(FIRST_ROOT, 0), rate=1000, ceil=1000, burst=2000, cburst=2000, quantum=1500)
    nested = WriteTree("lo", root.handle, root, {top: holder}, {FIRST_CHILD: top})
    found["bpf"] = found["htb"] or _try_tree("eBPF", nested, "cls_bpf")
    below = WriteTree(INGRESS_DEVICE, root.handle, root)
    found["ifb"] = found["htb"] or _try_tree("IFB device", below, "ifb") or _try_ingress()
    return found


def _try_ingress() -> str | None:
    try:
        ingress.try_ingress("lo")
    except PermissionError as error:
        return (
            f"This controller may not load eBPF programs and open their maps ({error.strerror}), as shaping what "
            "ends on this host takes: it has not CAP_BPF and CAP_SYS_ADMIN. docs/install.md tells how to give them."
        )
    except Exception as error:
        return f"This host has no eBPF program on the ingress: {getattr(error, 'reason', error)}."
    return None


def _try_queue(name: str, words: str) -> str | None:
    lines = f"qdisc add dev lo root {words}\nqdisc del dev lo root\n"
    try:
        done = subprocess.run(["tc", "-batch", "-"], input=lines, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "There is no tc on this host. Try `apt-get install iproute2`."
    if not done.returncode:
        return None
    if name == "fq_codel":
        return "Flows that share a class wait in one line; `modprobe sch_fq_codel` would part them."
    return f"This host has no {name}: {done.stderr.splitlines()[0]} Try `modprobe sch_{name}`."


def _try_tree(name: str, step: WriteTree, module: str) -> str | None:
    try:
        tc.write_tree(step)
    except Exception as error:
        return f"This host has no {name} for queues: {getattr(error, 'reason', error)}. Try `modprobe {module}`."
    return None


def _find_overlap(mask: int) -> str | None:
    """Who else uses bits of the packet mark under our mask."""
    foreign = list(_foreign_marks())
    taken = [(owner, other) for owner, other in foreign if other & mask]
    if not taken:
        return None
    owner, other = taken[0]
    free = [each for each in _USUAL_MASKS if not any(each & bits for _, bits in foreign)]
    advice = f"Set a mask that is free, such as {free[0]:#010x}." if free else "Free some bits of the mark first."
    return (
        f"{owner} uses bits {other & mask:#x} of the packet mark, which NETLIMIT_MARK_MASK {mask:#x} covers. {advice}"
    )


def _foreign_marks() -> Iterator[tuple[str, int]]:
    from pyroute2 import IPRoute

    with IPRoute() as ipr:
        for family in (2, 10):
            for rule in ipr.get_rules(family=family):
                mark, mask = rule.get("fwmark"), rule.get("fwmask")
                if mark:
                    yield f"A routing rule (ip rule, fwmark {mark:#x})", mask or mark
    for family in (4, 6):
        yield from _iptables_marks(family)
    yield from _nft_marks()


def _iptables_marks(family: int) -> Iterator[tuple[str, int]]:
    try:
        lines = iptables.foreign_rules(family)
    except Exception:  # the tool is missing; `iptables` among the capabilities says so
        return
    for line in lines:
        for match in re.finditer(
            r"--(?:mark|set-xmark|set-mark|nfmask|or-mark) (0x[0-9a-f]+)(?:/(0x[0-9a-f]+))?", line
        ):
            yield (
                f"the iptables rule '{line}'",
                int(match[2] or "0xffffffff" if "xmark" in match[0] else match[2] or match[1], 16),
            )


def _nft_marks() -> Iterator[tuple[str, int]]:
    try:
        done = subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return
    for line in done.stdout.splitlines():
        for match in re.finditer(r"\bmark (?:set |and |== |!= |& )*(0x[0-9a-f]+)", line):
            if "ct mark" not in line:
                yield f"The nftables rule '{line.strip()}'", int(match[1], 16)


def _notes() -> Iterator[str]:
    for device in sorted(os.listdir("/sys/class/net")):
        if device != "lo" and _receives_merged(device):
            yield (
                f"{device} merges packets before they are counted (GRO): one packet of a rate in packets can be up to "
                f"64 kB of TCP. `ethtool -K {device} gro off` makes a packet a packet, or give the rate in bits."
            )


def _receives_merged(device: str) -> bool:
    """ETHTOOL_GGRO by ioctl (linux/ethtool.h)."""
    import fcntl
    import socket
    import struct

    value = ctypes.create_string_buffer(struct.pack("II", 0x2B, 0), 8)
    request = struct.pack("16sP", device.encode(), ctypes.addressof(value)) + bytes(16)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            fcntl.ioctl(sock.fileno(), 0x8946, request)
        except OSError:
            return False
    return bool(struct.unpack("II", value.raw)[1])


if __name__ == "__main__":
    print(json.dumps(_probe_here()))
