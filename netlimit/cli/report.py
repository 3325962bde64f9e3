"""`netlimit limits report`: whether the limits are any good, as the limiter that runs here sees them."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv6Address, ip_address
from typing import Any

import typer

from netlimit.cli.asking import PLAIN, ask
from netlimit.cli.errors import CommandError, note_speaker
from netlimit.cli.parts import read_settings
from netlimit.cli.printing import JSON, add_row, make_table, print_as, print_table
from netlimit.settings import AnyListen, Listen, LocalListen

SECONDS = 30.0
"""How long the limiter may take for its whole answer."""


def report(context: typer.Context, json: bool = JSON) -> None:
    """Report which limits are too tight, too loose or unused, and what says so; what needs a look comes first."""
    place = read_settings(context).limiter_listen
    note_speaker(context, f"at {place} is not netlimit's limiter, or that of another version")
    print_as(json, _ask(place), _show)


def _ask(place: AnyListen) -> Any:
    import httpx

    near = "localhost" if isinstance(place, LocalListen) else _find_near(place)
    try:
        transport = httpx.HTTPTransport(uds=place.path) if isinstance(place, LocalListen) else None
        with httpx.Client(headers=PLAIN, trust_env=False, transport=transport) as client:
            answer = ask(client, "GET", f"http://{near}/v1/report", SECONDS)
        if answer.is_success:
            return answer.read_json()
    except httpx.TimeoutException:
        raise CommandError(f"The limiter at {place} did not answer in {SECONDS:g} seconds.") from None
    except (httpx.HTTPError, ValueError) as error:
        raise CommandError(
            f"No limiter answers at {place} ({error}). Is `netlimit limiter` running? NETLIMIT_LIMITER_LISTEN is where."
        ) from None
    raise CommandError(
        f"What answers at {place} (with status {answer.status}) is not netlimit's limiter; "
        "look at NETLIMIT_LIMITER_LISTEN."
    )


def _find_near(place: Listen) -> Listen:
    """Where to reach who listens there: on loopback, if that is everywhere."""
    try:
        address = ip_address(place.host)
    except ValueError:
        return place
    if not address.is_unspecified:
        return place
    return Listen("::1" if isinstance(address, IPv6Address) else "127.0.0.1", place.port)


def _show(told: Mapping[str, Any]) -> None:
    table = make_table("DOMAIN", "RULE", "LIMIT", "IT IS", "BECAUSE")
    for each in told["limits"]:
        add_row(table, each["domain"], each["rule"], each["limit"], each["fit"], each["because"])
    print_table(table)
