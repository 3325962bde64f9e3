"""Two programs for `test_half_sent.py`: one opens connections and sends half a request on each, or many, the other asks
the API again and again, and says how long it has waited."""

from __future__ import annotations

import http.client
import socket
import sys
import time
from contextlib import suppress

HALF = b"GET /api/v1/status HTTP/1.1\r\nHost: gateway\r\nX-Half: "
WHOLE = b"GET /healthz HTTP/1.1\r\nHost: gateway\r\n\r\n"


def flood(host: str, seconds: float, each: int, sources: list[str]) -> None:
    """Hold so many connections from each source; those that are closed are made anew. Every other source asks whole
    requests, one after the other, by each. Prints how many connections were made."""
    says = {source: (HALF, WHOLE)[number % 2] for number, source in enumerate(sources)}
    held: list[tuple[str, socket.socket]] = []
    wanted = [source for _ in range(each) for source in sources]
    made, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        while wanted and time.monotonic() < end:
            source = wanted.pop()
            connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            connection.settimeout(0.5)
            with suppress(OSError):
                connection.bind((source, 0))
                connection.connect((host, 8750))
                connection.sendall(says[source])
                connection.setblocking(False)
                held.append((source, connection))
                made += 1
                continue
            connection.close()
            wanted.append(source)
        kept = []
        for source, connection in held:
            try:
                closed = not connection.recv(65536)
                if not closed and says[source] == WHOLE:
                    connection.send(WHOLE)
            except BlockingIOError:
                closed = False
            except OSError:
                closed = True
            if closed:
                connection.close()
                wanted.append(source)
            else:
                kept.append((source, connection))
        held = kept
    print(made, flush=True)


def ask(host: str, seconds: float, token: str) -> None:
    """Print the longest time that an answer took, and how many there were."""
    longest, answers, end = 0.0, 0, time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.monotonic()
        connection = http.client.HTTPConnection(host, 8750, timeout=10)
        connection.request("GET", "/api/v1/rules?limit=1", headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        answer.read()
        connection.close()
        assert answer.status == 200, answer.status
        longest, answers = max(longest, time.monotonic() - began), answers + 1
        time.sleep(0.1)
    print(longest, answers)


if __name__ == "__main__":
    if sys.argv[1] == "flood":
        flood(sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
    else:
        ask(sys.argv[2], float(sys.argv[3]), sys.argv[4])
