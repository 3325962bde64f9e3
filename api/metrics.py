"""A few numbers in Prometheus' format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from api.context import no_query
from api.problems import responses
from api.standing import is_live
from api.tally import count_states
from netlimit.records import RuleCounters
from netlimit.store import Store

router = APIRouter(tags=["health"])
MOST_COUNTERS = 1000
"""Counters of so many rules, times gateways, are told at most: Prometheus keeps a series of each for ever."""


@router.get(
    "/metrics",
    summary="Numbers for Prometheus",
    dependencies=[Depends(no_query)],
    response_class=Response,
    responses={
        200: {"description": "The metrics as text.", "content": {"text/plain": {"schema": {"type": "string"}}}},
        **responses(422, 503),
    },
)
def read_metrics(request: Request) -> Response:
    """How many rules stand how, whether the gateways are up to date, and what rules that have a name have counted."""
    registry: CollectorRegistry = request.app.state.metrics
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def make_registry(store: Store) -> CollectorRegistry:
    """The metrics of one API over one store."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StoreMetrics(store))
    return registry


class StoreMetrics(Collector):
    """What the store knows, read when it is asked for."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def describe(self) -> list[Metric]:
        """Nothing: the store may not be there yet when the metrics are."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Read the numbers."""
        now, hosts = datetime.now(UTC), self._store.hosts()
        rules = GaugeMetricFamily("netlimit_rules", "Rules by state.", labels=["state"])
        for state, number in count_states(self._store, hosts, now).items():
            if state != "total":
                rules.add_metric([state], number)
        yield rules
        yield GaugeMetricFamily(
            "netlimit_wanted_revision", "The revision of the rule set.", value=self._store.revision()
        )
        for name, meaning, find in (
            ("applied_revision", "The revision that a gateway's kernel holds.", lambda host: host.applied_revision),
            ("drift_repairs", "What a gateway's controller has put back.", lambda host: host.drift),
            ("host_live", "Whether a gateway has reported lately.", lambda host: is_live(host, now)),
            ("host_paused", "Whether a gateway is paused by a teardown.", lambda host: host.paused),
        ):
            family = GaugeMetricFamily(f"netlimit_{name}", meaning, labels=["host"])
            for host in hosts:
                family.add_metric([host.host], float(find(host)))
            yield family
        yield from _count_rules(self._store.named_counters(MOST_COUNTERS))


def _count_rules(counted: Sequence[tuple[str, str, RuleCounters]]) -> Iterator[Metric]:
    """What rules that have a name have counted."""
    labels = ("rule", "name", "host")
    packets = CounterMetricFamily("netlimit_rule_packets", "Packets that met a named rule.", labels=[*labels, "what"])
    size = CounterMetricFamily("netlimit_rule_bytes", "The bytes of these packets.", labels=[*labels, "what"])
    delayed = CounterMetricFamily("netlimit_rule_delayed", "How often packets had to wait.", labels=labels)
    waiting = GaugeMetricFamily("netlimit_rule_queued_packets", "Packets that wait in a rule's queues.", labels=labels)
    queued = GaugeMetricFamily("netlimit_rule_queued_bytes", "The bytes of these packets.", labels=labels)
    for name, host, reading in counted:
        which, total = [str(reading.rule_id), name, host], reading.total
        packets.add_metric([*which, "matched"], total.matched_packets)
        packets.add_metric([*which, "dropped"], total.dropped_packets)
        size.add_metric([*which, "matched"], total.matched_bytes)
        size.add_metric([*which, "dropped"], total.dropped_bytes)
        delayed.add_metric(which, total.delayed)
        waiting.add_metric(which, reading.queued_packets)
        queued.add_metric(which, reading.queued_bytes)
    yield from (packets, size, delayed, waiting, queued)
