"""Who uses the command line, as the audit names them."""

from __future__ import annotations

import os
import pwd

from netlimit.records import Actor
from netlimit.settings import Settings


def local_actor(settings: Settings) -> Actor:
    """The user of this process and the gateway: "root on gw1", or with sudo who called it: "alice (sudo) on gw1"."""
    caller = os.environ.get("SUDO_USER") if os.geteuid() == 0 else None
    return Actor(f"{caller} (sudo) on {settings.host}" if caller else f"{_find_name()} on {settings.host}")


def _find_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"user {os.getuid()}"
