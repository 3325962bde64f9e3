"""`netlimit limits …`: the limiter's documents, in files and through the API."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from netlimit.cli.client import limits_path, open_client
from netlimit.cli.errors import CommandError
from netlimit.cli.printing import JSON, add_row, count, make_table, print_as, print_document, print_table, say
from netlimit.cli.report import report
from netlimit.reading import MOST, read_whole

if TYPE_CHECKING:  # what reads documents takes long to load, and other commands do not need it
    from netlimit.errors import Place
    from netlimit.l7.document import Document

app = typer.Typer(help="Limits: how many requests the limiter lets pass.", no_args_is_help=True)

_JSON, _YAML = "application/json", "application/yaml"
Domain = Annotated[str, typer.Argument(metavar="DOMAIN", help="The domain.")]


@app.command("check")
def check(
    path: Annotated[Path, typer.Argument(metavar="FILE|FOLDER", help="A document, or a folder of documents.")],
    json: bool = JSON,
) -> None:
    """Check documents without an API: every wrong place is named, with its line."""
    from netlimit.errors import LimitError
    from netlimit.l7.files import list_troubles, look, read_file

    good: dict[Path, Document] = {}
    wrong: list[str] = []
    for file, mark in look(path).items():
        try:
            good[file] = read_file(file, mark)
        except (OSError, LimitError) as error:
            wrong += list_troubles(file, error)
    wrong += _find_twice(good)
    if not wrong and not good:
        wrong = [f"{path} holds no files of limits; they end with .yaml, .yml or .json."]
    if wrong:
        raise CommandError("\n".join(wrong))
    found = [{"file": str(file), **_describe(document)} for file, document in good.items()]
    text = "\n".join(f"{each['file']}: {_word(each)}" for each in found)
    say(json, {"files": found}, text)


@app.command("list")
def list_them(context: typer.Context, json: bool = JSON) -> None:
    """List the domains that have limits in the database."""
    with open_client(context) as client:
        page = client.get("/limits")
    print_as(json, page, _list)


@app.command("show")
def show(context: typer.Context, domain: Domain, json: bool = JSON) -> None:
    """Print the limits of a domain, as they were given; with --json in the form of JSON."""
    with open_client(context) as client:
        text = client.read_text(limits_path(domain), _JSON if json else "*/*")
    if json:
        return say(True, jsonlib.loads(text), "")
    return print_document(text)


@app.command("put")
def put(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A document, YAML or JSON; - is stdin.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check it; keep nothing.")] = False,
    json: bool = JSON,
) -> None:
    """Keep the limits of the domain that a document names, in the place of those that it had."""
    from netlimit.l7.document import parse_document
    from netlimit.l7.files import is_json
    from netlimit.l7.markup import decode

    content = sys.stdin.buffer.read(MOST + 1) if str(file) == "-" else read_whole(file)
    text = decode(content)
    is_in_json = is_json(file) or (str(file) == "-" and text.lstrip().startswith("{"))
    domain = parse_document(text, is_in_json).domain
    headers = {"Content-Type": _JSON if is_in_json else _YAML}
    with open_client(context) as client:
        kept = client.call(
            "PUT",
            limits_path(domain),
            content=content,
            headers=headers,
            params={"dry_run": "true"} if dry_run else {},
        )
    where = "is good, and not kept" if dry_run else f"is kept at revision {kept['revision']}"
    say(json, kept, f"The document {where}. {_word(kept)}")


@app.command("remove")
def remove(
    context: typer.Context,
    domains: Annotated[list[str], typer.Argument(metavar="DOMAIN", help="Domains.")],
    json: bool = JSON,
) -> None:
    """Remove the limits of domains from the database."""
    with open_client(context) as client:
        warnings: list[str] = []
        for domain in domains:
            warnings = client.remove(limits_path(domain))
            if not json:
                typer.echo(" ".join([f"Removed the limits of the domain {domain}.", *warnings]))
    if json:
        typer.echo(jsonlib.dumps({"removed": domains, "warnings": warnings}))


@app.command("explain")
def explain(
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="FILE|DOMAIN", help="A document, or a domain of the database.")],
    descriptor: Annotated[
        str, typer.Argument(metavar="KEY=VALUE,…", help="What is told of a request; \\ stands before a comma in it.")
    ],
    json: bool = JSON,
) -> None:
    """Explain which rule a descriptor finds, which counter, and why; or why none."""
    from netlimit.l7 import explain as explaining
    from netlimit.l7.document import parse_document
    from netlimit.l7.files import is_json
    from netlimit.l7.markup import decode

    entries = explaining.parse_descriptor(descriptor)
    if Path(source).is_file():
        document = parse_document(decode(read_whole(Path(source))), is_json(Path(source)))
    else:
        with open_client(context) as client:
            document = parse_document(client.read_text(limits_path(source), _JSON), is_json=True)
    found = explaining.explain(document.root, entries)
    match = found.match
    said = {
        "domain": document.domain,
        "rule": match.rule.name if match else None,
        "counter": match.key if match else None,
        "steps": found.steps,
    }
    say(json, said, "\n".join(found.steps))


app.command("report")(report)


def _find_twice(good: Mapping[Path, Document]) -> list[str]:
    """What is said of domains that are in several files."""
    first: dict[str, Path] = {}
    return [
        f"{path}: The domain {document.domain!r} is in {first[document.domain]} already; put its limits into one file."
        for path, document in good.items()
        if first.setdefault(document.domain, path) != path
    ]


def _describe(document: Document) -> dict[str, Any]:
    """A document as the API describes one that it keeps."""
    return {
        "domain": document.domain,
        "rules": [rule.name for rule in document.root.walk()],
        "warnings": [_write(place) for place in document.warnings],
    }


def _write(place: Place) -> dict[str, Any]:
    return {"detail": place.sentence, "field": place.field, "line": place.line}


def _word(described: Mapping[str, Any]) -> str:
    """A document in a line, and one more for each of its warnings."""
    from netlimit.errors import Place

    lines = [f"The domain {described['domain']} has {count(len(described['rules']), 'rule')}."]
    lines += [f"  {Place(each['field'], each['detail'], each['line'])}" for each in described["warnings"]]
    return "\n".join(lines)


def _list(page: Mapping[str, Any]) -> None:
    table = make_table("DOMAIN", "REVISION", "GIVEN BY", "AT", "AS", right=["REVISION"])
    for each in page["items"]:
        add_row(table, each["domain"], each["revision"], each["actor"], each["updated_at"], each["content_type"])
    print_table(table)
