"""Somebody else on this host who takes a port and answers there, as any user may.

`python tests/cli/stranger.py UID HOST PORT FILE [once]`: what he is told goes into FILE; a line says when he listens.
With `once` he listens no more as soon as somebody has connected.
"""

from __future__ import annotations

import os
import socket
import sys

ANSWER = b'{"status":"ok"}'


def answer(connection: socket.socket, heard: int) -> None:
    with connection:
        os.write(heard, connection.recv(65536))
        connection.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER)
        )


def main(user: str, host: str, port: str, file: str, *once: str) -> None:
    heard = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.setgroups([])
    os.setgid(int(user))
    os.setuid(int(user))
    both = ":" in host and host == "::"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.create_server((host, int(port)), family=family, dualstack_ipv6=both)
    print("listens", flush=True)
    while True:
        connection, _ = server.accept()
        if once:
            server.close()
            print("listens no more", flush=True)
        try:
            answer(connection, heard)
        except OSError:
            continue


if __name__ == "__main__":
    main(*sys.argv[1:])
