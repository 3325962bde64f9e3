"""`netlimit status` and `netlimit counters`: how things stand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Any

import typer

from netlimit.cli.client import open_client, rule_path
from netlimit.cli.printing import JSON, add_row, make_table, print_as, print_table
from netlimit.rules import Action
from netlimit.safety import is_needed

Document = Mapping[str, Any]


def status(context: typer.Context, json: bool = JSON) -> None:
    """Show whether the gateways hold the rules, and what is wrong."""
    with open_client(context) as client:
        found = client.get("/status")
    print_as(json, found, _show_status)


def counters(
    context: typer.Context,
    key: Annotated[str, typer.Argument(metavar="ID|NAME", help="The rule's id or name.")],
    json: bool = JSON,
) -> None:
    """Show what a rule matched, dropped and made wait. It is read from the kernel now."""
    with open_client(context) as client:
        found = client.get(f"{rule_path(key)}/counters")
        action = None if json else client.get(rule_path(key))["action"]
    print_as(json, found, partial(_show_counters, action=action))


def _show_status(found: Document) -> None:
    states = ", ".join(f"{number} {state}" for state, number in found["rules"].items() if number and state != "total")
    typer.echo(f"Rules: {found['rules']['total']}" + (f" ({states})" if states else ""))
    typer.echo(f"Revision: {found['wanted_revision']} wanted, {_or_none(found['applied_revision'])} applied")
    if found["hosts"]:
        typer.echo("")
        _list_hosts(found)
    for sentence in _find_remarks(found):
        typer.echo(f"\n{sentence}")


def _list_hosts(found: Document) -> None:
    numbers = ["REVISION", "ENFORCED", "REPAIRS"]
    table = make_table("GATEWAY", "BACKEND", *numbers, "STATE", "SEEN", right=numbers)
    for host in found["hosts"]:
        state = "gone" if host["gone"] else "paused" if host["paused"] else "live" if host["live"] else "silent"
        seen = str(host["seen_at"]).partition(".")[0].replace("T", " ")
        held = f"{host['enforced']} of {host['desired']}"
        add_row(table, host["host"], host["backend"], host["applied_revision"], held, host["drift"], state, seen)
    print_table(table)


def _find_remarks(found: Document) -> Iterator[str]:
    if found["last_error"]:
        yield f"Error: {found['last_error']}"
    if found["window"]:
        window = found["window"]
        yield (
            f"{window['actor']} has opened a window of confirmation: unless it is confirmed in {window['left']:.0f} s, "
            f"revision {window['base']} comes back (`netlimit confirm` keeps what was changed)."
        )
    for host in found["hosts"]:
        yield from _tell_shortcomings(host)
    for host in found["hosts"]:
        yield from tell_safe(host["host"], host["safe_reasons"])
    for name, capability in found["capabilities"].items():
        if not capability["available"]:
            yield f"{'Missing' if capability['needed'] else 'Note'}: {name}. {capability['reason']}"
    yield from found["notes"]


def tell_safe(host: str, reasons: Mapping[str, str]) -> Iterator[str]:
    """Whom no rule touches."""
    needed = [network for network, reason in reasons.items() if is_needed(reason)]
    for start, networks in (
        (f"No rule touches, on {host}", [each for each in reasons if each not in needed]),
        (f"No rule touches what {host} itself exchanges with", needed),
    ):
        if networks:
            yield f"{start}: {', '.join(f'{network} ({reasons[network]})' for network in networks)}."


def _tell_shortcomings(host: Document) -> Iterator[str]:
    """What of a gateway is not as it should be, or was not lately."""
    meanings = {
        "degraded": "rules are not in force for all they speak of",
        "lifted": "rules with on_failure open are out of force",
        "drifted": "things were changed by others and are not yet put right",
    }
    short = [f"{host[kind]} {meaning}" for kind, meaning in meanings.items() if host[kind]]
    if short:
        yield f"On {host['host']}, {', '.join(short)}."
    if host["last_repairs"]:
        lines = [f"Repaired on {host['host']}:"]
        for repair in host["last_repairs"]:
            at = str(repair["at"]).partition(".")[0].replace("T", " ")
            first = str(repair["found"]).strip().partition("\n")[0]
            lines.append(f"  {at} {repair['kind']}, in {repair['seconds']:.3f} s: {first}")
        yield "\n".join(lines)


def _show_counters(found: Document, action: str | None) -> None:
    shapes = action == Action.SHAPE
    if found["as_of"] is None:
        typer.echo("Nothing has been counted yet.")
        return
    table = make_table("", "PACKETS", "BYTES", right=["PACKETS", "BYTES"])
    add_row(table, "matched", f"{found['matched_packets']:,}", f"{found['matched_bytes']:,}")
    lost = "would drop" if action == Action.OBSERVE else "dropped"
    add_row(table, lost, f"{found['dropped_packets']:,}", None if shapes else f"{found['dropped_bytes']:,}")
    if shapes:
        add_row(table, "delayed", f"{found['delayed']:,}")
        add_row(table, "waiting", f"{found['queued_packets']:,}", f"{found['queued_bytes']:,}")
    print_table(table)
    typer.echo(f"since {found['since']}, read at {found['as_of']}")


def _or_none(revision: int | None) -> str:
    return "none" if revision is None else str(revision)
