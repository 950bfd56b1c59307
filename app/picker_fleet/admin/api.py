"""The replica's HTTP API: health, metrics, a view of the shared state, and changes to it."""

from typing import Any

from fastapi import Depends, FastAPI, Request, Response

from picker_fleet import version
from picker_fleet.admin import changes, described, docs_page, event_stream, page_routes, problems, reading
from picker_fleet.admin.calls import ANY_FAULT, Calls
from picker_fleet.admin.events import Events
from picker_fleet.admin.guard import Guard
from picker_fleet.admin.hosts import Hosts
from picker_fleet.admin.metrics_page import LONGEST_S, MetricsPage
from picker_fleet.admin.models import HEALTHY, Health
from picker_fleet.admin.rate import Rate
from picker_fleet.admin.view import Controls, Lists, StateView
from picker_fleet.config import Settings
from picker_fleet.telemetry.metrics import PAGE_TYPE, Metrics

_HEALTH_RATE = 100.0  # calls a second from one address, whatever else it asks
_UNREADY: dict[str, Any] = {
    "model": Health,
    "description": "it is to get no traffic; `components` says why",
    "content": {
        "application/json": {
            "example": {**HEALTHY, "status": "unready", "components": {"redis": "no answer", "grpc": "ok"}}
        }
    },
}
_PAGE: dict[str, Any] = {
    "description": "the Prometheus text format",
    "content": {
        "text/plain": {
            "schema": {"type": "string"},
            "example": "# HELP epp_stock_level What is in flight, fleet-wide, in the stock's unit.\n"
            "# TYPE epp_stock_level gauge\nepp_stock_level 7.0\n",
        }
    },
}


def create(
    view: StateView,
    lists: Lists,
    controls: Controls,
    metrics: Metrics,
    settings: Settings,
    events: Events,
) -> FastAPI:
    """The API of one replica over its parts."""
    app = FastAPI(
        title="Picker Fleet",
        summary=f"One replica of pool {settings.pool}.",
        version=version(),
        responses=ANY_FAULT,
        openapi_url=None,  # its page loads scripts from elsewhere; docs_page has ours
    )
    app.add_middleware(Hosts, names=settings.admin.hosts)
    problems.add(app)
    pages = MetricsPage(metrics)
    rate, asked = Rate(settings.admin.rate), [Depends(Rate(_HEALTH_RATE))]

    @app.get("/healthz", tags=["health"], summary="Does the process live?", dependencies=asked)
    async def healthz() -> Health:
        """Whether the process lives: 200 for as long as its event loop turns, whatever its parts do."""
        ready, components = view.ready()
        status = "ok" if ready and set(components.values()) <= {"ok"} else "degraded"
        return Health.model_validate({**view.identity(), "status": status, "components": components})

    @app.get(
        "/readyz",
        tags=["health"],
        summary="Should this replica get traffic?",
        responses={503: _UNREADY},
        dependencies=asked,
    )
    async def readyz(response: Response) -> Health:
        """Whether this replica should get traffic: 200 or 503, with what is wrong by component."""
        ready, components = view.ready()
        response.status_code = 200 if ready else 503
        status = "ok" if ready else "unready"
        return Health.model_validate({**view.identity(), "status": status, "components": components})

    @app.get("/metrics", tags=["metrics"], summary="Metrics", response_class=Response, responses={200: _PAGE})
    async def page(request: Request) -> Response:
        """The Prometheus text page: made once a second at most, the same for all who read it."""
        async with problems.in_time(2 * LONGEST_S):
            text = await pages.read(request.client.host if request.client else "")
        return Response(text, headers={"content-type": PAGE_TYPE})

    calls = Calls(app, rate)
    reading.add(calls, view, lists)
    event_stream.add(calls, events)
    changes.add(calls, controls, Guard(settings.admin.token))
    page_routes.add(app, rate)
    described.add(app)
    docs_page.add(app, rate)
    return app
