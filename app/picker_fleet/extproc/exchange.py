"""One ext_proc exchange as a state machine, Envoy's messages in and answers out, and the service that runs
one for each stream.

    OPEN ── headers ──► BODY ── whole body ──► PLACED ── sent, standard ──► RESPONSE ──► DONE
      └─ header-only request ────────────────────▲  └─── sent, lean ──────────────────────▲

The mode is what Envoy says it will send (`codec.mode_of`).

No answer is sent before the whole body has arrived and the request is placed: until then Envoy can retry it
at another replica (G7). A placed request is withdrawn if its whole answer cannot have reached Envoy. In
`standard` the exchange settles the request exactly once at the end of the response (G6); else the access log
does. `server.Server` has the service on a transport.
"""

import asyncio
import enum
import logging
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    ProcessingRequest,
)
from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]

from picker_fleet.errors import (
    BadRequest,
    BodyStalled,
    BufferFull,
    RequestError,
    Unsupported,
)
from picker_fleet.extproc import codec
from picker_fleet.extproc.context import (
    BodyBudget,
    BodyBuffer,
    DrainGate,
    ExchangeContext,
    UploadDeadlines,
)
from picker_fleet.extproc.response import ModelRename, Response
from picker_fleet.extproc.transport import RpcError, Status, Stream
from picker_fleet.intake import (
    CONTENT_LENGTH,
    FORWARDED_FOR,
    METHOD,
    PATH,
    TEST_SELECTION,
    Ask,
    read_body,
    read_subset,
)
from picker_fleet.request import InferenceRequest, Placement
from picker_fleet.scheduling.chooser import SESSION_HEADER as SESSION

CONFIRM_AFTER_S = 1.0  # a placement older than this is confirmed before it is used; shorter than any lease

_log = logging.getLogger(__name__)


class Step(enum.Enum):
    """The states of the diagram above."""

    OPEN = enum.auto()
    BODY = enum.auto()
    PLACED = enum.auto()
    RESPONSE = enum.auto()
    DONE = enum.auto()


_OPEN, _BODY, _PLACED, _RESPONSE, _DONE = Step  # looked up often; a member through its class costs double


class _PlacedBody(NamedTuple):
    """A request that was placed before the end of its body was signalled. `length` is the body's, where it
    was rewritten.
    """

    answer: codec.Placed
    body: bytes
    request: InferenceRequest
    placement: Placement
    length: int | None
    arrived_s: float
    placed_s: float


class Exchange:
    """One request of Envoy: `receive` a message, write its answers, at the end `close`.

    Call `before_last_write` before the last answer of a `receive` is written: Envoy ends the stream as soon
    as it has that answer, often before the write returns, and its request would be withdrawn otherwise.
    """

    __slots__ = (
        "_body",
        "_code",
        "_context",
        "_forwarded_for",
        "_headers",
        "_mode",
        "_model",
        "_path",
        "_placed_body",
        "_placed_s",
        "_pressure",
        "_request",
        "_response",
        "_started_s",
        "_status",
        "_step",
        "_subset",
        "_target_model",
        "_unsent",
    )

    def __init__(self, context: ExchangeContext) -> None:
        self._context = context
        self._started_s = context.clock()
        self._step = _OPEN
        self._mode = ""
        self._headers: dict[str, bytes] = {}
        self._forwarded_for = b""
        self._subset: tuple[str, ...] | None = None
        self._body = BodyBuffer(context.bodies, context.settings.extproc.max_body_bytes)
        self._request: InferenceRequest | None = None
        self._model = ""
        self._path = b""
        self._target_model = ""
        self._placed_body: _PlacedBody | None = None
        self._placed_s = 0.0
        self._unsent: tuple[str, Placement] | None = None  # a placement that Envoy does not have yet
        self._pressure = ""  # as sent to the client once its request is placed
        self._response: Response | None = None
        self._code = ""  # of a decision that is not counted yet
        self._status = 200

    @property
    def done(self) -> bool:
        """Nothing more is to be read; the last answers of `receive` may still have to be written."""
        return self._step is _DONE

    @property
    def uploading(self) -> bool:
        """More of the request is to come, and nothing else is awaited."""
        return self._step is _BODY or self._step is _OPEN

    @property
    def upload_began_s(self) -> float:
        """When the request began to arrive; once all its bytes have, when it was placed."""
        return self._started_s if self._placed_body is None else self._placed_body.placed_s

    @property
    def streaming(self) -> bool:
        """The response comes in chunks; from now on messages may go to `pass_on`."""
        return self._response is not None and self._response.streaming

    def pass_on(self, data: bytes) -> tuple[Sequence[bytes], bool]:
        """Take Envoy's next message of a streaming response; the answers, and whether it was the last.

        Raises:
            RpcError: it is no message.
        """
        message = _read(data)
        return self._pass_on(message.WhichOneof("request"), message), self.done

    async def receive(self, message: ProcessingRequest) -> Iterable[bytes]:
        """Take Envoy's next message; the answers to write now, in order, each made when it is asked for.

        Raises:
            CancelledError: the client left while the request waited.
        """
        try:
            part = message.WhichOneof("request")
            if self._step is _BODY and part == "request_body":
                ended = self._keep(message.request_body)
                del message  # or a waiting request would keep the end of its body twice
                if ended:
                    return await self._answer_body()
                # Envoy signals the end of a body in a message of its own. By its content-length the body is
                # complete before that, so its placement begins here. Where one message answers, it is sent
                # at once; else the signal arrives while the request is being placed.
                if self._placed_body is None and self._body.size_bytes == self._body.content_length:
                    await self._place_body()
                    if self._in_one_message(self._body.size_bytes):
                        return await self._answer_body()
                return ()
            if self._step is _OPEN and part == "request_headers":
                return () if self._begin(message) else await self._place_read()
            if self._step is _RESPONSE:
                return self._pass_on(part, message)
            if self._step is _BODY and part == "request_trailers":
                return await self._answer_body(trailers=True)
            return self._unexpected(part, message)
        except RequestError as error:
            return (self._refuse(error),)
        except Exception:
            if self._step is _RESPONSE:
                raise  # too late for an answer
            _log.exception("an exchange failed", extra={"mode": self._mode, "model": self._model})
            self._release()
            return (self._refuse(RequestError("the picker failed on this request; its log says why")),)

    def before_last_write(self) -> None:
        """The last answer of a `receive` is about to be written: from here on Envoy may have it."""
        if self._code:
            context = self._context
            seconds = context.clock() - self._started_s
            context.metrics.answered(self._mode, self._model, self._code, seconds, self._target_model)
            lines = context.lines
            if self._code != "ok":
                lines.refused(self._request, self._code, self._status, self._mode, seconds)
            elif lines.debug:
                endpoints = self._unsent[1].endpoints if self._unsent is not None else ()
                lines.placed(self._request, endpoints, self._mode, seconds)
            self._code = ""
        if self._step is _PLACED:
            self._drop_body()
            self._unsent = None
            self._step = _DONE if self._response is None else _RESPONSE

    def close(self) -> None:
        """The stream has ended, for any reason: release what is still taken."""
        if self._step is _DONE and self._unsent is None and self._response is None:
            return
        if self._request is not None and self._step in (_OPEN, _BODY, _PLACED):
            # Envoy ended the stream before the decision: the client has left.
            self._context.client_left(self._request, self._mode, self._model, self._started_s)
        self._release()

    def fail_upload(self) -> bytes:
        """The rest of the request does not come: release everything; the answer to Envoy."""
        return self.abandon(BodyStalled("the rest of the body did not come"))

    def abandon(self, error: RequestError) -> bytes:
        self._release()
        return self._refuse(error)

    def _release(self) -> None:
        self._step = _DONE
        self._drop_body()
        if self._unsent is not None:
            request_id, placement = self._unsent
            self._context.gate.withdraw(request_id, placement)
            if placement.waited_s is not None:
                self._context.metrics.waited(self._model, placement.waited_s, False, self._target_model)
        elif self._response is not None:
            self._response.cut()
        self._unsent = self._response = None

    def _drop_body(self) -> None:
        self._placed_body = None
        self._body.release()

    # Messages in.

    def _begin(self, message: ProcessingRequest) -> bool:
        """Read the first message; whether a body follows it.

        Raises:
            UnknownPath, TooManyReads: no model server may be asked this, or not now.
            BadRequest: it has a body where it may not, or none where it must.
            PayloadTooLarge: its header says that its body is too large.
        """
        self._mode = codec.mode_of(message)
        if message.HasField("metadata_context"):
            hint = codec.read_metadata(message, codec.SUBSET_HINT)
            if hint is not None and codec.SUBSET in hint:
                self._subset = read_subset(hint[codec.SUBSET])
        headers = message.request_headers
        self._headers = codec.read_headers(headers, self._context.intake.headers)
        if self._context.selected is not None and TEST_SELECTION in self._headers:
            selected = self._context.selected(self._headers.pop(TEST_SELECTION))
            hinted = self._subset
            self._subset = selected if hinted is None else tuple(each for each in selected if each in hinted)
        method, path = self._headers.pop(METHOD, None), self._headers.pop(PATH, None)
        if method is None or path is None:
            raise Unsupported("Envoy sends no :method and :path; see forward_rules of the ext_proc filter")
        self._path = path
        if self._context.is_read(method, path, has_body=not headers.end_of_stream):
            return False
        self._forwarded_for = self._headers.pop(FORWARDED_FOR, b"")
        self._body.expect(self._headers.pop(CONTENT_LENGTH, b""))
        self._step = _BODY
        return True

    def _keep(self, part: HttpBody) -> bool:
        """Keep a chunk; whether it is marked as the last."""
        chunk = part.body
        if chunk:
            if self._placed_body is not None:
                raise BadRequest("the body is longer than its content-length")
            self._body.add(chunk)
        return bool(part.end_of_stream)

    def _unexpected(self, part: str | None, message: ProcessingRequest) -> Sequence[bytes]:
        if self._step is _OPEN:
            self._mode = codec.mode_of(message)
        if part == "response_headers" and self._step in (_OPEN, _BODY) and self._mode == "standard":
            # Envoy itself answers a request that is incomplete or has not begun: pass its answer on.
            self._step = _RESPONSE
            self._drop_body()
            self._response = self._own_response("", None)
            return self._pass_on(part, message)
        received = (part or "an empty message").replace("_", " ")
        wanted = "the request's headers" if self._step is _OPEN else "the rest of the request"
        raise Unsupported(
            f"{received} came where {wanted} should; see processing_mode of the ext_proc filter"
        )

    # Placement.

    async def _place_read(self) -> Sequence[bytes]:
        """Place a request without a body, which is not admitted."""
        placement = await self._context.gate.route(self._subset)
        self._pressure = codec.pressure(self._context.fill(), 0.0, 1.0)
        if self._mode == "standard":
            self._response = self._own_response("", None)
        return (self._placed(self._answer_to(placement).message()),)

    async def _place_body(self) -> None:
        """Place the request of a whole body; the result is in `_placed_body`."""
        body = self._body.join()
        ask = read_body(body)
        request = self._read_request(ask)
        length = rename = None
        if request.target_model != ask.model:
            body = ask.renamed(request.target_model)
            length = len(body)
            rename = ModelRename(request.target_model, ask.model)
        del ask  # or a waiting request would keep the parsed body too
        arrived_s = self._context.clock()
        request, placement = await self._admit(request, arrived_s)
        if self._mode == "standard":
            self._response = self._own_response(request.id, rename, placement)
        answer = self._answer_to(placement, request, length)
        self._placed_body = _PlacedBody(answer, body, request, placement, length, arrived_s, self._placed_s)

    async def _answer_body(self, *, trailers: bool = False) -> Iterable[bytes]:
        """The answers to a complete body; `trailers` says that trailers followed it.

        With trailers the body goes back with the headers, in every mode, and Envoy forwards the trailers. In
        chunks it would reach the model server twice wherever the route has retries: Envoy's router keeps a
        copy and sends it when the answer to the trailers lets them pass (docs/decisions.md, 15).
        """
        if self._placed_body is None:
            await self._place_body()
        placed, self._placed_body = self._placed_body, None
        assert placed is not None
        answer = placed.answer
        if self._mode != "standard":
            age_s = self._context.clock() - placed.placed_s
            if age_s > CONFIRM_AFTER_S:
                answer = await self._confirm(placed, age_s)
        if trailers or self._in_one_message(len(placed.body)):
            return (self._placed(answer.with_body(placed.body)),)
        return chain((self._placed(answer.message()),), codec.request_body(placed.body))

    async def _confirm(self, placed: _PlacedBody, age_s: float) -> codec.Placed:
        """The answer of a request placed `age_s` ago.

        Nothing renews its lease before Envoy has the answer, so the lease may have expired. Then the request
        queues again with its original arrival time (G4).
        """
        request, gate = placed.request, self._context.gate
        if await gate.confirm(request.id, placed.placement, age_s):
            return placed.answer
        gate.withdraw(request.id, placed.placement)
        self._unsent = None
        age_s = self._context.clock() - placed.arrived_s
        request, placement = await self._admit(request, placed.arrived_s, age_s)
        return self._answer_to(placement, request, placed.length)

    def _read_request(self, ask: Ask) -> InferenceRequest:
        self._model = ask.model
        from_envoy = self._mode != "standard"
        request = self._context.intake.request(ask, self._headers, subset=self._subset, trusted=from_envoy)
        self._model, self._target_model = request.model, request.target_model
        self._request = request
        self._context.new_flows.check(request.flow, self._forwarded_for)
        return request

    async def _admit(
        self, request: InferenceRequest, arrived_s: float, age_s: float = 0.0
    ) -> tuple[InferenceRequest, Placement]:
        context = self._context
        standard = self._mode == "standard"
        request, placement = await context.admit(request, stream_owned=standard, age_s=age_s)
        self._unsent = (request.id, placement)
        self._placed_s = context.clock()
        self._pressure = codec.pressure(context.fill(), self._placed_s - arrived_s, request.ttl_s)
        return request, placement

    # Answers.

    def _answer_to(
        self, placement: Placement, request: InferenceRequest | None = None, length: int | None = None
    ) -> codec.Placed:
        """The answer that sends the request to `placement`; without `request`, one that was not admitted."""
        context = self._context
        return codec.placed(
            placement,
            "" if request is None else request.id,
            length,
            context.tries(self._subset, request),
            "" if request is None else request.target_model,
            namespace=context.settings.extproc.metadata_namespace,
            pressure=self._pressure,
        )

    def _in_one_message(self, size_bytes: int) -> bool:
        """Whether headers and body go back in one message, so that neither is lost alone
        (docs/decisions.md, 15). Only in `lean`, where the Envoy is configured by this project."""
        return self._mode == "lean" and size_bytes <= codec.WHOLE_BYTES

    def _placed(self, answer: bytes) -> bytes:
        self._step = _PLACED
        self._code = "ok"
        return answer

    def _pass_on(self, part: str | None, message: ProcessingRequest) -> Sequence[bytes]:
        if self._response is None or part is None or not part.startswith("response_"):
            return ()  # the rest of a request that is answered already
        answers = self._response.pass_on(part, message)
        if self._response.ended:
            self._step = _DONE
        return answers

    def _own_response(
        self, request_id: str, rename: ModelRename | None, placement: Placement | None = None
    ) -> Response:
        context = self._context
        return Response(
            *(request_id, rename),
            settle=context.gate.settle,
            clock=context.clock,
            started_s=self._started_s,
            placed_s=context.clock(),
            namespace=context.settings.extproc.metadata_namespace,
            client_headers={
                SESSION: placement.session if placement is not None else "",
                codec.PRESSURE: self._pressure,
            },
            waited_s=placement.waited_s if placement is not None else None,
            target_model=self._target_model,
            tells_served=context.settings.extproc.conformance,
        )

    def _refuse(self, error: RequestError) -> bytes:
        self._step = _DONE
        self._drop_body()
        self._code = error.code
        overload = self._context.settings.fair_request_queue.overload_status
        refusal = codec.refusal(error, overload, self._context.fill, self._path)
        self._status = refusal.status
        return codec.refused(refusal, error.code)


def _read(data: bytes) -> ProcessingRequest:
    try:
        return ProcessingRequest.FromString(data)
    except DecodeError:
        raise RpcError(Status.INVALID_ARGUMENT, "no ProcessingRequest") from None


class ExchangeService:
    """Serves the streams of Envoy's `ext_proc` filter for one pool, an `Exchange` for each."""

    def __init__(self, context: ExchangeContext, uploads: UploadDeadlines) -> None:
        self._context = context
        self._uploads = uploads

    @property
    def bodies(self) -> BodyBudget:
        return self._context.bodies

    @property
    def drain_gate(self) -> DrainGate:
        return self._context.drain_gate

    async def quiet(self) -> None:
        await self._context.open_requests.none()

    async def process(self, stream: Stream) -> bytes | None:
        """Serve one stream of Envoy's; the last answer, None if there is none."""
        exchange = Exchange(self._context)
        task = asyncio.current_task()
        assert task is not None
        self._context.open_requests.began()
        try:
            # Uploads have a deadline. Other waits have none: Envoy ends the stream when its request ends,
            # which cancels this task, and keepalive ends the streams of an Envoy that vanished.
            uploading = True
            while True:
                uploading = uploading and exchange.uploading
                if uploading:
                    self._uploads.wait(exchange, task)
                try:
                    if exchange.streaming:
                        return await stream.relay(exchange.pass_on)
                    data = await stream.read()
                except BufferFull as fault:
                    refusal = exchange.abandon(fault)
                    exchange.before_last_write()
                    return refusal
                except asyncio.CancelledError:
                    if not self._uploads.has_ended(exchange) or task.uncancel() > 0:
                        raise  # Envoy ended the stream
                    refusal = exchange.fail_upload()
                    exchange.before_last_write()
                    return refusal
                if uploading:
                    self._uploads.received(exchange)
                if data is None:
                    return None
                message = _read(data)
                work = exchange.receive(message)
                del message, data  # a request that waits must not hold the end of its body twice
                answers = await work
                last = None
                for answer in answers:
                    if last is not None:
                        await stream.write(last)
                    last = answer
                if last is not None:
                    exchange.before_last_write()
                    if exchange.done:
                        return last
                    await stream.write(last)
                elif exchange.done:
                    return None
        finally:
            self._context.open_requests.ended()
            self._uploads.received(exchange)
            exchange.close()
