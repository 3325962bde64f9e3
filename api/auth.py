"""Who may do what: bearer tokens, of which only a salted scrypt hash is kept."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import sys
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from api.problems import Problem
from netlimit.errors import StoreError
from netlimit.settings import Settings
from netlimit.store import Store, Token

ROLES = ("admin", "operator", "viewer")
BOOTSTRAP = "bootstrap"
"""The name of the token that the first start makes, or that the settings give."""

_BLOCK, _LANES = 8, 1
_REMEMBERED = 1024
_FRESH_SECONDS = 1.0
_bearer = HTTPBearer(
    auto_error=False, description="An access token: the one that the first start made, or of `netlimit token create`."
)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the name of the token, for the audit, and its role."""

    name: str
    role: str


class Doorkeeper:
    """Knows tokens again. A hash takes long on purpose, so an answer is remembered by the token's SHA-256.

    Revocations and new tokens count within a second.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._remembered: OrderedDict[tuple[bytes, str], bool] = OrderedDict()
        self._active: list[Token] = []
        self._read_at = -_FRESH_SECONDS

    def find(self, secret: str) -> Token | None:
        """The active token that this is."""
        digest = hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
        return next((token for token in self._read_active() if self._fits(secret, digest, token.hash)), None)

    def _read_active(self) -> list[Token]:
        if time.monotonic() - self._read_at >= _FRESH_SECONDS:
            self._active = self._store.active_tokens(datetime.now(UTC))
            self._read_at = time.monotonic()
        return self._active

    def _fits(self, secret: str, digest: bytes, kept: str) -> bool:
        key = (digest, kept)
        known = self._remembered.get(key)
        if known is not None:
            return known
        with self._lock:  # one hash at a time: guessing must not take every core
            if key not in self._remembered:
                self._remembered[key] = verify_token(secret, kept)
            known = self._remembered[key]
            while len(self._remembered) > _REMEMBERED:
                self._remembered.popitem(last=False)
        return known


def hash_token(secret: str, cost: int = 2**14) -> str:
    """The salted scrypt hash (RFC 7914) under which a token is kept; `cost` is its N, a power of two."""
    salt = secrets.token_bytes(16)
    return f"scrypt${cost}${_BLOCK}${_LANES}${salt.hex()}${_scrypt(secret, salt, cost, _BLOCK, _LANES).hex()}"


def verify_token(secret: str, kept: str) -> bool:
    """Whether `kept` is the hash of this token. Takes the same time either way."""
    try:
        scheme, cost, block, lanes, salt, digest = kept.split("$")
        expected = bytes.fromhex(digest)
        found = _scrypt(secret, bytes.fromhex(salt), int(cost), int(block), int(lanes))
    except ValueError:
        return False
    return scheme == "scrypt" and hmac.compare_digest(found, expected)


def new_token() -> str:
    """A token that nobody guesses."""
    return secrets.token_urlsafe(32)


def authorized(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> Caller:
    """Let the request pass if its token may do it. Raises Problem 401 or 403."""
    if credentials is None:
        raise _unauthorized("A token is needed: send the header `Authorization: Bearer TOKEN`.")
    doorkeeper: Doorkeeper = request.app.state.doorkeeper
    token = doorkeeper.find(credentials.credentials)
    if token is None:
        raise _unauthorized("The token is not known, or was revoked, or has expired.", ', error="invalid_token"')
    if token.role not in ROLES or (token.role == "viewer" and request.method not in ("GET", "HEAD")):
        raise Problem(403, f"The token {token.name!r} is a {token.role}'s: it may look, but change nothing.")
    return Caller(token.name, token.role)


CallerOf = Annotated[Caller, Depends(authorized)]
"""The parameter of an operation that must know who asks."""


def bootstrap_token(store: Store, settings: Settings, now: datetime) -> None:
    """See to it that there is an admin token.

    One in the settings becomes the admin token, in place of an earlier one from there. Without one, the very first
    start makes one, writes it to `admin.token` (0600) beside the database and shows it on a terminal.
    Raises StoreError.
    """
    if settings.bootstrap_token:
        _keep_given(store, settings.bootstrap_token.get_secret_value(), now)
    elif not store.tokens_exist():
        secret = new_token()
        path = token_path(settings.database_url)
        _write_secret(path, secret)
        store.add_token(BOOTSTRAP, hash_token(secret), "admin", now)
        if sys.stdout.isatty():
            print(f"The admin token is {secret}\nIt is also in {path}; netlimit itself keeps only its hash.")


def token_path(database_url: str) -> Path:
    """Where the first start writes its token: beside a SQLite database, else in /var/lib/netlimit."""
    scheme, _, rest = database_url.partition(":///")
    directory = Path(rest.partition("?")[0]).parent if scheme.startswith("sqlite") else Path("/var/lib/netlimit")
    return directory / "admin.token"


def _keep_given(store: Store, secret: str, now: datetime) -> None:
    given = [token for token in store.active_tokens(now) if re.fullmatch(rf"{BOOTSTRAP}(-\d+)?", token.name)]
    if any(verify_token(secret, token.hash) for token in given):
        return
    for token in given:
        store.revoke_token(token.id, now)
    name = f"{BOOTSTRAP}-{len(store.tokens()) + 1}" if store.token(BOOTSTRAP) else BOOTSTRAP
    store.add_token(name, hash_token(secret), "admin", now)


def _write_secret(path: Path, secret: str) -> None:
    try:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secret + "\n")
    except OSError as error:
        raise StoreError(
            f"The admin token cannot be written to {path}: {error.strerror}. Set NETLIMIT_BOOTSTRAP_TOKEN instead."
        ) from error


def _unauthorized(sentence: str, reason: str = "") -> Problem:
    return Problem(401, sentence, headers={"WWW-Authenticate": f'Bearer realm="netlimit"{reason}'})


def _scrypt(secret: str, salt: bytes, cost: int, block: int, lanes: int) -> bytes:
    return hashlib.scrypt(
        secret.encode("utf-8", "surrogateescape"), salt=salt, n=cost, r=block, p=lanes, maxmem=64 * 2**20, dklen=32
    )
