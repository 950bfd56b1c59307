"""The replica's HTTP API: health, metrics, a view of the shared state, and changes to it.

Every fault is a problem document (RFC 9457, `application/problem+json`), also for paths and methods that
do not exist.
"""

import asyncio
import logging
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError, ResponseValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from app.admin import changes
from app.admin.guard import Guard
from app.admin.models import Endpoint, Explanation, Health, Problem, State
from app.admin.view import Controls, StateView
from app.admission.tuning import LIVE
from app.config import Settings
from app.errors import ConfigError, RequestError, StateUnavailable
from app.telemetry.metrics import PAGE_TYPE, Metrics

_STATE_S = 2.0
_PHRASES = {status.value: status.phrase for status in HTTPStatus}

_log = logging.getLogger(__name__)


def create(view: StateView, controls: Controls, metrics: Metrics, settings: Settings) -> FastAPI:
    """The API of one replica over its `view`, its `controls` and `metrics`."""
    app = FastAPI(
        title="Picker Fleet",
        summary=f"One replica of pool {settings.pool}.",
        version=_version(),
        responses={"default": {"model": Problem, "description": "a fault (application/problem+json)"}},
    )
    _add_problems(app)

    @app.get("/healthz", tags=["health"])
    async def healthz() -> Health:
        """Whether the process lives: 200 for as long as its event loop turns, whatever its parts do."""
        ready, components = view.ready()
        status = "ok" if ready and set(components.values()) <= {"ok"} else "degraded"
        return Health.model_validate({**view.identity(), "status": status, "components": components})

    @app.get("/readyz", tags=["health"], responses={503: {"model": Health}})
    async def readyz(response: Response) -> Health:
        """Whether this replica should get traffic: 200 or 503, with what is wrong by component."""
        ready, components = view.ready()
        response.status_code = 200 if ready else 503
        status = "ok" if ready else "unready"
        return Health.model_validate({**view.identity(), "status": status, "components": components})

    @app.get("/metrics", tags=["metrics"], response_class=Response)
    async def page() -> Response:
        """The Prometheus text page."""
        # In a thread: a page of many models takes long enough to delay decisions.
        return Response(await asyncio.to_thread(metrics.page), headers={"content-type": PAGE_TYPE})

    @app.get("/api/v1/state", tags=["state"], responses={503: {"model": Problem}})
    async def state() -> State:
        """Stock, bounds, queue length by band, ready backends, virtual times, replicas, degraded."""
        try:
            async with asyncio.timeout(_STATE_S):
                return State.model_validate(await view.state())
        except TimeoutError:
            raise StateUnavailable(f"the shared state did not answer within {_STATE_S:g} s") from None

    @app.get("/api/v1/endpoints", tags=["state"], responses={503: {"model": Problem}})
    async def endpoints() -> list[Endpoint]:
        """Every endpoint with its status and what it has in flight."""
        try:
            async with asyncio.timeout(_STATE_S):
                return [Endpoint.model_validate(each) for each in await view.endpoints()]
        except TimeoutError:
            raise StateUnavailable(f"the shared state did not answer within {_STATE_S:g} s") from None

    @app.get("/api/v1/requests/{request_id}", tags=["state"], responses={404: {"model": Problem}})
    async def explain(request_id: str) -> Explanation:
        """Why a request of late went where it went: asked of the replica that placed it."""
        found = view.explain(request_id)
        if found is None:
            raise HTTPException(404, "this replica knows nothing of the request, or picks without scorers")
        return Explanation.model_validate(found)

    changes.add(app, controls, Guard(settings.admin.token))
    return app


def _add_problems(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def refused(request: Request, fault: RequestError) -> JSONResponse:
        return _problem(request, fault.status, str(fault), code=fault.code)

    @app.exception_handler(ConfigError)
    async def unfit(request: Request, fault: ConfigError) -> JSONResponse:
        return _problem(request, 422, str(fault), faults=str(fault).splitlines(), live=list(LIVE))

    @app.exception_handler(HTTPException)
    async def http(request: Request, fault: HTTPException) -> JSONResponse:
        answer = _problem(request, fault.status_code, f"{request.method} {request.url.path}: {fault.detail}")
        answer.headers.update(fault.headers or {})
        return answer

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, fault: RequestValidationError) -> JSONResponse:
        faults = (
            f"{'.'.join(str(part) for part in error['loc'])}: {error['msg']}" for error in fault.errors()
        )
        return _problem(request, 422, "; ".join(faults))

    @app.exception_handler(ResponseValidationError)
    @app.exception_handler(Exception)
    async def broken(request: Request, fault: Exception) -> JSONResponse:
        _log.error("%s failed", request.url.path, exc_info=fault)
        return _problem(request, 500, f"the replica failed to answer: {type(fault).__name__}")


def _problem(request: Request, status: int, detail: str, **more: Any) -> JSONResponse:
    problem = Problem(
        title=_PHRASES.get(status, "Refused"),
        status=status,
        detail=detail,
        instance=request.url.path,
    )
    return JSONResponse(
        {**problem.model_dump(), **more}, status_code=status, media_type="application/problem+json"
    )


def _version() -> str:
    try:
        return version("picker-fleet")
    except PackageNotFoundError:
        return "unknown"
