"""The traffic tool that runs inside a namespace: `python -m scripts.testbed.traffic send|receive|flood|…`.

It prints one JSON object, and `ready` on standard error as soon as it is up. Every command ends by itself.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import sys

from scripts.testbed import connections, flood, meter, receiver, sender
from scripts.testbed.deadline import Deadline
from scripts.testbed.reports import ConnectReport, FloodReport, ListenReport, MeterReport, ReceiveReport, SendReport


def main() -> None:
    options = _parser().parse_args()
    try:
        options.run(options)
    except (OSError, ValueError, OverflowError) as error:
        sys.exit(f"traffic {options.command}: {error}")


def _send(options: argparse.Namespace) -> None:
    count = options.count if options.count is not None else round((options.rate or 0) * options.seconds)
    if count < 1:
        raise ValueError("Give --count, or --seconds with --rate.")
    report = sender.send(
        options.destination,
        options.port,
        rate=options.rate,
        count=count,
        size=options.size,
        sources=options.source,
        source_port=options.source_port,
        deadline=_deadline(options),
    )
    _show(report)


def _receive(options: argparse.Namespace) -> None:
    _show(receiver.receive(options.port, answer=options.answer, deadline=_deadline(options)))


def _flood(options: argparse.Namespace) -> None:
    report = flood.flood(
        ipaddress.IPv4Network(options.sources),
        ipaddress.IPv4Address(options.destination),
        device=options.device,
        gateway_mac=options.gateway_mac,
        size=options.size,
        core=options.core,
        seconds=options.seconds,
    )
    _show(report)


def _connect(options: argparse.Namespace) -> None:
    connections.connect(
        options.destination,
        options.port,
        count=options.count,
        rate=options.rate,
        sources=options.source,
        wait=options.wait,
        deadline=_deadline(options),
        show=_show,
    )


def _listen(options: argparse.Namespace) -> None:
    _show(connections.listen(options.port, deadline=_deadline(options)))


def _meter(options: argparse.Namespace) -> None:
    _show(meter.meter(options.device, every=options.every, deadline=_deadline(options)))


def _deadline(options: argparse.Namespace) -> Deadline:
    return Deadline(options.limit, until_eof=options.until_eof)


def _show(report: SendReport | ReceiveReport | FloodReport | ConnectReport | ListenReport | MeterReport) -> None:
    found = dict(vars(report))
    if isinstance(report, ReceiveReport):
        found |= {"by_source": report.by_source, "bins": report.bins}
    print(json.dumps(found), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.testbed.traffic", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    bounded = argparse.ArgumentParser(add_help=False)
    bounded.add_argument("--limit", type=float, default=60, help="ends after this many seconds, whatever happens")
    bounded.add_argument("--until-eof", action="store_true", help="ends when standard input does")
    toward = argparse.ArgumentParser(add_help=False)
    toward.add_argument("destination", help="an address, v4 or v6")
    toward.add_argument("--source", action="append", default=[], help="leave from this address; repeat for more")
    toward.add_argument("--rate", type=float, help="a second; without it all at once")

    send = commands.add_parser("send", parents=[bounded, toward], help="UDP at an exact rate")
    send.add_argument("--port", type=int, default=9000)
    send.add_argument("--source-port", type=int, default=0)
    send.add_argument("--size", type=int, default=128, help="IP bytes of a packet")
    send.add_argument("--count", type=int, help="packets")
    send.add_argument("--seconds", type=float, default=0, help="how long, instead of --count")
    send.set_defaults(run=_send)

    receive = commands.add_parser("receive", parents=[bounded], help="count UDP packets")
    receive.add_argument("--port", type=int, default=9000)
    receive.add_argument("--answer", action="store_true", help="send one byte back for each packet")
    receive.set_defaults(run=_receive)

    flood_ = commands.add_parser("flood", help="raw frames from many spoofed sources, from one core")
    flood_.add_argument("destination", help="an IPv4 address")
    flood_.add_argument("--sources", default="10.64.0.0/16", help="a frame from each address of this network")
    flood_.add_argument("--device", default="eth0")
    flood_.add_argument("--gateway-mac", required=True)
    flood_.add_argument("--size", type=int, default=64, help="IP bytes of a packet")
    flood_.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    flood_.add_argument("--seconds", type=float, default=2)
    flood_.set_defaults(run=_flood)

    connect = commands.add_parser("connect", parents=[bounded, toward], help="open TCP connections and hold them")
    connect.add_argument("--port", type=int, default=9000)
    connect.add_argument("--count", type=int, default=1)
    connect.add_argument("--wait", type=float, default=0.9, help="seconds that each connection has")
    connect.set_defaults(run=_connect)

    listen = commands.add_parser("listen", parents=[bounded], help="accept TCP connections and hold them")
    listen.add_argument("--port", type=int, default=9000)
    listen.set_defaults(run=_listen)

    meter_ = commands.add_parser("meter", parents=[bounded], help="read the bytes that a device has received")
    meter_.add_argument("--device", default="eth0")
    meter_.add_argument("--every", type=float, default=0.1, help="seconds between readings")
    meter_.set_defaults(run=_meter)
    return parser


if __name__ == "__main__":
    main()
