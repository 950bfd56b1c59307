"""Protects the admin API: each client has a rate limit, and each call needs a known Host, a token of the
required role, and an answer within a deadline. Every fault is answered with a problem document (RFC 9457)
that has a `code` for programs. `api.create` installs the protection.
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
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Security
from fastapi.exceptions import RequestValidationError, ResponseValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from picker_fleet.admin.models import Problem
from picker_fleet.domain.errors import ConfigError, RequestError, StartupError, StateUnavailable
from picker_fleet.domain.rates import Rates, retry_after_s
from picker_fleet.domain.sections import Admin, Role
from picker_fleet.domain.units import bearer_token, is_loopback
from picker_fleet.fleet.live_config import LIVE

MAX_ROWS, ROWS = 200, 100  # rows on a page: at most, since a longer page takes too long, and by default
BURST_S = 2.0  # a burst may have as many calls as the rate allows in these seconds
CHANGE_COST = 10  # a change counts as this many calls: it takes several scripts and work on every replica
_LISTS = ("/flows", "/queue", "/inflight", "/workloads")  # the calls that return pages of rows
_MOST_DIGITS = 9
_ROWS_A_CALL = 50  # reading this many rows takes as long as one other call
_MAX_CLIENTS = 1024
_MOST_QUERY_FIELDS = 32  # to parse 16 KiB of empty fields takes 20 to 40 ms
_REFUSAL_DELAY_S = 1.0  # delay of a refusal, for clients that ignore Retry-After
_READ_METHODS = ("GET", "HEAD")
_ANY_HOST_PATHS = ("/healthz", "/readyz", "/metrics")  # paths that accept any Host header, for probes
_BEARER = HTTPBearer(auto_error=False, description="admin.token, or one of admin.tokens")
_RELOAD_S = 2.0  # interval of reading the token files again while calls arrive
_REFUSALS_LOGGED_PER_S = 1.0
_PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-real-ip")
_EVERY_ANSWER = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"default-src 'none'; base-uri 'none'; frame-ancestors 'none'"),
    (b"cache-control", b"no-store"),
)  # security headers of every answer, unless the answer sets other values
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
Responses = dict[int | str, dict[str, Any]]  # the OpenAPI descriptions of a call's answers by status
# With `model` here FastAPI would build a validator for each fault of each call: half of a replica's start.
PROBLEM: dict[str, Any] = {
    "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
}
_T = TypeVar("_T")


def faults(*statuses: int) -> Responses:
    """The OpenAPI descriptions of the faults with the given statuses."""
    return dict.fromkeys(statuses, PROBLEM)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Time limits for API calls that read, for API calls that change the fleet, and for receiving a body."""

    read_s: float = 2.0
    change_s: float = 3.0  # long enough for a few script calls in Redis
    body_s: float = 5.0


async def within(limit_s: float, answer: Awaitable[_T]) -> _T:
    """Await `answer`. Raises StateUnavailable if the answer takes longer than `limit_s` seconds."""
    try:
        async with asyncio.timeout(limit_s):
            return await answer
    except TimeoutError:
        raise StateUnavailable(f"the shared state did not answer within {limit_s:g} s") from None


def address_of(request: Request) -> str:
    """The client's address; '' if the server does not know it."""
    return request.client.host if request.client is not None else ""


class Refused(HTTPException):
    """A refusal of an API call; `code` names the reason."""

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
        live = {"live": list(LIVE)} if request.url.path.endswith("/config") else {}
        return _problem(request, 422, "bad_config", str(fault), faults=faults, **live)

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
        _log.error("%s failed", request.scope["path"], exc_info=fault)
        detail = f"the replica failed to answer: {type(fault).__name__}"
        return _problem(request, 500, "internal_error", detail)


def _http_problem(request: Request, fault: HTTPException) -> JSONResponse:
    code = fault.code if isinstance(fault, Refused) else _CODES.get(fault.status_code, "refused")
    detail = f"{request.method} {request.scope['path']}: {fault.detail}"
    document = _problem(request, fault.status_code, code, detail)
    document.headers.update(fault.headers or {})
    return document


def _problem(request: Request, status: int, code: str, detail: str, **extra: Any) -> JSONResponse:
    title, instance = HTTPStatus(status).phrase, request.scope["path"]
    problem = Problem(title=title, status=status, code=code, detail=detail, instance=instance, **extra)
    return JSONResponse(problem.model_dump(), status_code=status, media_type="application/problem+json")


class RateLimit:
    """A rate limit by token buckets, one for each client address: at most `per_s` calls a second."""

    def __init__(
        self,
        per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._per_s = per_s
        self._rates = Rates(per_s, max(per_s * BURST_S, CHANGE_COST), _MAX_CLIENTS, clock)
        self._sleep = sleep

    async def __call__(self, request: Request, more: int = 0) -> None:
        """Return if the client is within its rate limit; if not, raise Refused (429) after a delay. A read
        counts as `more` calls besides itself."""
        cost = 1 + more if request.method in _READ_METHODS else CHANGE_COST
        wait_s = self._rates.take(address_of(request), cost)
        if wait_s:
            await self._sleep(_REFUSAL_DELAY_S)
            counts = f"a change counts as {CHANGE_COST}, each {_ROWS_A_CALL} rows of a page as one more"
            limit = f"{self._per_s:g} calls a second from one client ({counts})"
            raise Refused(429, "too_many_calls", f"more than {limit}", retry_after_s=retry_after_s(wait_s))


class Protection:
    """ASGI middleware around every API call: a rate limit, a check of the header Host, and security headers.

    Every call, even if refused, counts against the rate limit `calls`, except that `/healthz` and `/readyz`
    count against the limit `health`, and `/metrics` against a limit in documents.py.

    A read with an unknown Host gets status 421; any call with a malformed Host gets 400. The check of Host
    stops DNS rebinding: if a web page's domain resolves to this replica, the browser sends that domain as
    Host. Known hosts are the loopback, this machine's name, the address that received the call, and `hosts`;
    `*.example` in `hosts` matches all subdomains. `Access` authorises changes.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str], calls: RateLimit, health: RateLimit) -> None:
        self._app = app
        self._limits = {"/metrics": None, "/healthz": health, "/readyz": health}
        self._calls = calls
        known = [socket.gethostname().lower(), "localhost", *hosts]
        self._names = frozenset(name for name in known if not name.startswith("*."))
        self._suffixes = tuple(name[1:] for name in known if name.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = {name for name, _ in message["headers"]}
                more = [header for header in _EVERY_ANSWER if header[0] not in named]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        request, answer = Request(scope), self._app
        try:
            if (limit := self._limits.get(scope["path"], self._calls)) is not None:
                await limit(request, _rows(request) // _ROWS_A_CALL)
            if scope["path"] not in _ANY_HOST_PATHS:
                self._check_host(request)
            if scope["query_string"].count(b"&") >= _MOST_QUERY_FIELDS:
                raise Refused(400, "bad_query", f"the query has more than {_MOST_QUERY_FIELDS} fields")
        except Refused as fault:
            answer = _http_problem(request, fault)
        # FastAPI would parse cookies, although no call reads one.
        scope["headers"] = [header for header in scope["headers"] if header[0] != b"cookie"]
        await answer(scope, receive, with_headers)

    def _check_host(self, request: Request) -> None:
        hosts = request.headers.getlist("host")
        names = [_hostname(host) for host in hosts]
        given = repr(hosts[0][:80]) if len(hosts) == 1 else f"{len(hosts)} of them"
        if None in names:
            raise Refused(400, "bad_host", f"the Host given ({given}) is malformed")
        if request.method in (*_READ_METHODS, "OPTIONS") and not (
            len(names) == 1 and self._is_known(names[0] or "", request.scope)
        ):
            detail = f"the Host given ({given}) is no name of this replica; add it to admin.hosts"
            raise Refused(421, "unknown_host", detail)

    def _is_known(self, name: str, scope: Scope) -> bool:
        host = name.removesuffix(".")
        if host in self._names or (self._suffixes and host.endswith(self._suffixes)) or is_loopback(host):
            return True
        server = scope.get("server")
        return server is not None and _same_address(host, server[0])


def _rows(request: Request) -> int:
    """The most rows that a call may return; 0 if it returns no page of a list."""
    if not request.scope["path"].endswith(_LISTS):
        return 0
    limit = request.query_params.get("limit", "")
    return min(int(limit), MAX_ROWS) if limit.isdecimal() and len(limit) <= _MOST_DIGITS else ROWS


def _hostname(authority: str) -> str | None:
    """The host in `authority` (`host:port`); '' if it has no host, None if it is malformed."""
    try:
        return urlsplit(f"//{authority}").hostname or ""
    except ValueError:
        return None


def _same_address(one: str, other: str) -> bool:
    try:
        return ip_address(one) == ip_address(other)
    except ValueError:
        return False


class _Token(NamedTuple):
    name: str  # the name of the token's file, or `admin.token`
    role: Role
    secret: bytes


class Tokens:
    """The tokens in force, read again from their files every `_RELOAD_S` seconds. An unreadable or empty file
    gives no token, so removing a file revokes its token.

    Raises StartupError: a file of `admin.tokens` cannot be read, or has no token.
    """

    def __init__(self, settings: Admin, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._files: list[tuple[Path, Role]] = [(each.file, each.role) for each in settings.tokens]
        self._fixed: tuple[_Token, ...] = ()
        for file, _ in self._files:
            if not _read_token(file):
                raise StartupError(f"admin.tokens: {file} cannot be read, or has no token")
        token = None if settings.token is None else settings.token.encode()
        if settings.token_file is not None and token in (None, _read_token(settings.token_file)):
            self._files.append((settings.token_file, "operator"))
        elif token is not None:
            self._fixed = (_Token("admin.token", "operator", token),)
        self._in_force: tuple[_Token, ...] = ()
        self._needed = False
        self._read()

    @property
    def needed(self) -> bool:
        """Whether calls need a token: true once there was a token, even if all were removed since."""
        self._read_again()
        return self._needed

    def find(self, given: bytes) -> _Token | None:
        self._read_again()
        found = None
        for each in self._in_force:  # compare with every token, so that the time reveals nothing
            if hmac.compare_digest(given, each.secret):
                found = each
        return found

    def _read_again(self) -> None:
        if self._files and self._clock() >= self._due_s:
            self._read()

    def _read(self) -> None:
        self._due_s = self._clock() + _RELOAD_S
        read = (_Token(file.name, role, _read_token(file)) for file, role in self._files)
        self._in_force = (*self._fixed, *(each for each in read if each.secret))
        self._needed = self._needed or bool(self._in_force)


def _read_token(file: Path) -> bytes:
    """The token in `file`; '' if the file is unreadable or has no token."""
    try:
        return bearer_token(file.read_text(encoding="ascii")).encode()
    except (OSError, ValueError):
        return b""


class Access:
    """A route dependency that requires a token of `role`, or an operator's token. If no token is configured,
    anyone may read, and only processes on this machine may make changes.

    Sets `request.state.caller` to the token's name or the client's address. The sender of a long answer calls
    `request.state.may_go_on` to learn whether the token is still valid.
    """

    def __init__(self, tokens: Tokens, role: Role) -> None:
        self._tokens, self._role = tokens, role
        self._refusals = Rates(_REFUSALS_LOGGED_PER_S, 1, 1, time.monotonic)

    async def __call__(
        self,
        request: Request,
        bearer: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)] = None,
    ) -> None:
        """Return if the call is allowed; otherwise raise HTTPException 401 (no valid token) or 403 (the
        token's role is too low, or the client is not on this machine)."""
        request.state.caller = address = address_of(request)
        request.state.may_go_on = lambda: True
        fault: HTTPException | None = None
        if self._tokens.needed:
            # Starlette decodes headers as Latin-1, whatever their encoding.
            given = b"" if bearer is None else bearer.credentials.encode("latin-1", "replace")
            token = self._tokens.find(given)
            if token is None:
                challenge = {"www-authenticate": 'Bearer realm="picker"'}
                fault = HTTPException(401, "a bearer token of this fleet is needed", challenge)
            elif self._role == "operator" and token.role != "operator":
                fault = Refused(403, "operator_needed", f"token {token.name} may only read, not make changes")
            else:
                request.state.caller = token.name
                request.state.may_go_on = lambda: self._tokens.find(given) is not None
        elif self._role == "operator" and not _is_local(request):
            detail = "without an admin.token in the configuration only this machine may make changes"
            fault = HTTPException(403, detail)
        if fault is not None:
            if not self._refusals.take():
                path = request.scope["path"][:200]
                _log.warning(
                    "refused an admin API call from %s: status %s, path %a", address, fault.status_code, path
                )
            raise fault


def _is_local(request: Request) -> bool:
    """Whether the caller is a process on this machine, and no proxy and no browser with a foreign page."""
    if not is_loopback(address_of(request)) or any(name in request.headers for name in _PROXY_HEADERS):
        return False
    # A foreign web page can make a local browser send this call; Host or Origin then names that page.
    authority, origin = request.headers.get("host", ""), request.headers.get("origin")
    host = _hostname(authority) or ""
    return (host == "localhost" or is_loopback(host)) and (
        origin is None or origin.partition("://")[2] == authority
    )
