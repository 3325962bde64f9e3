"""Envoy's question as it comes: what a client has sent need be no UTF-8, and `string` fields refuse what is none."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from netlimit.l7.service.protocol import service_pb2

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


def parse_question(data: bytes) -> Any:
    """A RateLimitRequest whose texts are bytes; None for what is no such message."""
    try:
        return _Question.FromString(data)
    except DecodeError:
        return None
