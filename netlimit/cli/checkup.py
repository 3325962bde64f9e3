"""`netlimit doctor`, the command.

What it needs no other command needs, and would take a tenth of the time that each of them takes to start (measured).
"""

from __future__ import annotations

import typer

from netlimit.cli.printing import JSON


def doctor(context: typer.Context, json: bool = JSON) -> None:
    """Look for what this host lacks, and what gets in the way. Nothing is changed.

    Ends with 1 if something is found that keeps rules from holding."""
    from netlimit.cli.doctor import examine, look_at_settings

    settings, found = look_at_settings(context)
    examine(settings, json, found)
