"""A resolver that does not answer, in a network of its own: whoever is impatient waits for it no longer than for a
server that does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LOOK_UP = """
import socket, time
from netlimit.errors import StoreError
from netlimit.store import Store
silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
silent.bind(("127.0.0.1", 53))
store = Store("postgresql+psycopg://netlimit@db.example.net/netlimit", patience=1.0)
began = time.monotonic()
try:
    store.revision()
except StoreError as error:
    print(f"{time.monotonic() - began:.1f} {error}")
"""
PREPARE = 'ip link set lo up && mount --bind "$1" /etc/resolv.conf && shift && exec "$@"'


def test_who_is_impatient_waits_for_no_resolver(tmp_path: Path) -> None:
    servers = tmp_path / "resolv.conf"
    servers.write_text("nameserver 127.0.0.1\noptions timeout:30 attempts:4\n")
    command = ["unshare", "--net", "--mount", "sh", "-c", PREPARE, "-", servers, sys.executable, "-c", LOOK_UP]
    told = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True).stdout
    seconds, _, sentence = told.partition(" ")
    assert float(seconds) < 20, told
    assert "the resolver has not answered" in sentence
