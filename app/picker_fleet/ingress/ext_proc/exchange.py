"""One ext_proc exchange as a state machine that takes Envoy's messages and returns answers, and the service
that runs an exchange for each stream.

    OPEN ── headers ──► BODY ── whole body ──► PLACED ── sent, standard ──► RESPONSE ──► DONE
      └─ header-only request ────────────────────▲  └─── sent, lean ──────────────────────▲

A body is complete when Envoy sets end_of_stream, or when all bytes of the content-length have arrived and no
end follows within `END_S`. The content-length is only a hint: an earlier filter may have changed the body.

The `protocol_config` of Envoy's first message sets the mode (`codec.mode_of`).

No answer is sent before the whole body has arrived and the request is placed: until then Envoy can retry the
request at another replica (G7). If Envoy cannot have received the whole answer, the placement is withdrawn.
In `standard` the exchange settles the request exactly once at the end of the response (G6); in other modes
the access log does. `server.Server` runs the service on a transport.
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

from picker_fleet.domain.allowlist import Way
from picker_fleet.domain.budgets import BodyBudget
from picker_fleet.domain.errors import BadRequest, BodyStalled, BufferFull, RequestError, Unsupported
from picker_fleet.domain.request import InferenceRequest, Placement
from picker_fleet.grpc.transport import RpcError, Status, Stream
from picker_fleet.ingress.context import (
    BodyBuffer,
    DrainGate,
    ExchangeContext,
    UploadDeadlines,
    UploadOverdue,
)
from picker_fleet.ingress.ext_proc import codec
from picker_fleet.ingress.ext_proc.response import ModelRename, Response
from picker_fleet.ingress.intake import (
    CONTENT_ENCODING,
    CONTENT_LENGTH,
    CONTENT_TYPE,
    FORWARDED_FOR,
    METHOD,
    PATH,
    TEST_SELECTION,
    Ask,
    bodiless,
    read_body,
    read_subset,
)
from picker_fleet.scheduling.chooser import SESSION_HEADER as SESSION

END_S = 0.1  # to wait for end_of_stream once all bytes of the content-length have arrived
CONFIRM_AFTER_S = 1.0  # an older placement is confirmed before Envoy is answered; shorter than any lease

_log = logging.getLogger(__name__)


class Step(enum.Enum):
    """The states of the diagram above."""

    OPEN = enum.auto()
    BODY = enum.auto()
    PLACED = enum.auto()
    RESPONSE = enum.auto()
    DONE = enum.auto()


_OPEN, _BODY, _PLACED, _RESPONSE, _DONE = Step  # reading a member through its class takes twice as long


class _PlacedBody(NamedTuple):
    """A placed request with its body. `length` is the new content-length, None to keep the header;
    `is_decoded`: `body` is sent without its content-encoding. `request` is None for a request not admitted.
    """

    answer: codec.Placed
    body: bytes
    request: InferenceRequest | None
    placement: Placement
    length: int | None
    arrived_s: float
    placed_s: float
    is_decoded: bool = False


class Exchange:
    """One ext_proc stream: call `receive` for each message, write its answers, and at the end `close`.

    Call `before_last_write` before writing the last answer of a `receive`: Envoy may end the stream on that
    answer before the write returns, and `close` would then withdraw the request.
    """

    __slots__ = (
        "_body",
        "_code",
        "_context",
        "_decoded",
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
        "_tried",
        "_unsent",
        "_way",
    )

    def __init__(self, context: ExchangeContext) -> None:
        self._context = context
        self._started_s = context.clock()
        self._step = _OPEN
        self._mode = ""
        self._headers: dict[str, bytes] = {}
        self._forwarded_for = b""
        self._subset: tuple[str, ...] | None = None
        self._way = _READ
        self._body = context.new_body()
        self._decoded: BodyBuffer | None = None  # charges the decoded body to the budget
        self._tried = False  # whether placement before end_of_stream was tried
        self._request: InferenceRequest | None = None
        self._model = ""
        self._path = b""
        self._target_model = ""
        self._placed_body: _PlacedBody | None = None
        self._placed_s = 0.0
        self._unsent: tuple[str, Placement] | None = None  # a placement that Envoy does not have yet
        self._pressure = ""  # x-queue-pressure for the client, set on placement
        self._response: Response | None = None
        self._code = ""  # "ok" or the error code of a decision that the metrics lack
        self._status = 200

    @property
    def done(self) -> bool:
        """Whether no more messages are to be read; the last answers of `receive` may be unwritten."""
        return self._step is _DONE

    @property
    def uploading(self) -> bool:
        """Whether the exchange waits for more of the request, and for nothing else."""
        return self._step is _BODY or self._step is _OPEN

    @property
    def upload_began_s(self) -> float:
        """When the request began to arrive; after an early placement, when it was placed."""
        return self._started_s if self._placed_body is None else self._placed_body.placed_s

    @property
    def awaits_end(self) -> bool:
        """Whether all bytes of the content-length have arrived, but not the end of the body."""
        return self._step is _BODY and self._body.size_bytes == self._body.content_length

    async def end(self) -> Iterable[bytes]:
        """Treat the body as complete although its end has not arrived. Returns answers as `receive` does."""
        return await self.receive(_END)

    @property
    def streaming(self) -> bool:
        """Whether response chunks are arriving; further messages may go to `pass_on`."""
        return self._response is not None and self._response.streaming

    def pass_on(self, data: bytes) -> tuple[Sequence[bytes], bool]:
        """Answer Envoy's next message of a streaming response. Returns the answers, and whether that was all.

        Raises:
            RpcError: `data` is not a ProcessingRequest.
        """
        message = _read(data)
        return self._pass_on(message.WhichOneof("request"), message), self.done

    async def receive(self, message: ProcessingRequest) -> Iterable[bytes]:
        """Handle Envoy's next message. Returns the answers to write now, in order, built lazily.

        Raises:
            CancelledError: the client left while the request waited.
        """
        try:
            part = message.WhichOneof("request")
            if self._step is _BODY and part == "request_body":
                ended = self._keep(message.request_body)
                del message  # free this copy of the body's last chunk before the request waits
                if ended:
                    return await self._answer_body()
                # Envoy signals the end of a body in a separate message. Once all bytes of the content-length
                # have arrived, place the request without waiting for that message. A one-message answer is
                # sent at once; a chunked one waits for the signal, which arrives during placement.
                came = self._body
                if came.size_bytes == came.content_length and not self._tried and await self._place_early():
                    return await self._answer_body()
                return ()
            if self._step is _OPEN and part == "request_headers":
                return () if self._begin(message) else await self._place_bodiless()
            if self._step is _RESPONSE:
                return self._pass_on(part, message)
            if self._step is _BODY and part == "request_trailers":
                return await self._answer_body(trailers=True)
            return self._unexpected(part, message)
        except RequestError as error:
            return (self._refuse(error),)
        except Exception:
            if self._step is _RESPONSE:
                raise  # too late for a refusal: the response has begun
            _log.exception("an exchange failed", extra={"mode": self._mode, "model": self._model})
            self._release()
            return (self._refuse(RequestError("the picker failed on this request; its log says why")),)

    def before_last_write(self) -> None:
        """Record the decision before the last answer of a `receive` is written: Envoy may have it then."""
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
        """Release everything that the exchange still holds; the stream has ended, for any reason."""
        if self._step is _DONE and self._unsent is None and self._response is None:
            return
        if self._request is not None and self._step in (_OPEN, _BODY, _PLACED):
            # Envoy ended the stream before the decision: the client has left.
            self._context.client_left(self._request, self._mode, self._model, self._started_s)
        self._release()

    def fail_upload(self) -> bytes:
        """Refuse an upload that stalled, and release everything. Returns the answer to Envoy."""
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
        if self._decoded is not None:
            self._decoded.release()

    # Messages in.

    def _begin(self, message: ProcessingRequest) -> bool:
        """Read the first message. Returns whether to wait for a body.

        Raises:
            UnknownPath, TooManyReads: the path is not allowed, or the read limit is reached.
            BadRequest: the request lacks the body that its path needs.
        """
        self._mode = mode = codec.mode_of(message)
        if mode == codec.HEADERS_ALONE:
            self._mode = "lean"
        hint = codec.read_metadata(message, codec.SUBSET_HINT, codec.SUBSET)
        if hint is not None:
            self._subset = read_subset(hint)
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
        has_body = not headers.end_of_stream
        self._way = self._context.way(method, path, has_body=has_body)
        self._forwarded_for = self._headers.pop(FORWARDED_FOR, b"")
        length = self._headers.pop(CONTENT_LENGTH, b"")
        if self._way.kind == "session" or not has_body:
            return False
        if mode == codec.HEADERS_ALONE:
            raise Unsupported("request_body_mode NONE is not supported for requests with a body")
        self._body.announce(length)
        self._step = _BODY
        return True

    def _keep(self, part: HttpBody) -> bool:
        """Keep a chunk of the body. Returns whether Envoy marks it as the last."""
        chunk = part.body
        if chunk and self._placed_body is None:
            self._body.add(chunk)
        elif chunk.strip(_SPACES):  # already placed, so the JSON object was complete
            raise BadRequest("the body goes on behind its JSON object")
        return bool(part.end_of_stream)

    def _unexpected(self, part: str | None, message: ProcessingRequest) -> Sequence[bytes]:
        if self._step is _OPEN:
            self._mode = codec.mode_of(message)
        if part == "response_headers" and self._step in (_OPEN, _BODY) and self._mode == "standard":
            # Envoy sent a local reply before the request was complete: pass that reply on.
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

    async def _place_bodiless(self) -> Sequence[bytes]:
        """Place a request by its headers alone."""
        if self._way.kind == "read":
            placed = await self._place_read(b"")
        else:
            placed = await self._place_ask(bodiless(self._way), b"")
        return (self._placed(placed.answer.message()),)

    async def _place_read(self, body: bytes) -> _PlacedBody:
        """Place a request that needs no admission."""
        request_id, placement = await self._context.route(self._way, self._headers, self._subset)
        self._pressure = codec.pressure(self._context.fill(), 0.0, 1.0)
        if self._mode == "standard":
            request_id, self._response = "", self._own_response("", None, placement)
        now_s = self._context.clock()
        answer = self._answer_to(placement, read_id=request_id)
        return _PlacedBody(answer, body, None, placement, None, now_s, now_s)

    async def _place_early(self) -> bool:
        """Place a request before Envoy signals the end of its body. Returns whether to answer at once.

        Only JSON objects are placed early: their closing brace shows that the body is complete.
        """
        self._tried = True
        if self._way.source == "form" or self._way.kind == "read" or CONTENT_ENCODING in self._headers:
            return False
        body = self._body.join()
        if body[-1:] == b"}" or body.rstrip(_SPACES)[-1:] == b"}":
            try:
                await self._place_body(body)
                return self._in_one_message(len(body))
            except BadRequest:
                pass  # perhaps incomplete: an earlier filter may have lengthened the body
        self._body.keep(body)
        return False

    async def _place_body(self, body: bytes) -> None:
        """Place the request whose whole body is `body`; sets `_placed_body`."""
        if self._way.kind == "read":
            self._placed_body = await self._place_read(body)
            return
        if CONTENT_ENCODING in self._headers:
            ask, self._decoded = await self._context.decoded_ask(body, self._headers, self._way)
        else:
            ask = read_body(body, self._way, self._headers.get(CONTENT_TYPE, b""))
        self._placed_body = await self._place_ask(ask, body)

    async def _place_ask(self, ask: Ask, body: bytes) -> _PlacedBody:
        """Place the request `ask`, which was parsed from `body`."""
        request = self._read_request(ask)
        sent_model = ask.model or self._context.intake.default_model
        length = rename = None
        is_decoded = False
        if request.target_model != sent_model and (ask.model or ask.needs_model):
            body = ask.renamed(request.target_model)
            length, is_decoded = len(body), self._decoded is not None
            rename = ModelRename(request.target_model, ask.model) if ask.model else None
        elif self._decoded is not None:
            self._decoded.release()
        del ask  # free the parsed body before the request waits
        if length is None and self._body.content_length not in (-1, len(body)):
            length = len(body)
        arrived_s = self._context.clock()
        request, placement = await self._admit(request, arrived_s)
        if self._mode == "standard":
            self._response = self._own_response(request.id, rename, placement)
        answer = self._answer_to(placement, request, length, is_decoded=is_decoded)
        return _PlacedBody(answer, body, request, placement, length, arrived_s, self._placed_s, is_decoded)

    async def _answer_body(self, *, trailers: bool = False) -> Iterable[bytes]:
        """Answer a complete body; `trailers` says that trailers follow the body.

        With trailers, headers and body go back in one message, in every mode, and Envoy forwards the
        trailers. In chunks, the body would reach the model server twice on routes with retries: Envoy's
        router keeps a copy and sends that too once the trailers are answered (docs/decisions.md, 15).
        """
        if self._placed_body is None:
            await self._place_body(self._body.join())
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
        """Confirm a placement made `age_s` seconds ago. Returns the request's answer.

        Nothing renews a lease before Envoy has the answer, so the lease may have expired. Then the request
        queues again with its original arrival time (G4).
        """
        request, gate = placed.request, self._context.gate
        if request is None or await gate.confirm(request.id, placed.placement, age_s):
            return placed.answer
        gate.withdraw(request.id, placed.placement)
        self._unsent = None
        age_s = self._context.clock() - placed.arrived_s
        request, placement = await self._admit(request, placed.arrived_s, age_s)
        return self._answer_to(placement, request, placed.length, is_decoded=placed.is_decoded)

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
        self,
        placement: Placement,
        request: InferenceRequest | None = None,
        length: int | None = None,
        *,
        is_decoded: bool = False,
        read_id: str = "",
    ) -> codec.Placed:
        """The answer that sends a request to `placement`. Without `request`, the request was not admitted,
        and `read_id` is its id in the access log."""
        context = self._context
        return codec.placed(
            placement,
            read_id if request is None else request.id,
            length,
            context.tries(self._subset, request),
            "" if request is None else request.target_model,
            namespace=context.settings.extproc.metadata_namespace,
            pressure=self._pressure,
            removes=CONTENT_ENCODING if is_decoded else "",
            is_our_envoy=self._mode == "lean",
        )

    def _in_one_message(self, size_bytes: int) -> bool:
        """Whether headers and body go back in one message, so that neither is lost alone
        (docs/decisions.md, 15). Only in `lean`, where this project configures Envoy."""
        return self._mode == "lean" and size_bytes <= codec.WHOLE_BYTES

    def _placed(self, answer: bytes) -> bytes:
        self._step = _PLACED
        self._code = "ok"
        return answer

    def _pass_on(self, part: str | None, message: ProcessingRequest) -> Sequence[bytes]:
        if self._response is not None and part is not None and part.startswith("response_"):
            answers = self._response.pass_on(part, message)
            if self._response.ended:
                self._step = _DONE
            return answers
        if part == "request_body" and self._way.kind == "session":
            chunk = message.request_body
            return [codec.streamed_request(chunk.body, ended=chunk.end_of_stream)]
        if part == "request_trailers":
            return [codec.REQUEST_TRAILERS]  # the request was answered before its trailers arrived
        return ()  # more of a request that is already answered

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
            picked=placement.endpoints[0] if placement is not None else "",
            tells_served=context.settings.extproc.conformance,
            note_ids=context.origins.note if self._way.has_state else None,
        )

    def _refuse(self, error: RequestError) -> bytes:
        self._step = _DONE
        self._drop_body()
        self._code = error.code
        overload = self._context.settings.fair_request_queue.overload_status
        refusal = codec.refusal(error, overload, self._context.fill, self._path)
        self._status = refusal.status
        return codec.refused(refusal, error.code)


_READ = Way("read")
_SPACES = b" \t\r\n\0"
_END = ProcessingRequest(request_body={"end_of_stream": True})


def _read(data: bytes) -> ProcessingRequest:
    try:
        return ProcessingRequest.FromString(data)
    except DecodeError:
        raise RpcError(Status.INVALID_ARGUMENT, "no ProcessingRequest") from None


class ExchangeService:
    """Serves one pool's `ext_proc` streams, each with its own `Exchange`."""

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
        """Serve one of Envoy's streams. Returns the last answer, for the transport to send, or None."""
        exchange = Exchange(self._context)
        self._context.open_requests.began()
        reading: asyncio.Task[bytes | None] | None = None  # the read that waits for a body's end
        try:
            # Uploads have a deadline. Other waits have none: Envoy ends the stream when its request ends,
            # which cancels this task, and keepalive ends the streams of an Envoy that vanished.
            uploading = True
            while True:
                uploading = uploading and exchange.uploading
                waits = uploading and not stream.has_message
                if waits:
                    self._uploads.wait(exchange, stream)
                is_late = False
                try:
                    if reading is not None:
                        data, reading = await reading, None
                    elif exchange.streaming:
                        return await stream.relay(exchange.pass_on)
                    elif waits and exchange.awaits_end:
                        reading = asyncio.create_task(stream.read())
                        is_late = not (await asyncio.wait((reading,), timeout=END_S))[0]
                        if not is_late:
                            data, reading = reading.result(), None
                    else:
                        data = await stream.read()
                except BufferFull as fault:
                    refusal = exchange.abandon(fault)
                    exchange.before_last_write()
                    return refusal
                except UploadOverdue:
                    refusal = exchange.fail_upload()
                    exchange.before_last_write()
                    return refusal
                if waits:
                    self._uploads.received(exchange)
                if is_late:
                    work = exchange.end()
                elif data is None:
                    return None
                else:
                    message = _read(data)
                    work = exchange.receive(message)
                    del message, data  # free this copy of the body's last chunk before a wait
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
            if reading is not None:
                reading.cancel()
            self._context.open_requests.ended()
            self._uploads.received(exchange)
            exchange.close()
