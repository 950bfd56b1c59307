"""One check of a request over HTTP, as Envoy's `ext_authz` filter asks for it.

Envoy's request (mode `http`) has the client's method, path and body, and the headers that the picker reads.
The answer is 200 with the endpoint and the fields that the access log returns (docs/protocol.md), or the
refusal for the client. The body is parsed and dropped before the request waits, since Envoy keeps a copy: a
waiting request holds no body bytes in this replica.
"""

import logging
from collections.abc import Mapping
from typing import Final

from picker_fleet.domain.allowlist import Way
from picker_fleet.domain.errors import RequestError, Unsupported
from picker_fleet.domain.request import InferenceRequest, Placement
from picker_fleet.ingress.context import BodyBuffer, ExchangeContext
from picker_fleet.ingress.ext_proc import codec
from picker_fleet.ingress.ext_proc.accesslog import (
    ID_HEADER,
    TARGET_HEADER,
    TOKEN_HEADER,
    TOKEN_MARK,
    WAITED_HEADER,
)
from picker_fleet.ingress.intake import (
    CONTENT_ENCODING,
    CONTENT_TYPE,
    FORWARDED_FOR,
    ROUTE_TIMEOUT,
    Ask,
    bodiless,
    read_body,
    read_subset,
)
from picker_fleet.scheduling.chooser import SESSION_HEADER

MODE: Final = "http"
# Headers that Envoy passes on to the client, from a placement and from a refusal.
CLIENT_HEADERS: Final = (SESSION_HEADER, codec.PRESSURE)
REFUSAL_HEADERS: Final = ("content-type", "retry-after", codec.PRESSURE, codec.DROPPED_REASON)
# Envoy takes a 5xx from its authorisation server as a failure of that server, and hides it from the client.
# So a 5xx refusal is sent as an otherwise unused 4xx, which Envoy's configuration maps back.
CARRIED: Final = {status: status - 40 for status in (500, 503, 504)}

_log = logging.getLogger(__name__)


class Answer:
    """The answer to a check: status, header `lines`, body. Call `withdraw` if the answer cannot be sent."""

    __slots__ = ("_context", "_placement", "_request", "body", "lines", "status")

    def __init__(
        self,
        context: ExchangeContext,
        status: int,
        lines: str,
        body: bytes = b"",
        request: InferenceRequest | None = None,
        placement: Placement | None = None,
    ) -> None:
        self._context, self._request, self._placement = context, request, placement
        self.status, self.lines, self.body = status, lines, body

    def withdraw(self) -> None:
        """Withdraw the placement, since the answer cannot reach Envoy."""
        if self._request is not None and self._placement is not None:
            self._context.gate.withdraw(self._request.id, self._placement)


class Check:
    """One check; call `decide` once, with the whole request. `url` is the URL that Envoy requests."""

    __slots__ = ("_context", "_model", "_request", "_started_s", "_target_model", "_url")

    def __init__(self, context: ExchangeContext, url: bytes = b"") -> None:
        self._context, self._url = context, url
        self._started_s = context.clock()
        self._request: InferenceRequest | None = None
        self._model = self._target_model = ""

    async def decide(self, method: bytes, path: bytes, headers: dict[str, bytes], body: BodyBuffer) -> Answer:
        """Admit and place the request; a refusal is an answer, too. `body` is released before a wait.

        Raises:
            CancelledError: the client left while the request waited.
        """
        context = self._context
        try:
            way = context.way(method, path, has_body=body.size_bytes > 0)
            if way.kind == "read":
                answer = await self._route(way, headers)
            else:
                decoded = None
                if not body.size_bytes:
                    ask = bodiless(way)
                elif CONTENT_ENCODING in headers:
                    ask, decoded = await context.decoded_ask(body.join(), headers, way)
                else:
                    ask = read_body(body.join(), way, headers.get(CONTENT_TYPE, b""))
                try:
                    forwarded_for = headers.pop(FORWARDED_FOR, b"")
                    request = self._take(ask, headers)
                    sent = ask.model or context.intake.default_model
                    if request.target_model != sent and (ask.model or ask.needs_model):
                        raise Unsupported(
                            f"http mode cannot send model {sent or '(none)'} as {request.target_model}; "
                            "lean and standard can"
                        )
                finally:
                    if decoded is not None:
                        decoded.release()
                del ask
                body.release()  # a waiting request holds no body bytes
                answer = await self._admit(request, forwarded_for)
        except RequestError as error:
            return self.refuse(error)
        except Exception:
            _log.exception("a check failed", extra={"mode": MODE, "model": self._model})
            return self.refuse(RequestError("the picker failed on this request; its log says why"))
        except BaseException:
            if self._request is not None:
                context.client_left(self._request, MODE, self._model, self._started_s)
            raise
        context.metrics.answered(MODE, self._model, "ok", self._seconds(), self._target_model)
        return answer

    def refuse(self, error: RequestError) -> Answer:
        """Record a refusal. Returns the answer that the client gets."""
        context = self._context
        overload = context.settings.fair_request_queue.overload_status
        refusal = codec.refusal(error, overload, context.fill, self._url)
        seconds = self._seconds()
        context.metrics.answered(MODE, self._model, error.code, seconds, self._target_model)
        context.lines.refused(self._request, error.code, refusal.status, MODE, seconds)
        lines = "".join([f"{name}: {value}\r\n" for name, value in refusal.headers.items()])
        return Answer(context, CARRIED.get(refusal.status, refusal.status), lines, refusal.body)

    async def _route(self, way: Way, headers: Mapping[str, bytes]) -> Answer:
        """Choose endpoints for a request that needs no admission."""
        context = self._context
        request_id, placement = await context.route(way, headers, _subset(headers))
        return self._placed(None, placement, codec.pressure(context.fill(), 0.0, 1.0), request_id)

    def _take(self, ask: Ask, headers: dict[str, bytes]) -> InferenceRequest:
        self._model = ask.model
        headers.pop(ROUTE_TIMEOUT, None)  # Envoy's timeout of this check, not of the client's request
        subset = _subset(headers)
        request = self._context.intake.request(ask, headers, subset=subset, trusted=True)
        self._model, self._target_model, self._request = request.model, request.target_model, request
        return request

    async def _admit(self, request: InferenceRequest, forwarded_for: bytes) -> Answer:
        context = self._context
        context.new_flows.check(request.flow, forwarded_for)
        came_s = context.clock()
        request, placement = await context.admit(request, stream_owned=False)
        waited_s = context.clock() - came_s
        if context.lines.debug:
            context.lines.placed(request, placement.endpoints, MODE, self._seconds())
        return self._placed(request, placement, codec.pressure(context.fill(), waited_s, request.ttl_s))

    def _placed(
        self, request: InferenceRequest | None, placement: Placement, pressure: str, read_id: str = ""
    ) -> Answer:
        tries = self._context.tries(None if request is None else request.subset, request)
        endpoints = codec.destinations(placement, tries)
        lines = f"{codec.DESTINATION}: {endpoints}\r\n{codec.PRESSURE}: {pressure}\r\n"
        if request is not None or read_id:
            request_id = read_id if request is None else request.id
            token = TOKEN_MARK + placement.accounting_token
            lines += f"{ID_HEADER}: {request_id}\r\n{TOKEN_HEADER}: {token}\r\n"
        if request is None:
            return Answer(self._context, 200, lines)
        if placement.session:
            lines += f"{SESSION_HEADER}: {placement.session}\r\n"
        if placement.waited_s is not None:
            target = TOKEN_MARK + request.target_model
            lines += f"{WAITED_HEADER}: {placement.waited_s:.6f}\r\n{TARGET_HEADER}: {target}\r\n"
        return Answer(self._context, 200, lines, b"", request, placement)

    def _seconds(self) -> float:
        return self._context.clock() - self._started_s


def _subset(headers: Mapping[str, bytes]) -> tuple[str, ...] | None:
    """The endpoints of the subset hint, which Envoy's configuration puts into a header; None without one."""
    hint = headers.get(codec.SUBSET)
    if hint is None:
        return None
    return read_subset(hint.decode("latin-1").strip("[] ").replace('"', ""))
