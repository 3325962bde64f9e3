"""Commands that keep what the database holds, and bring it back."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from netlimit.cli.actor import local_actor
from netlimit.cli.errors import CommandError
from netlimit.cli.parts import open_store, read_settings
from netlimit.cli.printing import JSON, count, say
from netlimit.records import Window
from netlimit.several import name_some

File = Annotated[Path, typer.Argument(metavar="FILE", help="The backup: a SQLite file, whatever the database is.")]
Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="In the place of rules that are there, or of a database that is damaged; and with rules that were forced, "
        "or that need it here.",
    ),
]

_UNCONFIRMED = (
    "A window of confirmation is open: the backup holds what nobody has confirmed, and `netlimit restore` brings that "
    "back for good. Make another one when the window has ended."
)
_NAMED = 10
"""So many domains are said by name."""


def backup(context: typer.Context, file: File, json: bool = JSON) -> None:
    """Write all that the database holds to a new file. netlimit may run meanwhile."""
    settings = read_settings(context)
    with open_store(settings) as store:
        try:
            label = store.back_up(file, datetime.now(UTC))
        except FileExistsError:
            raise CommandError(f"There is a file {file} already; a backup is always a new one.") from None
        warnings = [_UNCONFIRMED] if store.warn_of_window("") else []
    document = {"file": str(file), "revision": label.revision, "made_at": label.made_at.isoformat()}
    text = f"Wrote {file}: the database at revision {label.revision}."
    say(json, {**document, "warnings": warnings}, "\n".join([text, *warnings]))


def restore(context: typer.Context, file: File, force: Force = False, json: bool = JSON) -> None:
    """Bring back what a backup holds. Into an empty database that is everything; else its rules,
    and the limits of requests, in the place of all others. Limits that are no more are written to files first."""
    settings = read_settings(context)
    with open_store(settings) as store:
        restored = store.restore(file, local_actor(settings), datetime.now(UTC), force)
        warnings = store.warn_of_window("this change, but for the limiter's documents,")
    if restored.unconfirmed is not None:
        warnings.append(_word_unconfirmed(restored.unconfirmed))
    former = restored.former
    document = {
        "revision": restored.revision,
        "rules": restored.rules,
        "backup": {"made_at": restored.label.made_at.isoformat(), "revision": restored.label.revision},
        "former_limits": former and {"folder": str(former.folder), "domains": former.domains},
        "damaged": restored.aside and str(restored.aside),
        "warnings": warnings,
    }
    made = f"{restored.label.made_at:%Y-%m-%d %H:%M:%S} UTC"
    text = f"Brought back {count(restored.rules, 'rule')} of {made}, as revision {restored.revision}."
    if former is not None:
        text += (
            f"\nThe limits of {_name(former.domains)} were others. What is no more is in {former.folder}: "
            "`netlimit limits put` brings one of its files back."
        )
    if restored.aside is not None:
        text += f"\nThe damaged database is {restored.aside} now."
    say(json, document, "\n".join([text, *warnings]))


def _word_unconfirmed(window: Window) -> str:
    return (
        f"The backup was made in a window of confirmation that {window.actor} had opened: what changed since revision "
        f"{window.base} nobody had confirmed, and it is in force now. Look through the rules (`netlimit rule list`)."
    )


def _name(domains: Sequence[str]) -> str:
    return name_some([repr(each) for each in domains], _NAMED)
