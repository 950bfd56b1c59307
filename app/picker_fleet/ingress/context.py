"""State that all requests of a pool share, in every mode: client limits, the drain gate, and
`ExchangeContext`, which holds them for exchanges (exchange.py) and checks (ingress/http/check.py).
`ByPool` keeps one object for each pool of the replica.
"""

import asyncio
import ipaddress
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from picker_fleet.admission.gate import Gate
from picker_fleet.admission.origins import Origins
from picker_fleet.domain.allowlist import NOT_LISTED, Api, Paths, Way, model_in_query
from picker_fleet.domain.budgets import BodyBudget
from picker_fleet.domain.config import Settings
from picker_fleet.domain.errors import (
    BadRequest,
    ClientGone,
    PayloadTooLarge,
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
from picker_fleet.ingress.intake import CONTENT_ENCODING, CONTENT_TYPE, REQUEST_ID, Ask, Intake, read_body
from picker_fleet.telemetry.logs import DecisionLines
from picker_fleet.telemetry.metrics import Metrics

STALLED_S = 30.0  # the longest silence within an upload
MAX_UPLOADS = 2048  # uploads that may wait for more of their request
_CHECKS = 6  # checks of upload deadlines per STALLED_S

_MAX_SOURCES = 10_000
_MAX_PATHS = 4096  # cached path lookups
_MAX_FLOWS = 16_384  # known flows kept; a flow dropped from them counts as new again
_NETWORK_BITS = 64  # IPv6 prefix that counts as one source: a customer has at least a /64
_MINUTE_S = 60.0
_READ_BURST_S = 2.0  # burst of reads, in seconds of `extproc.read_rate`

_log = logging.getLogger(__name__)


class BodyBuffer:
    """The chunks of one request's body, charged to `budget`; a body may have at most `limit_bytes`.

    `content_length` is the header's value, -1 without a valid header.
    """

    __slots__ = ("_budget", "_chunks", "_counted_bytes", "_limit_bytes", "content_length", "size_bytes")

    def __init__(self, budget: BodyBudget, limit_bytes: int) -> None:
        self._budget = budget
        self._limit_bytes = limit_bytes
        self._chunks: list[bytes] = []
        self._counted_bytes = 0
        self.size_bytes = 0
        self.content_length = -1

    def expect(self, length: bytes) -> None:
        """Record the content-length header and check it.

        Raises:
            PayloadTooLarge: the content-length is above the limit.
        """
        self.announce(length)
        if self.content_length > self._limit_bytes:
            raise self._too_large()

    def announce(self, length: bytes) -> None:
        """Record the content-length header without checking it: an earlier filter may have changed the
        body."""
        if length.isdigit():
            self.content_length = int(length[:20])

    def keep(self, body: bytes) -> None:
        """Put back the body that `join` returned; its bytes are still counted."""
        self._chunks = [body]

    def add(self, chunk: bytes) -> None:
        """Keep one more chunk.

        Raises:
            PayloadTooLarge: the body is larger than the limit.
            BufferFull: the replica's budget is used up.
        """
        size_bytes = len(chunk)
        self.size_bytes += size_bytes
        if self.size_bytes > self._limit_bytes:
            raise self._too_large()
        self._budget.take(size_bytes, self.size_bytes)
        self._counted_bytes += size_bytes
        self._chunks.append(chunk)

    def join(self) -> bytes:
        """Return the whole body and keep no copy; its bytes stay counted until `release`."""
        chunks, self._chunks = self._chunks, []
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def release(self) -> None:
        """Drop the body and give its bytes back to the budget; may be called twice."""
        if self._counted_bytes:
            self._budget.give_back(self._counted_bytes)
            self._counted_bytes = 0
            self._chunks = []

    def reset(self) -> None:
        """Drop the body and begin another."""
        self.release()
        self.size_bytes, self.content_length = 0, -1

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"the body is larger than {self._limit_bytes} bytes")


class UploadOverdue(Exception):
    """An upload has stalled or takes too long, or too many others wait."""


class Upload(Protocol):
    """A stream that waits for more of its request."""

    @property
    def upload_began_s(self) -> float:
        """When the request began to arrive, in seconds."""
        ...


class UploadDeadlines:
    """Ends uploads that stall or take too long: the pending read of their stream raises UploadOverdue.

    Envoy does not report a client that vanishes during its upload, and a deadline in Envoy would include the
    wait in the queue. Without a deadline here such an upload would keep its part of
    `extproc.max_buffered_bytes` for ever and delay every drain.

    `clock` is in seconds. An upload ends after `stalled_s` without a message, or when it has taken `whole_s`
    in all. If more than `most` uploads wait, the one that has waited longest ends.
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
        self._waiting: OrderedDict[Upload, tuple[float, Stream]] = OrderedDict()

    def wait(self, upload: Upload, stream: Stream) -> None:
        """Watch an upload that is about to read more of the request from `stream`."""
        self._waiting[upload] = self._clock(), stream
        if len(self._waiting) > self._most:
            _, (_, longest) = self._waiting.popitem(last=False)
            longest.interrupt(UploadOverdue())

    def received(self, upload: Upload) -> None:
        """Stop watching an upload that has received a message, or has ended."""
        self._waiting.pop(upload, None)

    async def run(self) -> None:
        """End overdue uploads, until cancelled."""
        while True:
            await asyncio.sleep(self._stalled_s / _CHECKS)
            now_s = self._clock()
            silent_since_s, begun_before_s = now_s - self._stalled_s, now_s - self._whole_s
            for upload, (at_s, stream) in list(self._waiting.items()):
                if at_s < silent_since_s or upload.upload_began_s < begun_before_s:
                    del self._waiting[upload]
                    stream.interrupt(UploadOverdue())


class AllowedPaths:
    """Finds how a request is served by its method and path, and caches the result in a dictionary."""

    def __init__(self, configured: Iterable[Api] = (), *, passes: bool = False) -> None:
        self._paths = Paths(configured, passes=passes)
        self._ways: dict[tuple[bytes, bytes], Way] = {}

    def way(self, method: bytes, path: bytes) -> Way | None:
        """How a request with these `:method` and `:path` is served; None if no model server may see it.

        Raises:
            BadRequest: the query, which names the model, has too many fields.
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


class _NoPaths(AllowedPaths):
    """The paths of a pool that is not served here: every request is refused."""

    def way(self, method: bytes, path: bytes) -> Way | None:
        raise UnknownPool("the proxy names a pool that is not served here")


class NewFlowLimit:
    """Lets each source begin `per_minute` new flows a minute (docs/fairness.md).

    Each flow gets its own fair share of the stock, so a client that invents flows could take more. A known
    flow costs one dictionary lookup; flows in `configured` are never new. `hops` is the number of proxies
    between clients and Envoy that append to x-forwarded-for. `clock` is in seconds.
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
        if source:  # without an address clients cannot be told apart
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
        """The client's address as the first trusted proxy saw it (IPv6: its /64 network); '' if unknown."""
        if not forwarded_for:
            return ""
        entries = forwarded_for.split(b",")
        text = entries[max(len(entries) - 1 - self._hops, 0)].strip().decode("latin-1")
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return text[:64]
        if isinstance(address, ipaddress.IPv4Address):
            return text
        return str(ipaddress.IPv6Network((address, _NETWORK_BITS), strict=False))


def read_limit(settings: ExtProc, clock: Callable[[], float]) -> Rates:
    return Rates(settings.read_rate, max(settings.read_rate * _READ_BURST_S, 1.0), 1, clock)


def new_flow_limit(settings: Settings, clock: Callable[[], float]) -> NewFlowLimit:
    names = {model.name for model in settings.models}
    queue = settings.fair_request_queue
    return NewFlowLimit(queue.new_flows_per_minute, names, settings.extproc.trusted_hops, clock)


class DrainGate:
    """Guards the admission gate: `close` refuses new requests, `shut_down` waiting ones too."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._closed = False
        self._waiting = 0

    @property
    def waiting(self) -> int:
        return self._waiting

    @property
    def closed(self) -> bool:
        """Whether new requests are refused."""
        return self._closed

    def close(self) -> None:
        """Refuse new requests; waiting ones go on waiting."""
        self._closed = True

    def shut_down(self) -> None:
        """Refuse all requests, waiting ones included."""
        self._closed = True
        self._gate.shut_down()

    async def admit(self, request: InferenceRequest, *, stream_owned: bool, age_s: float = 0.0) -> Placement:
        """As `Gate.admit`.

        Raises:
            ShuttingDown: the gate is closed, or the replica stopped while the request waited.
        """
        if self._closed:
            raise ShuttingDown()
        self._waiting += 1
        try:
            return await self._gate.admit(request, stream_owned=stream_owned, age_s=age_s)
        finally:
            self._waiting -= 1


class OpenRequests:
    """Counts requests that are being handled, in any mode, so that a drain can wait for them."""

    def __init__(self) -> None:
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def began(self) -> None:
        self._count += 1
        self._idle.clear()

    def ended(self) -> None:
        self._count -= 1
        if not self._count:
            self._idle.set()

    @property
    def count(self) -> int:
        return self._count

    async def none(self) -> None:
        await self._idle.wait()


@dataclass(frozen=True, slots=True)
class ExchangeContext:
    """Objects shared by a pool's requests, made once a pool. `reads` limits requests without admission;
    `fill` returns the used part of the queue, 0 to 1. `clock` is in seconds; only its differences count.
    `selected` parses the conformance suite's header of chosen endpoints; None if clients may not choose."""

    settings: Settings
    paths: AllowedPaths
    reads: Rates
    bodies: BodyBudget
    new_flows: NewFlowLimit
    intake: Intake
    gate: Gate
    origins: Origins
    drain_gate: DrainGate
    open_requests: OpenRequests
    metrics: Metrics
    lines: DecisionLines
    clock: Callable[[], float]
    fill: Callable[[], float]
    selected: Callable[[bytes], tuple[str, ...]] | None = None

    def way(self, method: bytes, path: bytes, *, has_body: bool) -> Way:
        """How a request with this method and path is served. Counts a read towards the read limit.

        Raises:
            UnknownPath: the path is not allowed.
            BadRequest: the request lacks the body that its path needs.
            TooManyReads: the replica's limit of reads a second is reached.
        """
        way = self.paths.way(method, path)
        if way is None:
            if not self.settings.extproc.conformance:
                raise UnknownPath(NOT_LISTED)
            return Way("inference" if has_body else "read")  # the conformance suite uses unlisted paths
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
        """A buffer for one body, or for its decoded form; each is charged to the budget."""
        return BodyBuffer(self.bodies, self.settings.extproc.max_body_bytes)

    async def decoded_ask(
        self, body: bytes, headers: Mapping[str, bytes], way: Way
    ) -> tuple[Ask, BodyBuffer]:
        """Decode and parse a request's encoded body. Returns the parsed request and the buffer that charges
        the decoded body to the budget; release the buffer when the decoded body is dropped.

        Raises:
            UnsupportedEncoding, PayloadTooLarge, BufferFull: the body cannot be decoded, or grows too large.
            BadRequest: the body is malformed; the message names the fault.
        """
        encodings, content_type = headers[CONTENT_ENCODING], headers.get(CONTENT_TYPE, b"")
        decoded, counted = await decode(body, encodings, self.new_body, self.bodies.decoding)
        try:
            return read_body(decoded, way, content_type), counted
        except BaseException:
            counted.release()
            raise

    async def admit(
        self, request: InferenceRequest, *, stream_owned: bool, age_s: float = 0.0
    ) -> tuple[InferenceRequest, Placement]:
        """As `DrainGate.admit`. If another request has the id, this request gets a new id. A request that
        refers to stored state goes to the endpoint that has the state."""
        if request.refers:
            origin = await self.origins.find(request.refers, request.ttl_s)
            request = request._replace(refers=(), origin=origin)
        try:
            return request, await self.drain_gate.admit(request, stream_owned=stream_owned, age_s=age_s)
        except RequestIdTaken:
            request = request._replace(id=self.intake.new_id())
        return request, await self.drain_gate.admit(request, stream_owned=stream_owned, age_s=age_s)

    async def route(
        self, way: Way, headers: Mapping[str, bytes], subset: tuple[str, ...] | None
    ) -> tuple[str, Placement]:
        """Choose endpoints for a request without admission, first the endpoint that has the named state, or
        the session's. Also returns the id by which the access log reports the answer's state ids, else ''."""
        origin = await self.origins.find((way.ref,)) if way.ref else ""
        session = self.intake.session_of(headers)
        placement = await self.gate.route(subset, origin=origin, session=session)
        if not way.has_state:
            return "", placement
        request_id = headers.get(REQUEST_ID, b"").decode("latin-1") or self.intake.new_id()
        return request_id, placement._replace(accounting_token=self.origins.read_token(request_id))

    def tries(self, subset: tuple[str, ...] | None, request: InferenceRequest | None) -> int:
        """The least number of endpoints that an answer names: Envoy's number of attempts if only some
        endpoints may serve the request, else 0 (no minimum)."""
        if subset is None and (request is None or not request.selector):
            return 0
        return 1 + self.settings.scheduling.fallbacks

    def client_left(self, request: InferenceRequest, mode: str, model: str, started_s: float) -> None:
        """Count and log a request whose client left before the decision; `model` is the requested model."""
        seconds = self.clock() - started_s
        self.metrics.client_gone(mode, model, seconds, request.target_model)
        self.lines.refused(request, ClientGone.code, ClientGone.status, mode, seconds)


def of_unknown_pool(context: ExchangeContext) -> ExchangeContext:
    """A context that refuses every request, for pools not served here; counts in `context`'s metrics."""
    return replace(context, paths=_NoPaths())
