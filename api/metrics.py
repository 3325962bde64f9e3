"""Numbers for Prometheus: what the database knows of rules and gateways, and what the API counts of itself.

`docs/monitoring.md` says what each of them means; a test compares the two.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial

from fastapi import APIRouter, Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from netlimit.errors import StoreError
from netlimit.records import DISPENSABLE, Counts, HostStatus, RuleCounters
from netlimit.shared import Shared
from netlimit.store import Store

from .context import no_query
from .problems import responses
from .standing import is_live
from .tally import count_states

router = APIRouter(tags=["health"])
MOST_COUNTERS = 1000
"""Counters of so many rules, times gateways, are told at most: Prometheus keeps a series of each for ever."""
_LEFT_OUT = frozenset({"total"})


@router.get(
    "/metrics",
    summary="Numbers for Prometheus",
    dependencies=[Depends(no_query)],
    response_class=Response,
    responses={
        200: {"description": "The metrics as text.", "content": {"text/plain": {"schema": {"type": "string"}}}},
        **responses(401, 422),
    },
)
async def read_metrics(request: Request) -> Response:
    """How many rules stand how, whether the gateways are up to date, what they repaired and counted, how the API does.

    Without the database there are only those of the API itself, and `netlimit_database_up` is 0.
    """
    shared: Shared[bytes] = request.app.state.exposition
    return Response(await shared.find(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def share_exposition(registry: CollectorRegistry) -> Shared[bytes]:
    """The text of all metrics, read once for all who ask at the same time: no token is needed for it on this host."""
    return Shared(partial(run_in_threadpool, generate_latest, registry))


def make_registry(store: Store, version: str) -> CollectorRegistry:
    """The metrics of one API over one store."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # it has no types
    registry = CollectorRegistry(auto_describe=False)
    registry.register(BuildInfo(version))
    registry.register(StoreMetrics(store))
    ProcessCollector(registry=registry)
    return registry


class BuildInfo(Collector):
    """Which netlimit this is."""

    def __init__(self, version: str) -> None:
        self._versions = {"version": version, "python": platform.python_version()}

    def collect(self) -> Iterator[Metric]:
        """The one number, which is 1."""
        yield InfoMetricFamily("netlimit_build", "The version of netlimit, and of its Python.", value=self._versions)


class StoreMetrics(Collector):
    """What the database knows, read when it is asked for."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._answered = 0.0

    def describe(self) -> list[Metric]:
        """Nothing: the database may not be there yet when the metrics are."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Read the numbers; without the database, only that it does not answer."""
        now = datetime.now(UTC)
        try:
            found = list(self._read(now))
            self._answered = now.timestamp()
        except StoreError:
            found = []
        yield GaugeMetricFamily("netlimit_database_up", "Whether the database answers.", value=bool(found))
        yield GaugeMetricFamily(
            "netlimit_database_seen_timestamp_seconds",
            "When the database last answered this question; 0 for never.",
            value=self._answered,
        )
        yield from found

    def _read(self, now: datetime) -> Iterator[Metric]:
        hosts = self._store.hosts()
        states = {state: n for state, n in count_states(self._store, hosts, now).items() if state not in _LEFT_OUT}
        yield _gauge("rules", "Rules by state.", ["state"], {(state,): n for state, n in states.items()})
        revision = self._store.revision()
        yield GaugeMetricFamily("netlimit_wanted_revision", "The revision of the rule set.", value=revision)
        yield from _tell_hosts(hosts)
        guards = set(self._store.guards())
        yield _gauge(
            "guard_live",
            "Whether a gateway has a guard that reported lately.",
            ["host"],
            {(host.host,): host.host in guards for host in hosts},
        )
        window = self._store.window()
        left = window.left(self._store.now()) if window is not None and window.outcome is None else None
        yield GaugeMetricFamily(
            "netlimit_window_open", "Whether a window of confirmation is open.", value=left is not None
        )
        yield GaugeMetricFamily(
            "netlimit_window_remaining_seconds", "How long it stays open; 0 when none is.", value=left or 0.0
        )
        yield from _sum_up(self._store.total_counters())
        yield from _count_rules(self._store.named_counters(MOST_COUNTERS))


_OF_HOST: tuple[tuple[str, str, Callable[[HostStatus], float]], ...] = (
    ("applied_revision", "The revision that a gateway's kernel holds.", lambda host: host.applied_revision),
    ("host_live", "Whether a gateway's controller has reported lately.", is_live),
    ("host_paused", "Whether a gateway is paused by a teardown.", lambda host: host.paused),
    (
        "host_seen_timestamp_seconds",
        "When a gateway's controller reported last.",
        lambda host: host.seen_at.timestamp() if host.seen_at else 0.0,
    ),
    ("host_error", "Whether a gateway has an error to tell, such as a fight.", lambda host: bool(host.last_error)),
    (
        "host_missing_capabilities",
        "What a gateway lacks that rules may need.",
        lambda host: sum(bool(why) for what, why in host.capabilities.items() if what not in DISPENSABLE),
    ),
)
_KINDS: tuple[tuple[str, Callable[[HostStatus], int]], ...] = (
    ("desired", lambda host: host.desired),
    ("enforced", lambda host: host.enforced),
    ("degraded", lambda host: host.degraded),
    ("drifted", lambda host: host.drifted),
    ("lifted", lambda host: host.lifted),
)


def _tell_hosts(hosts: Iterable[HostStatus]) -> Iterator[Metric]:
    """What gateways said last."""
    for name, meaning, find in _OF_HOST:
        yield _gauge(name, meaning, ["host"], {(host.host,): find(host) for host in hosts})
    yield _gauge(
        "host_rules",
        "Rules of a gateway: desired, enforced, degraded, lifted; and what was found drifted and is not yet repaired.",
        ["host", "kind"],
        {(host.host, kind): find(host) for host in hosts for kind, find in _KINDS},
    )
    repairs = CounterMetricFamily(
        "netlimit_drift_repairs", "What a gateway's controller has put back.", labels=["host", "kind"]
    )
    faults = CounterMetricFamily(
        "netlimit_controller_faults", "Errors of its own that a gateway's controller went on after.", labels=["host"]
    )
    applying = HistogramMetricFamily(
        "netlimit_apply_seconds", "How long passes over a gateway's kernel took.", labels=["host"]
    )
    for host in hosts:
        faults.add_metric([host.host], host.faults)
        for kind, number in sorted(host.repairs.items()):
            repairs.add_metric([host.host, kind], number)
        counts = dict(host.applying)
        total = counts.pop("sum", 0.0)
        if counts:
            applying.add_metric([host.host], sorted(counts.items(), key=lambda item: float(item[0])), total)
    yield from (repairs, faults, applying)


def _gauge(name: str, meaning: str, labels: list[str], values: Mapping[tuple[str, ...], float]) -> Metric:
    family = GaugeMetricFamily(f"netlimit_{name}", meaning, labels=labels)
    for key, value in values.items():
        family.add_metric(key, float(value))
    return family


def _sum_up(totals: Mapping[str, Counts]) -> Iterator[Metric]:
    """What all rules have counted, so that nothing is lost to those that have no name."""
    labels = ("host", "what")
    packets = CounterMetricFamily("netlimit_packets", "Packets that met any rule.", labels=labels)
    size = CounterMetricFamily("netlimit_bytes", "The bytes of these packets.", labels=labels)
    delayed = CounterMetricFamily("netlimit_delayed", "How often packets had to wait in queues.", labels=["host"])
    for host, total in totals.items():
        _add_counts(packets, size, [host], total)
        delayed.add_metric([host], total.delayed)
    yield from (packets, size, delayed)


def _count_rules(counted: Iterable[tuple[str, str, RuleCounters]]) -> Iterator[Metric]:
    """What rules that have a name have counted."""
    labels = ("rule", "name", "host")
    packets = CounterMetricFamily("netlimit_rule_packets", "Packets that met a named rule.", labels=[*labels, "what"])
    size = CounterMetricFamily("netlimit_rule_bytes", "The bytes of these packets.", labels=[*labels, "what"])
    delayed = CounterMetricFamily("netlimit_rule_delayed", "How often packets had to wait.", labels=labels)
    waiting = GaugeMetricFamily("netlimit_rule_queued_packets", "Packets that wait in a rule's queues.", labels=labels)
    queued = GaugeMetricFamily("netlimit_rule_queued_bytes", "The bytes of these packets.", labels=labels)
    for name, host, reading in counted:
        which, total = [str(reading.rule_id), name, host], reading.total
        _add_counts(packets, size, which, total)
        delayed.add_metric(which, total.delayed)
        waiting.add_metric(which, reading.queued_packets)
        queued.add_metric(which, reading.queued_bytes)
    yield from (packets, size, delayed, waiting, queued)


def _add_counts(packets: CounterMetricFamily, size: CounterMetricFamily, which: list[str], total: Counts) -> None:
    packets.add_metric([*which, "matched"], total.matched_packets)
    packets.add_metric([*which, "dropped"], total.dropped_packets)
    size.add_metric([*which, "matched"], total.matched_bytes)
    size.add_metric([*which, "dropped"], total.dropped_bytes)
