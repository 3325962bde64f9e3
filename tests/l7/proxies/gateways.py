"""Applications that nginx speaks to by FastCGI, uwsgi, SCGI or HTTP: each says what key it has got.

Where there are two fields of a name they take the last, as PHP and uWSGI do: a later variable replaces an earlier one.
"""

from __future__ import annotations

import socketserver
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import BinaryIO

VARIABLE = "HTTP_X_API_KEY"
_BEGIN, _END, _PARAMS, _STDIN, _STDOUT = 1, 3, 4, 5, 6
_ANSWER = b"Status: 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\nok"


def read_fastcgi(stream: BinaryIO) -> tuple[Mapping[str, str], int]:
    """The variables of a request, and its number."""
    params, number, kind = b"", 1, _BEGIN
    while kind != _STDIN:
        _, kind, number, length, padding, _ = struct.unpack(">BBHHBB", _read(stream, 8))
        content = _read(stream, length)
        _read(stream, padding)
        params += content if kind == _PARAMS else b""
        if kind == _STDIN and length:
            kind = _BEGIN
    variables, at = {}, 0
    while at < len(params):
        lengths = []
        for _ in range(2):
            size = 4 if params[at] & 0x80 else 1
            lengths.append(int.from_bytes(params[at : at + size]) & 0x7FFFFFFF)
            at += size
        name, value = params[at : at + lengths[0]], params[at + lengths[0] : at + sum(lengths)]
        variables[name.decode()] = value.decode("latin-1")
        at += sum(lengths)
    return variables, number


def read_uwsgi(stream: BinaryIO) -> Mapping[str, str]:
    _, size, _ = struct.unpack("<BHB", _read(stream, 4))
    block, texts, at = _read(stream, size), [], 0
    while at < size:
        (length,) = struct.unpack_from("<H", block, at)
        texts.append(block[at + 2 : at + 2 + length].decode("latin-1"))
        at += 2 + length
    return dict(zip(texts[::2], texts[1::2], strict=True))


def read_scgi(stream: BinaryIO) -> Mapping[str, str]:
    size = b""
    while (digit := _read(stream, 1)) != b":":
        size += digit
    texts = _read(stream, int(size)).decode("latin-1").split("\0")
    return dict(zip(texts[:-1:2], texts[1::2], strict=True))


def read_http(stream: BinaryIO) -> Mapping[str, str]:
    variables = {}
    stream.readline()
    while line := stream.readline().decode("latin-1").strip():
        name, _, value = line.partition(":")
        variables["HTTP_" + name.upper().replace("-", "_")] = value.strip()
    return variables


class Gateway(socketserver.ThreadingTCPServer):
    """An application behind a protocol; `keys` are those that it has got."""

    daemon_threads = True

    def __init__(self, protocol: str) -> None:
        super().__init__(("127.0.0.1", 0), _Serving)
        self.protocol = protocol
        self.keys: list[str | None] = []
        self.place = f"127.0.0.1:{self.server_address[1]}"


class _Serving(socketserver.StreamRequestHandler):
    server: Gateway

    def handle(self) -> None:
        reads = {"uwsgi": read_uwsgi, "scgi": read_scgi, "proxy": read_http}
        answer = _ANSWER
        if self.server.protocol == "fastcgi":
            variables, number = read_fastcgi(self.rfile)
            out = struct.pack(">BBHHBB", 1, _STDOUT, number, len(_ANSWER), 0, 0) + _ANSWER
            answer = out + struct.pack(">BBHHBBIB3x", 1, _END, number, 8, 0, 0, 0, 0)
        else:
            variables = reads[self.server.protocol](self.rfile)
            if self.server.protocol == "proxy":
                answer = _ANSWER.replace(b"Status:", b"HTTP/1.1", 1)
        self.server.keys.append(variables.get(VARIABLE))
        self.wfile.write(answer)


@contextmanager
def serving_by(protocol: str) -> Iterator[Gateway]:
    """An application that nginx reaches by `fastcgi_pass`, `uwsgi_pass`, `scgi_pass` or `proxy_pass`."""
    with Gateway(protocol) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def _read(stream: BinaryIO, size: int) -> bytes:
    found = stream.read(size)
    if len(found) < size:
        raise ConnectionError("nginx has hung up.")
    return found
