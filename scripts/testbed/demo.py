"""The demo: a flood through a gateway, and a rule that comes and goes, seen as the rate that arrives.

All of it happens in three network namespaces, which are removed at the end.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from scripts.testbed.chart import Sample, draw
from scripts.testbed.errors import LabError
from scripts.testbed.meter import rates
from scripts.testbed.namespaces import CLIENT, SERVER, Lab
from scripts.testbed.reports import ReceiveReport, SendReport
from scripts.testbed.service import URL, Service
from scripts.testbed.streams import receive, sending

FLOOD, CONFIGURED = 8000, 2000  # packets a second
RULE = {"name": "demo", "target": CLIENT, "rate": f"{CONFIGURED} packets/s"}
RULES = "/api/v1/rules"
PICTURE = (
    f"  client {CLIENT}  ───►  gateway, with netlimit  ───►  server {SERVER}\n"
    f"  sends {FLOOD:,} UDP packets/s                         counts what arrives\n"
)
SHORTEST, LONGEST = 4.0, 300.0  # seconds
MARGIN, WIDEST, ROWS, BESIDE = 7, 100, 11, 8
REQUEST_SECONDS = 10
SETTLED = 0.5  # seconds after a change until it is measured: the burst has passed by then
SHOWN = ("id", "target", "rate.text", "effective_rate.text", "effective_burst", "status.state", "status.enforced_by")


@dataclass
class Phase:
    """A stretch of the flood: its title, the limit that is set in it, and when it is measured (Unix times)."""

    title: str
    limit: float | None
    begin: float
    end: float = 0


class Demo:
    """The flood as it is seen, and the rule that comes and goes meanwhile."""

    def __init__(self, service: Service, console: Console, seconds: float) -> None:
        self.service = service
        self.console = console
        self.seconds = seconds
        self.width = min(console.width, WIDEST)
        self.every = max(0.1, 1.05 * seconds / (self.width - MARGIN))
        self.samples: list[Sample] = []
        self.phases: list[Phase] = []
        self.counters: Mapping[str, int] = {}
        self._interrupted = Event()

    def watch(self, measured: Iterator[float]) -> None:
        """Show the rates as they come until the story is told. Raises LabError."""
        with ThreadPoolExecutor(1) as pool, Live(console=self.console, auto_refresh=False) as live:
            try:
                story = pool.submit(self._tell)
                for rate in measured:
                    self.samples.append(Sample(rate, self.phases[-1].limit if self.phases else None))
                    live.update(self._chart(), refresh=self.console.is_terminal)
                    if story.done():
                        break
            finally:
                self._interrupted.set()
            story.result()

    def _tell(self) -> None:
        """The rule comes after a quarter of the time, and goes after three."""
        self._measure("before the rule", None, self.seconds / 4)
        self._ask("POST", RULES, RULE)
        self._measure("under the rule", CONFIGURED, self.seconds / 2)
        self.counters = self.service.request("GET", f"{RULES}/demo/counters").body
        self._ask("DELETE", f"{RULES}/demo")
        self._measure("after the rule", None, self.seconds / 4)

    def _measure(self, title: str, limit: float | None, seconds: float) -> None:
        self.phases.append(phase := Phase(title, limit, time.time() + SETTLED))
        if self._interrupted.wait(seconds):
            raise LabError("the demo was interrupted.")
        phase.end = time.time()

    def _ask(self, method: str, path: str, body: Mapping[str, object] | None = None) -> None:
        """Ask the API, and print what was asked and answered. Raises LabError when the answer is a refusal."""
        data = [f"-d '{json.dumps(body)}'"] if body else []
        asked = (f'$ curl -X {method} -H "$TOKEN" -H "Prefer: wait=5"', URL + path, *data)
        self._print(" \\\n       ".join(asked), "bold")
        answer = self.service.request(method, path, body, "Prefer: wait=5")
        self._print(answer.status)
        if not answer.status.startswith("HTTP/1.1 20"):
            raise LabError(f"the API refused it: {json.dumps(answer.body)}")
        if answer.body:
            self._print(abridge(answer.body))

    def _print(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style))

    def _chart(self) -> Text:
        rows = max(3, min(ROWS, self.console.height - BESIDE)) if self.console.is_terminal else ROWS
        return draw(self.samples, every=self.every, width=self.width, height=rows, top=FLOOD * 1.125)

    # -- the result

    def table(self, sent: SendReport, received: ReceiveReport) -> Table:
        """What was sent, delivered and configured, in packets/s."""
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for column in ("packets/s", "sent", "delivered", "configured", "difference"):
            table.add_column(column, justify="left" if column == "packets/s" else "right")
        for phase in self.phases:
            got = received.delivered(after=phase.begin - received.start, during=phase.end - phase.begin)
            rate = got.packets_per_second
            wanted = phase.limit or sent.rate
            limit = f"{phase.limit:,.0f}" if phase.limit else "no limit"
            table.add_row(
                phase.title, f"{sent.rate:,.0f}", f"{rate:,.1f}", limit, f"{round(rate / wanted - 1, 4) + 0:+.2%}"
            )
        return table

    def tally(self) -> str:
        """What the rule itself counted."""
        matched, dropped = (self.counters[name] for name in ("matched_packets", "dropped_packets"))
        return (
            f"The rule's own counters (GET {RULES}/demo/counters): {matched:,} packets\n"
            f"matched, {dropped:,} dropped, so {matched - dropped:,} passed."
        )


def abridge(body: Mapping[str, Any]) -> str:
    """The members of an answer that matter here, as JSON with dots for the others."""
    words: dict[str, list[str]] = {}
    for path in SHOWN:
        name, _, inner = path.partition(".")
        value = body[name][inner] if inner else body[name]
        words.setdefault(name, []).append(f'"{inner}": {json.dumps(value)}' if inner else json.dumps(value))
    nested = {path.partition(".")[0] for path in SHOWN if "." in path}
    members = (
        f'"{name}": {{{", ".join(v)}, …}}' if name in nested else f'"{name}": {v[0]}' for name, v in words.items()
    )
    return f"{{{', '.join(members)}, …}}"


def run(seconds: float, console: Console) -> None:
    """Builds the lab, runs the demo in it, and shows what came out."""
    console.print("Building three network namespaces and starting netlimit in one of them …", style="dim")
    with Lab() as lab, Service(lab.gateway) as service:
        console.print(Text(PICTURE))
        demo, longest = Demo(service, console, seconds), seconds + 3 * REQUEST_SECONDS
        with receive(lab.server) as receiver, sending(lab.client, SERVER, rate=FLOOD, seconds=longest) as sender:
            demo.watch(rates(lab.server, every=demo.every, seconds=longest))
            sent = sender.stop()
            received = receiver.stop()
        console.print()
        console.print(demo.table(sent, received))
        console.print(Text("\n" + demo.tally()))
    console.print("The namespaces, and all that was in them, are gone.", style="dim")


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20, help="how long the flood lasts (default: %(default)g)")
    seconds = min(max(parser.parse_args().seconds, SHORTEST), LONGEST)
    # A shell starts background jobs with Ctrl-C ignored; sent by hand, it shall work there too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 80)
    try:
        run(seconds, console)
    except KeyboardInterrupt:
        sys.exit("\nInterrupted; the namespaces are gone.")
    except (LabError, OSError) as error:
        sys.exit(f"scripts/demo: {error}")


if __name__ == "__main__":
    main()
