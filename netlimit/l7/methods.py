"""What the method of a request means: applications know it in capitals, and run for HEAD what they have for GET.

Every adapter asks here: whoever sends `post`, or HEAD instead of GET, meets the limits of POST and of GET.
"""

from __future__ import annotations

from collections.abc import Sequence

from netlimit.l7.rules import METHOD_KEY, Descriptor, Entry, read_besides_as_get

HEAD = "HEAD"
_OF_HEAD, _OF_GET = Entry(METHOD_KEY, HEAD), Entry(METHOD_KEY, "GET")


read_method = str.upper
"""A method in the form in which it is compared. No function of its own: each request calls it."""


def plain_method(method: bytes) -> str:
    """The same of one that has not been decoded."""
    return read_method(method.decode("utf-8", "replace"))


def find_heads(descriptors: Sequence[Descriptor]) -> list[int]:
    """The places of those that tell HEAD: such a request has the limits of GET as well (`take_for_get`)."""
    found = []
    for place, (entries, _, _, _) in enumerate(descriptors):  # faster than a comprehension where there is none
        if _OF_HEAD in entries:
            found.append(place)
    return found


def take_for_get(descriptor: Descriptor) -> Descriptor:
    """What a descriptor of HEAD tells where that is taken for GET."""
    entries = tuple([_OF_GET if entry == _OF_HEAD else entry for entry in descriptor.entries])
    return descriptor._replace(entries=entries, besides=read_besides_as_get(descriptor.besides))
