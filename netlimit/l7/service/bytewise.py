"""Envoy's question as it comes: what a client has sent need be no UTF-8, and `string` fields refuse what is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from netlimit.l7.service.protocol import service_pb2

MOST_FIELDS = 2000
"""Fields of a question at most, at all levels. A configuration decides how many there are, and clients how long they
are; a million of them would keep everybody else waiting for seconds."""
_Levels = Mapping[int, "_Levels"]
_LEVELS: _Levels = {2: {1: {}, 2: {}, 3: {}}}
"""The fields that are messages: descriptors, and their entries, limit, and hits."""
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
_QUESTION = "envoy.service.ratelimit.v3.RateLimitRequest"


def _make_class() -> type[Message]:
    """The class of questions whose texts are bytes: the same on the wire."""
    pool, known = DescriptorPool(), set[str]()

    def add(file: Any) -> None:
        if file.name in known:
            return
        known.add(file.name)
        for needed in file.dependencies:
            add(needed)
        copied = FileDescriptorProto()
        file.CopyToProto(copied)
        messages = [*copied.message_type]
        for message in messages:
            messages += message.nested_type
            for field in message.field:
                if field.type == FieldDescriptorProto.TYPE_STRING:
                    field.type = FieldDescriptorProto.TYPE_BYTES
        pool.Add(copied)

    add(service_pb2.DESCRIPTOR)
    return GetMessageClass(pool.FindMessageTypeByName(_QUESTION))


_Question = _make_class()


class TooMany(ValueError):
    """A message has more fields than anybody needs."""


def parse_question(data: bytes) -> Any:
    """A RateLimitRequest whose texts are bytes; None for what is no such message. Raises TooMany."""
    if len(data) > 2 * MOST_FIELDS:  # a field has two bytes at least
        _count_fields(memoryview(data), _LEVELS, 0)
    try:
        return _Question.FromString(data)
    except DecodeError:
        return None


def _count_fields(data: memoryview, levels: _Levels, before: int) -> int:
    """How many fields there are, with so many `before`. What is no message is left to the parser. Raises TooMany."""
    at = 0
    while at < len(data):
        before += 1
        if before > MOST_FIELDS:
            raise TooMany
        tag, at = _read_varint(data, at)
        kind, number = tag & 7, tag >> 3
        length, at = _read_varint(data, at) if kind in (_VARINT, _BYTES) else (0, at)
        if kind == _BYTES:
            if number in levels:
                before = _count_fields(data[at : at + length], levels[number], before)
            at += length
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            at += 8 if kind == _EIGHT_BYTES else 4
        elif kind != _VARINT:
            return before
    return before


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """A number, and where what follows begins (protocol buffers, encoding)."""
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            break
    return value, at
