"""The state that all requests of a pool share in every mode, and the class `Decision`, which takes one
request from its headers to its endpoints or its refusal. `ext_proc/` and `http/` translate for Envoy.
"""

import asyncio
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Final, NamedTuple

import orjson

from picker_fleet.admission.admission import Admission
from picker_fleet.admission.origins import Origins
from picker_fleet.domain.allowlist import NOT_LISTED, OF_SIDECAR, Api, Paths, Way, model_in_query
from picker_fleet.domain.budgets import BodyBudget, BodyBuffer
from picker_fleet.domain.config import Settings
from picker_fleet.domain.errors import (
    BadRequest,
    ClientGone,
    OverBurst,
    OverLimit,
    RequestError,
    RequestIdTaken,
    ShuttingDown,
    TooManyFlows,
    TooManyReads,
    UnknownPath,
    UnknownPool,
)
from picker_fleet.domain.rates import Rates, retry_after_s
from picker_fleet.domain.request import InferenceRequest, Placement
from picker_fleet.domain.sections import ExtProc
from picker_fleet.grpc.transport import Stream
from picker_fleet.ingress.bodies import decode
from picker_fleet.ingress.headers import CONTENT_ENCODING, CONTENT_TYPE, REQUEST_ID
from picker_fleet.ingress.intake import Ask, Intake, bodiless, read_body
from picker_fleet.ingress.quota_headers import quota_headers
from picker_fleet.scheduling.chooser import EndpointChooser
from picker_fleet.scheduling.token_prefixes import TokenPrefixes
from picker_fleet.telemetry.logs import DecisionLines
from picker_fleet.telemetry.metrics import Metrics

STALLED_S = 30.0  # an upload that sends nothing for this many seconds is ended
MAX_UPLOADS = 2048  # at this many incomplete uploads, a new one ends the upload that is silent for longest
_CHECKS = 6  # number of checks of upload deadlines per STALLED_S

_MAX_SOURCES = 10_000
_MAX_PATHS = 4096  # maximum cached lookups of request paths
_MAX_FLOWS = 16_384  # maximum flows to remember; a forgotten flow counts as new again
_NETWORK_BITS = 64  # an IPv6 network of this prefix counts as one client: a customer gets at least a /64
_MINUTE_S = 60.0
_READ_BURST_S = 2.0  # largest burst of reads, in seconds of `extproc.read_rate`

PRESSURE: Final = "x-queue-pressure"  # docs/fairness.md, "Backpressure"
DROPPED_REASON: Final = "x-llm-d-request-dropped-reason"
SHOULD_RETRY: Final = "x-should-retry"  # `false` keeps OpenAI's and Anthropic's clients from retries
_PRESSURE_STEPS = 100
PRESSURES: Final = tuple(f"{step / _PRESSURE_STEPS:.2f}" for step in range(_PRESSURE_STEPS + 1))
_RETRY_AFTER_S = 1
_LONGEST_RETRY_S = 120  # longest Retry-After: OpenAI's client waits no longer; Anthropic's would wait a month
_REMOVED: Final = tuple((name, "") for name in OF_SIDECAR)
_ANTHROPIC_KINDS: Final = {404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


class UploadOverdue(Exception):
    """An upload has stalled, takes too long, or must end because too many uploads are incomplete."""


class UploadDeadlines:
    """Ends request uploads that stall or take too long: the pending read of the stream raises UploadOverdue.

    Envoy does not report a client that vanishes during its upload, and a deadline in Envoy would include the
    wait in the queue. Without a deadline in the picker such an upload would keep its part of
    `extproc.max_buffered_bytes` for ever and delay every drain.

    `clock` is in seconds. An upload is ended after `stalled_s` without a message, or `whole_s` after its
    start. If more than `most` uploads wait for messages, the upload that has waited longest is ended.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        whole_s: float,
        stalled_s: float = STALLED_S,
        most: int = MAX_UPLOADS,
    ) -> None:
        self._clock = clock
        self._whole_s = whole_s
        self._stalled_s = min(stalled_s, whole_s)
        self._most = most
        self._waiting: OrderedDict[Stream, tuple[float, float]] = OrderedDict()  # (wait began, upload began)

    def wait(self, stream: Stream, began_s: float) -> None:
        """Watch an upload that is about to read more of the request, which began to arrive at `began_s`."""
        self._waiting[stream] = self._clock(), began_s
        if len(self._waiting) > self._most:
            longest, _ = self._waiting.popitem(last=False)
            longest.interrupt(UploadOverdue())

    def received(self, stream: Stream) -> None:
        """Stop watching an upload that has received a message, or has ended."""
        self._waiting.pop(stream, None)

    async def run(self) -> None:
        """Watch uploads and end the ones that stall or take too long, until cancelled."""
        while True:
            await asyncio.sleep(self._stalled_s / _CHECKS)
            now_s = self._clock()
            for stream, (silent_since_s, began_s) in list(self._waiting.items()):
                if now_s - silent_since_s > self._stalled_s or now_s - began_s > self._whole_s:
                    del self._waiting[stream]
                    stream.interrupt(UploadOverdue())


class AllowedPaths:
    """Finds how to serve a request, by its method and path, and caches each result."""

    def __init__(self, configured: Iterable[Api] = (), *, passes: bool = False) -> None:
        self._paths = Paths(configured, passes=passes)
        self._ways: dict[tuple[bytes, bytes], Way] = {}

    def way(self, method: bytes, path: bytes) -> Way | None:
        """How a request with this `:method` and `:path` is served; None: no model server may see it.

        Raises:
            BadRequest: the query, which names the model, has too many fields or several models.
        """
        bare, _, query = path.partition(b"?")
        way = self._ways.get((method, bare))
        if way is None:
            way = self._paths.way(method.decode("latin-1"), bare.decode("latin-1"))
            if way is None:
                return None
            if len(self._ways) >= _MAX_PATHS:
                self._ways.clear()
            self._ways[method, bare] = way
        if way.source == "query":
            try:
                return way._replace(model=model_in_query(query.decode(errors="replace")))
            except ValueError as fault:
                raise BadRequest(f"the query of the path: {fault}") from None
        return way


class NewFlowLimit:
    """Lets each source begin `per_minute` new flows a minute (docs/fairness.md).

    Each flow gets a fair share of the stock, so a client that invents flows could take more than its share. A
    known flow costs one dictionary lookup; flows in `configured` are never new. `hops` is the number of
    proxies between clients and Envoy that append to x-forwarded-for. `clock` is in seconds.
    """

    def __init__(
        self,
        per_minute: int,
        configured: Collection[str],
        hops: int,
        clock: Callable[[], float],
        *,
        max_flows: int = _MAX_FLOWS,
        max_sources: int = _MAX_SOURCES,
    ) -> None:
        self._max_flows = max_flows
        self._per_minute = per_minute
        self._hops = hops
        self._seen: dict[str, None] = {}
        self._configured = frozenset(configured)
        self._rates = Rates(per_minute / _MINUTE_S, per_minute, max_sources, clock)

    def check(self, flow: str, forwarded_for: bytes) -> None:
        """Count `flow` if it is new; `forwarded_for` is Envoy's x-forwarded-for header.

        Raises:
            TooManyFlows: the flow is new, and its source has reached its limit.
        """
        if flow in self._seen or flow in self._configured:
            return
        source = self._source(forwarded_for)
        if source:  # without an address the picker cannot tell clients apart
            wait_s = self._rates.take(source)
            if wait_s:
                raise TooManyFlows(
                    f"more than {self._per_minute} new flows a minute from one source",
                    retry_after_s=retry_after_s(wait_s),
                )
        self._seen[flow] = None
        if len(self._seen) > self._max_flows:
            del self._seen[next(iter(self._seen))]

    def _source(self, forwarded_for: bytes) -> str:
        """The client's address, or /64 network in IPv6, as the first trusted proxy saw it; '' if unknown.
        Some proxies add the client's port, or write an IPv4 address as an IPv6 address."""
        if not forwarded_for:
            return ""
        entries = forwarded_for.split(b",")
        text = entries[max(len(entries) - 1 - self._hops, 0)].strip().decode("latin-1")
        if text.startswith("["):
            text = text[1:].partition("]")[0]
        elif text.count(":") == 1:
            text = text.partition(":")[0]
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return text[:64]
        if isinstance(address, ipaddress.IPv6Address):
            address = address.ipv4_mapped or address
        if isinstance(address, ipaddress.IPv4Address):
            return str(address)
        return str(ipaddress.IPv6Network((address, _NETWORK_BITS), strict=False))


def read_limit(settings: ExtProc, clock: Callable[[], float]) -> Rates:
    return Rates(settings.read_rate, max(settings.read_rate * _READ_BURST_S, 1.0), 1, clock)


def new_flow_limit(settings: Settings, clock: Callable[[], float]) -> NewFlowLimit:
    names = {model.name for model in settings.models}
    queue = settings.fair_request_queue
    return NewFlowLimit(queue.new_flows_per_minute, names, settings.extproc.trusted_hops, clock)


class OpenRequests:
    """Counts the replica's open requests, in all pools and modes, so that a drain can wait for them.

    `closed`: the replica drains and refuses new requests; queued requests keep waiting.
    """

    def __init__(self) -> None:
        self.count = 0
        self.closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    def began(self) -> None:
        self.count += 1
        self._idle.clear()

    def ended(self) -> None:
        self.count -= 1
        if not self.count:
            self._idle.set()

    async def none(self) -> None:
        await self._idle.wait()


@dataclass(frozen=True, slots=True)
class ExchangeContext:
    """The objects that all requests of a pool share. `paths` is None for a pool that this replica does not
    serve. `reads` limits the rate of read requests; `fill` returns the used part of the queue's capacity, 0
    to 1. `clock` counts seconds from any origin. `selected` parses the header by which the conformance suite
    chooses endpoints; None if clients may not choose. `tokens` is None unless KV events are read."""

    settings: Settings
    paths: AllowedPaths | None
    reads: Rates
    bodies: BodyBudget
    new_flows: NewFlowLimit
    intake: Intake
    gate: Admission
    chooser: EndpointChooser
    origins: Origins
    open_requests: OpenRequests
    metrics: Metrics
    lines: DecisionLines
    clock: Callable[[], float]
    fill: Callable[[], float]
    selected: Callable[[bytes], tuple[str, ...]] | None = None
    tokens: TokenPrefixes | None = None

    def way(self, method: bytes, path: bytes, *, has_body: bool) -> Way:
        """How a request with this method and path is served. A read request counts towards the read limit.

        Raises:
            UnknownPool: the proxy names a pool that is not served here.
            UnknownPath: the path is not allowed.
            BadRequest: the request lacks the body that its path needs.
            TooManyReads: the replica's limit of reads a second is reached.
        """
        if self.paths is None:
            raise UnknownPool("the proxy names a pool that is not served here")
        way = self.paths.way(method, path)
        if way is None:
            if not self.settings.extproc.conformance:
                raise UnknownPath(NOT_LISTED)
            return Way("inference" if has_body else "read")  # the conformance suite sends unlisted paths
        if way.kind == "read":
            wait_s = self.reads.take()
            if wait_s:
                raise TooManyReads(
                    f"more than {self.settings.extproc.read_rate:g} reads a second",
                    retry_after_s=retry_after_s(wait_s),
                )
        elif way.kind == "inference" and not has_body and way.is_known:
            raise BadRequest("the request has no body; a JSON object with a model is needed")
        return way

    def new_body(self) -> BodyBuffer:
        """A buffer for one body, as received or as decoded; the body's bytes are charged to the budget."""
        return BodyBuffer(self.bodies, self.settings.extproc.max_body_bytes)

    async def ask(
        self, body: bytes | None, headers: Mapping[str, bytes], way: Way
    ) -> tuple[Ask, BodyBuffer | None]:
        """Parse a request's `body` (None: no body). Also returns the buffer that charges a decoded body to
        the budget, or None if the body was not encoded; the caller must release this buffer.

        Raises:
            UnsupportedEncoding, PayloadTooLarge, BufferFull: the body cannot be decoded, or is too large.
            BadRequest: the body is malformed; the message names the fault.
        """
        if body is None:
            return bodiless(way), None
        content_type = headers.get(CONTENT_TYPE, b"")
        if CONTENT_ENCODING not in headers:
            return read_body(body, way, content_type), None
        encodings = headers[CONTENT_ENCODING]
        decoded, counted = await decode(body, encodings, self.new_body, self.bodies.decoding)
        try:
            return read_body(decoded, way, content_type), counted
        except BaseException:
            counted.release()
            raise


class Decision:
    """Follows one request until Envoy gets its endpoints or its refusal; counts and logs the outcome.

    `mode` is `standard`, `lean` or `http`. In `standard` the end of the request's stream settles the request;
    in the modes `lean` and `http` the request's final access-log entry does. `path` selects the error format
    of a refusal. `trusts_id`: Envoy itself has set the header x-request-id.

    `placement` is set from the admission until `placed` or `withdraw` is called. `request_id` is the
    request's id in the access log; '' if the picker needs no access-log entry about the request. `pressure`
    is the value of `x-queue-pressure` for the client. Times are in seconds of the context's clock.
    """

    def __init__(self, context: ExchangeContext, mode: str = "", path: bytes = b"") -> None:
        self._context = context
        self.mode, self.path = mode, path
        self.trusts_id = True
        self.began_s = context.clock()
        self.arrived_s = self.placed_s = self.began_s
        self.model = self.target_model = ""
        self.request: InferenceRequest | None = None
        self.request_id = ""
        self.placement: Placement | None = None
        self.pressure = ""
        self._subset: tuple[str, ...] | None = None
        self._ask: Ask | None = None  # is set only while KV events are read

    async def route(self, way: Way, headers: Mapping[str, bytes], subset: tuple[str, ...] | None) -> None:
        """Choose endpoints for a request that needs no admission. The first endpoint stores the state that
        the request names, or else has served the request's session.

        Raises:
            NoEndpoints: no endpoint, or no endpoint of the subset, is ready.
        """
        context, self._subset = self._context, subset
        origin = await context.origins.find((way.ref,)) if way.ref else ""
        session = context.intake.session_of(headers)
        placement = context.chooser.route(subset, origin=origin, session=session)
        if way.has_state and self.mode != "standard":  # the access log reports ids of state in the answer
            self.request_id = headers.get(REQUEST_ID, b"").decode("latin-1") or context.intake.new_id()
            placement = placement._replace(accounting_token=context.origins.read_token(self.request_id))
        self.placement, self.placed_s = placement, context.clock()
        self.pressure = pressure(context.fill(), 0.0, 1.0)

    def read(
        self, ask: Ask, headers: Mapping[str, bytes], subset: tuple[str, ...] | None, forwarded_for: bytes
    ) -> bool:
        """Make the request from its body and headers; `forwarded_for` is the value of the header
        x-forwarded-for. Returns whether the model in the body must be replaced by `target_model`.

        Raises:
            BadRequest: a header that the picker reads is malformed; the message names it.
            TooManyFlows: the flow is new, and its source has reached its limit.
        """
        context, self._subset = self._context, subset
        self.model = ask.model
        request = context.intake.request(ask, headers, subset=subset, trusted=self.trusts_id)
        self.request, self.model, self.target_model = request, request.model, request.target_model
        context.new_flows.check(request.flow, forwarded_for)
        self.arrived_s = context.clock()
        if context.tokens is not None:
            self._ask = ask
        asked = ask.model or context.intake.default_model
        return request.target_model != asked and (ask.model != "" or ask.needs_model)

    async def admit(self, age_s: float = 0.0) -> None:
        """Wait for the request's turn and its endpoints. The request is queued as if it had arrived `age_s`
        seconds ago. If another request has the same id, this request gets a new id. A request that refers to
        stored state goes to the endpoint that has the state.

        Raises:
            RequestError: as `Admission.admit`, or the replica drains.
        """
        context, request = self._context, self.request
        assert request is not None, "read comes first"
        if context.open_requests.closed:
            raise ShuttingDown()
        if request.refers:
            origin = await context.origins.find(request.refers, request.ttl_s)
            self.request = request = request._replace(refers=(), origin=origin)
        owned = self.mode == "standard"
        try:
            self.placement = await context.gate.admit(request, stream_owned=owned, age_s=age_s)
        except RequestIdTaken:
            self.request = request = request._replace(id=context.intake.new_id())
            self.placement = await context.gate.admit(request, stream_owned=owned, age_s=age_s)
        self.request_id, self.placed_s = request.id, context.clock()
        self.pressure = pressure(context.fill(), self.placed_s - self.arrived_s, request.ttl_s)

    async def confirm(self, age_s: float) -> None:
        """Make sure that the request still has the placement made `age_s` seconds ago.

        No lease is renewed before Envoy has the answer. If the request's lease has expired, the request
        queues again with its original arrival time (G4).

        Raises:
            RequestError: for the same reasons as in `Admission.confirm` and `Admission.admit`.
        """
        request, placement, gate = self.request, self.placement, self._context.gate
        if request is None or placement is None or await gate.confirm(request.id, placement, age_s):
            return
        gate.withdraw(request.id, placement)
        self.placement = None
        await self.admit(self._context.clock() - self.arrived_s)

    def destinations(self, placement: Placement) -> str:
        """The picked endpoints as the value of the header `x-gateway-destination-endpoint`.

        If a subset or labels restrict the request, repeat its endpoints until each of Envoy's attempts has
        one: after the last named endpoint, Envoy would try any endpoint of the pool.
        """
        named = placement.endpoints
        if self._subset is not None or (self.request is not None and self.request.selector):
            missing = 1 + self._context.settings.scheduling.fallbacks - len(named)
            named = (*named, *islice(cycle(named), max(missing, 0)))
        return ",".join(named)

    def stage_headers(self, placement: Placement) -> tuple[tuple[str, str], ...]:
        """The headers that name the request's prefill endpoint and encoders, and their values. Envoy removes
        a header with the value '' from the client's request."""
        stages, request = self._context.settings.scheduling.stages, self.request
        encoders: tuple[str, ...] = ()
        if request is not None and request.media:
            encoders = self._context.chooser.encoders(request, placement)
        prefiller = placement.prefillers[0] if placement.prefillers else ""
        return (stages.header, prefiller), (stages.encode.header, ",".join(encoders)), *_REMOVED

    def quota_headers(self) -> dict[str, str]:
        """The headers that give the client its tenants' remaining quota; empty without tenants."""
        quota = "" if self.placement is None else self.placement.quota
        if not quota:
            return {}
        is_anthropic = _is_of_anthropic(self.path)
        return quota_headers(quota, is_anthropic=is_anthropic, now_s=time.time())

    def placed(self) -> None:
        """Count and log that Envoy now gets the placement; do nothing without a placement."""
        placement, self.placement = self.placement, None
        if placement is None:
            return
        context = self._context
        seconds = context.clock() - self.began_s
        context.metrics.answered(self.mode, self.model, "ok", seconds, self.target_model)
        if placement.prefillers:
            context.metrics.split(self.mode, self.model, self.target_model)
            if self.mode != "standard" and placement.prefill_s is not None:
                # In `standard` the picker sees the answer begin; in other modes the access log reports this.
                asyncio.get_running_loop().call_later(
                    placement.prefill_s, context.gate.prefilled, self.request_id
                )
        if self._ask is not None and context.tokens is not None and self.request is not None:
            (ask, self._ask), target = (self._ask, None), self.target_model
            text = partial(ask.renamed, target) if ask.model not in ("", target) else lambda: ask.text
            placed_on = placement.endpoints[0], *placement.prefillers[:1]
            context.tokens.placed(self.request, placed_on, self.path, text)
        if context.lines.debug:
            context.lines.placed(self.request, placement.endpoints, self.mode, seconds)

    def refuse(self, error: RequestError) -> "Refusal":
        """Count and log a refusal, and withdraw any placement. Returns the answer that the client gets."""
        self.withdraw()
        context = self._context
        overload_status = context.settings.fair_request_queue.overload_status
        refused = refusal(error, overload_status, context.fill(), self.path)
        seconds = context.clock() - self.began_s
        context.metrics.answered(self.mode, self.model, error.code, seconds, self.target_model)
        context.lines.refused(self.request, error.code, refused.status, self.mode, seconds)
        return refused

    def client_left(self) -> None:
        """Count and log that the client left before the decision, and withdraw any placement."""
        self.withdraw()
        if self.request is not None:
            context = self._context
            seconds = context.clock() - self.began_s
            context.metrics.client_gone(self.mode, self.model, seconds, self.target_model)
            context.lines.refused(self.request, ClientGone.code, ClientGone.status, self.mode, seconds)

    def withdraw(self) -> None:
        """Undo a placement that Envoy cannot have received."""
        placement, self.placement = self.placement, None
        if placement is None or self.request is None:
            return
        self._context.gate.withdraw(self.request.id, placement)
        if placement.waited_s is not None:
            self._context.metrics.waited(self.model, placement.waited_s, False, self.target_model)


class Refusal(NamedTuple):
    """An error answer that the picker itself gives to a client, in every mode."""

    status: int
    headers: dict[str, str]
    body: bytes


def refusal(error: RequestError, overload_status: int, fill: float, path: bytes = b"") -> Refusal:
    """The status, headers and body of a refusal. The body has the error format of the API that `path`
    belongs to, Anthropic's or OpenAI's.

    `overload_status` is the status for requests dropped for overload; `fill` is the used part of the queue.
    """
    status = overload_status if error.is_overload else error.status
    headers = {
        "content-type": "application/json",
        PRESSURE: PRESSURES[-1] if error.by_queue else pressure(fill, 0.0, 1.0),
    }
    if error.retry_after_s is not None or status in (429, 503):
        headers["retry-after"] = str(_RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s)
    if error.reason is not None:
        headers[DROPPED_REASON] = error.reason
    if isinstance(error, OverBurst) or (error.retry_after_s or 0) > _LONGEST_RETRY_S:
        headers[SHOULD_RETRY] = "false"
    is_anthropic = _is_of_anthropic(path)
    if isinstance(error, OverLimit):
        headers |= quota_headers(error.quota, is_anthropic=is_anthropic, now_s=time.time())
    if is_anthropic:
        kind = _ANTHROPIC_KINDS.get(status, error.kind)
        text: dict[str, object] = {"type": "error", "error": {"type": kind, "message": str(error)}}
    else:
        text = {"error": {"message": str(error), "type": error.kind, "code": error.code}}
    return Refusal(status, headers, orjson.dumps(text, option=orjson.OPT_APPEND_NEWLINE))


def _is_of_anthropic(path: bytes) -> bool:
    """Whether `path` belongs to Anthropic's API, that is, is `/v1/messages` or a path below it."""
    return b"/v1/messages" in path and b"/v1/messages/" in path.partition(b"?")[0] + b"/"


def pressure(fill: float, waited_s: float, ttl_s: float) -> str:
    """The value of the header `x-queue-pressure`, `0.00` to `1.00`: how near a request is to a refusal.

    The value is the greater of `fill`, the used part of the queue, and the part of its TTL that the request
    has waited. The replica computes this pressure without a call to Redis.
    """
    waited = waited_s / ttl_s
    greater = fill if fill > waited else waited
    return PRESSURES[round(greater * _PRESSURE_STEPS)] if greater < 1 else PRESSURES[-1]
