"""Who knocks at a port, and who answers there, each in a process in its namespace.

knocker.py answer PORT   returns the first thing that each connection says, and closes it
knocker.py knock         of each line of its input, `SOURCE HOST PORT SECONDS`, it says "open" if a connection is made
                         in time that returns what it is sent, or else "shut"
"""

from __future__ import annotations

import contextlib
import socket
import sys


def answer(port: str) -> None:
    with socket.create_server(("::", int(port)), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(1)
                connection.sendall(connection.recv(100))


def knock(source: str, host: str, port: str, seconds: str) -> bool:
    try:
        with socket.create_connection((host, int(port)), float(seconds), (source, 0)) as connection:
            connection.sendall(b"hello")
            return connection.recv(100) == b"hello"
    except OSError:
        return False


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["answer", port]:
            answer(port)
        case ["knock"]:
            print("ready", flush=True)
            for line in sys.stdin:
                print("open" if knock(*line.split()) else "shut", flush=True)
