"""`netlimit top`: who is being limited, and what the rules do, as it happens."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from netlimit.cli.client import Client, open_client, rule_path
from netlimit.cli.describing import describe_limit, describe_traffic
from netlimit.cli.printing import JSON, add_row, make_table, open_console, say

MOST_OFFENDERS = 10
_AT_ONCE = 8
"""Readings that are asked for at the same time; each is a look into the kernel."""

Document = Mapping[str, Any]


@dataclass(frozen=True)
class Flow:
    """What a rule does now, per second."""

    rule: int
    name: str | None
    what: str
    matched_packets: float
    dropped_packets: float
    dropped_bits: float


@dataclass(frozen=True)
class Frame:
    """What is shown at a time: the worst offenders by what they lost in all, the rules by what they drop now."""

    offenders: Sequence[Document]
    flows: Sequence[Flow]


def top(
    context: typer.Context,
    keys: Annotated[list[str] | None, typer.Argument(metavar="[ID|NAME]...", help="Which rules to watch.")] = None,
    most: Annotated[int, typer.Option("--rules", min=1, max=1000, help="The most rules to watch.")] = 20,
    every: Annotated[float, typer.Option("--every", min=0.2, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame, and end.")] = False,
    json: bool = JSON,
) -> None:
    """Watch who is limited and what the rules let through and drop; Ctrl-C ends it."""
    with open_client(context) as client, suppress(KeyboardInterrupt):
        frames = watch(client, _find_rules(client, keys or [], most), every)
        if once or json:
            frame = next(frames)
            if json:
                say(True, {"offenders": frame.offenders, "rules": [asdict(flow) for flow in frame.flows]}, "")
            else:
                open_console().print(render(frame))
            return
        with Live(console=open_console(), auto_refresh=False) as live:
            for frame in frames:
                live.update(render(frame), refresh=True)


def watch(client: Client, rules: Sequence[Document], every: float) -> Iterator[Frame]:
    """Look again and again; the first frame comes after the second look."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        before = _read_counters(client, pool, rules)
        while True:
            time.sleep(every)
            after = _read_counters(client, pool, rules)
            flows = [measure(rule, before[rule["id"]], after[rule["id"]]) for rule in rules]
            offenders = client.get("/offenders", limit=MOST_OFFENDERS)["items"]
            yield Frame(offenders, sorted(flows, key=lambda flow: (-flow.dropped_packets, -flow.matched_packets)))
            before = after


def measure(rule: Document, before: Document, after: Document) -> Flow:
    """What a rule did between two readings of its counters, per second."""
    seconds = 0.0
    if before["as_of"] and after["as_of"]:
        seconds = (datetime.fromisoformat(after["as_of"]) - datetime.fromisoformat(before["as_of"])).total_seconds()

    def rate(counter: str) -> float:
        return max(0, after[counter] - before[counter]) / seconds if seconds > 0 else 0.0

    what = " ".join(part for part in (rule["target"], describe_traffic(rule), describe_limit(rule)) if part)
    return Flow(
        rule=rule["id"],
        name=rule["name"],
        what=f"{rule['action']} {what}",
        matched_packets=rate("matched_packets"),
        dropped_packets=rate("dropped_packets"),
        dropped_bits=8 * rate("dropped_bytes"),
    )


def render(frame: Frame) -> Group:
    """Two tables, one above the other."""
    offenders = make_table("OFFENDER", "DROPPED PACKETS", "BYTES", right=["DROPPED PACKETS", "BYTES"])
    for each in frame.offenders:
        add_row(offenders, each["address"], f"{each['packets']:,}", f"{each['bytes']:,}")
    first: Table | Text = offenders if frame.offenders else Text("Nobody is being limited.")
    numbers = ["MATCHED/s", "DROPPED/s", "DROPPED bit/s"]
    flows = make_table("ID", "NAME", "RULE", *numbers, right=["ID", *numbers])
    for flow in frame.flows:
        measured = (flow.matched_packets, flow.dropped_packets, flow.dropped_bits)
        add_row(flows, flow.rule, flow.name, flow.what, *(f"{number:,.0f}" for number in measured))
    second: Table | Text = flows if frame.flows else Text("There are no rules to watch.")
    return Group(first, Text(""), second)


def _find_rules(client: Client, keys: Sequence[str], most: int) -> list[Document]:
    if keys:
        return [client.get(rule_path(key)) for key in keys]
    return list(client.get("/rules", state="applied", limit=most)["items"])


def _read_counters(client: Client, pool: ThreadPoolExecutor, rules: Sequence[Document]) -> dict[int, Document]:
    paths = [f"{rule_path(str(rule['id']))}/counters" for rule in rules]
    return {rule["id"]: found for rule, found in zip(rules, pool.map(client.get, paths), strict=True)}
