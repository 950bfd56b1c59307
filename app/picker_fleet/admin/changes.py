"""The routes that change the fleet, and the configuration they change."""

import asyncio
from typing import Annotated, Any

import orjson
from fastapi import Depends, HTTPException, Path, Request
from starlette.requests import ClientDisconnect

from picker_fleet.admin.calls import Calls
from picker_fleet.admin.guard import Guard
from picker_fleet.admin.models import Config, Dispatch, Drained, Eviction, Problem
from picker_fleet.admin.problems import Refused, in_time
from picker_fleet.admin.reading import OneRequest
from picker_fleet.admin.view import Controls

_CHANGE_S = 3.0  # a change is a few calls of the shared state
_BODY_S = 5.0
_MOST_BODY_BYTES = 64 * 1024
_PATCH_BODY = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {"type": "object"},
            "example": {
                "fair_request_queue": {"total_capacity": 2000, "ordering": None},
                "weights": {"gold": 3.0},
            },
        }
    },
}

Address = Annotated[
    str, Path(description="the endpoint's `ip:port`, IPv6 in brackets", examples=["10.0.0.1:8000"])
]


def add(calls: Calls, controls: Controls, guard: Guard) -> None:
    """Add the routes to `calls`; those that change something ask `guard` first."""
    reading = calls.group("config", {503: {"model": Problem}})
    changing = calls.group(
        "changes", {status: {"model": Problem} for status in (401, 403, 503)}, [Depends(guard)]
    )

    @reading.get("/config", summary="The configuration in force")
    async def config() -> Config:
        """The configuration in force, and the live changes in it."""
        async with in_time(_CHANGE_S):
            return Config.model_validate(await controls.config())

    @changing.patch(
        "/config",
        summary="Change the configuration, fleet-wide",
        responses={status: {"model": Problem} for status in (400, 408, 413, 422)},
        openapi_extra={"requestBody": _PATCH_BODY},
    )
    async def change(request: Request) -> Config:
        """Change bounds, capacities, policies or weights for the whole fleet, while requests wait.

        The body is a partial settings tree; null takes a change back. All of it takes effect, or nothing.
        """
        patch = await _read(request)
        async with in_time(_CHANGE_S):
            return Config.model_validate(await controls.change(patch))

    @changing.post("/pause", summary="Stop dispatching")
    async def pause() -> Dispatch:
        """Stop dispatching: arrivals wait or are refused, what runs goes on."""
        async with in_time(_CHANGE_S):
            return Dispatch.model_validate(await controls.pause(True))

    @changing.post("/resume", summary="Go on dispatching")
    async def resume() -> Dispatch:
        """Let requests pass and be served again, within the bounds."""
        async with in_time(_CHANGE_S):
            return Dispatch.model_validate(await controls.pause(False))

    @changing.post(
        "/requests/{request_id:path}/evict",
        summary="Take a request out of the queue",
        responses={status: {"model": Problem} for status in (404, 409)},
    )
    async def evict(request_id: OneRequest) -> Eviction:
        """Take a request out of the queue; its client is answered at once."""
        async with in_time(_CHANGE_S):
            result = await controls.evict(request_id)
        if result == "running":
            raise Refused(409, "request_running", "the request has left the queue already")
        if result != "evicted":
            raise Refused(404, "unknown_request", "no such request waits")
        return Eviction(id=request_id)

    @changing.post(
        "/endpoints/{address}/drain", summary="Drain an endpoint", responses={404: {"model": Problem}}
    )
    async def drain(address: Address) -> Drained:
        """Send nothing new to an endpoint; what runs there finishes."""
        return await _drain(address, True)

    @changing.post(
        "/endpoints/{address}/undrain", summary="Undrain an endpoint", responses={404: {"model": Problem}}
    )
    async def undrain(address: Address) -> Drained:
        """Let an endpoint have requests again."""
        return await _drain(address, False)

    async def _drain(address: str, on: bool) -> Drained:
        async with in_time(_CHANGE_S):
            if not await controls.drain(address, on):
                raise Refused(404, "unknown_endpoint", f"no endpoint {address}")
        return Drained(address=address, drained=on)

    calls.add(reading)
    calls.add(changing)


async def _read(request: Request) -> dict[str, Any]:
    """The JSON object in the body, of at most 64 KiB; HTTPException 400, 408 or 413 without one."""
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > _MOST_BODY_BYTES:
                    raise HTTPException(413, f"the body is larger than {_MOST_BODY_BYTES} bytes")
    except ClientDisconnect:
        raise HTTPException(400, "the body was cut off") from None
    except TimeoutError:
        raise HTTPException(408, f"the body did not come within {_BODY_S:g} s") from None
    try:
        patch = orjson.loads(body)
    except orjson.JSONDecodeError as fault:
        raise HTTPException(400, f"the body is not JSON: {fault}") from None
    if not isinstance(patch, dict):
        raise HTTPException(400, "the body must be a JSON object of sections")
    return patch
