"""Fields that follow a body (a trailer section, RFC 9112, 7.1.2) are none of its head.

uvicorn, where httptools reads for it, puts them among `scope["headers"]`: into the same list, so that they are there
before an application is called, if all has come at once, and appear there later otherwise. A client behind a proxy that
hands them on (HAProxy) so writes fields that only the proxy is to write. RFC 9110 (6.5.1) forbids to merge what is not
known to be safe there, and nothing that an application is told of a request by such fields is.

The scope does not tell where a field stood, so this is mended where it begins: in the protocol, when a module is
imported that relies on the scope. That is before there are connections. A middleware may be made only when the first
request has come (Starlette without lifespan), and httptools looks up whom to call when a connection begins.
"""

from __future__ import annotations

from typing import Any

_CALLED = ("on_message_begin", "on_header", "on_headers_complete")
"""What httptools calls of a protocol for a head, in this order; `on_header` for what follows the body, too."""


def ignore_trailers() -> None:
    """Have uvicorn ignore them in the whole process, where it is installed with httptools. It may be called again."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return
    end_heads(HttpToolsProtocol)


def end_heads(protocol: type[Any]) -> None:
    """Have a protocol of httptools, and those made of it, take no field for one of the head when that has ended. One
    that is not called so, or does it already, stays as it is."""
    if hasattr(protocol, "netlimit_head_ended") or not all(hasattr(protocol, name) for name in _CALLED):
        return
    begin, take, end = (getattr(protocol, name) for name in _CALLED)

    def on_message_begin(self: Any) -> None:
        self.netlimit_head_ended = False
        begin(self)

    def on_header(self: Any, name: bytes, value: bytes) -> None:
        if not self.netlimit_head_ended:
            take(self, name, value)

    def on_headers_complete(self: Any) -> None:
        self.netlimit_head_ended = True
        end(self)

    protocol.netlimit_head_ended = False
    for name, call in zip(_CALLED, (on_message_begin, on_header, on_headers_complete), strict=True):
        setattr(protocol, name, call)
