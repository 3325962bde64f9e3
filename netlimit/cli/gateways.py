"""`netlimit gateway`: who has reported, and forgetting one that is gone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from netlimit.cli.client import gateway_path, open_client
from netlimit.cli.printing import JSON, add_row, make_table, print_as, print_table, say

app = typer.Typer(help="Gateways: which have reported.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The gateway's name.")]


@app.command("list")
def list_them(context: typer.Context, json: bool = JSON) -> None:
    """List the gateways that have reported."""
    with open_client(context) as client:
        found = client.get("/gateways")
    print_as(json, found, _list)


@app.command()
def forget(context: typer.Context, name: Name, json: bool = JSON) -> None:
    """Forget a gateway that is gone: as an admin.

    One that has another name now, for example. One that still reports is refused."""
    with open_client(context) as client:
        warnings = client.remove(gateway_path(name))
    say(json, {"name": name, "warnings": warnings}, "\n".join([f"Forgot the gateway {name}.", *warnings]))


def _list(found: Mapping[str, Any]) -> None:
    if not found["items"]:
        typer.echo("No controller has reported yet; run `netlimit serve` on a gateway.")
        return
    numbers = ["REVISION", "NAMED BY RULES"]
    table = make_table("GATEWAY", "BACKEND", *numbers, "STATE", "SEEN", right=numbers)
    for each in found["items"]:
        state = "paused" if each["paused"] and each["state"] == "live" else each["state"]
        seen = str(each["seen_at"]).partition(".")[0].replace("T", " ")
        add_row(table, each["name"], each["backend"], each["applied_revision"], each["rules"], state, seen)
    print_table(table)
