"""`netlimit rule …`: rules, through the API."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from netlimit.cli import options
from netlimit.cli.client import BULK_SECONDS, Client, open_client, rule_path
from netlimit.cli.describing import describe_preview, describe_rule, list_rules, show_rule
from netlimit.cli.printing import JSON, count, print_as, say
from netlimit.reading import MOST, read_whole
from netlimit.records import State
from netlimit.rules import FIELDS
from netlimit.rules import Action as RuleAction

app = typer.Typer(help="Rules: who may send or receive how much.", no_args_is_help=True)

Key = Annotated[str, typer.Argument(metavar="ID|NAME", help="The rule's id or name.")]
Keys = Annotated[list[str], typer.Argument(metavar="ID|NAME", help="Ids or names of rules.")]
Field = StrEnum("Field", {field: field for field in sorted(FIELDS - {"target", "ttl", "enabled"})})  # type: ignore[misc]
DRY_RUN = {"dry_run": "true"}


@app.command("add")
def add_rule(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="An address or CIDR.")],
    rate: options.Rate = None,
    per: options.Per = None,
    direction: options.Direction = None,
    protocol: options.Protocol = None,
    ports: options.Ports = None,
    source_ports: options.SourcePorts = None,
    interface: options.Interface = None,
    burst: options.Burst = None,
    action: options.Action = None,
    ceil: options.Ceil = None,
    ttl: options.Ttl = None,
    expires_at: options.ExpiresAt = None,
    name: options.Name = None,
    labels: options.Labels = None,
    hosts: options.Hosts = None,
    comment: options.Comment = None,
    on_failure: options.OnFailure = None,
    disabled: Annotated[bool, typer.Option("--disabled", help="Keep it, but do not enforce it yet.")] = False,
    dry_run: options.DryRun = False,
    force: options.Force = False,
    wait: options.Wait = 5,
    no_wait: options.NoWait = False,
    json: bool = JSON,
) -> None:
    """Add a rule, and wait until the kernel holds it."""
    fields = options.collect_fields(
        {field: value for field, value in locals().items() if field in FIELDS}
        | ({"enabled": False} if disabled else {})
    )
    with open_client(context) as client:
        if dry_run:
            draft = client.call("POST", "/rules", json=fields, params=DRY_RUN | forced(force))
            return say(json, draft, describe_preview(draft))
        rule = client.call("POST", "/rules", json=fields, params=forced(force), wait=None if no_wait else wait)
    return say(json, rule, f"Added {describe_rule(rule)}")


@app.command("edit")
def edit_rule(
    context: typer.Context,
    key: Key,
    target: Annotated[str | None, typer.Option("--target", help="Another address or CIDR.")] = None,
    rate: options.Rate = None,
    per: options.Per = None,
    direction: options.Direction = None,
    protocol: options.Protocol = None,
    ports: options.Ports = None,
    source_ports: options.SourcePorts = None,
    interface: options.Interface = None,
    burst: options.Burst = None,
    action: options.Action = None,
    ceil: options.Ceil = None,
    ttl: options.Ttl = None,
    expires_at: options.ExpiresAt = None,
    name: options.Name = None,
    labels: options.Labels = None,
    hosts: options.Hosts = None,
    comment: options.Comment = None,
    on_failure: options.OnFailure = None,
    enabled: Annotated[bool | None, typer.Option("--enable/--disable", help="Enforce it, or not.")] = None,
    unset: Annotated[list[Field] | None, typer.Option("--unset", help="Put this field back to its default.")] = None,
    dry_run: options.DryRun = False,
    force: options.Force = False,
    wait: options.Wait = 5,
    no_wait: options.NoWait = False,
    json: bool = JSON,
) -> None:
    """Change some fields of a rule; the others stay. Labels are added to those that it has."""
    fields = options.collect_fields({field: value for field, value in locals().items() if field in FIELDS})
    fields |= {field.value: None for field in unset or ()}
    if not fields:
        raise typer.BadParameter("Nothing to change was given; `netlimit rule edit --help` shows the options.")
    with open_client(context) as client:
        if dry_run:
            draft = client.call("PATCH", rule_path(key), json=fields, params=DRY_RUN | forced(force))
            return say(json, draft, describe_preview(draft))
        rule = client.call("PATCH", rule_path(key), json=fields, params=forced(force), wait=None if no_wait else wait)
    return say(json, rule, f"Changed {describe_rule(rule)}")


@app.command("list")
def list_them(
    context: typer.Context,
    contains: Annotated[str | None, typer.Option("--contains", help="Whose target has this address.")] = None,
    target: Annotated[str | None, typer.Option("--target", help="With this very target.")] = None,
    labels: Annotated[list[str] | None, typer.Option("--label", help="With this label, key=value.")] = None,
    action: Annotated[RuleAction | None, typer.Option("--action", help="With this action.")] = None,
    state: Annotated[State | None, typer.Option("--state", help="In this state.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="The most rules to show.")] = 100,
    json: bool = JSON,
) -> None:
    """List rules."""
    options.read_labels(labels or [])
    wanted = {"contains": contains, "target": target, "label": labels, "action": action, "state": state}
    with open_client(context) as client:
        page = read_rules(client, limit, wanted)
    print_as(json, page, list_rules)


@app.command("show")
def show(context: typer.Context, key: Key, json: bool = JSON) -> None:
    """Show one rule, and how it stands."""
    with open_client(context) as client:
        rule = client.get(rule_path(key))
    print_as(json, rule, show_rule)


@app.command("remove")
def remove(
    context: typer.Context,
    keys: Keys,
    force: options.Force = False,
    wait: options.Wait = 5,
    no_wait: options.NoWait = False,
    json: bool = JSON,
) -> None:
    """Remove rules, and wait until the kernel has forgotten them."""
    with open_client(context) as client:
        for key in keys:
            warnings = client.remove(rule_path(key), params=forced(force), wait=None if no_wait else wait)
            if not json:
                typer.echo(" ".join([f"Removed rule {key}.", *warnings]))
    if json:
        typer.echo(jsonlib.dumps({"removed": keys, "warnings": warnings}))


@app.command("import")
def import_rules(
    context: typer.Context,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A JSON array, or a JSON object on each line; - is stdin.")
    ],
    force: options.Force = False,
    wait: options.Wait = 5,
    no_wait: options.NoWait = False,
    json: bool = JSON,
) -> None:
    """Add many rules: all of them, or none."""
    body = sys.stdin.buffer.read(MOST + 1) if str(file) == "-" else read_whole(file)
    is_array = body.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    headers = {"Content-Type": "application/json" if is_array else "application/x-ndjson"}
    with open_client(context) as client:
        added = client.call(
            "POST",
            "/rules/bulk",
            content=body,
            headers=headers,
            params=forced(force),
            wait=None if no_wait else wait,
            timeout=BULK_SECONDS,
        )
    line = f"Added {count(added['added'], 'rule')} at revision {added['revision']}: {added['state']}."
    say(json, added, " ".join([line, *added.get("warnings", ())]))


@app.command("export")
def export_rules(
    context: typer.Context,
    ndjson: Annotated[bool, typer.Option("--ndjson", help="A JSON object on each line, rather than an array.")] = False,
    json: Annotated[bool, typer.Option("--json", help="A JSON array (the default).")] = False,
) -> None:
    """Print all rules in the form that `rule import` reads."""
    if ndjson and json:
        raise typer.BadParameter("Give either --json or --ndjson.")
    with open_client(context) as client:
        lines = (jsonlib.dumps(exported(rule), ensure_ascii=False) for rule in walk_rules(client, {}))
        if ndjson:
            for line in lines:
                typer.echo(line)
            return
        typer.echo("[", nl=False)
        for number, line in enumerate(lines):
            typer.echo(f"{',' if number else ''}\n{line}", nl=False)
        typer.echo("\n]")


def forced(force: bool) -> dict[str, str]:
    """What tells the API that the safe set is not to be heeded."""
    return {"force": "true"} if force else {}


def exported(rule: Mapping[str, Any]) -> dict[str, Any]:
    """What of a returned rule makes it anew: no defaults that are empty, rates as text."""
    fields = {field: value for field, value in rule.items() if field in FIELDS and value not in (None, [], {}, "")}
    return {field: value["text"] if field in ("rate", "ceil") else value for field, value in fields.items()}


def walk_rules(client: Client, wanted: Mapping[str, object]) -> Iterator[dict[str, Any]]:
    """Every rule that matches, page by page."""
    for page in client.walk("/rules", wanted):
        yield from page["items"]


def read_rules(client: Client, most: int, wanted: Mapping[str, object]) -> dict[str, Any]:
    """At most so many rules that match, as one page."""
    items: list[Any] = []
    for page in client.walk("/rules", wanted, most):
        items += page["items"]
    return {**page, "items": items}
