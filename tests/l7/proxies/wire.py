"""Requests byte by byte, over HTTP/1.1 and HTTP/2, so that nothing on the way to a proxy tidies them up."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from contextlib import suppress

PATIENCE = 5.0
"""Seconds for an answer; some of these requests get none, and no connection of them is closed."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST, _SETTINGS, _GOAWAY, _CONTINUATION = 0, 1, 3, 4, 7, 9
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_CANCEL = struct.pack(">I", 8)
_FRAME = 16384
_STATIC = {8: 200, 9: 204, 10: 206, 11: 304, 12: 400, 13: 404, 14: 500}
"""The statuses of HPACK's static table."""
_DIGITS = {"00000": "0", "00001": "1", "00010": "2", "011001": "3", "011010": "4", "011011": "5", "011100": "6",
           "011101": "7", "011110": "8", "011111": "9"}  # fmt: skip
"""Digits in HPACK's Huffman code."""

Pairs = Sequence[tuple[bytes, bytes]]


async def send_plainly(place: str, source: str, request: bytes, patience: float = PATIENCE) -> str:
    """Send what is a request over HTTP/1.1, or is none; the status of the last answer, or "closed", or "nothing"."""
    try:
        reader, writer = await connect(place, source)
    except OSError:
        return "closed"
    answer = b""
    try:
        async with asyncio.timeout(patience):
            writer.write(request)
            while part := await reader.read(65536):
                answer += part
    except TimeoutError:
        pass
    except OSError:
        answer = answer or b""
    else:
        if not answer:
            return "closed"
    finally:
        writer.transport.abort()
    lines = [line for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.")]
    return lines[-1].split()[1].decode() if lines else "nothing"


async def send_in_frames(place: str, source: str, fields: Pairs, tunnelled: bytes = b"", trailer: Pairs = ()) -> str:
    """Send the fields of a request over HTTP/2; the status of the answer, or "reset", "closed" or "nothing". What is
    `tunnelled` follows that answer, on a stream that stays open. A `trailer` follows a body of two bytes."""
    reader, writer = await connect(place, source)
    block = _write_block(fields)
    parts = [block[start : start + _FRAME] for start in range(0, len(block), _FRAME)] or [b""]
    frames = _PREFACE + _frame(_SETTINGS, 0, 0, b"")
    for number, part in enumerate(parts):
        flags = (0 if number or tunnelled or trailer else _END_STREAM) | (_END_HEADERS if part is parts[-1] else 0)
        frames += _frame(_CONTINUATION if number else _HEADERS, flags, 1, part)
    if trailer:
        frames += _frame(_DATA, 0, 1, b"{}") + _frame(_HEADERS, _END_STREAM | _END_HEADERS, 1, _write_block(trailer))
    try:
        async with asyncio.timeout(PATIENCE):
            writer.write(frames)
            status = await _read_status(reader, writer)
            if tunnelled:
                writer.write(_frame(_DATA, 0, 1, tunnelled))
                await asyncio.sleep(0.3)
            return status
    except (asyncio.IncompleteReadError, OSError):
        return "closed"
    except TimeoutError:
        return "nothing"
    finally:
        writer.transport.abort()


def write_resets(fields: Pairs, number: int) -> bytes:
    """A connection over HTTP/2 on which so many streams are opened with these fields, and reset at once."""
    return _PREFACE + _frame(_SETTINGS, 0, 0, b"") + _reset(fields, 0, number)


async def reset_in_frames(place: str, source: str, fields: Pairs, batches: int, pause: float) -> None:
    """Open a hundred streams at once over HTTP/2 and reset each at once, again and again after a pause of so many
    seconds; what is answered is read by nobody."""
    reader, writer = await connect(place, source)
    reading = asyncio.create_task(_read_on(reader))
    with suppress(OSError):
        writer.write(_PREFACE + _frame(_SETTINGS, 0, 0, b""))
        for batch in range(batches):
            writer.write(_reset(fields, 100 * batch, 100))
            await asyncio.sleep(pause)
    reading.cancel()
    writer.transport.abort()


def _reset(fields: Pairs, before: int, number: int) -> bytes:
    """So many streams, which come after others on a connection."""
    block = _write_block(fields)
    return b"".join(
        _frame(_HEADERS, _END_STREAM | _END_HEADERS, stream, block) + _frame(_RST, 0, stream, _CANCEL)
        for stream in range(2 * before + 1, 2 * (before + number), 2)
    )


async def _read_on(reader: asyncio.StreamReader) -> None:
    with suppress(OSError):
        while await reader.read(65536):
            pass


async def connect(place: str, source: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection from a certain address."""
    host, _, port = place.rpartition(":")
    return await asyncio.open_connection(host, int(port), local_addr=(source, 0))


async def _read_status(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    while True:
        head = await reader.readexactly(9)
        kind, flags, stream = head[3], head[4], struct.unpack(">I", head[5:])[0]
        payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
        if kind == _SETTINGS and not flags & _ACK:
            with suppress(OSError):
                writer.write(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _GOAWAY or (kind == _RST and stream == 1):
            return "reset"
        elif kind == _HEADERS and stream == 1:
            return _find_status(payload)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _write_block(fields: Pairs) -> bytes:
    return b"".join(b"\0" + _write_text(name) + _write_text(value) for name, value in fields)


def _write_text(text: bytes) -> bytes:
    """A text as it is (RFC 7541, 5.2)."""
    if len(text) < 127:
        return bytes([len(text)]) + text
    length, rest = bytearray([127]), len(text) - 127
    while rest >= 128:
        length.append(rest % 128 + 128)
        rest //= 128
    return bytes([*length, rest]) + text


def _find_status(block: bytes) -> str:
    """The `:status` that stands first in a block of fields."""
    while block[0] & 0xE0 == 0x20:  # the size of the table
        block = block[1:]
    if block[0] & 0x80:
        return str(_STATIC[block[0] & 0x7F])
    name = block[0] & (0x3F if block[0] & 0x40 else 0x0F)
    assert name in _STATIC, block  # with another value
    size = block[1] & 0x7F
    value = block[2 : 2 + size]
    if not block[1] & 0x80:
        return value.decode()
    bits, status = "".join(f"{byte:08b}" for byte in value), ""
    while len(status) < 3:
        code = next(code for code in _DIGITS if bits.startswith(code))
        status, bits = status + _DIGITS[code], bits[len(code) :]
    return status
