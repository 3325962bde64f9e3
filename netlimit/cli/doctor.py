"""`netlimit doctor`: what this host can do."""

from __future__ import annotations

import typer

from netlimit.cli.parts import make_kernel, read_settings
from netlimit.cli.printing import JSON, add_row, make_table, print_table, say
from netlimit.records import DISPENSABLE


def doctor(context: typer.Context, json: bool = JSON) -> None:
    """Try what this host can do: iptables, ipsets, queues (htb, tbf, bpf, ifb). Nothing is changed."""
    settings = read_settings(context)
    facts = make_kernel(settings).probe(settings.mark_mask)
    if json:
        say(True, {"capabilities": facts.capabilities, "hz": facts.hz, "notes": facts.notes}, "")
        return
    table = make_table("CAPABILITY", "HERE", "WHY NOT, AND WHAT WOULD HELP")
    for name, reason in facts.capabilities.items():
        add_row(table, name, _word(name, reason), reason)
    print_table(table)
    for note in facts.notes:
        typer.echo(f"\n{note}")
    missing = [name for name, reason in facts.capabilities.items() if reason and name not in DISPENSABLE]
    typer.echo(f"\nMissing: {', '.join(missing)}." if missing else "\nNothing is missing.")


def _word(name: str, reason: str | None) -> str:
    if reason is None:
        return "yes"
    return "not needed" if name in DISPENSABLE else "no"
