"""Faults as problem documents (RFC 9457), each with a `code` that programs can tell it by."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError, ResponseValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from picker_fleet.admin.models import Problem
from picker_fleet.errors import ConfigError, RequestError, StateUnavailable
from picker_fleet.live_config import LIVE

_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_CODES = {
    400: "bad_request",
    401: "token_needed",
    403: "not_local",
    404: "unknown_path",
    405: "method_not_allowed",
    408: "body_too_slow",
    413: "body_too_large",
}
_READ_S = 2.0

_log = logging.getLogger(__name__)


class Refused(HTTPException):
    """A call that cannot be carried out; `code` says which fault it is."""

    def __init__(self, status: int, code: str, detail: str, *, retry_after_s: int | None = None) -> None:
        headers = None if retry_after_s is None else {"retry-after": str(retry_after_s)}
        super().__init__(status, detail, headers)
        self.code = code


@asynccontextmanager
async def in_time(limit_s: float | None = None) -> AsyncIterator[None]:
    """StateUnavailable once `limit_s` (2 s for what only reads) have passed."""
    limit_s = _READ_S if limit_s is None else limit_s
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise StateUnavailable(f"the shared state did not answer within {limit_s:g} s") from None


def add(app: FastAPI) -> None:
    """Make every fault of `app` a problem document, also for paths and methods that do not exist."""

    @app.exception_handler(RequestError)
    async def refused(request: Request, fault: RequestError) -> JSONResponse:
        document = _problem(request, fault.status, fault.code, str(fault))
        if fault.status == 503:
            document.headers["retry-after"] = str(fault.retry_after_s or 1)
        return document

    @app.exception_handler(ConfigError)
    async def unfit(request: Request, fault: ConfigError) -> JSONResponse:
        faults = str(fault).splitlines()
        return _problem(request, 422, "bad_config", str(fault), faults=faults, live=list(LIVE))

    @app.exception_handler(HTTPException)
    async def http(request: Request, fault: HTTPException) -> JSONResponse:
        return answer(request, fault)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, fault: RequestValidationError) -> JSONResponse:
        errors = fault.errors()
        faults = [f"{'.'.join(str(part) for part in error['loc'])}: {error['msg']}" for error in errors]
        code = f"bad_{errors[0]['loc'][-1]}" if errors else "invalid"
        return _problem(request, 422, code, "; ".join(faults), faults=faults)

    @app.exception_handler(ResponseValidationError)
    @app.exception_handler(Exception)
    async def broken(request: Request, fault: Exception) -> JSONResponse:
        _log.error("%s failed", request.url.path, exc_info=fault)
        return _problem(
            request, 500, "internal_error", f"the replica failed to answer: {type(fault).__name__}"
        )


def answer(request: Request, fault: HTTPException) -> JSONResponse:
    """The problem document that `fault` is answered with."""
    code = fault.code if isinstance(fault, Refused) else _CODES.get(fault.status_code, "refused")
    detail = f"{request.method} {request.url.path}: {fault.detail}"
    document = _problem(request, fault.status_code, code, detail)
    document.headers.update(fault.headers or {})
    return document


def _problem(request: Request, status: int, code: str, detail: str, **more: Any) -> JSONResponse:
    problem = Problem(
        title=_PHRASES.get(status, "Refused"),
        status=status,
        code=code,
        detail=detail,
        instance=request.url.path,
    )
    return JSONResponse(
        {**problem.model_dump(), **more}, status_code=status, media_type="application/problem+json"
    )
