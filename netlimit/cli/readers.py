"""Whether the users of the units may read the settings file: root can read everything, and would notice nothing."""

from __future__ import annotations

import grp
import pwd
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from netlimit.cli.privileges import CONTROLLER, USER
from netlimit.conflicts import Finding, Severity
from netlimit.custody import find_bar
from netlimit.errors import SettingsError
from netlimit.several import name_some

UNITS = tuple(Path(each, "systemd/system") for each in ("/etc", "/run", "/usr/lib", "/lib"))
"""Where units are."""
PARTS: Mapping[str, str] = {"netlimit-controller.service": CONTROLLER, "netlimit-api.service": USER}
NAME = "settings file"
"""The name of the findings about it."""
_LATER = "What runs goes on. At its next start no part does, and a boot goes by the settings that were good last."


def find_unit_users() -> dict[str, pwd.struct_passwd]:
    """Whom the installed units run as, by name."""
    found = {}
    for unit, name in PARTS.items():
        if any((place / unit).is_file() for place in UNITS):
            with suppress(KeyError):
                found[name] = pwd.getpwnam(name)
    return found


def find_unread(file: Path, users: Mapping[str, pwd.struct_passwd]) -> Iterator[Finding]:
    """Tell of those of the users who may not read a settings file, as root. An operator's file is left as it is: who
    has taken its rights, be it a program that does so each hour, may have meant it, for there are passwords in it."""
    bars: dict[Path, list[pwd.struct_passwd]] = {}
    with suppress(OSError):  # who may change no rights cannot tell
        for user in users.values():
            if (bar := find_bar(file, user)) is not None:
                bars.setdefault(bar, []).append(user)
    for bar, barred in bars.items():
        names = name_some([each.pw_name for each in barred], len(barred))
        what = "read" if bar == file else f"pass {bar}, and so read"
        yield Finding(
            NAME,
            Severity.SERIOUS,
            f"{names} may not {what} the settings file {file}. {_LATER}",
            _advise(file, bar, barred[0]),
        )


def _advise(file: Path, bar: Path, user: pwd.struct_passwd) -> str:
    group = _name_group(user.pw_gid)
    let_read = f"chgrp {group} {file} && chmod 0640 {file}"
    if bar == file:
        return f"`{let_read}`"
    if bar == file.parent:
        return f"`chgrp {group} {bar} && chmod 0750 {bar} && {let_read}`"
    return f"Let {user.pw_name} pass {bar}."


def _name_group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def word_unusable(fault: SettingsError) -> Finding:
    """Tell of a settings file that cannot be used, by the controller at least."""
    later = "At its next start the controller does not, and a boot goes by the settings that were good last."
    return Finding(NAME, Severity.SERIOUS, f"{fault} What runs goes on. {later}", "Mend it, and start the parts again.")
