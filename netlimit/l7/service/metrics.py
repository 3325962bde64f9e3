"""Numbers for Prometheus: what the limiter has decided, by rule, and what the service has answered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from netlimit.l7.usage import Usage

MOST_RULES = 1000
"""So many rules are told of at most: Prometheus keeps a series of each for ever."""
Answers = Counter[tuple[str, str | int]]
"""How often each way in has given each answer: `("decide", 429)`, `("grpc", "OVER_LIMIT")`."""

_OUTCOMES = ("admitted", "refused", "observed")
_KINDS = ("over", "near", "queued")


def make_registry(usage: Usage, answers: Answers) -> CollectorRegistry:
    """The metrics of one limiter."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(LimiterMetrics(usage, answers))
    ProcessCollector(registry=registry)
    return registry


def write_metrics(registry: CollectorRegistry) -> bytes:
    """All of it, as text."""
    return generate_latest(registry)


class LimiterMetrics(Collector):
    """What the limiter has counted since its start."""

    def __init__(self, usage: Usage, answers: Answers) -> None:
        self._usage = usage
        self._answers = answers

    def describe(self) -> list[Metric]:
        """Nothing: the rules change."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The counts of the moment."""
        labels = ("domain", "rule", "limit")
        hits = CounterMetricFamily(
            "netlimit_limiter_hits", "Hits that a rule has judged, by what became of them.", labels=[*labels, "outcome"]
        )
        marked = CounterMetricFamily(
            "netlimit_limiter_admitted_hits",
            "Of the admitted ones: those beyond the limit that were tolerated, those near it, those that had to wait.",
            labels=[*labels, "kind"],
        )
        for concurrency, counts in islice(self._usage, MOST_RULES):
            which = [counts.rule.domain, counts.rule.name, "concurrency" if concurrency else "rate"]
            for outcome in _OUTCOMES:
                hits.add_metric([*which, outcome], getattr(counts, outcome))
            for kind in _KINDS:
                marked.add_metric([*which, kind], getattr(counts, kind))
        answers = CounterMetricFamily(
            "netlimit_limiter_answers", "Answers, by the way in which the limiter was asked.", labels=["way", "answer"]
        )
        for (way, answer), number in self._answers.items():
            answers.add_metric([way, str(answer)], number)
        yield from (hits, marked, answers)
