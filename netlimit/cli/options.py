"""The options that describe a rule, and the fields of the API that they mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

Rate = Annotated[
    str | None,
    typer.Option("--rate", help='How much: "200 packets/s", "20 Mbit/s", "10 connections/s", "50 connections".'),
]
Per = Annotated[str | None, typer.Option("--per", help="Whose bucket it is: host, target, /24, peer.")]
Direction = Annotated[
    str | None, typer.Option("--direction", help="from (default): what the target sends; to: what it gets.")
]
Protocol = Annotated[str | None, typer.Option("--protocol", help="any (default), tcp, udp, icmp.")]
Ports = Annotated[list[str] | None, typer.Option("--port", help="Destination port, range or list; may be repeated.")]
SourcePorts = Annotated[list[str] | None, typer.Option("--source-port", help="Source port; may be repeated.")]
Interface = Annotated[str | None, typer.Option("--interface", help="Only what enters (from) or leaves (to) here.")]
Burst = Annotated[str | None, typer.Option("--burst", help="How much may come at once.")]
Action = Annotated[str | None, typer.Option("--action", help="drop (default), reject, observe, allow, block, shape.")]
Ceil = Annotated[str | None, typer.Option("--ceil", help="For shape: may borrow up to here.")]
Ttl = Annotated[str | None, typer.Option("--ttl", help="How long the rule lasts: 90s, 10m, 2h, 7d.")]
ExpiresAt = Annotated[
    str | None, typer.Option("--expires-at", help="When it ends: 2030-01-31T18:00:00Z; without a zone, in UTC.")
]
Name = Annotated[str | None, typer.Option("--name", help="A unique name.")]
Labels = Annotated[list[str] | None, typer.Option("--label", help="key=value; may be repeated.")]
Hosts = Annotated[list[str] | None, typer.Option("--host", help="Only on this gateway; may be repeated.")]
Comment = Annotated[str | None, typer.Option("--comment", help="A note.")]
OnFailure = Annotated[str | None, typer.Option("--on-failure", help="closed (default) or open.")]
Wait = Annotated[int, typer.Option("--wait", min=0, max=60, help="Seconds to wait until the kernel holds it.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Keep nothing: only show what it would do.")]
Force = Annotated[
    bool,
    typer.Option(
        "--force", help="Even if it would hit who is safe (an SSH session, say), or close a whole gateway. Admins only."
    ),
]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Do not wait.")]


def collect_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a rule, of options that were given (by the names of their parameters). Raises BadParameter."""
    fields = {field: value for field, value in given.items() if value is not None and value != []}
    if "labels" in fields:
        fields["labels"] = read_labels(fields["labels"])
    return fields


def read_labels(texts: Sequence[str]) -> dict[str, str]:
    """Labels written key=value. Raises BadParameter."""
    labels = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"The label {text!r} has no value; write for example --label customer=acme.")
        labels[key] = value
    return labels
