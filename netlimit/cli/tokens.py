"""`netlimit token`: access tokens, made, listed and revoked in the database itself."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from netlimit.cli.actor import local_actor
from netlimit.cli.client import advise, find_token
from netlimit.cli.errors import CommandError
from netlimit.cli.parts import open_store, read_settings
from netlimit.cli.printing import JSON, add_row, make_table, print_as, print_table, say
from netlimit.errors import RuleError
from netlimit.roles import Role, parse_role
from netlimit.rules import parse_ttl
from netlimit.tokens import check_name

if TYPE_CHECKING:
    from netlimit.store import Token

app = typer.Typer(help="Access tokens of the API.", no_args_is_help=True)

RoleOption = Annotated[
    str,
    typer.Option(
        "--role", help="viewer: may look; operator: may change rules; admin: may also force rules and deal with tokens."
    ),
]
Ttl = Annotated[str | None, typer.Option("--ttl", help="How long it is good: 90s, 10m, 2h, 30d; by default for ever.")]
NewName = Annotated[str, typer.Argument(metavar="NAME", help="Who is to have it; the audit names this.")]
AnyName = Annotated[str, typer.Argument(metavar="NAME", help="The token's name, or its id.")]


@app.command()
def create(context: typer.Context, name: NewName, role: RoleOption, ttl: Ttl = None, json: bool = JSON) -> None:
    """Make a token. It is printed once; only its hash is kept."""
    settings, now = read_settings(context), datetime.now(UTC)
    chosen, expires_at = _read(name, role, ttl, now)
    with open_store(settings) as store:
        token, text = store.issue_token(name, chosen, now, expires_at, local_actor(settings))
    ends = f", good until {expires_at:%Y-%m-%d %H:%M} UTC" if expires_at else ""
    if not json and sys.stdout.isatty():
        typer.echo(f"The token of {name} ({chosen}{ends}), shown only now:", err=True)
    say(json, {**describe(token), "token": text}, text)


@app.command()
def show(context: typer.Context) -> None:
    """Print the token that commands here show to the API.

    It is NETLIMIT_TOKEN, or else the admin's that the first start has kept in a file, if that file is as it was made.
    """
    settings = read_settings(context)
    token = find_token(settings)
    if token is None:
        raise CommandError(f"There is no token here. {advise(settings, had_token=False)}")
    typer.echo(token)


@app.command(name="list")
def list_tokens(context: typer.Context, json: bool = JSON) -> None:
    """Show all tokens there ever were."""
    with open_store(read_settings(context)) as store:
        tokens = store.tokens()
    print_as(json, {"items": [describe(token) for token in tokens]}, lambda document: _show(tokens))


@app.command()
def revoke(context: typer.Context, name: AnyName, json: bool = JSON) -> None:
    """Revoke a token: within a second it is good for nothing."""
    settings, now = read_settings(context), datetime.now(UTC)
    with open_store(settings) as store:
        token = store.token(name) or (store.token(int(name)) if name.isdecimal() else None)
        if token is None or not store.revoke_token(token.id, now, local_actor(settings)):
            raise CommandError(
                f"There is no token {name!r} that is not revoked already; `netlimit token list` shows all."
            )
        token = store.token(token.id) or token
    say(json, describe(token), f"Revoked the token of {token.name}.")


def describe(token: Token) -> dict[str, Any]:
    """A token as JSON, without what it is recognized by."""
    times = {"created_at": token.created_at, "expires_at": token.expires_at, "revoked_at": token.revoked_at}
    written = {name: moment.isoformat().replace("+00:00", "Z") if moment else None for name, moment in times.items()}
    return {"id": token.id, "name": token.name, "role": token.role, **written}


def _read(name: str, role: str, ttl: str | None, now: datetime) -> tuple[Role, datetime | None]:
    try:
        check_name(name)
        return parse_role(role), None if ttl is None else now + timedelta(seconds=parse_ttl(ttl))
    except (ValueError, RuleError) as error:
        raise CommandError(str(error)) from None


def _show(tokens: list[Token]) -> None:
    now = datetime.now(UTC)
    table = make_table("ID", "NAME", "ROLE", "MADE", "ENDS", "STATE", right=("ID",))
    for token in tokens:
        add_row(
            table,
            token.id,
            token.name,
            token.role,
            _word(token.created_at),
            _word(token.expires_at),
            _state(token, now),
        )
    print_table(table)


def _state(token: Token, now: datetime) -> str:
    if token.revoked_at is not None:
        return "revoked"
    return "expired" if token.expires_at is not None and token.expires_at <= now else "good"


def _word(moment: datetime | None) -> str:
    return f"{moment:%Y-%m-%d %H:%M}" if moment else ""
