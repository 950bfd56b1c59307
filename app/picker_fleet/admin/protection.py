"""What protects the admin API, installed by `api.create`: a call names a host of this replica, keeps to its
client's rate, ends by a deadline, and is authorised if it changes something. Every fault is answered as a
problem document (RFC 9457) with a `code` for programs.
"""

import asyncio
import hmac
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import ip_address
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Security
from fastapi.exceptions import RequestValidationError, ResponseValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from picker_fleet.admin.models import Problem
from picker_fleet.errors import ConfigError, RequestError, StateUnavailable
from picker_fleet.rates import Rates, retry_after_s
from picker_fleet.replica.live_config import LIVE
from picker_fleet.units import is_loopback

BURST_S = 2.0  # unused calls of this many seconds may be made at once
CHANGE_COST = 10  # a change counts as this many calls: it runs several scripts, and every replica follows it
_MAX_CLIENTS = 1024
_REFUSAL_DELAY_S = 1.0  # slows down a client that ignores Retry-After
_READ_METHODS = ("GET", "HEAD")
_ANY_HOST_PATHS = ("/healthz", "/readyz", "/metrics")  # probes and scrapers call by any address
_BEARER = HTTPBearer(auto_error=False, description="admin.token of the configuration")
_PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-real-ip")
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

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a call may take: one that reads, one that changes something, and the body of a request."""

    read_s: float = 2.0
    change_s: float = 3.0  # a few script calls
    body_s: float = 5.0


async def within(limit_s: float, answer: Awaitable[_T]) -> _T:
    """The answer; StateUnavailable if it takes longer than `limit_s`."""
    try:
        async with asyncio.timeout(limit_s):
            return await answer
    except TimeoutError:
        raise StateUnavailable(f"the shared state did not answer within {limit_s:g} s") from None


class Refused(HTTPException):
    """A call that cannot be carried out; `code` names the fault."""

    def __init__(self, status: int, code: str, detail: str, *, retry_after_s: int | None = None) -> None:
        headers = None if retry_after_s is None else {"retry-after": str(retry_after_s)}
        super().__init__(status, detail, headers)
        self.code = code


def add_problem_documents(app: FastAPI) -> None:
    """Answer every fault of `app` with a problem document, also for unknown paths and methods."""

    @app.exception_handler(RequestError)
    async def request_error(request: Request, fault: RequestError) -> JSONResponse:
        document = _problem(request, fault.status, fault.code, str(fault))
        if fault.status == 503:
            document.headers["retry-after"] = str(fault.retry_after_s or 1)
        return document

    @app.exception_handler(ConfigError)
    async def invalid_config(request: Request, fault: ConfigError) -> JSONResponse:
        faults = str(fault).splitlines()
        return _problem(request, 422, "bad_config", str(fault), faults=faults, live=list(LIVE))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, fault: HTTPException) -> JSONResponse:
        return _http_problem(request, fault)

    @app.exception_handler(RequestValidationError)
    async def invalid_parameter(request: Request, fault: RequestValidationError) -> JSONResponse:
        errors = fault.errors()
        faults = [f"{'.'.join(str(part) for part in error['loc'])}: {error['msg']}" for error in errors]
        code = f"bad_{errors[0]['loc'][-1]}" if errors else "invalid"
        return _problem(request, 422, code, "; ".join(faults), faults=faults)

    @app.exception_handler(ResponseValidationError)
    @app.exception_handler(Exception)
    async def internal_error(request: Request, fault: Exception) -> JSONResponse:
        _log.error("%s failed", request.url.path, exc_info=fault)
        detail = f"the replica failed to answer: {type(fault).__name__}"
        return _problem(request, 500, "internal_error", detail)


def _http_problem(request: Request, fault: HTTPException) -> JSONResponse:
    code = fault.code if isinstance(fault, Refused) else _CODES.get(fault.status_code, "refused")
    detail = f"{request.method} {request.url.path}: {fault.detail}"
    document = _problem(request, fault.status_code, code, detail)
    document.headers.update(fault.headers or {})
    return document


def _problem(request: Request, status: int, code: str, detail: str, **extra: Any) -> JSONResponse:
    title = _PHRASES.get(status, "Refused")
    problem = Problem(
        title=title, status=status, code=code, detail=detail, instance=request.url.path, **extra
    )
    return JSONResponse(problem.model_dump(), status_code=status, media_type="application/problem+json")


class KnownHosts:
    """ASGI middleware that answers reads with a foreign Host with 421.

    It stops DNS rebinding: a web page that makes its own name point here has the browser send that name as
    Host. Known are the loopback, this machine's name, the address the call came to, and `names`; a name that
    begins with `*.` stands for all names below it. Changes are checked by `ChangeAuthorization`.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        self._app = app
        known = [socket.gethostname().lower(), "localhost", *names]
        self._names = frozenset(name for name in known if not name.startswith("*."))
        self._suffixes = tuple(name[1:] for name in known if name.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "http"
            and scope["method"] in (*_READ_METHODS, "OPTIONS")
            and scope["path"] not in _ANY_HOST_PATHS
        ):
            hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            if len(hosts) != 1 or not self._is_known(hosts[0], scope):
                given = repr(hosts[0][:80]) if len(hosts) == 1 else f"{len(hosts)} of them"
                detail = f"this replica does not go by the Host given ({given}); admin.hosts lists its names"
                response = _http_problem(Request(scope), Refused(421, "unknown_host", detail))
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_known(self, host_header: str, scope: Scope) -> bool:
        try:
            host = urlsplit(f"//{host_header}").hostname or ""
        except ValueError:
            return False
        host = host.removesuffix(".")
        if host in self._names or (self._suffixes and host.endswith(self._suffixes)) or is_loopback(host):
            return True
        server = scope.get("server")
        return server is not None and _same_address(host, server[0])


def _same_address(one: str, other: str) -> bool:
    try:
        return ip_address(one) == ip_address(other)
    except ValueError:
        return False


class RateLimit:
    """A dependency of routes: `per_s` calls a second from one address, as a token bucket."""

    def __init__(
        self,
        per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._per_s = per_s
        self._rates = Rates(per_s, max(per_s * BURST_S, CHANGE_COST), _MAX_CLIENTS, clock)
        self._sleep = sleep

    async def __call__(self, request: Request) -> None:
        """Pass, or raise Refused 429 after a delay."""
        host = request.client.host if request.client is not None else ""
        wait_s = self._rates.take(host, 1 if request.method in _READ_METHODS else CHANGE_COST)
        if wait_s:
            await self._sleep(_REFUSAL_DELAY_S)
            limit = f"{self._per_s:g} calls a second from one client (a change counts as {CHANGE_COST})"
            raise Refused(429, "too_many_calls", f"more than {limit}", retry_after_s=retry_after_s(wait_s))


class ChangeAuthorization:
    """A dependency of routes that change something: the client has `admin.token`; if there is no token, the
    client is a process on this machine."""

    def __init__(self, token: str | None) -> None:
        self._token = None if token is None else token.encode()

    async def __call__(
        self,
        request: Request,
        bearer: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)] = None,
    ) -> None:
        """Pass, or raise HTTPException 401 (no token or a wrong one) or 403 (not from this machine)."""
        if self._token is not None:
            # The server decodes headers as Latin-1, whatever their encoding.
            given = b"" if bearer is None else bearer.credentials.encode("latin-1", "replace")
            if not hmac.compare_digest(given, self._token):
                challenge = {"www-authenticate": 'Bearer realm="picker"'}
                raise HTTPException(401, "the bearer token of this fleet is needed", challenge)
        elif not _is_local(request):
            detail = "without an admin.token in the configuration only this machine may make changes"
            raise HTTPException(403, detail)


def _is_local(request: Request) -> bool:
    """Whether a process on this machine calls for itself, and not for a proxy's client or a foreign web
    page."""
    if request.client is None or not is_loopback(request.client.host):
        return False
    if any(name in request.headers for name in _PROXY_HEADERS):
        return False
    # A foreign page can make a local browser send this call; Host or Origin then has the page's name.
    host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    origin = request.headers.get("origin")
    return (host == "localhost" or is_loopback(host)) and (
        origin is None or urlsplit(origin).netloc == request.headers.get("host")
    )
