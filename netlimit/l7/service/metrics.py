"""Numbers for Prometheus: what the limiter has decided, by rule, and what the service has answered."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import islice

from prometheus_client import ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from netlimit.l7.report import Finding
from netlimit.l7.service.pieces import in_pieces
from netlimit.l7.usage import Counts, Usage

MOST_RULES = 1000
"""So many rules are told of at most: Prometheus keeps a series of each for ever."""
Answers = Counter[tuple[str, str | int]]
"""How often each way in has given each answer: `("decide", 429)`, `("grpc", "OVER_LIMIT")`."""

_LIMIT = ("domain", "rule", "limit")
_OUTCOMES = ("admitted", "refused", "observed")
_KINDS = ("over", "near", "queued", "deferred")

_Series = Iterable[tuple[Sequence[str], float]]
"""The values of labels, and a number."""
_Limits = list[tuple[list[str], Counts]]
"""The values of `_LIMIT`, and what that limit has counted."""


class LimiterMetrics:
    """What the limiter has counted since its start."""

    def __init__(
        self,
        usage: Usage,
        answers: Answers,
        report: Callable[[], Awaitable[Iterator[Finding]]],
        is_up: Callable[[], bool],
        count_lost: Callable[[], int] = int,
    ) -> None:
        """`is_up` says whether all counters can be asked, `count_lost` how often they were lost."""
        self._count_lost = count_lost
        self._usage = usage
        self._answers = answers
        self._report = report
        self._is_up = is_up
        self._process = ProcessCollector(registry=None)

    async def write(self) -> bytes:
        """All of it, as text. The event loop goes on meanwhile: there may be many thousand series."""
        return b"".join([text async for text in self._write()])

    async def _write(self) -> AsyncIterator[bytes]:
        async for text in self._write_hits():
            yield text
        async for text in self._write_findings():
            yield text
        answers = CounterMetricFamily(
            "netlimit_limiter_answers", "Answers, by the way in which the limiter was asked.", labels=["way", "answer"]
        )
        for (way, answer), number in self._answers.items():
            answers.add_metric([way, str(answer)], number)
        yield _write_family(answers)
        up = "netlimit_limiter_counters_up", "Whether the counters can be asked; if not, each rule says what happens."
        yield _write_family(GaugeMetricFamily(*up, self._is_up()))
        lost = "netlimit_limiter_counters_lost", "How often Redis has lost its counters: limits began anew."
        yield _write_family(CounterMetricFamily(*lost, self._count_lost()))
        for family in self._process.collect():
            yield _write_family(family)

    async def _write_hits(self) -> AsyncIterator[bytes]:
        limits = [
            ([counts.rule.domain, counts.rule.name, "concurrency" if concurrency else "rate"], counts)
            for concurrency, counts in islice(self._usage, MOST_RULES)
        ]
        hits = CounterMetricFamily(
            "netlimit_limiter_hits", "Hits that a rule has judged, by what became of them.", labels=[*_LIMIT, "outcome"]
        )
        marked = CounterMetricFamily(
            "netlimit_limiter_marked_hits",
            "Of these: beyond the limit and tolerated, near it, made to wait, or kept to be replayed.",
            labels=[*_LIMIT, "kind"],
        )
        detailed = CounterMetricFamily(
            "netlimit_limiter_value_hits",
            "Hits by value, of rules with detailed_metric or value_to_metric.",
            labels=[*_LIMIT, "value", "outcome"],
        )
        lists = _list_hits(limits, _OUTCOMES), _list_hits(limits, _KINDS), _list_values(limits)
        for family, series in zip((hits, marked, detailed), lists, strict=True):
            async for text in _write_long(family, series):
                yield text

    async def _write_findings(self) -> AsyncIterator[bytes]:
        findings = list(islice(await self._report(), MOST_RULES))
        keys = GaugeMetricFamily(
            "netlimit_limiter_keys", "About how many keys a limit has seen, and how many reached it.",
            labels=[*_LIMIT, "which"],
        )  # fmt: skip
        fit = GaugeMetricFamily(
            "netlimit_limiter_fit", "1 for what `netlimit limits report` says of a limit.", labels=[*_LIMIT, "fit"]
        )
        async for text in _write_long(keys, _list_keys(findings)):
            yield text
        async for text in _write_long(fit, (([each.domain, each.rule, each.kind, each.fit], 1) for each in findings)):
            yield text


def _list_hits(limits: _Limits, which: Iterable[str]) -> _Series:
    for limit, counts in limits:
        for each in which:
            yield [*limit, each], getattr(counts, each)


def _list_values(limits: _Limits) -> _Series:
    for limit, counts in limits:
        # As a list: others may come before all have been written.
        for value, (admitted, refused) in list(counts.detail.counts.items()) if counts.detail else ():
            yield [*limit, value, "admitted"], admitted
            yield [*limit, value, "refused"], refused


def _list_keys(findings: Iterable[Finding]) -> _Series:
    for each in findings:
        limit = [each.domain, each.rule, each.kind]
        yield [*limit, "all"], each.keys
        yield [*limit, "limited"], each.limited_keys


async def _write_long(family: CounterMetricFamily | GaugeMetricFamily, series: _Series) -> AsyncIterator[bytes]:
    """The text of a family that may have many series: its head, and then these in pieces."""
    head = _write_family(family)
    yield head
    async for piece in in_pieces(series):
        family.samples = []
        for values, number in piece:
            family.add_metric(values, number)
        yield _write_family(family)[len(head) :]


def _write_family(family: Metric) -> bytes:
    return generate_latest(_One(family))


class _One(Collector):
    """A family alone, as prometheus_client takes what it is to write."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> list[Metric]:
        return [self._family]
