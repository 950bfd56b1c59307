"""The routes that show the shared state; they ask nobody's leave, and change nothing."""

from collections.abc import Mapping
from typing import Annotated, Any

import orjson
from fastapi import Path, Query, Response
from pydantic import AfterValidator

from picker_fleet.admin import listed
from picker_fleet.admin.calls import Calls, Responses
from picker_fleet.admin.listed import BandName
from picker_fleet.admin.models import Endpoint, Problem, State
from picker_fleet.admin.problems import Refused, in_time
from picker_fleet.admin.view import Lists, StateView
from picker_fleet.request import Band

MOST_ROWS = 200  # of a page: a longer one would take a replica, and who waits for it, too long
_MOST_WANTED = 1000
_PAGED: Responses = {
    400: {"model": Problem, "description": "`bad_cursor`"},
    422: {"model": Problem, "description": "`bad_limit`, `bad_band`: names what would be valid"},
    503: {"model": Problem, "description": "`state_unavailable`: the shared state does not answer"},
}
_UNREACHABLE: Responses = {503: _PAGED[503]}
_NO_SUCH: Responses = {404: {"model": Problem, "description": "nobody knows it"}}
Limit = Annotated[
    int,
    Query(ge=1, le=_MOST_WANTED, description=f"rows wanted; a page has at most {MOST_ROWS}", examples=[100]),
    AfterValidator(lambda wanted: min(wanted, MOST_ROWS)),
]
Cursor = Annotated[
    str | None,
    Query(description="`cursor` of the page before; left out for the first"),
]
OfBand = Annotated[BandName | None, Query(description="only this band", examples=["Default"])]

OneFlow = Annotated[str, Path(description="the flow's name: a fairness id, or a model", examples=["gold"])]
OneWorkload = Annotated[str, Path(description="the id that its requests name", examples=["chat"])]
OneRequest = Annotated[str, Path(description="its `x-request-id`", examples=["4f1d-9c"])]


def add(calls: Calls, view: StateView, lists: Lists) -> None:
    """Add the routes to `calls`."""
    routes = calls.group("state", _UNREACHABLE)

    @routes.get("/state", summary="The state of the fleet")
    async def state() -> State:
        """Stock, bounds, queue length by band, ready backends, virtual times, replicas, degraded."""
        async with in_time():
            return State.model_validate(await view.state())

    @routes.get("/endpoints", summary="Endpoints")
    async def endpoints() -> list[Endpoint]:
        """Every endpoint with its status, what it has in flight, and what its own metrics page says."""
        async with in_time():
            return [Endpoint.model_validate(each) for each in await view.endpoints()]

    @routes.get("/replicas", summary="Replicas")
    async def replicas() -> listed.Replicas:
        """Every replica that is known, live ones first."""
        async with in_time():
            return listed.Replicas.model_validate({"replicas": await lists.replicas()})

    @routes.get("/flows", summary="Flows that wait", response_model=listed.Flows, responses=_PAGED)
    async def flows(limit: Limit = 100, cursor: Cursor = None, band: OfBand = None) -> Response:
        """Flows that wait, in the order in which they are served, then those at their limit.

        While they are served their tags grow: of a walk over all pages, a flow that moves may come twice,
        and none is left out.
        """
        async with in_time():
            return _page(await lists.flows(limit, cursor, _band(band)))

    @routes.get("/flows/{flow:path}", summary="One flow", responses=_NO_SUCH)
    async def flow(flow: OneFlow) -> listed.FlowDetail:
        """One flow; its name may contain any character, `/` too."""
        async with in_time():
            found = await lists.flow(flow)
        if found is None:
            raise Refused(404, "unknown_flow", "no request of this flow waits, and none was served of late")
        return listed.FlowDetail.model_validate(found)

    @routes.get("/queue", summary="Requests that wait", response_model=listed.Queue, responses=_PAGED)
    async def queue(
        limit: Limit = 100,
        cursor: Cursor = None,
        band: OfBand = None,
        flow: Annotated[str | None, Query(description="only this flow", examples=["gold"])] = None,
    ) -> Response:
        """Waiting requests in dispatch order, as far as it can be foretold; `order` says how far."""
        async with in_time():
            return _page(await lists.queue(limit, cursor, _band(band), flow))

    @routes.get("/inflight", summary="Requests in flight", response_model=listed.Inflight, responses=_PAGED)
    async def inflight(limit: Limit = 100, cursor: Cursor = None) -> Response:
        """Requests in flight, those first whose lease ends first."""
        async with in_time():
            return _page(await lists.in_flight(limit, cursor))

    @routes.get("/workloads", summary="Workloads", response_model=listed.Workloads, responses=_PAGED)
    async def workloads(limit: Limit = 100, cursor: Cursor = None) -> Response:
        """Workloads of the registry, in no order; one that comes or goes meanwhile may be missed."""
        async with in_time():
            return _page(await lists.workloads(limit, cursor))

    @routes.get("/workloads/{workload_id:path}", summary="One workload", responses=_NO_SUCH)
    async def workload(workload_id: OneWorkload) -> listed.Workload:
        """One workload; its id may contain any character."""
        async with in_time():
            found = await lists.workload(workload_id)
        if found is None:
            raise Refused(404, "unknown_workload", "no such workload has asked of late")
        return listed.Workload.model_validate(found)

    @routes.get("/requests/{request_id:path}", summary="Where a request is, and why", responses=_NO_SUCH)
    async def request(request_id: OneRequest) -> listed.Whereabouts:
        """Where a request is, and why; and, from the replica that placed it, why it went where it went."""
        async with in_time():
            found = await lists.request(request_id)
        if found is None:
            raise Refused(404, "unknown_request", "neither the pool nor this replica knows of the request")
        return listed.Whereabouts.model_validate(found)

    calls.add(routes)


def _page(page: Mapping[str, Any]) -> Response:
    """`page` as it stands: to check 200 rows against the model takes as long as making them. That they are of
    its shape is tested where they are made (tests/scripts/test_views.py).
    """
    return Response(orjson.dumps(page), media_type="application/json")


def _band(name: BandName | None) -> Band | None:
    return None if name is None else Band.parse(name)
