"""The settings that were good last, kept beside the copy of the rules: who starts a machine has to put its limits back
though somebody has broken the settings file since, or taken the rights to read it, or lost it.

They are the controller's to write, as that copy is, and hold no secret. What is taken of them says so loudly.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import typer

from netlimit.custody import acting_for, made_file, name_user, opened
from netlimit.errors import SettingsError, StoreError
from netlimit.rules import Target
from netlimit.settings import (
    Listen,
    RecalledSettings,
    Settings,
    find_file,
    load_settings,
    parse_safe,
    read_environment,
    read_stated,
)
from netlimit.several import say_more
from netlimit.stalls import Stalled, find_disk
from netlimit.translation import know_translators

FILE = "settings.json"
"""Their name in the controller's directory."""
_PLAIN = ("backend", "failure_seconds", "host", "listen", "log_format", "log_level", "mark_mask", "set_size")
_SPARED = ("safe", "trusted_proxies")
_URLS = ("database_url", "counters_url")
_WHOLE = "is_whole"
"""Whether the database's URL is there as it was: it may have had a password."""
_FROM_FILE = "from_file"
"""The names of those that the settings file has stated, and the environment has not."""
_MOST_TOLD = 8
"""So many addresses are told of a list that is lost."""
_LONGEST = 2**23
"""Bytes: a settings file of the longest kind, with each of its addresses written out."""
_OTHERS_WRITE = 0o022

log = logging.getLogger(__name__)


def keep_settings(settings: Settings) -> None:
    """Keep them. Where that fails it is told in the log: it must keep nobody from limiting."""
    try:
        find_disk(settings.state).call(partial(_write, settings.state, print_settings(settings)))
    except (OSError, StoreError, Stalled) as error:
        log.error(
            "The settings cannot be kept in %s: %s. A boot at which the settings file cannot be used has none, or "
            "former ones.",
            settings.state / FILE,
            (isinstance(error, OSError) and error.strerror) or str(error).rstrip("."),
        )


def print_settings(settings: Settings) -> str:
    """What is kept of settings. Raises StoreError for a URL of no database."""
    from netlimit.l7.redis.hosts import leave_out_login
    from netlimit.store.engine import leave_out_secrets

    database, is_whole = leave_out_secrets(settings.database_url)
    kept = {name: _print(getattr(settings, name)) for name in (*_PLAIN, *_SPARED)}
    kept |= {"database_url": database, "counters_url": leave_out_login(settings.counters_url), _WHOLE: is_whole}
    kept[_FROM_FILE] = sorted(settings.written & kept.keys() - read_environment().keys())
    return json.dumps(kept, indent=1, sort_keys=True) + "\n"


def _print(value: Any) -> Any:
    if isinstance(value, Listen):
        return str(value)
    return [*map(str, value)] if isinstance(value, tuple) else value


def _write(directory: Path, text: str) -> None:
    """Put the file there, whole, unless it says so already."""
    fresh = f"{FILE}.new"
    with acting_for(directory / FILE), opened(directory.resolve(), directory=True) as place:
        with suppress(OSError, ValueError):
            if _read(place, _find_owners(place)) == text:
                return
        with suppress(FileNotFoundError):
            os.unlink(fresh, dir_fd=place)
        with made_file(fresh, place, 0o600) as descriptor, open(descriptor, "wb", closefd=False) as file:
            file.write(text.encode())
            file.flush()
            os.fsync(descriptor)
        os.rename(fresh, FILE, src_dir_fd=place, dst_dir_fd=place)
        os.fsync(place)


def _find_owners(place: int) -> set[int]:
    """Whose the file in an open directory may be: root's and this process's user's; for root, the directory's too."""
    return {0, os.geteuid() or os.fstat(place).st_uid}


def _read_kept(directory: Path, owners: Collection[int] | None = None) -> Any:
    """What the file says, which these have written, or else whoever may have. Raises OSError, ValueError and
    RecursionError."""
    with acting_for(directory / FILE), opened(directory.resolve(), directory=True) as place:
        return json.loads(_read(place, owners or _find_owners(place)))


def _read(place: int, owners: Collection[int]) -> str:
    """What the file in an open directory says. Raises OSError, also where others than these have written it, or could,
    and ValueError."""
    with opened(FILE, place) as descriptor:
        found = os.fstat(descriptor)
        if found.st_uid not in owners:
            raise PermissionError(errno.EPERM, f"it belongs to {name_user(found.st_uid)}")
        if found.st_mode & _OTHERS_WRITE:
            raise PermissionError(errno.EPERM, "others may write it")
        with open(descriptor, "rb", closefd=False) as file:
            raw = file.read(_LONGEST + 1)
    if len(raw) > _LONGEST:
        raise ValueError(f"it is larger than {_LONGEST} bytes")
    return raw.decode("utf-8")


def read_settings_to_limit(context: typer.Context) -> Settings:
    """The settings that this command goes by, which limits this host. Raises SettingsError."""
    return load_settings_to_limit(context.find_root().params.get("config"))


def load_settings_to_limit(config: Path | None = None) -> Settings:
    """The settings by which this host is to be limited. Raises SettingsError, also where their file is lost: where it
    is gone or states nothing, and what it stated when they were good last is other than what would hold now. Who may
    not read those that were good last cannot tell."""
    settings, file = load_settings(config), find_file(config)
    know_translators(settings.translators)
    lack = None if settings.written else _find_lack(file)
    if lack is None or not (lost := _find_lost(settings)):
        return settings
    had = " and ".join(f"{name} = {_word_value(value)}" for name, value in lost.items())
    raise SettingsError(
        "--config",
        f"The settings file {file} {lack}, and had {had} when the settings were good last. Bring it back; or, to begin "
        f"with the defaults on purpose, remove {settings.state / FILE}.",
        file,
    )


def _find_lack(file: Path) -> str | None:
    """Why a settings file states nothing, None where that is meant: who names /dev/null wants none."""
    if file.exists():
        return "states nothing" if file.is_file() else None
    return "is a link to what is not there" if file.is_symlink() else "is gone"


def _find_lost(settings: Settings) -> dict[str, Any]:
    """Of what the file stated when settings were good last, that which is other than it is now, without a file, and is
    not stated by the environment."""
    try:
        kept = find_disk(settings.state).call(partial(_read_kept, settings.state))
        _take(kept, settings.state)
        now = json.loads(print_settings(settings))
        lost = {*kept[_FROM_FILE]} & {*_PLAIN, *_SPARED, *_URLS} - read_environment().keys()
        return {name: kept[name] for name in sorted(lost) if kept[name] != now[name]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError, StoreError, Stalled):
        return {}


def _word_value(value: Any) -> str:
    if isinstance(value, list):
        return json.dumps(value[:_MOST_TOLD]) + say_more(value, _MOST_TOLD)
    return json.dumps(value)


def read_settings_or_last(context: typer.Context, whole: bool = False) -> tuple[Settings, SettingsError | None]:
    """The settings that this command goes by, and None; or those that were good last, and why the present ones cannot
    be used. A file that is named with --config is an error if it cannot. `whole`: with the database. Raises
    SettingsError."""
    config: Path | None = context.find_root().params.get("config")
    try:
        return load_settings_to_limit(config), None
    except SettingsError as fault:
        if config is not None:
            raise
        return recall(fault, whole), fault


def recall(fault: SettingsError, whole: bool = False) -> Settings:
    """The settings that were good last, after such a fault. Whoever is safe by them is, and whoever is by what can be
    read of the present ones: nobody is to be locked out. `whole`: the database's URL is needed, with its password,
    which is taken from the present ones alone. Raises SettingsError where there are none."""
    stated, written = read_stated()
    directory = _find_directory({**written, **stated})
    try:
        # Root opens no database that another user names.
        kept = _read_kept(directory, {0} if whole and os.geteuid() == 0 else None)
        found = _take(kept, directory)
        if whole:
            found = _complete(found, kept, {**written, **stated})
    except (OSError, ValueError, KeyError, TypeError, RecursionError, StoreError) as error:
        raise SettingsError(
            fault.setting,
            f"{fault} Nor can the settings that were good last be taken from {directory / FILE}: {_word(error)}.",
            fault.file,
        ) from None
    spared = {name: _join(getattr(found, name), stated.get(name), written.get(name)) for name in _SPARED}
    return found.model_copy(update=spared)


def recall_for_root(fault: SettingsError) -> Settings:
    """The same for root, who looks into the database: the one that the present settings name, for another user may have
    named that of those that are kept; nor does he ask counters. Raises SettingsError where there are none."""
    stated, written = read_stated()
    url = {**written, **stated}.get("database_url")
    usual = Settings.model_fields["database_url"].default
    named = {"database_url": url if isinstance(url, str) else usual, "counters_url": "memory://"}
    return recall(fault).model_copy(update=named)


def word_recalled(fault: SettingsError, settings: Settings) -> str:
    """What is to be said where they are taken."""
    return (
        f"{fault} THE SETTINGS THAT WERE GOOD LAST ARE TAKEN INSTEAD, of {settings.state / FILE}, as {settings.host}. "
        "Mend this soon: the controller does not start until then."
    )


def _find_directory(stated: Mapping[str, Any]) -> Path:
    """The controller's directory, as far as what can be read of the settings tells."""
    told = {name: stated[name] for name in ("state_directory", "database_url") if isinstance(stated.get(name), str)}
    return RecalledSettings(**told).state


def _take(kept: Any, directory: Path) -> Settings:
    """Raises ValueError, KeyError, TypeError."""
    return RecalledSettings(**{name: kept[name] for name in (*_PLAIN, *_SPARED, *_URLS)}, state_directory=directory)


def _complete(found: Settings, kept: Mapping[str, Any], stated: Mapping[str, Any]) -> Settings:
    """With the password of the database, if that is still the one that present settings name. Raises ValueError."""
    from netlimit.store.engine import leave_out_secrets

    if kept[_WHOLE] is True:
        return found
    url = stated.get("database_url")
    if not isinstance(url, str) or leave_out_secrets(url)[0] != found.database_url:
        raise ValueError("the password of the database is not kept")
    return found.model_copy(update={"database_url": url})


def _join(kept: Iterable[Target], *stated: Any) -> tuple[Target, ...]:
    """All addresses that were spared, and those that are now: of a list with a mistake in it, the others."""
    found = dict.fromkeys(kept)
    for value in stated:
        items = value.split(",") if isinstance(value, str) else value
        for item in items if isinstance(items, list) else ():
            with suppress(ValueError):
                found |= dict.fromkeys(parse_safe([item]))
    return tuple(found)


def _word(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    if isinstance(error, StoreError) or type(error) is ValueError:
        return str(error).rstrip(".")
    return "it is not what was kept"
