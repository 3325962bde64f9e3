"""Bodies of requests: read up to a limit, of a type that is known, as JSON that cannot be read in two ways."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NoReturn

from fastapi import Request

from .problems import Problem

SMALL = 64 * 2**10
"""The most bytes of a body that describes one rule."""
BULK = 64 * 2**20
"""The most bytes of a body that describes many."""
JSON = ("application/json",)
MERGE_PATCH = ("application/merge-patch+json", *JSON)
NDJSON = ("application/x-ndjson", "application/ndjson", "application/jsonl", "application/x-jsonlines")

_BLANK = re.compile(r"[ \t\r\n]*")


class _Ambiguous(ValueError):
    """JSON that readers disagree about."""


async def read_body(request: Request, limit: int, accepted: tuple[str, ...]) -> bytes:
    """Read the body. Raises Problem 415 for another media type and 413 for more than `limit` bytes.

    What is too much is read and dropped up to four times the limit: a client that is still sending when
    the connection closes would never see the answer.
    """
    media_type = find_media_type(request)
    if media_type not in accepted:
        sent = f"is {media_type!r}" if media_type else "has no Content-Type"
        raise Problem(415, f"The body {sent}; send {accepted[0]}.", headers={"Accept": ", ".join(accepted)})
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= limit:
            chunks.append(chunk)
        else:
            chunks.clear()
        if size > 4 * limit:
            break
    if size > limit:
        raise Problem(413, f"The body is too large: at most {limit} bytes are read here.")
    return b"".join(chunks)


def find_media_type(request: Request) -> str:
    """The media type of the body, without parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def parse_object(body: bytes) -> dict[str, object]:
    """Read one JSON object. Raises Problem 400, or 422 for what is JSON but no object."""
    text = decode(body)
    if not text.strip():
        raise Problem(400, "The body is empty; a JSON object is needed.")
    return expect_object(parse_json(text))


def parse_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines of NDJSON that are not blank, each with its number from 1; one at a time, for there may be millions."""
    begin, number = 0, 0
    while begin < len(text):
        number += 1
        end = text.find("\n", begin)
        line = text[begin:] if end < 0 else text[begin:end]
        begin = len(text) if end < 0 else end + 1
        if line.strip():
            yield number, line


def parse_array(text: str) -> Iterator[object]:
    """The items of a JSON array, one at a time: what has been dealt with need not stay in memory.

    Raises Problem 400 where the text stops being JSON.
    """
    escapes = "\\u" in text
    position = _skip_blank(text, 0)
    if text[position : position + 1] != "[":
        _refuse_syntax("A JSON array of rules is needed, or NDJSON with its own Content-Type.")
    position = _skip_blank(text, position + 1)
    number, closed = 0, text[position : position + 1] == "]"
    while not closed:
        number += 1
        try:
            item, position = _DECODER.raw_decode(text, position)
            if escapes:
                _check_text(item)
        except (ValueError, RecursionError) as error:
            _refuse_syntax(f"Item {number}: {_explain(error)}")
        yield item
        position = _skip_blank(text, position)
        closed = text[position : position + 1] == "]"
        if not closed and text[position : position + 1] != ",":
            _refuse_syntax(f"After item {number} the array has neither a comma nor an end.")
        position = position + 1 if closed else _skip_blank(text, position + 1)
    if _skip_blank(text, position + (number == 0)) != len(text):
        _refuse_syntax("There is something after the end of the array.")


def parse_json(text: str) -> object:
    """Read JSON. Raises Problem 400 for what is none or ambiguous, 422 for text that no database keeps."""
    try:
        value: object = _DECODER.decode(text)
        if "\\u" in text:
            _check_text(value)
    except (ValueError, RecursionError) as error:
        _refuse_syntax(_explain(error))
    return value


def expect_object(value: object) -> dict[str, object]:
    """Insist on an object. Raises Problem 422."""
    if not isinstance(value, dict):
        raise Problem(422, 'A rule is a JSON object, such as {"target": "10.1.2.3", "rate": "200 packets/s"}.')
    return value


def decode(body: bytes) -> str:
    """Read UTF-8, with or without a byte order mark. Raises Problem 400."""
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        _refuse_syntax(f"Byte {error.start} is not UTF-8.")


def _refuse_twice(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise _Ambiguous(f"The key {twice!r} is there twice.")
    return members


def _refuse_constant(text: str) -> NoReturn:
    raise _Ambiguous(f"{text} is no number in JSON.")


_DECODER = json.JSONDecoder(object_pairs_hook=_refuse_twice, parse_constant=_refuse_constant)


def _explain(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "It is nested too deeply."
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, in line {error.lineno}, column {error.colno}."
    return str(error) if isinstance(error, _Ambiguous) else "A number in it has too many digits."


def _refuse_syntax(reason: str) -> NoReturn:
    raise Problem(400, f"The body cannot be read as JSON. {reason}")


def _skip_blank(text: str, position: int) -> int:
    match = _BLANK.match(text, position)
    assert match is not None
    return match.end()


def _check_text(value: object) -> None:
    """Refuse what no database keeps. Such characters only come from escapes, so texts without need no look."""
    if isinstance(value, str) and ("\0" in value or not _encodes(value)):
        raise Problem(422, f"The text {value!r} has a character that cannot be kept: null, or half a surrogate pair.")
    if isinstance(value, Mapping):
        for key, member in value.items():
            _check_text(key)
            _check_text(member)
    elif isinstance(value, list):
        for item in value:
            _check_text(item)


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
