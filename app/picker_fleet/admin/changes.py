"""Operators' fleet-wide changes. `FleetControls` writes each change to the shared state with its operator;
`add_routes` adds the calls to the API.
"""

import asyncio
import json
import logging
import re
import time
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import APIRouter, HTTPException, Path, Request
from starlette.requests import ClientDisconnect

from picker_fleet.admin import models
from picker_fleet.admin.protection import Deadlines, Refused, address_of, faults, within
from picker_fleet.domain.config import Settings
from picker_fleet.domain.errors import ConfigError, RequestError, StateUnavailable
from picker_fleet.domain.units import without_secrets
from picker_fleet.fleet import live_config
from picker_fleet.fleet.heartbeat import Membership
from picker_fleet.state.store import Store
from picker_fleet.telemetry.logs import AUDIT

_MAX_ATTEMPTS = 3
_MAX_BODY_BYTES = 64 * 1024
_MOST_DETAIL = 4000  # maximum characters that a change's record keeps; two nodes of a tenant fit
_NOTE_S = 0.5
_SECRET = "(set)"
_SECRET_KEYS = re.compile(r"(.*_)?(token|password|secret)")
_PATCH: dict[str, Any] = {
    "fair_request_queue": {"total_capacity": 2000, "ordering": None},
    "weights": {"gold": 3.0},
}
_T = TypeVar("_T")
_log = logging.getLogger(AUDIT)

RequestId = Annotated[str, Path(description="its `x-request-id`", examples=["4f1d-9c"])]
Address = Annotated[
    str, Path(description="the endpoint's `ip:port`, IPv6 in brackets", examples=["10.0.0.1:8000"])
]


def json_body(example: Mapping[str, Any]) -> dict[str, Any]:
    """The OpenAPI description of a call whose body is a JSON object."""
    content = {"application/json": {"schema": {"type": "object"}, "example": example}}
    return {"requestBody": {"required": True, "content": content}}


class FleetControls:
    """Reads the fleet's configuration and makes fleet-wide changes. Each method raises StateFault if Redis
    does not answer or refuses the call."""

    def __init__(self, store: Store, membership: Membership, settings: Settings) -> None:
        self._store = store
        self._membership = membership
        self._settings = settings
        self._changing = asyncio.Lock()

    async def config(self) -> models.Config:
        tuned = await self._store.live_config()
        settings, weights = self._settings, {}
        try:
            effective = live_config.applied(self._settings, tuned.changes)
            settings, weights = effective.settings, dict(effective.weights)
        except ConfigError:
            pass  # the live changes do not fit this replica's configuration; `changes` lists them
        return models.Config(
            config=_without_secrets(settings.model_dump(mode="json")),
            weights=weights,
            changes=live_config.nested(tuned.changes),
            paused=bool(tuned.overrides.get("paused")),
            tuned_version=tuned.version,
            live=list(live_config.LIVE),
        )

    async def change(self, patch: Mapping[str, Any]) -> models.Config:
        """Apply `patch`, a partial settings tree (null reverts a change); return the new configuration.

        Raises:
            ConfigError: a key cannot change live, or the new configuration is invalid; nothing has changed.
        """
        settings = self._settings
        changes = live_config.flattened(
            patch, settings.fair_request_queue.band_weights, live_config.scorers_of(settings)
        )
        async with self._changing:
            for _ in range(_MAX_ATTEMPTS):
                tuned = await self._store.live_config()
                wanted = live_config.overrides(self._settings, live_config.merged(tuned.changes, changes))
                version = await self._tune(live_config.replacing(tuned.overrides, wanted), changes)
                if int(version) == int(tuned.version or 0) + 1:
                    break
                # Another replica made a change since this replica read the changes. Redis now stores both
                # changes: compute the overrides again from both.
                changes = {}
        return await self.config()

    async def noted(self, request: Request, limit_s: float, change: Awaitable[_T]) -> _T:
        """Make a change within `limit_s`; record it and its operator in the log and in `changes`. A refused
        change is not recorded. If Redis does not reply, the recorded outcome is `unknown`.
        """
        outcome = "unknown"
        try:
            made = await within(limit_s, change)
            outcome = "made"
        except (HTTPException, Refused, ConfigError):
            outcome = ""
            raise
        finally:
            if outcome:
                await self._note(request, outcome)
        return made

    async def _note(self, request: Request, outcome: str) -> None:
        caller, address = request.state.caller, address_of(request)
        detail = getattr(request.state, "detail", "")[:_MOST_DETAIL]
        what = f"{request.method} {request.scope['path']}"
        _log.warning(
            "change by operator %s from %s: %a, body %a, outcome %s", caller, address, what, detail, outcome
        )
        change = models.Change(
            at=time.time(), by=caller, address=address, change=what, detail=detail, outcome=outcome
        )
        with suppress(RequestError, TimeoutError):  # if Redis fails, the log still has the change
            async with asyncio.timeout(_NOTE_S):
                await self._store.note_change(change.model_dump_json())

    async def changes(self) -> models.Changes:
        """The changes that operators made, newest first; Redis keeps the last 200."""
        noted = await self._store.operator_changes()
        return models.Changes(changes=[models.Change.model_validate_json(each) for each in noted])

    async def pause(self, paused: bool) -> models.Dispatch:
        version = await self._tune({"paused": 1 if paused else None}, {})
        return models.Dispatch(paused=paused, tuned_version=version)

    async def evict(self, request_id: str) -> models.Eviction:
        """Take a request out of the queue. Raises Refused: 404 if unknown, 409 if no longer in the queue."""
        result = await self._store.evict(request_id)
        if result == "running":
            raise Refused(409, "request_running", "the request has already left the queue")
        if result == "unknown":
            raise Refused(404, "unknown_request", "no such request waits")
        return models.Eviction(id=request_id)

    async def drain(self, address: str, on: bool) -> models.Drained:
        """Drain an endpoint if `on`, else end its drain. Raises Refused (404) for an unknown endpoint."""
        marked = await self._store.mark_endpoint(address, "drained", on)
        self._membership.heartbeat_now()
        if marked != "marked":
            raise Refused(404, "unknown_endpoint", f"no endpoint {address}")
        return models.Drained(address=address, drained=on)

    async def _tune(self, overrides: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
        version = await self._store.set_live_config(overrides, changes)
        if not version:
            raise StateUnavailable("the pool is not known yet: no replica has published its settings")
        self._membership.heartbeat_now()
        return version


def _without_secrets(tree: Any, key: str = "") -> Any:
    """The settings `tree` with masked secrets: values of secret keys, and credentials and queries in URLs."""
    if isinstance(tree, dict):
        return {name: _without_secrets(each, name) for name, each in tree.items()}
    if isinstance(tree, list):
        return [_without_secrets(each, key) for each in tree]
    if isinstance(tree, str):
        return _SECRET if _SECRET_KEYS.fullmatch(key) else without_secrets(tree)
    return tree


def add_routes(
    reading: APIRouter, changing: APIRouter, controls: FleetControls, deadlines: Deadlines
) -> None:
    """Add the calls that read the configuration and the list of changes to `reading`, and the calls that
    change the fleet to `changing`."""
    limit_s = deadlines.change_s

    @reading.get("/config", summary="The configuration in force")
    async def config() -> models.Config:
        """The configuration in force, and the live changes that it includes."""
        return await within(limit_s, controls.config())

    @reading.get("/changes", summary="Who changed what")
    async def listed() -> models.Changes:
        """The changes that operators have made, the newest first; the shared state keeps the last 200."""
        return await within(limit_s, controls.changes())

    @changing.patch(
        "/config",
        summary="Change the configuration, fleet-wide",
        responses=faults(400, 408, 413, 422),
        openapi_extra=json_body(_PATCH),
    )
    async def change(request: Request) -> models.Config:
        """Change bounds, capacities, policies or weights for the whole fleet, while requests wait.

        The body is a partial settings tree; null reverts a change. All of the body takes effect, or nothing.
        """
        patch = await read_object(request, deadlines.body_s)
        return await controls.noted(request, limit_s, controls.change(patch))

    @changing.post("/pause", summary="Stop dispatching")
    async def pause(request: Request) -> models.Dispatch:
        """Stop dispatching: arrivals wait or are refused, running requests finish."""
        return await controls.noted(request, limit_s, controls.pause(True))

    @changing.post("/resume", summary="Continue dispatching")
    async def resume(request: Request) -> models.Dispatch:
        """Resume dispatching requests from the queue."""
        return await controls.noted(request, limit_s, controls.pause(False))

    @changing.post(
        "/requests/{request_id:path}/evict",
        summary="Take a request out of the queue",
        responses=faults(404, 409),
    )
    async def evict(request: Request, request_id: RequestId) -> models.Eviction:
        """Take a request out of the queue; its client is answered at once."""
        return await controls.noted(request, limit_s, controls.evict(request_id))

    @changing.post("/endpoints/{address}/drain", summary="Drain an endpoint", responses=faults(404))
    async def drain(request: Request, address: Address) -> models.Drained:
        """Send no new requests to an endpoint; requests that run there finish."""
        return await controls.noted(request, limit_s, controls.drain(address, True))

    @changing.post("/endpoints/{address}/undrain", summary="Undrain an endpoint", responses=faults(404))
    async def undrain(request: Request, address: Address) -> models.Drained:
        """End the drain of an endpoint: send new requests to it again."""
        return await controls.noted(request, limit_s, controls.drain(address, False))


async def read_object(request: Request, limit_s: float) -> dict[str, Any]:
    """The JSON object in the body, also kept as `request.state.detail`. HTTPException: the body is invalid
    (400), slow (408), or over 64 KiB (413)."""
    body = bytearray()
    try:
        async with asyncio.timeout(limit_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > _MAX_BODY_BYTES:
                    raise HTTPException(413, f"the body is larger than {_MAX_BODY_BYTES} bytes")
    except ClientDisconnect:
        raise HTTPException(400, "the body was cut off") from None
    except TimeoutError:
        raise HTTPException(408, f"the body did not come within {limit_s:g} s") from None
    try:
        orjson.loads(body)  # refuses NaN and lone surrogates, which Python's JSON reader accepts
        patch = json.loads(body, object_pairs_hook=_without_repeats)
        request.state.detail = orjson.dumps(patch).decode()
    except (ValueError, TypeError, RecursionError) as fault:
        raise HTTPException(400, f"the body is not JSON that can be read: {fault}") from None
    if not isinstance(patch, dict):
        raise HTTPException(400, "the body must be a JSON object of sections")
    return patch


def _without_repeats(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of a JSON object's key-value pairs. Raises ValueError if the object repeats a key."""
    found = dict(members)
    if len(found) < len(members):
        raise ValueError("a key is given twice")
    return found
