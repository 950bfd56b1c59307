"""Dashboards with no fleet behind them: `python -m bench.adminload.standin URL`.

What the replica at URL serves is asked for once and kept; the snapshot it tells is told again each second, as
if it were new. So a browser does the same here as at the fleet, which has nothing to do with it. Prints its
addresses as a line of JSON, and ends with its stdin.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from picker_fleet.admin.events import event
from picker_fleet.admin.server import serving
from picker_tools.local_fleet.network import LOOPBACK

_SERVERS = 3  # a browser opens no more than six connections to one, and each page keeps one
_EVERY_S = 1.0
_DEADLINE_S = 30.0
_SNAPSHOT = "snapshot"


async def _snapshot(fleet: httpx.AsyncClient) -> dict[str, Any]:
    """The first snapshot that the fleet tells."""
    async with asyncio.timeout(_DEADLINE_S), fleet.stream("GET", "/api/v1/events") as told:
        found = False
        async for line in told.aiter_lines():
            if found:
                said: dict[str, Any] = json.loads(line.removeprefix("data: "))
                return said
            found = line == f"event: {_SNAPSHOT}"
    raise RuntimeError("the fleet told no snapshot")


def _made(fleet: httpx.AsyncClient, snapshot: dict[str, Any]) -> FastAPI:
    kept: dict[str, tuple[bytes, str]] = {}
    app = FastAPI(openapi_url=None)

    async def told() -> AsyncIterator[bytes]:
        while True:
            yield event(_SNAPSHOT, {**snapshot, "at": time.time()})
            await asyncio.sleep(_EVERY_S)

    @app.get("/api/v1/events")
    async def events() -> StreamingResponse:
        return StreamingResponse(told(), media_type="text/event-stream")

    @app.get("/{path:path}")
    async def anything(request: Request, path: str) -> Response:
        asked = f"/{path}?{request.url.query}"
        if asked not in kept:
            answer = await fleet.get(asked)
            kept[asked] = answer.content, answer.headers["content-type"]
        body, kind = kept[asked]
        return Response(body, headers={"content-type": kind})

    return app


async def _main(url: str) -> None:
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(
            httpx.AsyncClient(base_url=url, timeout=_DEADLINE_S, trust_env=False)
        )
        app = _made(fleet, await _snapshot(fleet))
        servers = [await stack.enter_async_context(serving(app, f"{LOOPBACK}:0")) for _ in range(_SERVERS)]
        print(json.dumps([f"http://{each}" for each in servers]), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
