"""The buckets that `netlimit.hashlimit` computes are those that iptables and the kernel make of the same words."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from netlimit.compile import Compilation
from netlimit.errors import RuleError
from netlimit.hashlimit import Bucket, fit_bucket
from netlimit.kernel.base import observe
from netlimit.limits import Facts
from netlimit.plan import diff
from netlimit.rates import parse_rate
from netlimit.rules import parse_rule
from tests.kernel.worker import RemoteKernel
from tests.unit.strategies import NOW

SEED = 20300101
KNOWN = [
    *("1 packets/day", "1 packets/h", "1 packets/min", "59 packets/min", "1 packets/s", "7777 packets/s"),
    *("10000 packets/s", "1000000 packets/s", "86399 packets/day", "12 kbit/s", "1500 B/s", "20 Gbit/s"),
    *("1 MiB/s", "1 KiB/s", "2 KiB/s", "1 GiB/s", "1 Mbit/s", "1 Gbit/s", "100 Mbit/s"),
]


BURSTS = (None, 10**6 - 1, 10**6, 10**6 + 1, 2**32 - 1)
"""The default, and those about where iptables, and the kernel, end."""


def buckets(count: int, bursts: Sequence[int | None] = (None,)) -> dict[tuple[str, int | None], Bucket]:
    randomness = random.Random(SEED)
    texts = list(KNOWN)
    while len(texts) < count:
        size = int(10 ** randomness.uniform(0, 6))
        texts.append(f"{size} packets/{randomness.choice(['s', 'min', 'h', 'day'])}")
        texts.append(f"{int(10 ** randomness.uniform(3.2, 9.3))} B/{randomness.choice(['s', 's', 'min'])}")
    found = {}
    for text, burst in product(texts, bursts):
        try:
            found[text, burst] = fit_bucket(parse_rate(text), burst)
        except RuleError:
            continue
    return found


def test_iptables_shows_the_rate_that_was_computed(linux: RemoteKernel) -> None:
    print(f"seed {SEED}")
    wanted = buckets(1000, BURSTS)
    assert len(wanted) > 1000
    assert max(int(bucket.burst) for bucket in wanted.values() if bucket.burst) == 10**6
    lines = ["*mangle", ":NL-T - [0:0]"]
    for number, bucket in enumerate(wanted.values()):
        burst = f"--hashlimit-burst {bucket.burst} " if bucket.burst else ""
        lines.append(
            f"-A NL-T -m hashlimit --hashlimit-above {bucket.above} {burst}--hashlimit-mode srcip "
            f"--hashlimit-htable-size 16 --hashlimit-htable-expire {bucket.expire_ms} --hashlimit-name nl-{number}"
        )
    linux.run("iptables-legacy-restore", stdin="\n".join([*lines, "COMMIT", ""]))
    shown = [line for line in linux.run("iptables-legacy-save", "-t", "mangle").splitlines() if "hashlimit" in line]
    assert len(shown) == len(wanted)
    for (text, bucket), line in zip(wanted.items(), shown, strict=True):
        above = re.search(r"--hashlimit-above (\S+)(?: --hashlimit-burst (\S+))?", line)
        assert above is not None
        assert (text, above[1], above[2]) == (text, bucket.shown, bucket.burst)


def test_what_is_written_by_library_is_what_iptables_would_have_written(linux: RemoteKernel) -> None:
    compilation = Compilation(Facts(mark_mask=0xFFFF0000))
    for number, (text, _) in enumerate(buckets(120), start=1):
        rule = parse_rule({"target": f"10.1.0.{number}", "rate": text}, NOW)
        assert compilation.put(replace(rule, id=number)) is None
    for step in diff(compilation.state, observe(linux)).steps:
        linux.apply(step)
    assert observe(linux) == compilation.state


def test_the_slowest_rates_let_their_burst_through_and_no_more(linux: RemoteKernel) -> None:
    """The kernel's credits for a day still fit into its 64 bits."""
    linux.run("ip", "link", "set", "lo", "up")
    wanted = {1: "1 packets/day", 2: "2 packets/day", 3: "1 packets/h", 4: "1 connections/day"}
    for port, text in wanted.items():
        bucket = fit_bucket(parse_rate(text), None)
        words = f"-p udp --dport {port} -m hashlimit --hashlimit-above {bucket.above} --hashlimit-burst {bucket.burst}"
        table = f"--hashlimit-mode srcip --hashlimit-htable-expire {bucket.expire_ms} --hashlimit-name nl-t{port}"
        linux.run("iptables-legacy", "-t", "mangle", "-A", "PREROUTING", *words.split(), *table.split(), "-j", "DROP")
    script = "import socket\nsock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
    script += f"for port in {list(wanted)} * 9:\n    sock.sendto(b'x', ('127.0.0.1', port))\n"
    linux.run("python3", "-c", script)
    counted = linux.run("iptables-legacy", "-t", "mangle", "-vnxL", "PREROUTING").splitlines()[2:]
    assert [int(line.split()[0]) for line in counted] == [8, 7, 8, 8]
