from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest

from netlimit.controller import Controller, Setup
from netlimit.kernel.fake import FakeKernel
from netlimit.packet import Packet
from netlimit.questions import Questions
from netlimit.rules import Rule
from netlimit.store import Store
from tests.databases import find_url
from tests.forcing import make_rule


@dataclass
class Clock:
    moment: datetime = datetime(2030, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.moment

    def pass_by(self, **time: float) -> None:
        self.moment += timedelta(**time)


@dataclass
class Site:
    """A gateway with a real store and a kernel in memory."""

    store: Store
    clock: Clock = field(default_factory=Clock)
    set_size: int = 1000

    def __post_init__(self) -> None:
        self.kernel = FakeKernel(now=lambda: self.clock().timestamp())
        self.controller = self.restart()

    def restart(self, mark_mask: int | None = None) -> Controller:
        setup = Setup("gw", "fake", safe=("192.0.2.9/32",), set_size=self.set_size, mark_mask=mark_mask)
        self.controller = Controller(self.store, self.kernel, setup, self.clock)
        self.controller._premises.elapsed = lambda: self.clock().timestamp()  # it passes, and is not set
        self.controller._premises.uptime = lambda: 86400.0
        return self.controller

    def add(self, **fields: object) -> Rule:
        return self.store.add([make_rule(fields, self.clock())], "test", self.clock())[0]

    def answer_question(self) -> None:
        """Have the oldest question answered, as if the controller had rested from the last."""
        self.controller._questions = Questions()
        self.controller._answer_question()

    def send(self, src: str, dst: str = "203.0.113.1", times: int = 1, **fields: object) -> list[str]:
        packet = Packet(ip_address(src), ip_address(dst), in_interface="lan", out_interface="wan", **fields)  # type: ignore[arg-type]
        return [self.kernel.trace(packet) for _ in range(times)]


@pytest.fixture
def site(tmp_path: Path, database: str, request: pytest.FixtureRequest) -> Iterator[Site]:
    store = Store(find_url(database, request, tmp_path))
    yield Site(store)
    store.close()


@pytest.fixture
def small_site(sqlite_url: str) -> Iterator[Callable[[int], Site]]:
    store = Store(sqlite_url)
    yield lambda size: Site(store, set_size=size)
    store.close()
