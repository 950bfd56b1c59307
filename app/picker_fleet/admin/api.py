"""The HTTP API of one replica: health, metrics, the fleet's shared state, changes to it, and the dashboard.

`create` builds the app from its parts; serve.py runs the app on the admin port (server.py). If a replica
serves several pools, each has the same API and dashboard below `/pools/NAME`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Path, Query, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import AfterValidator, BaseModel

from picker_fleet import version
from picker_fleet.admin import changes, documents, models, tenants, usage
from picker_fleet.admin.changes import FleetControls, RequestId
from picker_fleet.admin.documents import MAX_METRICS_AGE_S, MetricsText
from picker_fleet.admin.events import Events, EventStream
from picker_fleet.admin.examples import HEALTHY
from picker_fleet.admin.protection import (
    MAX_ROWS,
    PROBLEM,
    ROWS,
    Access,
    Deadlines,
    Protection,
    RateLimit,
    Refused,
    Responses,
    Tokens,
    add_problem_documents,
    address_of,
    faults,
    within,
)
from picker_fleet.admin.tenants import TenantTree
from picker_fleet.admin.usage import UsageExport
from picker_fleet.admin.views import FleetView
from picker_fleet.domain.config import Settings
from picker_fleet.domain.sections import Role
from picker_fleet.telemetry.metrics import Metrics

MAX_LIMIT = 1000
_HEALTH_RATE = 100.0  # health calls a second from one address; the limit of other calls is separate
_ANY_FAULT: Responses = {"default": {**PROBLEM, "description": "a fault (application/problem+json)"}}
_UNREADY_EXAMPLE = {**HEALTHY, "status": "unready", "components": {"redis": "no answer", "grpc": "ok"}}
_UNREADY: Responses = {
    503: {
        "model": models.Health,
        "description": "the replica must get no traffic; `components` says why",
        "content": {"application/json": {"example": _UNREADY_EXAMPLE}},
    }
}


def _text(kind: str, description: str, example: str) -> dict[str, Any]:
    """OpenAPI description of a response that is not JSON."""
    return {"description": description, "content": {kind: {"schema": {"type": "string"}, "example": example}}}


_METRICS: Responses = {
    200: _text(
        "text/plain",
        "the Prometheus text format",
        "# HELP epp_stock_level Requests or tokens in flight, fleet-wide.\n"
        "# TYPE epp_stock_level gauge\nepp_stock_level 7.0\n",
    )
}
_EVENTS: Responses = {
    200: _text(
        "text/event-stream",
        "Server-sent events: `snapshot` (the state, 50 flows and workloads, endpoints and"
        " replicas), `decisions` (while the decision log is on) and `unavailable`, each second.",
        'event: snapshot\ndata: {"at": 1767225600.5, "flows": [], "flows_total": 0}\n\n',
    ),
    503: {**PROBLEM, "description": "`too_many_listeners`: on this replica, or from the client's address"},
}
_UNREACHABLE: Responses = {
    503: {**PROBLEM, "description": "`state_unavailable`: the shared state does not answer"}
}
_PAGED: Responses = {
    400: {**PROBLEM, "description": "`bad_cursor`"},
    422: {**PROBLEM, "description": "`bad_limit`, `bad_band`: `detail` names the valid values"},
    **_UNREACHABLE,
}
_UNKNOWN: Responses = {404: {**PROBLEM, "description": "the object that the path names is unknown"}}

_Limit = Annotated[
    int,
    Query(ge=1, le=MAX_LIMIT, description=f"rows wanted; a page has at most {MAX_ROWS}", examples=[100]),
    AfterValidator(lambda wanted: min(wanted, MAX_ROWS)),
]
_OnlyBand = Annotated[
    str | None, Query(description="only this band: its name, or its priority", examples=["Default"])
]
_OnlyFlow = Annotated[str | None, Query(description="only this flow", examples=["gold"])]
_FlowName = Annotated[str, Path(description="the flow's name: a fairness id, or a model", examples=["gold"])]
_WorkloadId = Annotated[str, Path(description="the workload's id", examples=["chat"])]


@dataclass(frozen=True, slots=True)
class OperatedPool:
    """One pool's views, controls, events and metrics, for operators."""

    name: str
    view: FleetView
    controls: FleetControls
    events: Events
    metrics: Metrics
    tenants: TenantTree
    usage: UsageExport


def create(
    pools: Sequence[OperatedPool],
    settings: Settings,
    *,
    deadlines: Deadlines = Deadlines(),  # noqa: B008 - immutable
    rate_limit: Callable[[float], RateLimit] = RateLimit,
    full: Callable[[], str] = str,
) -> FastAPI:
    """The API of a replica that serves `pools`; the first pool is also served at `/`. `full()` returns the
    reason why the gRPC port accepts no more streams, or ''.

    Raises:
        StartupError: a file of `admin.tokens` has no token.
    """
    names = [pool.name for pool in pools]
    tokens = Tokens(settings.admin)
    app = _app(f"One replica of pool {', '.join(names)}.")
    app.add_middleware(
        Protection,
        hosts=settings.admin.hosts,
        calls=rate_limit(settings.admin.rate),
        health=rate_limit(_HEALTH_RATE),
    )
    _add_health(app, pools, full)
    _add_metrics(app, MetricsText([pool.metrics for pool in pools]))
    _add_pool(app, pools[0], pools, tokens, deadlines)
    if len(pools) > 1:
        for pool in pools:
            own = _app(f"Pool {pool.name} of one replica.")
            _add_pool(own, pool, pools, tokens, deadlines)
            app.mount(f"/pools/{pool.name}", own)

        @app.get("/pools/{name}/{path:path}", include_in_schema=False)
        async def unknown_pool(name: str, path: str) -> Response:
            raise Refused(404, "unknown_pool", f"this replica serves {', '.join(names)}")

    return app


def _app(summary: str) -> FastAPI:
    app = FastAPI(
        title="Picker Fleet",
        summary=summary,
        version=version(),
        responses=_ANY_FAULT,
        openapi_url=None,  # FastAPI's API page loads scripts from a CDN; documents.py serves another API page
    )
    add_problem_documents(app)
    return app


def _add_pool(
    app: FastAPI,
    pool: OperatedPool,
    pools: Sequence[OperatedPool],
    tokens: Tokens,
    deadlines: Deadlines,
) -> None:
    """Add the routes for `pool`, and the route that lists all `pools`."""

    def group(tag: str, responses: Responses, role: Role = "viewer") -> APIRouter:
        return APIRouter(
            prefix="/api/v1",
            tags=[tag],
            responses={**_ANY_FAULT, **faults(401, 429), **responses},
            dependencies=[Depends(Access(tokens, role))],
        )

    state, stream, config = group("state", _UNREACHABLE), group("state", {}), group("config", faults(503))
    changing = group("changes", faults(403, 503), "operator")
    _add_views(state, pool.view, deadlines)
    usage.add_routes(state, pool.usage, pool.tenants, deadlines)
    _add_list_of_pools(stream, pools)
    _add_events(stream, pool.events)
    changes.add_routes(config, changing, pool.controls, deadlines)
    tenants.add_routes(state, changing, pool.tenants, pool.controls, deadlines)
    for router in (state, stream, config, changing):
        # `include_router` would rebuild each route and its models, at startup and at the first call.
        app.router.routes.extend(router.routes)
    documents.add_dashboard(app)
    documents.add_api_description(app)


def _add_health(app: FastAPI, pools: Sequence[OperatedPool], full: Callable[[], str]) -> None:
    view = pools[0].view

    def health() -> tuple[bool, dict[str, str]]:
        """Whether all pools are ready, and each component's state by name (of several pools: POOL/NAME)."""
        fault = full()
        found = {pool.name: pool.view.ready() for pool in pools}
        components = {
            component if len(pools) == 1 else f"{name}.{component}": state
            for name, (_, of_pool) in found.items()
            for component, state in of_pool.items()
        }
        return not fault and all(ready for ready, _ in found.values()), {**components, "grpc": fault or "ok"}

    @app.get("/healthz", tags=["health"], summary="Is the process alive?")
    async def healthz() -> models.Health:
        """Whether the process is alive: status 200 while its event loop runs, even if a component failed."""
        ready, components = health()
        status = "ok" if ready and set(components.values()) <= {"ok"} else "degraded"
        return view.health(status, components)

    @app.get("/readyz", tags=["health"], summary="Should this replica get traffic?", responses=_UNREADY)
    async def readyz(response: Response) -> models.Health:
        """Whether this replica should get traffic (status 200) or not (503), with each component's fault."""
        ready, components = health()
        response.status_code = 200 if ready else 503
        return view.health("ok" if ready else "unready", components)


def _add_metrics(app: FastAPI, text: MetricsText) -> None:
    @app.get("/metrics", tags=["metrics"], summary="Metrics", response_class=Response, responses=_METRICS)
    async def read(request: Request) -> Response:
        """The metrics as Prometheus text, rendered at most once a second, the same text for all readers."""
        content = await within(2 * MAX_METRICS_AGE_S, text.read(address_of(request)))
        return Response(content, headers={"content-type": CONTENT_TYPE_LATEST})


def _add_views(routes: APIRouter, view: FleetView, deadlines: Deadlines) -> None:
    limit_s = deadlines.read_s

    @routes.get("/state", summary="The state of the fleet")
    async def state() -> models.State:
        """The pool's state: stock, bounds, queue length by band, ready endpoints, virtual times, replicas."""
        return await within(limit_s, view.state())

    @routes.get("/endpoints", summary="Endpoints")
    async def endpoints() -> list[models.Endpoint]:
        """Every endpoint with status, requests in flight, and values from the endpoint's metrics page."""
        return await within(limit_s, view.endpoints())

    @routes.get("/replicas", summary="Replicas")
    async def replicas() -> models.Replicas:
        """Every known replica, live replicas first."""
        return await within(limit_s, view.replicas())

    @routes.get("/flows", summary="Flows that wait", response_model=models.Flows, responses=_PAGED)
    async def flows(limit: _Limit = ROWS, cursor: models.Cursor = None, band: _OnlyBand = None) -> Response:
        """Flows with waiting requests in the order in which the queue serves them, then flows at their limit.

        Start tags grow while flows are served, so a flow may appear on two pages, but no flow is left out.
        """
        return _json(await within(limit_s, view.flows(limit, cursor, band)))

    @routes.get("/flows/{flow:path}", summary="One flow", responses=_UNKNOWN)
    async def flow(flow: _FlowName) -> models.FlowDetail:
        """One flow; its name may contain any character, even `/`."""
        return await within(limit_s, view.flow(flow))

    @routes.get("/queue", summary="Requests that wait", response_model=models.Queue, responses=_PAGED)
    async def queue(
        limit: _Limit = ROWS, cursor: models.Cursor = None, band: _OnlyBand = None, flow: _OnlyFlow = None
    ) -> Response:
        """Waiting requests in the predicted dispatch order; `order` describes that order and its limits."""
        return _json(await within(limit_s, view.queue(limit, cursor, band, flow)))

    @routes.get("/inflight", summary="Requests in flight", response_model=models.Inflight, responses=_PAGED)
    async def inflight(limit: _Limit = ROWS, cursor: models.Cursor = None) -> Response:
        """Requests in flight, in the order in which their leases end."""
        return _json(await within(limit_s, view.in_flight(limit, cursor)))

    @routes.get("/workloads", summary="Workloads", response_model=models.Workloads, responses=_PAGED)
    async def workloads(limit: _Limit = ROWS, cursor: models.Cursor = None) -> Response:
        """Known workloads, unordered; workloads that come or go between two pages may be missing."""
        return _json(await within(limit_s, view.workloads(limit, cursor)))

    @routes.get("/workloads/{workload_id:path}", summary="One workload", responses=_UNKNOWN)
    async def workload(workload_id: _WorkloadId) -> models.Workload:
        """One workload; its id may contain any character."""
        return await within(limit_s, view.workload(workload_id))

    @routes.get("/requests/{request_id:path}", summary="Where a request is, and why", responses=_UNKNOWN)
    async def request(request_id: RequestId) -> models.RequestStatus:
        """Where a request is and why; the replica that placed the request also explains the endpoint."""
        return await within(limit_s, view.request(request_id))


def _add_list_of_pools(routes: APIRouter, pools: Sequence[OperatedPool]) -> None:
    @routes.get("/pools", summary="The pools of this replica")
    async def list_of_pools() -> models.Pools:
        """The pools of this replica, the default pool first, with the paths of their dashboards."""
        return models.Pools(
            pools=[
                models.Pool(
                    name=pool.name,
                    default=pool is pools[0],
                    ready=pool.view.ready()[0],
                    path="/" if len(pools) == 1 else f"/pools/{pool.name}/",
                )
                for pool in pools
            ]
        )


def _add_events(routes: APIRouter, events: Events) -> None:
    @routes.get("/events", summary="Snapshots, each second", response_class=Response, responses=_EVENTS)
    async def stream(request: Request) -> EventStream:
        """A stream of snapshots and of new decisions, until the client disconnects."""
        listener = events.join(address_of(request))
        if listener is None:
            detail = "this replica takes no more listeners, or no more from this address; ask another replica"
            raise Refused(503, "too_many_listeners", detail)
        return EventStream(events, listener, request.state.may_go_on)


def _json(page: BaseModel) -> Response:
    """Serialise `page` without FastAPI, which would validate 200 rows again and so delay decisions."""
    return Response(page.model_dump_json(), media_type="application/json")
