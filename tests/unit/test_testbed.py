"""The testbed itself: what tests and benches rely on must be true without any limit in the way."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from netlimit.kernel.iptables import LOCK as LOCK_PATH
from scripts.testbed import streams
from scripts.testbed.chart import Sample, draw
from scripts.testbed.errors import LabError
from scripts.testbed.fairness import jain
from scripts.testbed.namespaces import CLIENT, CLIENT6, NAMESPACES, SERVER, SERVER6, WAN, Lab
from scripts.testbed.reports import MeterReport, ReceiveReport, TransferReport
from scripts.testbed.transfers import transferring

ROOT = Path(__file__).resolve().parents[2]
LOCK = Path(LOCK_PATH)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces are made by root only")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab() as lab:
        yield lab


@needs_root
@pytest.mark.parametrize("destination", [SERVER, SERVER6])
def test_pings_pass(lab: Lab, destination: str) -> None:
    assert streams.ping(lab.client, destination, count=5) == 5


@needs_root
@pytest.mark.parametrize("destination", [SERVER, SERVER6])
@pytest.mark.parametrize("rate", [1_000, 50_000])
def test_the_rate_is_held_and_all_of_it_arrives(lab: Lab, destination: str, rate: int) -> None:
    with streams.receive(lab.server) as receiver:
        sent = streams.send(lab.client, destination, rate=rate, seconds=2, size=200)
    received = receiver.report()

    assert sent.packets == 2 * rate
    assert sent.rate == pytest.approx(rate, rel=0.01)
    assert received.lost == 0
    assert received.packets == pytest.approx(sent.packets, rel=0.01)
    assert received.bytes == received.packets * 200
    assert received.delivered(after=0.5, during=1).packets_per_second == pytest.approx(rate, rel=0.05)


@needs_root
def test_packets_leave_from_all_sources_in_turn(lab: Lab) -> None:
    sources = ["10.1.5.1", "10.1.5.2", "10.77.0.1"]
    lab.add_client_addresses(*sources, "fd00:1::5", "fd00:77::1")
    with streams.receive(lab.server) as receiver:
        streams.send(lab.client, SERVER, rate=None, count=300, sources=sources)
        streams.send(lab.client, SERVER6, rate=None, count=20, sources=["fd00:1::5", "fd00:77::1"])

    expected = {**dict.fromkeys(sources, 100), "fd00:1::5": 10, "fd00:77::1": 10}
    assert receiver.report().by_source == expected
    assert all(streams.ping(lab.server, source) == 1 for source in expected)


@needs_root
def test_connections_are_established_refused_or_time_out(lab: Lab) -> None:
    with streams.listen(lab.server, 80) as listener, streams.connect(lab.client, SERVER, 80, count=20) as held:
        assert held.report().established == 20
        with streams.connect(lab.client, SERVER6, 80, count=3, rate=50) as more:
            assert more.report().established == 3
        with streams.connect(lab.client, SERVER, 81, count=2) as refused:
            assert refused.report().refused == 2
        with streams.connect(lab.client, "10.2.9.9", 80, count=2, wait=0.2) as lost:
            assert lost.report().timed_out == 2
    assert listener.report().accepted == 23


@needs_root
def test_nat_hides_the_client_and_forwards_to_it() -> None:
    with Lab(nat=True) as lab:
        lab.forward_port(8080, 80)
        with streams.receive(lab.server, answer=True) as receiver:
            streams.send(lab.client, SERVER, rate=100, count=10)
            time.sleep(0.1)
            assert "UNREPLIED" not in lab.gateway.run("conntrack", "-L", "-p", "udp").stdout
        assert receiver.report().by_source == {WAN: 10}
        with streams.listen(lab.client, 80), streams.connect(lab.server, WAN, 8080, count=2) as held:
            assert held.report().established == 2


@needs_root
def test_a_flood_reaches_the_other_side(lab: Lab) -> None:
    report, forwarded = streams.flood(lab, seconds=0.3, sources="10.64.0.0/20")

    assert report.packets > 4096
    assert forwarded == pytest.approx(report.packets - report.backlog_drops, rel=0.01)


@needs_root
def test_the_meter_counts_ethernet_bytes(lab: Lab) -> None:
    streams.open_sink(lab)
    with streams.metering(lab.server, every=0.01) as meter:
        streams.send(lab.client, streams.SINK, rate=1000, seconds=0.5, size=1500)
        readings = meter.stop().readings

    counted = readings[-1][1] - readings[0][1]
    assert counted == pytest.approx(500 * (1500 + 14), abs=200)  # a question of ARP or two may be among them


@needs_root
def test_a_transfer_keeps_a_connection_full(lab: Lab) -> None:
    bucket = ("tbf", "rate", "20mbit", "burst", "20k", "limit", "100k")
    lab.gateway.run("tc", "qdisc", "add", "dev", "wan", "root", *bucket)
    try:
        with transferring(lab.client, lab.server, SERVER, seconds=1, skip=0.5) as transfer:
            report = transfer.report()
    finally:
        lab.gateway.run("tc", "qdisc", "del", "dev", "wan", "root")

    assert report.seconds == pytest.approx(1, abs=0.2)
    assert report.bits_per_second == pytest.approx(20e6 * 1448 / 1514, rel=0.1)


@needs_root
def test_round_trips_are_milliseconds(lab: Lab) -> None:
    taken = streams.round_trips(lab.client, SERVER, count=5)

    assert len(taken) == 5
    assert all(0 < each < 500 for each in taken)
    assert streams.round_trips(lab.client, "10.2.9.9") == []


@needs_root
def test_what_cannot_start_says_why(lab: Lab) -> None:
    with pytest.raises(LabError, match=r"receive.*in server did not start.*Address already in use"):  # noqa: SIM117
        with streams.receive(lab.server, 5000):
            streams.receive(lab.server, 5000)
    with pytest.raises(LabError, match=r"`false` in gateway ended with 1"):
        lab.gateway.run("false")


@needs_root
def test_who_uses_iptables_waits_until_others_have_let_go_of_its_lock(lab: Lab) -> None:
    """It is one for all namespaces, and so for all tests that run side by side."""
    rules = "*filter\n-A OUTPUT -p udp --dport 9 -j RETURN\nCOMMIT\n"
    with LOCK.open("a") as lock, ThreadPoolExecutor() as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = [
            pool.submit(lab.gateway.run, *command.split(), input=rules)
            for command in ("ip6tables-legacy -S OUTPUT", "true", "iptables-legacy-restore")
        ]
        time.sleep(1)
        ended = [each.done() for each in waiting]
        fcntl.flock(lock, fcntl.LOCK_UN)
        listed, _, _ = [each.result() for each in waiting]
    assert ended == [False, True, False]
    assert "-P OUTPUT ACCEPT" in listed.stdout
    assert "--dport 9" in lab.gateway.run("iptables-legacy-save").stdout


@needs_root
def test_nothing_is_left() -> None:
    with pytest.raises(ZeroDivisionError), Lab() as lab:  # noqa: PT012
        names = [namespace.name for namespace in lab.namespaces]
        assert all((NAMESPACES / name).exists() for name in names)
        process = lab.client.popen("sh", "-c", "sleep 300 & echo $!; wait", stdout=subprocess.PIPE)
        assert process.stdout is not None
        grandchild = int(process.stdout.readline())
        raise ZeroDivisionError

    assert not any((NAMESPACES / name).exists() for name in names)
    assert process.returncode is not None
    assert not _is_alive(grandchild)
    lab.remove()


@needs_root
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_removes_it(number: signal.Signals) -> None:
    with _lab_command() as process:
        names = _names(process.pid)
        process.send_signal(number)
        process.wait(60)

    assert len(names) == 3
    assert _names(process.pid) == []


@needs_root
def test_the_next_lab_removes_what_a_killed_one_left() -> None:
    with _lab_command() as process:
        process.kill()
        process.wait(60)
    assert len(_names(process.pid)) == 3

    with Lab():
        assert _names(process.pid) == []


@needs_root
def test_the_lab_command_passes_names_and_status_on() -> None:
    script = 'ip netns exec "$NL_CLIENT" ping -c 1 -W 1 10.2.0.2 >/dev/null && echo "$NL_GATEWAY"; exit 7'
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/lab", "--", "sh", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )

    assert done.returncode == 7, done.stderr
    assert done.stdout.startswith("nl-g-")


def test_delivered_counts_whole_bins_behind_the_burst() -> None:
    steady = [(n, 2, 200) for n in range(1, 700)]
    report = ReceiveReport(
        packets=1_898,
        bytes=189_800,
        first=1.0,
        last=8.0,
        start=1.0,
        lost=0,
        series={CLIENT: [(0, 500, 50_000), *steady], CLIENT6: [(10, 3, 300)]},
    )

    assert report.bins[:2] == [500, 2]
    assert report.by_source == {CLIENT: 1_898, CLIENT6: 3}
    assert report.delivered(after=1, during=5).packets_per_second == 200
    assert report.delivered(after=1, during=5).bits_per_second == 160_000
    assert report.delivered(during=1).packets == 500 + 99 * 2 + 3
    assert report.delivered(source=CLIENT6).packets == 3
    assert report.delivered(source="10.9.9.9").packets == 0


def test_rates_over_time_are_whole_stretches_of_one_source() -> None:
    report = ReceiveReport(
        packets=27,
        bytes=27_000,
        first=100.0,
        last=100.29,
        start=100.0,
        lost=0,
        series={
            CLIENT: [(n, 1, 1_000) for n in (*range(10), *range(20, 30))],
            CLIENT6: [(n, 1, 1_000) for n in range(12, 19)],
        },
    )

    assert report.began(CLIENT6) == pytest.approx(100.12)
    steady = 10 * (1_000 + 14) * 8 / 0.1
    assert report.rates(CLIENT, begin=100.0, end=100.35) == pytest.approx([steady, 0, steady])
    assert report.rates(CLIENT, every=0.05, begin=100.25, end=100.35) == pytest.approx([steady, 0])
    assert report.rates("10.9.9.9", begin=100.0, end=100.2) == [0, 0]
    assert report.delivered(during=0.1).ethernet_bits_per_second == pytest.approx(steady)


def test_a_meter_tells_the_rate_between_its_readings() -> None:
    report = MeterReport([(10.0, 0), (11.0, 9_999), (11.5, 10_999), (13.0, 13_999), (14.1, 99_999)])

    assert report.bits_per_second(10.9, 14) == pytest.approx(16_000)
    with pytest.raises(LabError, match="1 readings"):
        report.bits_per_second(10.9, 11.1)


def test_a_transfer_is_what_its_receiver_got() -> None:
    said = {"end": {"sum_sent": {"bytes": 9_000_000}, "sum_received": {"bytes": 6_250_000, "seconds": 5.0}}}

    assert TransferReport.parse(json.dumps(said)).bits_per_second == 10_000_000
    with pytest.raises(LabError, match="iperf3: unable to connect to server"):
        TransferReport.parse('{"error": "unable to connect to server"}')
    with pytest.raises(LabError, match="printed no JSON: 'iperf3: bad option'"):
        TransferReport.parse("iperf3: bad option\n")


def test_jain_tells_equal_shares_from_unequal_ones() -> None:
    assert jain([7] * 10) == pytest.approx(1)
    assert jain([5, 0, 0, 0]) == pytest.approx(0.25)
    assert jain([1, 2]) == pytest.approx(0.9)


def test_the_chart_draws_the_limit_where_it_was_set() -> None:
    samples = [Sample(1000)] * 10 + [Sample(200, limit=200)] * 10
    lines = draw(samples, every=0.1, width=40, height=6).plain.splitlines()

    assert lines[0].startswith("1,200 │")
    assert lines[1].endswith("█" * 10 + " " * 10)
    assert lines[5] == "  200 │" + "█" * 10 + "━" * 10
    assert lines[6].startswith("    0 └──")
    assert lines[7].split() == ["0", "1"]


@contextlib.contextmanager
def _lab_command() -> Iterator[subprocess.Popen[str]]:
    """scripts/lab, up."""
    with subprocess.Popen([sys.executable, ROOT / "scripts/lab"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            while "Ctrl-C" not in process.stdout.readline():
                assert process.poll() is None
            yield process
        finally:
            process.kill()


def _names(owner: int) -> list[str]:
    return [path.name for path in NAMESPACES.iterdir() if f"-{owner}-" in path.name]


def _is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its new parent to notice does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
