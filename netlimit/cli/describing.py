"""Rules in words and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import typer
from rich.table import Table

from netlimit.cli.printing import add_row, make_table, print_table
from netlimit.records import State

Rule = Mapping[str, Any]


def describe_rule(rule: Rule) -> str:
    """One line: which rule, what it does, and how it stands."""
    standing = rule["status"]
    by = f" by {standing['enforced_by']}" if standing["enforced_by"] else ""
    what = " ".join(part for part in (describe_traffic(rule), describe_limit(rule)) if part)
    line = f"rule {describe_title(rule)}: {rule['action']} {rule['target']} {what}: {standing['state']}{by}."
    return " ".join([line, *_tell_end(rule), *filter(None, [standing["message"]]), *rule.get("warnings", ())])


def _tell_end(rule: Rule) -> Iterator[str]:
    if rule["expires_at"] is not None:
        yield f"It ends at {datetime.fromisoformat(rule['expires_at']).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC."


def describe_title(rule: Rule) -> str:
    """Its id, and its name if it has one."""
    return f"{rule['id']} ({rule['name']})" if rule["name"] else str(rule["id"])


def describe_traffic(rule: Rule) -> str:
    """Which of the target's traffic: "to udp 53"."""
    words = [rule["direction"]]
    if rule["protocol"] != "any":
        words.append(rule["protocol"])
    if rule["ports"]:
        words.append(",".join(map(str, rule["ports"])))
    if rule["source_ports"]:
        words.append("source " + ",".join(map(str, rule["source_ports"])))
    if rule["interface"]:
        words.append(f"on {rule['interface']}")
    return " ".join(words)


def describe_limit(rule: Rule) -> str:
    """How much, and for whom: "5 Mbit/s up to 20 Mbit/s per host"; empty for `allow` and `block`."""
    if not rule["rate"]:
        return ""
    ceiling = f" up to {rule['ceil']['text']}" if rule["ceil"] else ""
    return f"{rule['rate']['text']}{ceiling} per {rule['per']}"


def describe_preview(draft: Rule) -> str:
    """What a rule would do: in words on each gateway, then the steps."""
    found = draft["preview"]
    lines = [f"Nothing is kept. {found['message'] or 'If it were:'}"]
    for host, here in found["hosts"].items():
        by = f" by {here['enforced_by']}" if here["enforced_by"] else ""
        lines.append(f"{host}: {here['state']}{by}." + (f" {here['message']}" if here["message"] else ""))
        lines += [f"  {sentence}" for sentence in (*here["words"], *here["relations"])]
        lines += [f"    {step}" for step in here["text"].splitlines() if here["steps"]]
    held = draft["effective_rate"]
    if held is not None and held["text"] != draft["rate"]["text"]:
        lines.append(f"The kernel would really hold {held['text']}.")
    lines += draft.get("warnings", ())
    lines += [f"{host} did not answer." for host in found["silent"]]
    return "\n".join(lines)


def list_rules(page: Mapping[str, Any]) -> None:
    """Print rules, a line each."""
    table = make_table("ID", "NAME", "TARGET", "TRAFFIC", "LIMIT", "ACTION", "STATE", right=["ID"])
    for rule in page["items"]:
        add_row(
            table,
            rule["id"],
            rule["name"],
            rule["target"],
            describe_traffic(rule),
            describe_limit(rule),
            rule["action"],
            _name_state(rule["status"]),
        )
    print_table(table)
    more = page["total"] - len(page["items"])
    if more:
        typer.echo(f"and {more:,} more; --limit shows them.")


def show_rule(rule: Rule) -> None:
    """Print one rule, field by field; those that are empty are left out."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for field, value in rule.items():
        if field == "status":
            add_row(table, "state", describe_standing(value))
            if len(value["hosts"]) > 1:
                for host, standing in value["hosts"].items():
                    add_row(table, f"  {host}", describe_standing(standing))
        elif value not in (None, [], {}, ""):
            add_row(table, field, _write(value))
    print_table(table)


def _name_state(standing: Mapping[str, Any]) -> str:
    """The state in a word or two; what there is to say of it, `netlimit rule show` says."""
    noted = standing["state"] == State.APPLIED and standing["message"]
    return f"{standing['state']}, with a note" if noted else str(standing["state"])


def describe_standing(standing: Mapping[str, Any]) -> str:
    """A state, what enforces it, and why it is not better."""
    by = f" by {standing['enforced_by']}" if standing["enforced_by"] else ""
    return f"{standing['state']}{by}" + (f": {standing['message']}" if standing["message"] else "")


def _write(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(value["text"]) if "text" in value else ", ".join(f"{key}={text}" for key, text in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
