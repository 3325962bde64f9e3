"""Those who share packet marks with us: looked at again and again, and judged calmly where they come and go."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from netlimit.errors import say_fault
from netlimit.kernel.base import Kernel
from netlimit.marks import WIDTH, Choice, MarkUse, Use, choose

log = logging.getLogger(__name__)

REMEMBERED_SECONDS = 600.0
"""How long bits are left to somebody who has used them, where there are others."""
FLAPPING_SECONDS, CALM_SECONDS = 120.0, 30.0
"""Who is in our way twice within the first must be gone for the second before limits are enforced again."""
_MOST_REMEMBERED = 4096


class Neighbours:
    """Which bits of the packet mark are ours, as others leave them."""

    def __init__(self, kernel: Kernel, asked: int | None, now: Callable[[], float] = time.monotonic) -> None:
        self._kernel = kernel
        self._asked = asked
        self._now = now
        self._found = MarkUse()
        self._seen: dict[Use, float] = {}
        self._kept: int | None = None
        self._looks_since: float | None = None
        self._began: list[float] = []
        self._lacking: Choice | None = None
        self._lacked_at = 0.0
        self.choice = choose(self._found, asked)

    def keep(self, mask: int | None) -> None:
        """Note the bits that are in force (None: none yet)."""
        self._kept = mask
        self.choice = self._stay_calm(self._choose())

    def look(self, patience: float = 0.0) -> bool:
        """Look who uses marks now, and wait up to `patience` seconds if nothing is known yet; whether limits can be
        enforced now that could not, or no longer."""
        try:
            self._found = self._kernel.marks(patience)
            if self._looks_since is None:
                self._looks_since = self._now()
        except Exception as error:  # it only advises
            self._found = MarkUse(unread=(say_fault(error),))
        before, self.choice = self.choice, self._stay_calm(self._choose())
        for note in self.choice.notes:
            if note not in before.notes:
                log.warning("%s", note)
        return (before.problem, before.reject) != (self.choice.problem, self.choice.reject)

    def _choose(self) -> Choice:
        """Somebody who was there a while ago may come again: his bits are left to him if others are free. Where ours
        are few, and nobody has been in the way of more for as long, those are ours."""
        choice = choose(self._found, self._asked, self._kept)
        now = self._now()
        self._seen |= dict.fromkeys(self._found.uses, now)
        recent = sorted(self._seen.items(), key=lambda item: -item[1])[:_MOST_REMEMBERED]
        self._seen = {use: at for use, at in recent if now - at < REMEMBERED_SECONDS}
        moves = choice.mask != self._kept
        if self._asked is None and choice.problem is None and (moves or self._may_widen(choice.mask)):
            roomy = choose(MarkUse(tuple(self._seen), self._found.unread), None, self._kept if moves else None)
            settled = choose(self._found, roomy.mask)
            bears = roomy.problem is None and settled.problem is None and settled.reject.keys() <= choice.reject.keys()
            if bears and (moves or roomy.mask.bit_count() > choice.mask.bit_count()):
                return settled
        return choice

    def _may_widen(self, mask: int) -> bool:
        """Whether bits are few, and it is known who has used any lately: after a start others may not have come yet."""
        since = self._looks_since
        known = since is not None and self._now() - since >= REMEMBERED_SECONDS and not self._found.unread
        return known and mask.bit_count() < WIDTH

    def _stay_calm(self, choice: Choice) -> Choice:
        """Rules go out of force at once when somebody is in their way, but come back only when he stays away."""
        now, lacks = self._now(), bool(choice.problem or choice.reject)
        if lacks:
            if self._lacking is None:
                self._began = [at for at in self._began if now - at < FLAPPING_SECONDS] + [now]
            self._lacking, self._lacked_at = choice, now
            return choice
        flaps = len([at for at in self._began if now - at < FLAPPING_SECONDS]) > 1
        if self._lacking is not None and flaps and now - self._lacked_at < CALM_SECONDS:
            return replace(choice, problem=self._lacking.problem, reject=self._lacking.reject)
        self._lacking = None
        return choice
