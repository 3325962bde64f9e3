"""What the store refuses, and why. The sentences name the other rule, so that an operator can go and look at it."""

from __future__ import annotations

from collections.abc import Sequence

from netlimit.errors import NetlimitError
from netlimit.rules import Rule
from netlimit.several import say_more


class Conflict(NetlimitError):
    """The same traffic is limited already by another rule in force.

    `rule_id` and `name` are the other rule's; `rule_id` is None when the other one is `index` of the same batch.
    """

    def __init__(self, sentence: str, rule_id: int | None, name: str | None, index: int | None = None) -> None:
        super().__init__(sentence)
        self.rule_id = rule_id
        self.name = name
        self.index = index


class NameTaken(Conflict):
    """Another rule bears the name already."""


ABSENT = -1
"""In the place of a revision: there must be nothing."""


class Stale(NetlimitError):
    """The rule has changed since the caller read it; `revision` is the present one, and `expected` the one that was
    read, or ABSENT."""

    def __init__(self, rule_id: int, expected: int, revision: int) -> None:
        now = f"it is at revision {revision}, not {expected}. Read it again and repeat the change."
        said = f"has changed meanwhile: {now}"
        if expected == ABSENT:
            said = f"is there already: it is at revision {revision}, and was to be new."
        super().__init__(f"Rule {rule_id} {said}")
        self.rule_id = rule_id
        self.revision = revision


class NotKept(NetlimitError):
    """There is no such rule."""

    def __init__(self, rule_id: int) -> None:
        super().__init__(f"There is no rule {rule_id}; it may have been removed.")
        self.rule_id = rule_id


class NoDocument(NetlimitError):
    """A domain has no document of limits in the database."""

    def __init__(self, domain: str) -> None:
        super().__init__(f"The domain {domain!r} has no limits in the database; they may have been removed.")
        self.domain = domain


class DocumentChanged(NetlimitError):
    """A domain's limits have changed since the caller read them; `revision` is the present one, None where none is, and
    `expected` the one that was read, or ABSENT."""

    def __init__(self, domain: str, expected: int, revision: int | None) -> None:
        now = f"are at revision {revision}, not at {expected}" if revision is not None else "are not there"
        if expected == ABSENT:
            now = f"are at revision {revision}, and were to be new"
        super().__init__(
            f"The limits of the domain {domain!r} have changed meanwhile: they {now}. "
            "Read them again and repeat the change."
        )
        self.domain = domain
        self.revision = revision


class NoGateway(NetlimitError):
    """No gateway has reported by this name."""

    def __init__(self, host: str, known: Sequence[str]) -> None:
        others = f"known are {', '.join(known)}" if known else "none has reported yet"
        super().__init__(f"There is no gateway named {host!r}; {others}.")
        self.host = host


class GatewayAlive(NetlimitError):
    """A gateway is not gone: something there has reported lately; `what` is that, in words."""

    def __init__(self, host: str, what: str) -> None:
        super().__init__(
            f"The gateway {host!r} is not gone: {what} has reported in the last 15 seconds, and would do so again. "
            "Stop netlimit there, or give that gateway another name (NETLIMIT_HOST), and forget it then."
        )
        self.host = host


class NoSuchRevision(NetlimitError):
    """A revision that is not known: not yet, or not any more."""

    def __init__(self, revision: int, sentence: str) -> None:
        super().__init__(sentence)
        self.revision = revision


class TooMuchAtOnce(NetlimitError):
    """An exchange of rules that only an admin may have made at once, for others can change nothing meanwhile."""


class WindowOpen(NetlimitError):
    """A window of confirmation is open already."""


class NoWindow(NetlimitError):
    """No window of confirmation is open, or another one than was meant."""


class ConcernsOthers(NetlimitError):
    """What a window of confirmation would undo was there before it, and concerns other gateways."""


class TokenExists(NetlimitError):
    """A token of this name is kept already."""

    def __init__(self, name: str) -> None:
        super().__init__(f"There is a token named {name!r} already, or there was; choose another name.")
        self.name = name


class TokenEnded(NetlimitError):
    """The token of who wants to change something is good no more, or not for that."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"The token {name!r} was revoked, has expired, or is of another role since this was asked; "
            "nothing was changed."
        )


class ManyErrors(NetlimitError):
    """Several rules of one batch cannot be kept: `errors` pairs the index in the batch with what is wrong there."""

    def __init__(self, errors: Sequence[tuple[int, NetlimitError]]) -> None:
        self.errors = sorted(errors, key=lambda pair: pair[0])
        index, first = self.errors[0]
        more = say_more(self.errors)
        super().__init__(f"None of the rules was kept. Rule {index + 1} of the batch: {first}{more}")


def limited_already(rule: Rule, rule_id: int, name: str | None) -> Conflict:
    """Word the conflict of `rule` with one that is kept."""
    return Conflict(
        f"The traffic of '{rule}' is limited already by rule {_title(rule_id, name)}; "
        "change that one, or disable it first.",
        rule_id,
        name,
    )


def limited_twice(rule: Rule, index: int, name: str | None) -> Conflict:
    """Word the conflict of `rule` with an earlier one of its own batch."""
    return Conflict(
        f"The traffic of '{rule}' is limited already by rule {_title(index + 1, name)} of this same batch; "
        "leave one of them out.",
        None,
        name,
        index,
    )


def name_taken(name: str, rule_id: int) -> NameTaken:
    """Word that a kept rule has the name."""
    return NameTaken(f"The name {name!r} belongs to rule {rule_id} already; choose another.", rule_id, name)


def name_twice(name: str, index: int) -> NameTaken:
    """Word that an earlier rule of the same batch has the name."""
    sentence = f"The name {name!r} belongs to rule {index + 1} of this same batch already; choose another."
    return NameTaken(sentence, None, name, index)


def _title(number: int, name: str | None) -> str:
    return f"{number} ({name})" if name else str(number)
