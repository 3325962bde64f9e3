"""What the API counts of itself."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER = "other"
"""The label of methods and paths that do not exist here: whoever asks for them must not make up series."""


class Meter:
    """The requests of one API. Counting is safe from any thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "netlimit_api_request_duration_seconds",
            "How long answers of the API took, with what they waited for at the wish of whoever asked.",
            ["method", "route", "status"],
            buckets=BOUNDS,
            registry=registry,
        )
        self.in_flight = Gauge("netlimit_api_requests_in_flight", "Requests that are under way.", registry=registry)
        self._failures = Counter(
            "netlimit_api_login_failures_total", "Requests without a token that is good.", registry=registry
        )
        self._throttled = Counter(
            "netlimit_api_throttled_requests_total", "Requests refused because they were too many.", registry=registry
        )

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request that has been answered."""
        self._seconds.labels(method if method in METHODS else OTHER, route, f"{status // 100}xx").observe(seconds)
        if status == 401:
            self._failures.inc()
        elif status == 429:
            self._throttled.inc()
