"""What is asked of the HTTP service: read up to a limit, and checked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

from netlimit.l7.identity import find_told, plain_client
from netlimit.l7.listening import Message, Receive
from netlimit.l7.rules import CLIENT_KEY, Descriptor, Entry
from netlimit.l7.service.answers import Problem

LARGEST = 64 * 2**10
"""Bytes of a body at most."""
SECONDS = 10.0
"""How long a body may take."""
MOST_DESCRIPTORS = 100
"""Descriptors of one request at most, and entries of one descriptor."""
MOST_HITS = 2**32 - 1
"""The largest weight, as in Envoy's protocol."""
SHORT, REMEMBERED = 512, 4096
"""Bytes of a question that is remembered, since it is likely to be asked again; and how many are."""

_CLOSE = {"Connection": "close"}
_EXAMPLE = '{"domain": "web", "descriptors": [[{"key": "remote_address", "value": "192.0.2.7"}]]}'


class Question(NamedTuple):
    """May so many hits of these descriptors pass? `client` are the addresses that are told as his, where descriptors
    have their blocks."""

    domain: str
    descriptors: tuple[Descriptor, ...]
    hits: int = 1
    client: tuple[str, ...] = ()


async def read_body(receive: Receive) -> bytes:
    """The body of a request. Raises Problem 413 for one that is too large, and 408 for one that comes too slowly."""
    message = await receive()
    body: bytes = message.get("body", b"")
    if message.get("more_body") or message["type"] == "http.disconnect":
        body = await _read_on(receive, message)
    if len(body) > LARGEST:
        raise Problem(413, f"The body is too large: {LARGEST} bytes are the most.")
    return body


async def _read_on(receive: Receive, message: Message) -> bytes:
    """A body that comes in pieces. What is too much is read and dropped, up to four times the limit: who is still
    sending when the connection closes would never see the answer."""
    chunks, size = [message.get("body", b"")], 0
    try:
        async with asyncio.timeout(SECONDS):
            while message.get("more_body") and size <= 4 * LARGEST:
                message = await receive()
                chunk = message.get("body", b"")
                size += len(chunk)
                if size <= LARGEST:
                    chunks.append(chunk)
    except TimeoutError:
        raise Problem(408, f"The body did not come within {SECONDS:g} seconds.", headers=_CLOSE) from None
    if message["type"] == "http.disconnect":
        raise Problem(400, "The body ended before its time.")
    if size > LARGEST:
        raise Problem(413, f"The body is too large: {LARGEST} bytes are the most.", headers=_CLOSE)
    return b"".join(chunks)


def parse_object(body: bytes) -> dict[str, Any]:
    """Read a JSON object. Raises Problem 400 for what is no JSON, and 422 for JSON that is something else."""
    try:
        value = _DECODER.decode(body.decode())
    except UnicodeDecodeError as error:
        raise Problem(400, f"The body cannot be read as JSON: byte {error.start} is not UTF-8.") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise Problem(400, f"The body cannot be read as JSON: {error.msg}, in {where}.") from None
    except RecursionError:
        raise Problem(400, "The body cannot be read as JSON: it is nested too deeply.") from None
    except ValueError as error:
        raise Problem(400, f"The body cannot be read as JSON: {error}") from None
    if type(value) is not dict:
        raise Problem(422, f"The body is not a JSON object, such as {_EXAMPLE}.")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number in JSON.")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def read_question(body: bytes) -> Question:
    """Read `{"domain", "descriptors": [[{"key", "value"}…]…], "hits"}`. Raises Problem 400 or 422."""
    return _read_again(body) if len(body) <= SHORT else _read_question(body)


def _read_question(body: bytes) -> Question:
    asked = parse_object(body)
    try:
        domain, told, hits = asked["domain"], asked["descriptors"], asked.get("hits", 1)
    except KeyError as error:
        (name,) = error.args
        raise Problem(422, f"`{name}` is missing; write for example {_EXAMPLE}.", name) from None
    if len(asked) > 2 + ("hits" in asked):
        unknown = min(asked.keys() - {"domain", "descriptors", "hits"})
        raise Problem(422, f"There is no {unknown[:100]!r} in a question; known are domain, descriptors and hits.")
    if type(domain) is not str or not domain:
        raise Problem(422, "`domain` is the name of the domain whose rules the request is under.", "domain")
    if type(hits) is not int or not 0 <= hits <= MOST_HITS:
        raise Problem(422, f"`hits` is a whole number from 0, which only looks, to {MOST_HITS}.", "hits")
    if type(told) is not list or not 0 < len(told) <= MOST_DESCRIPTORS:
        raise Problem(422, f"`descriptors` is a list of 1 to {MOST_DESCRIPTORS} descriptors.", "descriptors")
    descriptors = tuple([_read_descriptor(index, each) for index, each in enumerate(told)])
    clients = [entry.value for each in descriptors for entry in each.entries if entry.key == CLIENT_KEY]
    if not any(":" in value for value in clients):
        return Question(domain, descriptors, hits)
    return Question(domain, tuple(map(_count_by_block, descriptors)), hits, find_told(clients))


_read_again = lru_cache(REMEMBERED)(_read_question)


def _read_descriptor(index: int, told: object) -> Descriptor:
    if type(told) is not list or not 0 < len(told) <= MOST_DESCRIPTORS:
        place = f"descriptors[{index}]"
        raise Problem(422, f"`{place}` is a list of 1 to {MOST_DESCRIPTORS} entries.", place)
    return Descriptor(tuple([_read_entry(index, number, entry) for number, entry in enumerate(told)]))


def _count_by_block(descriptor: Descriptor) -> Descriptor:
    """The same with an IPv6 client told by his /64, in which he may choose freely."""
    return descriptor._replace(
        entries=tuple(
            Entry(key, plain_client(value.encode(errors="replace")) if key == CLIENT_KEY else value)
            for key, value in descriptor.entries
        )
    )


def _read_entry(index: int, number: int, told: Mapping[str, object]) -> Entry:
    try:
        key, value = told["key"], told.get("value", "")
    except (KeyError, TypeError):
        key = value = None
    if type(key) is str and type(value) is str and key and len(told) <= 2:
        return Entry(key, value)
    place = f"descriptors[{index}][{number}]"
    raise Problem(422, f'`{place}` is an entry with two texts, such as {{"key": "path", "value": "/login"}}.', place)
