"""Numbers for Prometheus: what the limiter has decided, by rule, and what the service has answered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from netlimit.l7.report import Finding
from netlimit.l7.usage import Usage

MOST_RULES = 1000
"""So many rules are told of at most: Prometheus keeps a series of each for ever."""
Answers = Counter[tuple[str, str | int]]
"""How often each way in has given each answer: `("decide", 429)`, `("grpc", "OVER_LIMIT")`."""

_LIMIT = ("domain", "rule", "limit")
_OUTCOMES = ("admitted", "refused", "observed")
_KINDS = ("over", "near", "queued", "deferred")


def make_registry(
    usage: Usage,
    answers: Answers,
    report: Callable[[], list[Finding]],
    is_up: Callable[[], bool],
    count_lost: Callable[[], int] = int,
) -> CollectorRegistry:
    """The metrics of one limiter; `is_up` says whether all its counters can be asked, `count_lost` how often they were
    lost."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(LimiterMetrics(usage, answers, report, is_up, count_lost))
    ProcessCollector(registry=registry)
    return registry


def write_metrics(registry: CollectorRegistry) -> bytes:
    """All of it, as text."""
    return generate_latest(registry)


class LimiterMetrics(Collector):
    """What the limiter has counted since its start."""

    def __init__(
        self,
        usage: Usage,
        answers: Answers,
        report: Callable[[], list[Finding]],
        is_up: Callable[[], bool],
        count_lost: Callable[[], int] = int,
    ) -> None:
        self._count_lost = count_lost
        self._usage = usage
        self._answers = answers
        self._report = report
        self._is_up = is_up

    def describe(self) -> list[Metric]:
        """Nothing: the rules change."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The counts of the moment."""
        yield from self._collect_hits()
        yield from self._collect_findings()
        answers = CounterMetricFamily(
            "netlimit_limiter_answers", "Answers, by the way in which the limiter was asked.", labels=["way", "answer"]
        )
        for (way, answer), number in self._answers.items():
            answers.add_metric([way, str(answer)], number)
        yield answers
        up = "netlimit_limiter_counters_up", "Whether the counters can be asked; if not, each rule says what happens."
        yield GaugeMetricFamily(*up, self._is_up())
        lost = "netlimit_limiter_counters_lost", "How often Redis has lost its counters: limits began anew."
        yield CounterMetricFamily(*lost, self._count_lost())

    def _collect_hits(self) -> Iterator[Metric]:
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
        for concurrency, counts in islice(self._usage, MOST_RULES):
            which = [counts.rule.domain, counts.rule.name, "concurrency" if concurrency else "rate"]
            for outcome in _OUTCOMES:
                hits.add_metric([*which, outcome], getattr(counts, outcome))
            for kind in _KINDS:
                marked.add_metric([*which, kind], getattr(counts, kind))
            for value, (admitted, refused) in counts.detail.counts.items() if counts.detail else ():
                detailed.add_metric([*which, value, "admitted"], admitted)
                detailed.add_metric([*which, value, "refused"], refused)
        yield from (hits, marked, detailed)

    def _collect_findings(self) -> Iterator[Metric]:
        keys = GaugeMetricFamily(
            "netlimit_limiter_keys", "About how many keys a limit has seen, and how many reached it.",
            labels=[*_LIMIT, "which"],
        )  # fmt: skip
        fit = GaugeMetricFamily(
            "netlimit_limiter_fit", "1 for what `netlimit limits report` says of a limit.", labels=[*_LIMIT, "fit"]
        )
        for each in self._report()[:MOST_RULES]:
            which = [each.domain, each.rule, each.kind]
            keys.add_metric([*which, "all"], each.keys)
            keys.add_metric([*which, "limited"], each.limited_keys)
            fit.add_metric([*which, each.fit], 1)
        yield from (keys, fit)
