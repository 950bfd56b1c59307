"""One check of a request over HTTP: by its body, as Envoy's `ext_authz` filter asks, or by headers alone.

Envoy's request (mode `http`) has the client's method, path and body, and the headers that the picker reads.
The answer is 200 with the endpoint and what the access log brings back (docs/protocol.md), or the refusal
that the client gets. The body is read and dropped before the request waits, since Envoy keeps it: a waiting
request costs this replica no bytes of its body.

nginx's `auth_request`, Caddy's `forward_auth` and the like send no body. They say method, path and model in
headers (docs/proxies.md), and get a settle token in place of what an access log would bring back.
"""

import json
import logging
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Final

from picker_fleet.errors import BadRequest, PayloadTooLarge, RequestError, Unsupported
from picker_fleet.ext_authz import settle
from picker_fleet.extproc import codec
from picker_fleet.extproc.accesslog import ID_HEADER, TARGET_HEADER, TOKEN_HEADER, TOKEN_MARK, WAITED_HEADER
from picker_fleet.extproc.context import BodyBuffer, ExchangeContext
from picker_fleet.intake import (
    CONTENT_LENGTH,
    FORWARDED_FOR,
    ROUTE_TIMEOUT,
    Ask,
    read_body,
    read_metadata,
    read_subset,
)
from picker_fleet.request import InferenceRequest, Placement
from picker_fleet.scheduling.chooser import SESSION_HEADER

MODE: Final = "http"
# Envoy passes these on to the client: of a placement, and of a refusal.
CLIENT_HEADERS: Final = (SESSION_HEADER, codec.PRESSURE)
REFUSAL_HEADERS: Final = ("content-type", "retry-after", codec.PRESSURE, codec.DROPPED_REASON)
# Envoy takes a 5xx of its authorisation server for its failure, and tells the client nothing of it. So such a
# refusal is carried by a 4xx that nobody else uses, which Envoy's configuration turns back.
CARRIED: Final = {status: status - 40 for status in (500, 503, 504)}

# What a check by headers alone is made of. Only the proxy may set these; it asks without the client's own.
FORWARDED_METHOD: Final = "x-forwarded-method"
FORWARDED_URI: Final = "x-forwarded-uri"
MODEL: Final = "x-picker-model"
BODY_BYTES: Final = "x-picker-body-bytes"  # the body's length, for costs in tokens
# nginx takes any refusal but 401 and 403 for a failure. So it asks for this status, and the answer has the
# client's in headers.
REFUSE_AS: Final = "x-picker-refuse-as"
STATUS: Final = "x-picker-status"
ERROR: Final = "x-picker-error"  # the client's body, one line of ASCII
FORWARDED_HEADERS: Final = (FORWARDED_METHOD, FORWARDED_URI, MODEL, BODY_BYTES, REFUSE_AS)
_REFUSE_AS: Final = {b"401": 401, b"403": 403}

_log = logging.getLogger(__name__)


class Answer:
    """What Envoy is told: status, header `lines`, body. `withdraw` takes the placement back if it cannot be
    sent.

    `to_settle` is what the proxy of a check by headers has to settle, None if it has nothing to.
    """

    __slots__ = ("_context", "_placement", "_request", "body", "lines", "status", "to_settle")

    def __init__(
        self,
        context: ExchangeContext,
        status: int,
        lines: str,
        body: bytes = b"",
        request: InferenceRequest | None = None,
        placement: Placement | None = None,
        to_settle: settle.Placed | None = None,
    ) -> None:
        self._context, self._request, self._placement = context, request, placement
        self.to_settle = to_settle
        self.status, self.lines, self.body = status, lines, body

    def withdraw(self) -> None:
        """The answer cannot reach Envoy."""
        if self._request is not None and self._placement is not None:
            self._context.gate.withdraw(self._request.id, self._placement)


class Check:
    """One check: `decide` or `decide_by_headers` once, with the whole request."""

    __slots__ = ("_by_headers", "_context", "_model", "_refuse_as", "_request", "_started_s", "_target_model")

    def __init__(self, context: ExchangeContext) -> None:
        self._context = context
        self._by_headers = False
        self._refuse_as = 0  # the status of every refusal; 0: each has its own
        self._started_s = context.clock()
        self._request: InferenceRequest | None = None
        self._model = self._target_model = ""

    def decide(
        self, method: bytes, path: bytes, headers: dict[str, bytes], body: BodyBuffer
    ) -> Coroutine[None, None, Answer]:
        """Admit and place the request; every refusal is an answer, too. `body` is released before a wait.

        Raises:
            CancelledError: the client left while the request waited.
        """

        def read() -> Ask | None:
            if self._context.is_read(method, path, has_body=body.size_bytes > 0):
                return None
            headers.pop(CONTENT_LENGTH, None)
            return read_body(body.join())

        return self._decide(read, headers, body.release)

    def decide_by_headers(self, headers: dict[str, bytes]) -> Coroutine[None, None, Answer]:
        """As `decide`, for a proxy that keeps the body and says the rest in `FORWARDED_HEADERS`."""
        self._by_headers = True
        self._refuse_as = _REFUSE_AS.get(headers.pop(REFUSE_AS, b""), 0)
        return self._decide(partial(self._read_forwarded, headers), headers)

    async def _decide(
        self,
        read: Callable[[], Ask | None],
        headers: dict[str, bytes],
        release: Callable[[], None] = lambda: None,
    ) -> Answer:
        """Decide what `read` finds, None for a request without a body; `release` the body once it is read."""
        context = self._context
        try:
            ask = read()
            if ask is None:
                answer = await self._route(headers)
            else:
                forwarded_for = headers.pop(FORWARDED_FOR, b"")
                request = self._take(ask, headers)
                if request.target_model != ask.model:
                    raise Unsupported(
                        f"http mode cannot send model {ask.model} as {request.target_model}; "
                        "lean and standard can"
                    )
                del ask
                release()  # a request that waits holds nothing of its body
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
        """The answer that the client gets in place of its request's."""
        context = self._context
        refusal = codec.refusal(error, context.settings.fair_request_queue.overload_status, context.fill)
        seconds = self._seconds()
        context.metrics.answered(MODE, self._model, error.code, seconds, self._target_model)
        context.lines.refused(self._request, error.code, refusal.status, MODE, seconds)
        lines = "".join([f"{name}: {value}\r\n" for name, value in refusal.headers.items()])
        if self._refuse_as:
            body = json.dumps(json.loads(refusal.body))
            lines += f"{STATUS}: {refusal.status}\r\n{ERROR}: {body}\r\n"
            return Answer(context, self._refuse_as, lines)
        status = refusal.status if self._by_headers else CARRIED.get(refusal.status, refusal.status)
        return Answer(context, status, lines, refusal.body)

    def _read_forwarded(self, headers: dict[str, bytes]) -> Ask | None:
        """What headers alone ask for; None for a request without a body."""
        if headers.pop(CONTENT_LENGTH, b"0") != b"0":
            raise BadRequest("a check by headers has no body; /check/PATH takes one")
        method, path = headers.get(FORWARDED_METHOD, b""), headers.get(FORWARDED_URI, b"")
        if not method or not path:
            raise BadRequest(f"a check by headers needs {FORWARDED_METHOD} and {FORWARDED_URI}")
        if self._context.is_read(method, path, has_body=method == b"POST"):
            return None
        model, size = headers.get(MODEL, b""), headers.get(BODY_BYTES, b"")
        if not model:
            raise BadRequest(f"no model is known: the proxy has to set {MODEL}")
        body_bytes = int(size[:20]) if size.isdigit() else 0
        limit_bytes = self._context.settings.extproc.max_body_bytes
        if body_bytes > limit_bytes:
            raise PayloadTooLarge(f"the body is larger than {limit_bytes} bytes")
        try:
            return read_metadata({"model": model.decode()}, body_bytes)
        except UnicodeDecodeError:
            raise BadRequest(f"header {MODEL} is not valid UTF-8") from None

    async def _route(self, headers: Mapping[str, bytes]) -> Answer:
        """Endpoints without admission, for a request that has no body."""
        context = self._context
        placement = await context.gate.route(_subset(headers))
        return self._placed(None, placement, codec.pressure(context.fill(), 0.0, 1.0))

    def _take(self, ask: Ask, headers: dict[str, bytes]) -> InferenceRequest:
        self._model = ask.model
        headers.pop(ROUTE_TIMEOUT, None)  # Envoy's own, of its request to this replica
        subset = _subset(headers)
        request = self._context.intake.request(ask, headers, subset=subset, trusted=True)
        self._model, self._target_model, self._request = request.model, request.target_model, request
        return request

    async def _admit(self, request: InferenceRequest, forwarded_for: bytes) -> Answer:
        context = self._context
        context.new_flows.check(request.flow, forwarded_for)
        came_s = context.clock()
        placement = await context.drain_gate.admit(request, stream_owned=False)
        waited_s = context.clock() - came_s
        if context.lines.debug:
            context.lines.placed(request, placement.endpoints, MODE, self._seconds())
        return self._placed(request, placement, codec.pressure(context.fill(), waited_s, request.ttl_s))

    def _placed(self, request: InferenceRequest | None, placement: Placement, pressure: str) -> Answer:
        tries = self._context.tries(None if request is None else request.subset, request)
        endpoints = codec.destinations(placement, tries)
        lines = f"{codec.DESTINATION}: {endpoints}\r\n{codec.PRESSURE}: {pressure}\r\n"
        if request is None:
            return Answer(self._context, 200, lines)
        if placement.session:
            lines += f"{SESSION_HEADER}: {placement.session}\r\n"
        token = placement.accounting_token
        if self._by_headers:
            target = "" if placement.waited_s is None else request.target_model
            to_settle = settle.Placed(request.id, token, placement.waited_s, target)
            lines += f"{settle.TOKEN}: {to_settle.token()}\r\n"
            return Answer(self._context, 200, lines, b"", request, placement, to_settle)
        lines += f"{ID_HEADER}: {request.id}\r\n{TOKEN_HEADER}: {TOKEN_MARK}{token}\r\n"
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
