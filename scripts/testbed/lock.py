"""Legacy iptables has one lock for all namespaces, and its tools end with status 4 at once when somebody else holds it,
another gateway of the same test run, say: those of 1.8.11, as in Debian 13. Those that save take none."""

from __future__ import annotations

TOOLS = tuple(f"{base}-legacy{verb}" for base in ("iptables", "ip6tables") for verb in ("", "-restore"))


def wait_for_lock(argv: tuple[str, ...]) -> tuple[str, ...]:
    """The same command, which waits for the lock if it is one that takes it."""
    place = next((place for place, word in enumerate(argv, 1) if word in TOOLS), 0)
    return (*argv[:place], "-w", *argv[place:]) if place and "-w" not in argv else argv
