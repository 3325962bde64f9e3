"""Who may do what: three roles, and what each of them may do."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """What a token is for. Each may do what the one before it may, and more."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"


class Act(StrEnum):
    """What can be asked of the API, by who may do it."""

    READ = "read"
    CHANGE = "change"
    FORCE = "force"
    TOKENS = "tokens"
    FORGET = "forget"


WORDS = {
    Act.READ: "look",
    Act.CHANGE: "change rules",
    Act.FORCE: "force a rule that would hit the safe set",
    Act.TOKENS: "make, list and revoke tokens",
    Act.FORGET: "forget a gateway, whose addresses nobody keeps open then",
}
"""Each act, as it goes into a sentence."""

MAY = {
    Role.VIEWER: frozenset({Act.READ}),
    Role.OPERATOR: frozenset({Act.READ, Act.CHANGE}),
    Role.ADMIN: frozenset({Act.READ, Act.CHANGE, Act.FORCE, Act.TOKENS, Act.FORGET}),
}
"""What each role may do. Nothing else in netlimit knows that."""


def parse_role(text: str) -> Role:
    """Read a role. Raises ValueError with a sentence."""
    try:
        return Role(text)
    except ValueError:
        raise ValueError(f"{text!r} is no role; it can be {', '.join(Role)}.") from None
