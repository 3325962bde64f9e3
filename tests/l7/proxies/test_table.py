"""Whatever a request looks like, what the limiter refuses does not reach the application (docs/proxies.md)."""

from __future__ import annotations

import asyncio
import os
import posixpath
import re
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote, unquote, urljoin

from netlimit.l7.addresses import AddressRules
from netlimit.rules import parse_rule
from scripts.testbed.streams import ROOT
from tests.l7.proxies.apart import run_apart
from tests.l7.proxies.deferring import deferring
from tests.l7.proxies.kinds import KINDS, Kind
from tests.l7.proxies.programs import APART, PROGRAMS, Places, ask_always, running_at
from tests.l7.proxies.recording import Recorder, recording
from tests.l7.proxies.wire import send_in_frames, send_plainly
from tests.l7.service.serving import serving
from tests.ports import free_port

PAGE = ROOT / "docs/proxies.md"
FREE, CLIENT, PATH, NAMED, BLOCKED = range(1, 6)
"""The second byte of a client's address: what is exhausted for it, or whether it is blocked."""
STATES = {CLIENT: "client", PATH: "path", NAMED: "host", BLOCKED: "blocked"}
RULES = """
domain: web
descriptors:
  - key: remote_address
    value: 10.1.*
    rate_limit: {unlimited: true}
  - key: remote_address
    value: 10.2.*
    rate_limit: {unit: day, requests_per_unit: 1}
  - key: remote_address
    value: 10.3.*
    descriptors:
      - key: path
        value: /login
        rate_limit: {unit: day, requests_per_unit: 1}
  - key: remote_address
    value: 10.4.*
    descriptors:
      - key: host
        value: host.example
        rate_limit: {unit: day, requests_per_unit: 1}
"""
BLOCK = {"target": "10.5.0.0/16", "action": "block"}
VERSIONS: Mapping[str, tuple[list[str], str]] = {
    "nginx": (["/usr/sbin/nginx", "-v"], "nginx/"),
    "HAProxy": (["/usr/sbin/haproxy", "-v"], "version "),
    "Envoy": ([f"{PROGRAMS}/envoy", "--version"], "/"),
    "Caddy": ([f"{PROGRAMS}/caddy", "version"], "v"),
    "nginx-defer": (["/usr/sbin/nginx", "-v"], "nginx/"),
}
AT_ONCE = 24


def ask_about_hosts(text: str) -> str:
    """A configuration that asks about the host as well, and about who comes often, too."""
    text = re.sub(
        r"key=remote_address(&key=remote_address,path)?(&|;)",
        r"key=remote_address&key=remote_address,path&key=remote_address,host\2",
        ask_always(text),
    )
    path = '- request_headers: {header_name: ":path", descriptor_key: path}\n'
    host = path.replace(":path", ":authority").replace("path}", "host}")
    before = " " * 34
    more = f"{before[4:]}- actions:\n{before}- remote_address: {{}}\n{before}{host}"
    return text.replace(before + path, before + path + more)


def means_login(line: bytes) -> bool:
    """Whether a server may take the target of a request line for /login: one that knows no fragments or does, merges
    slashes first or last, or leaves `..` as they are."""
    target = b" ".join(line.split(b" ")[1:-1]).decode("latin-1")
    paths = {unquote(re.split(end, target, maxsplit=1)[0]) for end in (r"\?", r"[?#]")}
    paths |= {re.sub("^https?://[^/]*", "", path) for path in paths}
    meant = {posixpath.normpath(f"/{path.lstrip('/')}") for path in paths}
    resolved = {unquote(urljoin("http://h/", quote(path))) for path in paths}
    meant |= {re.sub("/+", "/", url.removeprefix("http://h")) for url in resolved}
    return "/login" in meant


def find_version(name: str) -> str:
    command, before = VERSIONS[name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(re.escape(before) + r"(\d+\.\d+)", done.stdout + done.stderr)
    assert found is not None
    return f"{name} {found[1]}"


@dataclass
class Trial:
    """One proxy, and every request in every state."""

    name: str
    number: int
    place: str
    h2: str
    recorder: Recorder
    answers: dict[tuple[int, int, int], str] = field(default_factory=dict)
    """By state, version and kind."""

    def mark(self, state: int, version: int, kind: int) -> str:
        return f"{self.name}-{state}-{version}-{kind}"

    async def run(self) -> None:
        room = asyncio.Semaphore(AT_ONCE)

        async def send(state: int, version: int, number: int) -> None:
            async with room:
                await self._send(state, version, number)

        states = (FREE, *STATES)
        await asyncio.gather(
            *(
                send(state, version, number)
                for number, kind in enumerate(KINDS)
                for version in kind.versions
                for state in states
                if self._concerns(state, kind)
            )
        )

    def _concerns(self, state: int, kind: Kind) -> bool:
        return (state != PATH or kind.path) and (state != NAMED or kind.named)

    async def _send(self, state: int, version: int, number: int) -> None:
        kind, source = KINDS[number], f"10.{state}.{self.number * 2 + version}.{number + 1}"
        if state not in (FREE, BLOCKED):
            first = Kind("the one that is within the limit").write_plainly(f"first-{self.mark(state, version, number)}")
            assert await send_plainly(self.place, source, first) == "200", (self.name, kind.name, STATES[state])
            assert f"first-{self.mark(state, version, number)}" in self.recorder.reached
        mark = self.mark(state, version, number)
        if version == 1:
            answer = await send_plainly(self.place, source, kind.write_plainly(mark))
        else:
            answer = await send_in_frames(self.h2, source, kind.write_fields(mark))
        self.answers[state, version, number] = answer

    def find_passed(self, version: int, number: int) -> list[str]:
        """In which states a request has reached the application that should not have: that of the path does if it has
        become one that is none of /login."""
        passed = []
        for state, name in STATES.items():
            line = self.recorder.reached.get(self.mark(state, version, number))
            if line is not None and (state != PATH or means_login(line)):
                passed.append(name)
        return passed

    def describe(self, number: int) -> str:
        """What became of a request, over HTTP/1.1 and HTTP/2."""
        told = [self._describe(version, number) for version in KINDS[number].versions]
        return told[0] if len({*told}) == 1 else " / ".join(told)

    def _describe(self, version: int, number: int) -> str:
        passed = self.find_passed(version, number)
        if passed:
            return f"**passes** ({', '.join(passed)})"
        if self.mark(FREE, version, number) in self.recorder.reached:
            return "held"
        return self.answers[FREE, version, number]


def test_what_the_limiter_refuses_never_reaches_the_application(root: None, tmp_path: Path) -> None:
    rows: dict[str, list[str]] = {}

    def body() -> None:
        for number, name in enumerate(VERSIONS):
            trial = try_proxy(name, number, tmp_path)
            rows[find_version(name)] = [trial.describe(number) for number in range(len(KINDS))]

    run_apart(body)
    plain = next(number for number, kind in enumerate(KINDS) if kind.name == "`/login`")
    assert {cells[plain] for cells in rows.values()} == {"held"}
    faults = [
        f"{proxy}: {kind.name}: {cell}"
        for proxy, cells in rows.items()
        for kind, cell in zip(KINDS, cells, strict=True)
        if "passes" in cell
    ]
    assert not faults, "\n".join(faults)
    check_page(rows)


def try_proxy(name: str, number: int, directory: Path) -> Trial:
    directory = directory / name
    directory.mkdir()
    defers = name == "nginx-defer"
    text = RULES
    if defers:
        text = re.sub(r"^( *)rate_limit: \{unit", r"\1on_limit: defer\n\1rate_limit: {unit", RULES, flags=re.MULTILINE)
    with ExitStack() as stack:
        recorder = stack.enter_context(recording())
        served = stack.enter_context(serving(text))
        rule = replace(parse_rule(BLOCK, datetime.now(UTC)), id=1, revision=1)
        served.addresses = AddressRules([rule], [1])
        deferral = stack.enter_context(deferring(served, directory, recorder.place)) if defers else ""
        h2 = f"127.0.0.1:{free_port()}" if name.lower() in APART else ""
        places = Places(f"127.0.0.1:{free_port()}", recorder.place, served.place, served.grpc_place, deferral, h2, True)
        place = stack.enter_context(running_at(name.lower(), directory, places, ask_about_hosts))
        trial = Trial(name, number, place, h2 or place, recorder)
        asyncio.run(trial.run())
        time.sleep(0.2)  # what is on its way to the application though its client has been answered
    return trial


def check_page(rows: dict[str, list[str]]) -> None:
    """Compare with the page, or (NETLIMIT_GOLDEN=write) write it there. It tells nothing of other versions."""
    head = f"| request | {' | '.join(rows)} |"
    lines = [f"| {kind.name} | {' | '.join(cells[number] for cells in rows.values())} |"
             for number, kind in enumerate(KINDS)]  # fmt: skip
    text = PAGE.read_text("utf-8")
    begin = text.index("| request |")
    if os.environ.get("NETLIMIT_GOLDEN") == "write":
        table = "\n".join([head, "|---" * (len(rows) + 1) + "|", *lines])
        PAGE.write_text(f"{text[:begin]}{table}\n", "utf-8")
        return
    written = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text[begin:].splitlines()]
    assert [line[0] for line in written[2:]] == [kind.name for kind in KINDS]
    for column, proxy in enumerate(written[0][1:], 1):
        if proxy in rows:
            assert [line[column] for line in written[2:]] == rows[proxy]
