"""`netlimit top`: who is being limited, and what the rules do, as it happens."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table

from netlimit.cli.client import Client, open_client, rule_path
from netlimit.cli.flows import Flow, measure
from netlimit.cli.printing import JSON, add_row, make_line, make_table, open_console, say
from netlimit.rules import Action

MOST_OFFENDERS = 10
MOST_MEASURED = 10_000
"""So many rules are measured for the busiest of them to be found; whoever has more names those that he means."""
_AT_ONCE = 1000

Document = Mapping[str, Any]


@dataclass(frozen=True)
class Frame:
    """What is shown at a time: the worst offenders by what they lost in all; of the rules those that drop most now,
    then those that match most. `left_out` is how many rules were not measured."""

    offenders: Sequence[Document]
    flows: Sequence[Flow]
    left_out: int = 0


def top(
    context: typer.Context,
    keys: Annotated[list[str] | None, typer.Argument(metavar="ID|NAME", help="Which rules to watch.")] = None,
    most: Annotated[int, typer.Option("--rules", min=1, max=1000, help="The most rules to show: the busiest.")] = 20,
    every: Annotated[float, typer.Option("--every", min=0.2, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame, and end.")] = False,
    json: bool = JSON,
) -> None:
    """Watch who is limited, and what the busiest rules do. Ctrl-C ends it."""
    with open_client(context) as client, suppress(KeyboardInterrupt):
        frames = watch(client, *_find_rules(client, keys or []), most, every)
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


def watch(client: Client, rules: Sequence[Document], left_out: int, most: int, every: float) -> Iterator[Frame]:
    """Look again and again; the first frame comes after the second look. A rule that is removed meanwhile is left."""
    before = _read_counters(client, rules)
    while True:
        time.sleep(every)
        after = _read_counters(client, rules)
        there = [rule for rule in rules if rule["id"] in before and rule["id"] in after]
        flows = [measure(rule, before[rule["id"]], after[rule["id"]]) for rule in there]
        offenders = client.get("/offenders", limit=MOST_OFFENDERS)["items"]
        yield Frame(offenders, sorted(flows, key=_weigh)[:most], left_out)
        before = after


def _weigh(flow: Flow) -> tuple[float, ...]:
    """What is dropped comes first, then what would be, then what is matched."""
    observes = flow.action == Action.OBSERVE
    dropped = 0.0 if observes else flow.dropped_packets
    return -dropped, -flow.dropped_packets, -flow.matched_packets, -flow.queued_packets, flow.rule


def render(frame: Frame) -> Group:
    """Tables, one above the other: offenders, rules that limit, rules that shape."""
    shaping = [flow for flow in frame.flows if flow.action == Action.SHAPE]
    observing = [flow for flow in frame.flows if flow.action == Action.OBSERVE]
    others = [flow for flow in frame.flows if flow.action not in (Action.SHAPE, Action.OBSERVE)]
    parts = [
        _list_offenders(frame.offenders) if frame.offenders else make_line("No host loses packets to a limit."),
        *([_list_limits(others)] if others else []),
        *([_list_limits(observing, "WOULD DROP")] if observing else []),
        *([_list_queues(shaping)] if shaping else []),
        *([] if frame.flows else [make_line("There are no rules to watch.")]),
        *(
            [make_line(f"{frame.left_out:,} more rules were not measured; name those that are meant.")]
            if frame.left_out
            else []
        ),
    ]
    return Group(parts[0], *(each for part in parts[1:] for each in (make_line(""), part)))


def _list_offenders(offenders: Sequence[Document]) -> Table:
    table = make_table("OFFENDER", "DROPPED PACKETS", "BYTES", right=["DROPPED PACKETS", "BYTES"])
    for each in offenders:
        add_row(table, each["address"], f"{each['packets']:,}", f"{each['bytes']:,}")
    return table


def _list_limits(flows: Sequence[Flow], lost: str = "DROPPED") -> Table:
    numbers = ["MATCHED/s", f"{lost}/s", f"{lost} bit/s"]
    table = make_table("ID", "NAME", "RULE", *numbers, right=["ID", *numbers])
    for flow in flows:
        measured = (flow.matched_packets, flow.dropped_packets, flow.dropped_bits)
        add_row(table, flow.rule, flow.name, flow.what, *(f"{number:,.0f}" for number in measured))
    return table


def _list_queues(flows: Sequence[Flow]) -> Table:
    numbers = ["SENT Mbit/s", "DROPPED/s", "DELAYED/s", "WAITING", "BYTES"]
    table = make_table("ID", "NAME", "QUEUE", *numbers, right=["ID", *numbers])
    for flow in flows:
        measured = (flow.dropped_packets, flow.delayed, flow.queued_packets, flow.queued_bytes)
        sent = f"{flow.sent_bits / 1e6:,.2f}"
        add_row(table, flow.rule, flow.name, flow.what, sent, *(f"{number:,.0f}" for number in measured))
    return table


def _find_rules(client: Client, keys: Sequence[str]) -> tuple[list[Document], int]:
    """The rules to measure, and how many there are besides: those that are named, or all that are enforced."""
    if keys:
        return [client.get(rule_path(key)) for key in keys], 0
    found: list[Document] = []
    left_out = 0
    for state in ("applied", "degraded"):
        before = len(found)
        for page in client.walk("/rules", {"state": state}, MOST_MEASURED - before):
            found += page["items"][: MOST_MEASURED - len(found)]
        left_out += page["total"] - (len(found) - before)
    return found, left_out


def _read_counters(client: Client, rules: Sequence[Document]) -> dict[int, Document]:
    counted: dict[int, Document] = {}
    for start in range(0, len(rules), _AT_ONCE):
        found = client.get("/counters", rule=[rule["id"] for rule in rules[start : start + _AT_ONCE]])
        counted |= {each["rule"]: each for each in found["items"]}
    return counted
