"""`netlimit explain`: which rules hit a packet, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from netlimit.cli.client import open_client
from netlimit.cli.printing import JSON, say
from netlimit.rules import Protocol

Port = Annotated[int | None, typer.Option("--port", min=0, max=65535, help="Its destination port.")]
SourcePort = Annotated[int | None, typer.Option("--source-port", min=0, max=65535, help="Its source port.")]


def explain(
    context: typer.Context,
    src: Annotated[str, typer.Option("--src", metavar="IP", help="The packet's source address.")],
    dst: Annotated[str, typer.Option("--dst", metavar="IP", help="Its destination address.")],
    protocol: Annotated[Protocol | None, typer.Option("--protocol", help="Its protocol; udp by default.")] = None,
    port: Port = None,
    source_port: SourcePort = None,
    enters: Annotated[str | None, typer.Option("--in", help="The interface where it enters.")] = None,
    leaves: Annotated[str | None, typer.Option("--out", help="The interface where it leaves.")] = None,
    established: Annotated[
        bool, typer.Option("--established", help="It belongs to an open TCP connection of this host.")
    ] = False,
    host: Annotated[str | None, typer.Option("--host", help="Only the rules of this gateway.")] = None,
    json: bool = JSON,
) -> None:
    """Explain which rules hit a packet. They come in their order; then those that do not, and why."""
    query = {"src": src, "dst": dst, "protocol": protocol, "port": port, "source_port": source_port, "host": host}
    if established:
        query["established"] = "true"
    with open_client(context) as client:
        explanation = client.get("/explain", **query, **{"in": enters, "out": leaves})
    say(json, explanation, explanation["text"])
