"""Rules that shape, and UDP that would fill more than they give: rates are Ethernet bits, as tc counts them."""

from __future__ import annotations

from dataclasses import dataclass

from scripts.testbed import streams
from scripts.testbed.namespaces import SERVER, SERVER6, SERVER_MAC, Lab, Namespace
from scripts.testbed.reports import ETHERNET, ReceiveReport, SendReport
from scripts.testbed.stalls import share

SIZE = 1500
FRAME = 8 * (SIZE + ETHERNET)
MEGABIT = 1e6
MEASURED = 0.05
"""By how much a rate may be off: a packet at the edge of what is watched, and a core that others use too."""
MOST_STALLED = 0.5


def shape(target: str, rate: str = "1 Mbit/s", **fields: object) -> dict[str, object]:
    """A rule that shapes, as the API takes it."""
    return {"target": target, "action": "shape", "rate": rate, **fields}


def offer(
    namespace: Namespace,
    destination: str = "",
    *sources: str,
    megabits: float,
    seconds: float,
    port: int = 9000,
) -> streams.Stream[SendReport]:
    """Start to send UDP from sources in turn, so many megabits a second from each. By default to the server."""
    peers = max(len(sources), 1)
    return streams.sending(
        *(namespace, destination or (SERVER6 if ":" in sources[0] else SERVER), port),
        rate=peers * megabits * MEGABIT / FRAME,
        seconds=seconds,
        size=SIZE,
        sources=sources,
    )


@dataclass(frozen=True)
class Passed:
    """What arrived, in megabits a second, while a core of the machine stood still for some share (0 to 1) of the time.

    What a class may send is saved up for some 20 ms only: what longer stalls keep from being sent is gone.
    """

    megabits: float
    stalled: float

    def is_about(self, expected: float, rel: float = MEASURED) -> bool:
        """Whether so many megabits a second passed: never more, and less by no more than what stalls took."""
        assert self.stalled < MOST_STALLED, "The machine stood still for too long to measure anything."
        return expected * (1 - self.stalled) * (1 - rel) <= self.megabits <= expected * (1 + rel)


def megabits(report: ReceiveReport, *sources: str, after: float, during: float) -> Passed:
    """What arrived from some sources together, from so many seconds after the first packet on."""
    begin = min(report.began(source) for source in sources) + after
    return passed(report, *sources, begin=begin, end=begin + during)


def passed(report: ReceiveReport, *sources: str, begin: float, end: float) -> Passed:
    """What arrived from some sources together between two Unix times."""
    rates = (report.rates(source, every=end - begin, begin=begin, end=end) for source in sources)
    return Passed(sum(rate for (rate,) in rates) / MEGABIT, share(report.stalls, begin, end))


def add_server_addresses(lab: Lab, *addresses: str) -> None:
    """Give the server more addresses in its subnets."""
    lab.server.ip(*(f"addr replace {each} dev eth0 {'nodad' if ':' in each else ''}" for each in addresses))
    lab.gateway.ip(*(f"neigh replace {each} lladdr {SERVER_MAC} nud reachable dev wan" for each in addresses))


def count_received(namespace: Namespace) -> int:
    """The IPv4 packets that have come in: those by which IPv6 looks for its neighbours do not count."""
    names, numbers = [line for line in namespace.run("cat", "/proc/net/snmp").stdout.splitlines() if line[:3] == "Ip:"]
    return int(dict(zip(names.split(), numbers.split(), strict=True))["InReceives"])
