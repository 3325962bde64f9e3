"""`netlimit status` and `netlimit counters`: how things stand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from netlimit.cli.client import open_client, rule_path
from netlimit.cli.printing import JSON, add_row, make_table, print_as, print_table

Document = Mapping[str, Any]


def status(context: typer.Context, json: bool = JSON) -> None:
    """Show whether the gateways hold the rules, what they can do, and what went wrong."""
    with open_client(context) as client:
        found = client.get("/status")
    print_as(json, found, _show_status)


def counters(
    context: typer.Context,
    key: Annotated[str, typer.Argument(metavar="ID|NAME", help="The rule's id or name.")],
    json: bool = JSON,
) -> None:
    """Show what a rule matched and dropped, read from the kernel now."""
    with open_client(context) as client:
        found = client.get(f"{rule_path(key)}/counters")
    print_as(json, found, _show_counters)


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
    table = make_table("GATEWAY", "BACKEND", "REVISION", "REPAIRS", "STATE", "SEEN", right=["REVISION", "REPAIRS"])
    for host in found["hosts"]:
        state = "paused" if host["paused"] else "live" if host["live"] else "silent"
        seen = str(host["seen_at"]).partition(".")[0].replace("T", " ")
        add_row(table, host["host"], host["backend"], host["applied_revision"], host["drift"], state, seen)
    print_table(table)


def _find_remarks(found: Document) -> Iterator[str]:
    if found["last_error"]:
        yield f"Error: {found['last_error']}"
    for name, capability in found["capabilities"].items():
        if not capability["available"]:
            yield f"Missing: {name}. {capability['reason']}"
    yield from found["notes"]


def _show_counters(found: Document) -> None:
    if found["as_of"] is None:
        typer.echo("Nothing has been counted yet.")
        return
    table = make_table("", "PACKETS", "BYTES", right=["PACKETS", "BYTES"])
    for what in ("matched", "dropped"):
        add_row(table, what, f"{found[f'{what}_packets']:,}", f"{found[f'{what}_bytes']:,}")
    print_table(table)
    typer.echo(f"since {found['since']}, read at {found['as_of']}")


def _or_none(revision: int | None) -> str:
    return "none" if revision is None else str(revision)
