"""The first token, without which nobody could make another."""

from __future__ import annotations

import logging
import os
import sys
from datetime import datetime
from pathlib import Path

from netlimit.errors import StoreError
from netlimit.settings import Settings
from netlimit.store import Store, TokenExists
from netlimit.tokens import BOOTSTRAP, hash_token, is_reserved, make_token, verify_token

REVOKED = (
    "The token in NETLIMIT_BOOTSTRAP_TOKEN was revoked, or another has taken its place, and is not let in again. Set "
    "another one; `netlimit token create`, run as root on this host, makes one at once."
)
log = logging.getLogger(__name__)


def bootstrap_token(store: Store, settings: Settings, now: datetime) -> None:
    """See to it that there is an admin token.

    One in the settings becomes the admin token, in place of an earlier one from there; one that was revoked, or whose
    place another has taken, does not. Without one, the very first start makes one, writes it to `admin.token` (0600)
    beside the database and shows it on a terminal.
    Raises StoreError.
    """
    if settings.bootstrap_token:
        _keep_given(store, settings.bootstrap_token.get_secret_value(), now)
    elif not store.tokens_exist():
        path = token_path(settings.database_url)
        text = make_first(store, path, now)
        if text and sys.stdout.isatty():
            print(f"The admin token is {text}\nIt is also in {path}; netlimit itself keeps only its hash.")


def make_first(store: Store, path: Path, now: datetime) -> str | None:
    """Make the first token, whose text only this file holds then, and is returned; None, and no file, where another
    start, here or on another gateway, has made one meanwhile. Raises StoreError."""
    token = make_token()
    kept = hash_token(token.text)
    written = path.with_name(f"{path.name}.{token.handle}")
    _write_secret(written, token.text)  # before it is kept, for nobody could read it afterwards
    try:
        store.add_token(BOOTSTRAP, kept, "admin", now, handle=token.handle)
    except BaseException as error:
        written.unlink(missing_ok=True)
        if not isinstance(error, TokenExists):
            raise
        log.info("Another start has made the first token just now; its file is there.")
        return None
    written.replace(path)
    return token.text


def token_path(database_url: str) -> Path:
    """Where the first start writes its token: beside a SQLite database, else in /var/lib/netlimit."""
    scheme, _, rest = database_url.partition(":///")
    directory = Path(rest.partition("?")[0]).parent if scheme.startswith("sqlite") else Path("/var/lib/netlimit")
    return directory / "admin.token"


def _keep_given(store: Store, text: str, now: datetime) -> None:
    given = [token for token in store.active_tokens(now) if is_reserved(token.name)]
    if any(verify_token(text, token.hash) for token in given):
        return
    before = [token for token in store.tokens() if is_reserved(token.name) and token not in given]
    if any(verify_token(text, token.hash) for token in before):  # who has it by a leak must not be let in by a restart
        log.warning("%s", REVOKED)
        return
    for token in given:
        store.revoke_token(token.id, now)
    name = f"{BOOTSTRAP}-{len(store.tokens()) + 1}" if store.token(BOOTSTRAP) else BOOTSTRAP
    try:
        store.add_token(name, hash_token(text), "admin", now)
    except TokenExists:  # another gateway has begun at the same moment, very likely with the same one
        _keep_given(store, text, now)


def _write_secret(path: Path, text: str) -> None:
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text + "\n")
    except OSError as error:
        raise _say_unwritten(path, error) from error


def _say_unwritten(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"The admin token cannot be written to {path}: {error.strerror}. Set NETLIMIT_BOOTSTRAP_TOKEN instead."
    )
