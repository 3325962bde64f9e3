"""The least that the same servers can do: an ASGI application that says hello, and a gRPC handler that does nothing."""

from __future__ import annotations

import gc
import socket
from typing import Any

import grpc
import uvicorn
import uvloop

from netlimit.cli.daemons import stay_prompt
from netlimit.l7.service.protocol.service_pb2 import RateLimitRequest, RateLimitResponse
from netlimit.l7.service.rpc import SERVICE

_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/plain"), (b"content-length", b"5")],
}
_BODY = {"type": "http.response.body", "body": b"hello"}


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """Say so, whatever is asked."""
    await send(_START)
    await send(_BODY)


async def do_nothing(request: RateLimitRequest, context: object) -> RateLimitResponse:
    """Answer with nothing."""
    return RateLimitResponse()


def main() -> None:
    """Serve both until it is ended, and print where."""
    stay_prompt()
    uvloop.run(_serve())


def _configure() -> uvicorn.Config:
    """uvicorn as anybody runs it who wants speed."""
    return uvicorn.Config(
        hello,
        loop="none",
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
    )


async def _serve() -> None:
    handler = grpc.unary_unary_rpc_method_handler(
        do_nothing, RateLimitRequest.FromString, RateLimitResponse.SerializeToString
    )
    rpc = grpc.aio.server()
    rpc.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {"ShouldRateLimit": handler})])
    port = rpc.add_insecure_port("127.0.0.1:0")
    await rpc.start()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(f"127.0.0.1:{listening.getsockname()[1]} 127.0.0.1:{port}", flush=True)
        gc.freeze()
        await uvicorn.Server(_configure()).serve([listening])
