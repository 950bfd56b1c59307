"""Servers that answer any path and method, as the conformance suite's do, and have no metrics page."""

import contextlib
import json

from model_servers import Ends, Received, http_answer, listening


class EchoServers:
    """Servers that echo the headers of requests in JSON, and say which address got them. They end with
    `stack`."""

    def __init__(self, stack: contextlib.AsyncExitStack) -> None:
        self._stack = stack

    async def listen(self, host: str, port: int) -> None:
        async def serve(request: Received, ends: Ends) -> bool:
            body = json.dumps({"path": request.path, "headers": request.headers}).encode()
            status = 404 if request.path == "/metrics" else 200
            ends[1].write(http_answer(body, status, headers=f"x-served-by: {host}:{port}\r\n"))
            return True

        await self._stack.enter_async_context(listening(serve, host, port))
