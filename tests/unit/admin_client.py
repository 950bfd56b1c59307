"""Serves the admin API to tests on its real server, over a replica whose state the test sets."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import httpx
from fastapi import FastAPI
from scripted_store import ScriptedStore

from picker_fleet.admin.api import OperatedPool, create
from picker_fleet.admin.changes import FleetControls
from picker_fleet.admin.events import Event, Events
from picker_fleet.admin.examples import EXAMPLES
from picker_fleet.admin.fleet_state import FleetStateCache
from picker_fleet.admin.models import Endpoint, Health, State
from picker_fleet.admin.protection import Deadlines, RateLimit
from picker_fleet.admin.server import serving
from picker_fleet.admin.tenants import TenantTree
from picker_fleet.admin.usage import UsageExport
from picker_fleet.admin.views import FleetView
from picker_fleet.domain.config import Settings
from picker_fleet.domain.known_fleet import KnownFleet
from picker_fleet.fleet.heartbeat import Membership
from picker_fleet.state.store import Store
from picker_fleet.telemetry.metrics import Metrics

STATE: dict[str, Any] = EXAMPLES["State"]


class View:
    """A replica whose state and faults the test sets; if `answer` is None, reading the state never ends."""

    def __init__(self, answer: dict[str, Any] | Exception | None = STATE) -> None:
        self.components = {"redis": "ok", "grpc": "ok"}
        self.is_ready = True
        self.answer = answer

    async def state(self) -> State:
        if self.answer is None:
            await asyncio.Event().wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return State.model_validate(self.answer)

    async def endpoints(self) -> list[Endpoint]:
        return [Endpoint(address="10.0.0.1:8000", labels={}, status="ready", in_flight=2)]

    def ready(self) -> tuple[bool, dict[str, str]]:
        return self.is_ready, self.components

    def health(self, status: str, components: dict[str, str]) -> Health:
        return Health(status=status, components=components, replica="r-1", pool="default")


class CountingMembership:
    """A membership that counts the calls of its method `heartbeat_now`."""

    heartbeats = 0

    def heartbeat_now(self) -> None:
        self.heartbeats += 1


class NoEvents:
    async def read(self) -> list[Event]:
        return []

    def recent(self) -> list[Event]:
        return []


def api(
    view: View | None = None,
    store: ScriptedStore | None = None,
    settings: Settings | None = None,
    metrics: Metrics | None = None,
    events: Events | None = None,
    *,
    deadlines: Deadlines | None = None,
    rate_limit: Callable[[float], RateLimit] = RateLimit,
    full: str = "",
    usage: UsageExport | None = None,
) -> FastAPI:
    """The admin API of a replica whose shared state is in `store`."""
    settings = settings or Settings()
    membership = cast(Membership, CountingMembership())
    shared = cast(Store, store or ScriptedStore())
    controls = FleetControls(shared, membership, settings)
    tenants = TenantTree(shared, cast(FleetStateCache, None), KnownFleet(settings), partial(asyncio.sleep, 0))
    shown = cast(FleetView, view or View())
    pool = OperatedPool(
        settings.pool,
        shown,
        controls,
        events or Events(NoEvents()),
        metrics or Metrics(),
        tenants,
        cast(UsageExport, usage),
    )
    deadlines = deadlines or Deadlines()
    return create([pool], settings, deadlines=deadlines, rate_limit=rate_limit, full=lambda: full)


@asynccontextmanager
async def asking(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of the application `app`, which is served on the loopback interface."""
    async with (
        serving(app, "127.0.0.1:0") as address,
        httpx.AsyncClient(base_url=f"http://{address}", verify=False, timeout=10) as client,
    ):
        yield client


def problem(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = response.json()
    assert document["status"] == status
    assert document["title"]
    return document
