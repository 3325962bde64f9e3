"""A stand-in for sshd, with processes, titles and sockets as OpenSSH has them, and who talks with it.

sshd.py listen PORT [ADDRESS]   who says "login" is logged in; every line is answered with itself
sshd.py talk HOST PORT [FROM]   sends each line of its input, and prints the answer, or "silence"
"""

from __future__ import annotations

import os
import signal
import socket
import sys

LISTENER = "sshd: /usr/sbin/sshd -D [listener] 0 of 10-100 startups"
STRANGER, SESSION = "sshd: [accepted]", "sshd: root@pts/0"
PATIENCE = 2.5


def become(title: str, *words: str) -> None:
    os.execv("/proc/self/exe", [title, __file__, *words])  # noqa: S606 - the title is what this is about


def listen(port: int, address: str = "") -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with (
        socket.create_server((address, port))
        if address
        else socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    ) as server:
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            if not os.fork():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.set_inheritable(connection.fileno(), True)
                become(STRANGER, "serve", str(connection.fileno()))
            connection.close()


def serve(descriptor: int) -> None:
    with socket.socket(fileno=descriptor) as connection:
        while line := connection.recv(100):
            connection.sendall(line)
            if line.strip() == b"login":
                become(SESSION, "serve", str(descriptor))


def talk(host: str, port: str, source: str = "") -> None:
    try:
        connection = socket.create_connection((host, int(port)), PATIENCE, (source, 0) if source else None)
    except OSError:
        print("no connection", flush=True)
        return
    print("connected", flush=True)
    with connection, connection.makefile("rwb", buffering=0) as stream:
        for line in sys.stdin.buffer:
            stream.write(line)
            try:
                answer = stream.readline()
            except TimeoutError:
                answer = b"silence\n"
            print(answer.decode(), end="", flush=True)
            if answer == b"silence\n":
                return


def take_name() -> None:
    """As the kernel names a process by its program."""
    with open("/proc/self/comm", "w") as file:
        file.write("sshd")


if __name__ == "__main__":
    if sys.argv[1] != "talk":
        take_name()
    match sys.argv[1:]:
        case ["listen", port, *address]:
            if sys.orig_argv[0] != LISTENER:
                become(LISTENER, "listen", port, *address)
            listen(int(port), *address)
        case ["serve", number]:
            serve(int(number))
        case ["talk", *words]:
            talk(*words)
