"""What a descriptor in a document says, as a rule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from netlimit.errors import LimitError
from netlimit.l7.fields import Findings, Record
from netlimit.l7.forms import find_misfit, find_odd_key
from netlimit.l7.limit import UNITS, Algorithm, Limit, Refill, parse_limit
from netlimit.l7.rules import Entry, Escalation, Mode, OnFailure, OnLimit, Rule
from netlimit.l7.values import parse_time

PRIORITY = 50
LEASE = 60
"""Seconds that a request in flight counts when nobody says that it has ended."""

_ACTING = ("mode", "overshoot", "priority", "on_limit", "max_wait", "on_failure", "emergency", "escalate")
"""What becomes of requests, and when."""
_COUNTING = ("requests_per_unit", "unit_multiplier", "algorithm", "burst", "refill", "count_refused")
"""How requests are counted."""
_UNUSABLE = Limit(0, 1)
"""Stands for a limit of which something is wrong."""


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A descriptor's fields, the path at which they stand, and where to say what is wrong with them."""

    record: Record
    path: str
    findings: Findings

    def find_entry(self) -> Entry | None:
        """The key and value that lead here; None where there is no usable key."""
        record = self.record
        key, value = record.get("key", ""), record.get("value", "")
        if not key:
            if "key" in record or "key" not in record.lines:
                self.complain("key", "It is missing: what is told of a request, such as `key: remote_address`.")
            return None
        if "*" in key:
            self.warn("key", "A `*` in a key is an ordinary letter; in a value it stands for any text.")
        if odd := find_odd_key(key):
            self.warn("key", odd)
        if value and (misfit := find_misfit(key, value)):
            self.warn("value", misfit)
        if record.get("share_threshold") and "*" not in value:
            self.complain("share_threshold", "Only a value with a `*` in it has a threshold to share.")
        return Entry(key, value)

    def make_rule(self, domain: str, name: str, told: tuple[int, ...]) -> Rule | None:
        """The rule of descriptors that end here; None where there is no limit. What contradicts itself is wrong."""
        record = self.record
        rate = record.get("rate_limit")
        unlimited = rate is not None and rate.get("unlimited", False)
        limit = self._make_limit(rate) if rate is not None and not unlimited else None
        concurrency = self._make_concurrency() if "concurrency" in record.lines else None
        if limit is None and concurrency is None:
            self._check_idle(rate, unlimited)
        if "rate_limit" not in record.lines and concurrency is None:
            return None
        on_limit = OnLimit(record.get("on_limit", OnLimit.REJECT))
        on_failure = OnFailure(record.get("on_failure", OnFailure.OPEN))
        if on_limit is not OnLimit.QUEUE and "max_wait" in record:
            self.complain("max_wait", "Nothing waits here; with `on_limit: queue` requests do.")
        if on_failure is OnFailure.CLOSED and "emergency" in record:
            self.complain("emergency", "There is no emergency limit with `on_failure: closed`; leave one of them out.")
        if limit is None and concurrency is not None and "emergency" in record:
            self.warn("emergency", "It has no effect: it stands in for a rate, and here `concurrency` alone limits.")
        mode = self._find_mode()
        if "escalate" in record.lines and (on_limit is not OnLimit.REJECT or mode is Mode.OBSERVE):
            said = f"mode: {mode}" if on_limit is OnLimit.REJECT else f"on_limit: {on_limit}"
            self.warn("escalate", f"It has no effect. With `{said}` nobody is blocked; those are whom a limit rejects.")
        return Rule(
            domain,
            name,
            limit,
            concurrency,
            mode=mode,
            overshoot=record.get("overshoot"),
            priority=record.get("priority", PRIORITY),
            on_limit=on_limit,
            max_wait=parse_time(record.get("max_wait", "30")),
            on_failure=on_failure,
            emergency=parse_limit(record["emergency"]) if "emergency" in record else None,
            alias=rate.get("name") if rate is not None else None,
            replaces=self._find_replaced(rate) if rate is not None else (),
            unlimited=unlimited,
            quota=record.get("quota_mode", False),
            detailed_metric=record.get("detailed_metric", False),
            value_to_metric=told,
            escalate=self._make_escalation(),
        )

    def complain(self, field: str, sentence: str) -> None:
        """Something is wrong with a field, or with one that is not there."""
        self.findings.complain(*self._place(field, sentence))

    def warn(self, field: str, sentence: str) -> None:
        """A field has no effect."""
        self.findings.warn(*self._place(field, sentence))

    def _place(self, field: str, sentence: str) -> tuple[str, str, int | None]:
        record: object = self.record
        line = self.record.line
        for name in field.split("."):
            if isinstance(record, Record):
                line, record = record.lines.get(name, line), record.get(name)
        return f"{self.path}.{field}", sentence, line

    def _make_limit(self, rate: Record) -> Limit:
        missing = [field for field in ("unit", "requests_per_unit") if field not in rate.lines]
        for field in missing:
            such = "requests_per_unit: 5" if field != "unit" else "unit: minute"
            self.complain(f"rate_limit.{field}", f"It is missing; write for example `{such}`.")
        if not rate.keys() >= {"unit", "requests_per_unit"}:
            return _UNUSABLE
        amount, seconds = rate["requests_per_unit"], UNITS[rate["unit"]] * rate.get("unit_multiplier", 1)
        algorithm = Algorithm(rate.get("algorithm", Algorithm.FIXED_WINDOW))
        options = {field: rate[field] for field in ("burst", "refill", "count_refused") if field in rate}
        if "refill" in options:
            options["refill"] = Refill(options["refill"])
        try:
            return Limit(amount, seconds, algorithm, **options)
        except LimitError:
            for some in ({}, *({field: value} for field, value in options.items())):  # each of them may be wrong
                self._complain_of(amount, seconds, algorithm, some)
            return _UNUSABLE

    def _complain_of(self, amount: int, seconds: int, algorithm: Algorithm, options: dict[str, Any]) -> None:
        try:
            Limit(amount, seconds, algorithm, **options)
        except LimitError as error:
            self.complain(f"rate_limit.{error.field}", str(error))

    def _make_concurrency(self) -> Limit:
        said = self.record.get("concurrency")
        if not isinstance(said, Record):
            return Limit(said, LEASE, Algorithm.CONCURRENCY) if said is not None else _UNUSABLE
        if "limit" not in said.lines:
            self.complain("concurrency.limit", "It is missing; write for example `limit: 20`.")
        seconds = math.ceil(parse_time(said.get("lease", LEASE)))
        return Limit(said.get("limit", 0), seconds, Algorithm.CONCURRENCY)

    def _make_escalation(self) -> Escalation | None:
        said: Record | None = self.record.get("escalate")
        if said is None:
            return None
        missing = [field for field in ("after", "within", "block") if field not in said.lines]
        for field in missing:
            self.complain(f"escalate.{field}", "It is missing; write `escalate: {after: 100, within: 1m, block: 10m}`.")
        if len(said) < 3:
            return None
        return Escalation(said["after"], math.ceil(parse_time(said["within"])), math.ceil(parse_time(said["block"])))

    def _find_mode(self) -> Mode:
        record = self.record
        mode = Mode(record.get("mode", Mode.HARD))
        if record.get("shadow_mode"):
            if "mode" in record and mode is not Mode.OBSERVE:
                self.complain("shadow_mode", f"It means `mode: observe`, but `mode` is {mode}; leave one of them out.")
            mode = Mode.OBSERVE
        if mode is Mode.SOFT and "overshoot" not in record.lines:
            self.complain("overshoot", "It is missing: how many percent over its limit a soft one goes.")
        if mode not in (Mode.SOFT, Mode.ELASTIC) and "overshoot" in record:
            self.complain("overshoot", f"A limit that is {mode} goes over by no percentage; soft and elastic ones do.")
        if mode is not Mode.ELASTIC and "priority" in record:
            self.complain("priority", f"A limit that is {mode} knows no priorities; elastic ones do.")
        return mode

    def _find_replaced(self, rate: Record) -> tuple[str, ...]:
        names = []
        for number, entry in enumerate(rate.get("replaces", ())):
            field = f"rate_limit.replaces[{number}].name"
            name = entry.get("name") if entry is not None else None
            if name and name == rate.get("name"):
                self.complain(field, f"{name!r} is the name of this very `rate_limit`, which cannot replace itself.")
            elif name:
                names.append(name)
            elif entry is not None:
                self.complain(field, "It is missing: the `name` of the `rate_limit` that is replaced.")
        return tuple(names)

    def _check_idle(self, rate: Record | None, unlimited: bool) -> None:
        """Where nothing is limited, little else has a meaning."""
        acting = [field for field in _ACTING if field in self.record.lines]
        if "rate_limit" not in self.record.lines:
            for field in acting:
                self.complain(field, "It needs a limit beside it: `rate_limit`, or `concurrency`.")
        elif unlimited and rate is not None:
            if "unit" in rate:
                self.complain("rate_limit.unit", "What is unlimited has no unit; leave one of them out.")
            for field in (*acting, *(f"rate_limit.{field}" for field in _COUNTING if field in rate)):
                self.warn(field, "It has no effect: what is unlimited is neither counted nor refused.")
