"""`netlimit token`: on a gateway itself, in its database."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tests.cli.running import Netlimit, until

FORM = re.compile(r"nl_[a-z0-9]{12}_[A-Za-z0-9_-]{43}\n")


def test_a_token_is_printed_once_and_good_until_it_is_revoked(served: Netlimit) -> None:
    printed = served.do("token", "create", "ci", "--role", "operator", "--ttl", "30d")
    assert FORM.fullmatch(printed)
    token = printed.strip()
    assert served.run("rule", "list", NETLIMIT_TOKEN=token).returncode == 0
    assert served.run("rule", "add", "10.1.2.3", "--action", "block", NETLIMIT_TOKEN=token).returncode == 0
    (kept,) = [each for each in served.ask("token", "list")["items"] if each["name"] == "ci"]
    ends = datetime.fromisoformat(kept["expires_at"]) - datetime.now(UTC)
    assert timedelta(days=29) < ends <= timedelta(days=30)
    assert (kept["role"], kept["revoked_at"]) == ("operator", None)
    assert token not in served.do("token", "list") + served.do("token", "list", "--json")
    assert served.do("token", "revoke", "ci") == "Revoked the token of ci.\n"
    until(lambda: served.run("rule", "list", NETLIMIT_TOKEN=token).returncode == 1)
    assert "revoked" in served.do("token", "list")
    assert "There is no token 'ci' that is not revoked already" in served.refuse("token", "revoke", "ci")


def test_the_token_of_the_command_line_is_shown_unless_somebody_has_exchanged_its_file(
    served: Netlimit, tmp_path: Path
) -> None:
    """A shell that reads it (`cat`) follows a link of the API's user to any file."""
    file = Path(served.environment["NETLIMIT_DATABASE_URL"].partition("///")[2]).parent / "admin.token"
    assert served.run("token", "show", NETLIMIT_TOKEN="").stdout == file.read_text()
    assert served.run("token", "show", NETLIMIT_TOKEN="nl_1_2").stdout == "nl_1_2\n"
    moved, secret = tmp_path / "moved", tmp_path / "secret"
    secret.write_text("of somebody else\n")
    file.rename(moved)
    try:
        file.symlink_to(secret)
        assert "There is no token here." in served.refuse("token", "show", NETLIMIT_TOKEN="")
    finally:
        moved.replace(file)


def test_tokens_of_the_command_line_are_in_the_audit(served: Netlimit) -> None:
    made = served.ask("token", "create", "audited", "--role", "viewer")
    assert FORM.fullmatch(made["token"] + "\n")
    served.run("token", "revoke", str(made["id"]), SUDO_USER="alice")
    admin = (Path(served.environment["NETLIMIT_DATABASE_URL"].partition("///")[2]).parent / "admin.token").read_text()
    assert served.run("rule", "list", NETLIMIT_TOKEN=admin.strip()).returncode == 0
    from netlimit.store import AuditFilter, Store

    store = Store(served.environment["NETLIMIT_DATABASE_URL"])
    revoked, created = store.audit(limit=2)
    assert created.after == {"token": "audited", "role": "viewer", "expires_at": None}
    assert (revoked.action, created.action) == ("revoke-token", "create-token")
    user = "root" if os.geteuid() == 0 else created.actor.partition(" on ")[0]
    assert created.actor == f"{user} on gw1"
    if os.geteuid() == 0:
        assert revoked.actor == "alice (sudo) on gw1"
    assert store.audit(which=AuditFilter(actor=created.actor, action="create-token"))
    store.close()


def test_what_is_no_token_is_refused_in_words(served: Netlimit) -> None:
    served.do("token", "create", "twice", "--role", "viewer")
    for arguments, said in (
        (("twice", "--role", "viewer"), "There is a token named 'twice' already"),
        (("bootstrap-3", "--role", "viewer"), "choose another"),
        (("a b", "--role", "viewer"), "is no name for a token"),
        (("one", "--role", "king"), "it can be viewer, operator, admin"),
        (("one", "--role", "viewer", "--ttl", "soon"), "no length of time"),
    ):
        assert said in served.refuse("token", "create", *arguments)
    assert served.run("token", "create", "one").returncode == 2
    assert "There is no token 'nobody'" in served.refuse("token", "revoke", "nobody")
