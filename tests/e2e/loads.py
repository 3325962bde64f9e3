"""Rules that shape, and UDP that would fill more than they give: rates are Ethernet bits, as tc counts them."""

from __future__ import annotations

from scripts.testbed import streams
from scripts.testbed.namespaces import SERVER, SERVER6, SERVER_MAC, Lab, Namespace
from scripts.testbed.reports import ETHERNET, ReceiveReport, SendReport

SIZE = 1500
FRAME = 8 * (SIZE + ETHERNET)
MEGABIT = 1e6
MEASURED = 0.05
"""By how much a rate may be off: a packet at the edge of what is watched, and a core that others use too."""


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


def megabits(report: ReceiveReport, *sources: str, after: float, during: float) -> float:
    """What arrived from some sources together, in megabits a second, from so many seconds after the first packet on."""
    begin = min(report.began(source) for source in sources) + after
    rates = (report.rates(source, every=during, begin=begin, end=begin + during) for source in sources)
    return sum(rate for (rate,) in rates) / MEGABIT


def add_server_addresses(lab: Lab, *addresses: str) -> None:
    """Give the server more addresses in its subnets."""
    lab.server.ip(*(f"addr replace {each} dev eth0 {'nodad' if ':' in each else ''}" for each in addresses))
    lab.gateway.ip(*(f"neigh replace {each} lladdr {SERVER_MAC} nud reachable dev wan" for each in addresses))
