"""Servers that, like the conformance suite's, answer every path and method and have no metrics page."""

import contextlib
import json

from model_servers import Ends, Received, http_answer, listening


class EchoServers:
    """HTTP servers that return each request's path and headers as JSON, and their address in a header. The
    servers stop when `stack` closes."""

    def __init__(self, stack: contextlib.AsyncExitStack) -> None:
        self._stack = stack

    async def listen(self, host: str, port: int) -> None:
        async def serve(request: Received, ends: Ends) -> bool:
            body = json.dumps({"path": request.path, "headers": request.headers}).encode()
            status = 404 if request.path == "/metrics" else 200
            ends[1].write(http_answer(body, status, headers=f"x-served-by: {host}:{port}\r\n"))
            return True

        await self._stack.enter_async_context(listening(serve, host, port))
