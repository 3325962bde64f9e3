"""Real proxies with the configurations of docs/proxies, on free ports."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from scripts.testbed.streams import ROOT
from tests.cli.running import SECONDS
from tests.ports import free_port

CONFIGURATIONS = ROOT / "docs/proxies"
PROGRAMS = Path(sys.executable).parent


Change = Callable[[str], str]
APART = {"nginx", "nginx-defer", "haproxy"}
"""Those that listen for HTTP/2 without TLS at another place."""


def ask_always(text: str) -> str:
    """A configuration of nginx that asks about a client however often it comes, as about many that come less often."""
    return text.replace("rate=500r/s", "rate=1000000r/s").replace("burst=200 ", "burst=1000000 ")


@dataclass(frozen=True)
class Places:
    """Where everything is: host and port, as text."""

    proxy: str
    application: str
    limiter: str
    grpc: str
    deferral: str = ""
    h2: str = ""
    """Where the proxy listens for HTTP/2 without TLS, where that is not the same place."""
    any_host: bool = False
    """Whether Caddy answers for any host, and not for its own address alone."""
    changes: Change = str
    """What is changed in a configuration of the docs before anything else."""

    def put_into(self, text: str) -> str:
        """A configuration of the docs for these places instead of those that it names. Those of Unix sockets are no
        places of this host."""
        text = self.changes(text)
        moved = {"80": self.proxy, "8080": self.application, "8751": self.limiter, "8752": self.grpc}
        if self.deferral:
            moved["8753"] = self.deferral
        for port, place in moved.items():
            if place.startswith("unix:"):
                assert port not in re.findall(r"127\.0\.0\.1\D{1,14}(\d+)", text), text
            written = rf"(127\.0\.0\.1:|127\.0\.0\.1, port_value: ){port}\b"
            text = re.sub(written, rf"\g<1>{place.rpartition(':')[2]}", text)
        return text


def make_nginx(directory: Path, places: Places, page: str = "nginx.conf") -> list[str]:
    server = places.put_into((CONFIGURATIONS / page).read_text())
    if places.h2:
        server = server.replace("    listen ", f"    listen {places.h2} http2;\n    listen ", 1)
    temporary = "".join(
        f"{kind}_temp_path {directory}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (directory / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {directory}/pid; error_log {directory}/log;\n"
        f"events {{ worker_connections 8192; }}\nhttp {{ access_log off; {temporary}\n{server}\n}}"
    )
    return ["/usr/sbin/nginx", "-e", f"{directory}/log", "-c", f"{directory}/nginx.conf"]


def make_nginx_defer(directory: Path, places: Places) -> list[str]:
    return make_nginx(directory, places, "nginx-defer.conf")


def make_haproxy(directory: Path, places: Places) -> list[str]:
    script = directory / "netlimit.lua"
    name = f"abns@netlimit{places.proxy}"  # one for the whole host
    script.write_text(places.changes((CONFIGURATIONS / "netlimit.lua").read_text()).replace("abns@netlimit", name))
    configuration = places.put_into((CONFIGURATIONS / "haproxy.cfg").read_text()).replace("abns@netlimit", name)
    if places.h2:
        plain = f"bind {places.proxy}\n"
        configuration = configuration.replace(plain, f"{plain}    bind {places.h2} proto h2\n")
    (directory / "haproxy.cfg").write_text(configuration.replace("/etc/haproxy/netlimit.lua", str(script)))
    return ["/usr/sbin/haproxy", "-db", "-q", "-f", f"{directory}/haproxy.cfg"]


def make_envoy(directory: Path, places: Places) -> list[str]:
    (directory / "envoy.yaml").write_text(places.put_into((CONFIGURATIONS / "envoy.yaml").read_text()))
    return [
        *(f"{PROGRAMS}/envoy", "--config-path", f"{directory}/envoy.yaml", "--concurrency", "1"),
        *("--use-dynamic-base-id", "--log-level", "error", "--disable-hot-restart"),
    ]


def make_caddy(directory: Path, places: Places) -> list[str]:
    options = "{\n\tadmin off\n\tpersist_config off\n\tauto_https off\n\tservers {\n\t\tprotocols h1 h2c\n\t}\n}\n"
    server = places.put_into((CONFIGURATIONS / "Caddyfile").read_text())
    if places.any_host:
        port = places.proxy.rpartition(":")[2]
        server = server.replace(f"http://{places.proxy} {{\n", f"http://:{port} {{\n\tbind 127.0.0.1\n")
    (directory / "Caddyfile").write_text(options + server)
    return [f"{PROGRAMS}/caddy", "run", "--config", f"{directory}/Caddyfile"]


MAKERS: Mapping[str, Callable[[Path, Places], list[str]]] = {
    "nginx": make_nginx,
    "haproxy": make_haproxy,
    "envoy": make_envoy,
    "caddy": make_caddy,
}


@contextmanager
def running(name: str, directory: Path, application: str, limiter: str, grpc: str) -> Iterator[str]:
    """Run a proxy until the block ends; where it is."""
    with running_at(name, directory, Places(f"127.0.0.1:{free_port()}", application, limiter, grpc)) as place:
        yield place


@contextmanager
def running_at(
    name: str, directory: Path, places: Places, change: Change = str, before: Sequence[str] = ()
) -> Iterator[str]:
    """The same at given places, with a change to what is in its configuration, led in by other words (`setpriv …`)."""
    log = directory / "output"
    with log.open("w") as output:
        command = {**MAKERS, "nginx-defer": make_nginx_defer}[name](directory, places)
        for file in directory.iterdir():
            if file.suffix in (".conf", ".cfg", ".lua", ".yaml", "") and file != log:
                file.write_text(change(file.read_text()))
        environment = {"HOME": str(directory), "PATH": "/usr/bin:/bin"}
        process = subprocess.Popen([*before, *command], cwd=directory, stdout=output, stderr=output, env=environment)
    try:
        _await(places.proxy, process, log)
        yield places.proxy
    finally:
        process.kill()
        process.wait()


def _await(place: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()
        try:
            httpx.options(f"http://{place}/awaited", timeout=20, trust_env=False)
        except httpx.TransportError:
            time.sleep(0.02)
        else:
            return
    raise AssertionError(log.read_text())
