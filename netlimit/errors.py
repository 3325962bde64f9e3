"""What can go wrong, as sentences for an operator: what was asked, what is wrong, what would work."""

from __future__ import annotations


class NetlimitError(Exception):
    """The base of every error that netlimit raises on purpose; `str()` is a sentence."""


class RuleError(NetlimitError):
    """A rule that cannot be kept: `field` names the part of it that is wrong."""

    def __init__(self, field: str, sentence: str) -> None:
        super().__init__(sentence)
        self.field = field


class LimitError(NetlimitError):
    """A limit of the L7 limiter that cannot be kept: `field` names the part of it that is wrong."""

    def __init__(self, field: str, sentence: str) -> None:
        super().__init__(sentence)
        self.field = field


class CountersUnavailable(NetlimitError):
    """The limiter's counters cannot be asked now; the sentence says where they are and what is wrong."""


class KernelError(NetlimitError):
    """The kernel, or the tool that speaks to it, refused a step.

    `step` is the step as a plan prints it, `reason` what the kernel said.
    """

    def __init__(self, step: str, reason: str) -> None:
        super().__init__(f"The kernel refused '{step}': {reason}")
        self.step = step
        self.reason = reason


class StoreError(NetlimitError):
    """The database cannot do what was asked; the sentence says what would help."""


class SettingsError(NetlimitError):
    """A setting that cannot be used: `setting` is its name as an environment variable."""

    def __init__(self, setting: str, sentence: str) -> None:
        super().__init__(sentence)
        self.setting = setting
