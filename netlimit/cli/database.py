"""The database: bringing it up to date, and letting the API's user at it."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterable
from pathlib import Path

import typer

from netlimit.cli.errors import CommandError
from netlimit.cli.parts import open_store, read_settings
from netlimit.cli.printing import JSON, say
from netlimit.custody import find_rights, give, opened

app = typer.Typer(help="The database that keeps the rules.", no_args_is_help=True)

_SHARED_DIRECTORY, _SHARED_FILE = 0o2770, 0o660
_TOKEN = "admin.token"  # noqa: S105  # the name of a file


@app.command()
def upgrade(context: typer.Context, json: bool = JSON) -> None:
    """Make the database, or bring it to the schema of this netlimit. Harmless when done twice."""
    settings = read_settings(context)
    with open_store(settings) as store:
        store.upgrade()
        revision = store.revision()
    say(json, {"revision": revision}, f"The database is up to date; the rules are at revision {revision}.")


def find_file(database_url: str) -> Path | None:
    """The file of a SQLite database."""
    scheme, _, rest = database_url.partition(":///")
    return Path(rest.partition("?")[0]) if scheme.startswith("sqlite") else None


def find_token_file(database_url: str) -> Path:
    """Where the first start has written its token: `api.bootstrap.token_path`, whose import takes half a second."""
    path = find_file(database_url)
    return (path.parent if path else Path("/var/lib/netlimit")) / _TOKEN


def share(path: Path, user: pwd.struct_passwd) -> None:
    """Let a user's group read and write the database and its directory. As root; raises CommandError.

    A directory that holds other things than the database is left as it is, and must let the user in already.
    """
    group = user.pw_gid
    directory = path.parent
    files = [directory / f"{path.name}{ending}" for ending in ("", "-journal", "-shm", "-wal")]
    own = {*(each.name for each in files), _TOKEN}
    owners = {user.pw_uid, *_find_owners(path)}
    for each in files:
        _share_file(each, user, owners)
    # The directory last: once others may write it, files are opened with their rights.
    if set(os.listdir(directory)) <= own and not _may_write(directory, user):
        with opened(directory.resolve(), directory=True) as place:
            # Whose it is, keeps it: the operator has chosen it.
            give(place, -1, group, _SHARED_DIRECTORY, of=(os.fstat(place).st_uid,))
        for each in files:  # of the former group's, where SQLite has made them since
            _share_file(each, user, owners)
    _check_way(directory, user)


def _check_way(directory: Path, user: pwd.struct_passwd) -> None:
    for place in directory.resolve().parents:
        if not _may(place, user, stat.S_IXOTH):
            raise CommandError(
                f"The user {user.pw_name!r}, whom the API runs as, may not pass {place}, "
                "under which the database lies; keep it elsewhere with NETLIMIT_DATABASE_URL, "
                "or use another user with --api-user."
            )
    if not _may_write(directory, user):
        group = grp.getgrgid(user.pw_gid).gr_name
        raise CommandError(
            f"The user {user.pw_name!r}, whom the API runs as, may not write to {directory}, where the database lies: "
            f"use `chgrp {group} {directory}` and `chmod 2770 {directory}`."
        )


def _find_owners(path: Path) -> set[int]:
    """Whose the database is, and who could put any there."""
    try:
        former = find_rights(path)
        return {path.lstat().st_uid, *(former or ())[:1]}
    except OSError as error:
        raise CommandError(f"{path} cannot be shared with the API: {error.strerror}.") from None


def _share_file(path: Path, user: pwd.struct_passwd, owners: Iterable[int]) -> None:
    """Only a plain file with one name, of root's or of these users': the directory may be writable to others."""
    try:
        with opened(path) as descriptor:
            give(descriptor, -1, user.pw_gid, _SHARED_FILE, of=owners)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CommandError(f"{path} cannot be shared with the API: {error.strerror}.") from None


def _may_write(path: Path, user: pwd.struct_passwd) -> bool:
    return _may(path, user, stat.S_IWOTH | stat.S_IXOTH)


def _may(path: Path, user: pwd.struct_passwd, rights: int) -> bool:
    """Whether the user has rights (as of others) to a path, going by its mode."""
    found = path.stat()
    if user.pw_uid == 0:
        return True
    if found.st_uid == user.pw_uid:
        wanted = rights << 6
    elif found.st_gid in os.getgrouplist(user.pw_name, user.pw_gid):
        wanted = rights << 3
    else:
        wanted = rights
    return found.st_mode & wanted == wanted
