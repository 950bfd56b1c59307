"""One ext_proc exchange as a state machine: messages of Envoy in, answers out; no gRPC.

    OPEN ── headers ──► BODY ── whole body ──► PLACED ── told, standard ──► RESPONSE ──► DONE
      └─ header-only request, headers mode ──────▲  └─── told, lean and headers ──────────▲

The mode is what Envoy says it will send (extproc/mode.py).

Nothing goes out until the whole body has come and the request is placed: until then Envoy can take the
exchange to another replica (G7). A placed request whose whole answer cannot have reached Envoy is withdrawn,
one that is held through its response is settled, exactly once (G6); the access log settles the others.
"""

import enum
import logging
import math
from collections.abc import Iterable, Sequence
from itertools import chain

from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    ProcessingRequest,
    ProcessingResponse,
)

from picker_fleet.errors import (
    BadRequest,
    BodyStalled,
    ClientGone,
    Dropped,
    PayloadTooLarge,
    RequestError,
    ShuttingDown,
    TooManyFlows,
    TooManyReads,
    UnknownPath,
    Unsupported,
)
from picker_fleet.extproc import codec
from picker_fleet.extproc.desk import Desk
from picker_fleet.extproc.mode import mode_of
from picker_fleet.extproc.placing import KEPT_S, Placing
from picker_fleet.extproc.pressure import FULL, pressure
from picker_fleet.intake import CONTENT_LENGTH, FORWARDED_FOR, METHOD, PATH, read_metadata, read_subset
from picker_fleet.paths import NOT_LISTED

_log = logging.getLogger(__name__)


class Step(enum.Enum):
    """Where an exchange is; the drawing above."""

    OPEN = enum.auto()
    BODY = enum.auto()
    PLACED = enum.auto()
    RESPONSE = enum.auto()
    DONE = enum.auto()


_OPEN, _BODY, _PLACED, _RESPONSE, _DONE = Step  # looked up often; a member through its class costs double


class Exchange(Placing):
    """One request of Envoy: `receive` a message, write what it gives, at the end `close`.

    `told` is said before the last answer of a `receive` is written, not after: Envoy ends the stream as soon
    as it has that one, often before the write returns, and would have its request taken back otherwise.
    """

    __slots__ = (
        "_body",
        "_body_bytes",
        "_code",
        "_held_bytes",
        "_length",
        "_status",
        "_step",
    )

    def __init__(self, desk: Desk) -> None:
        super().__init__(desk)
        self._step = _OPEN
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._held_bytes = 0  # of them, as `desk.bodies` counts them
        self._length = -1  # of the body, if its header says so
        self._code = ""  # of a decision that is not counted yet
        self._status = 200

    @property
    def done(self) -> bool:
        """Nothing more is to be read; what `receive` gave last is still to be written."""
        return self._step is _DONE

    @property
    def uploading(self) -> bool:
        """More of the request is to come, and nothing else is awaited."""
        return self._step is _BODY or self._step is _OPEN

    @property
    def upload_began_s(self) -> float:
        """When the request began to come; once all its bytes have, when it was placed."""
        return self._started_s if self._ready is None else self._ready.placed_s

    async def receive(self, message: ProcessingRequest) -> Iterable[ProcessingResponse]:
        """Take Envoy's next message; the answers to write now, in order, each made when it is asked for.

        Raises:
            CancelledError: the client went away while the request waited.
        """
        try:
            part = message.WhichOneof("request")
            if self._step is _BODY and part == "request_body":
                ended = self._keep(message.request_body)
                del message  # a long wait should not hold the last of the body twice
                return await self._go_on(ended)
            if self._step is _OPEN and part == "request_headers":
                return () if self._begin(message) else await self._place_headers(message)
            if self._step is _RESPONSE:
                return self._pass_on(part, message)
            if self._step is _BODY and part == "request_trailers":
                return await self._answer_body(trailed=True)
            return self._unexpected(part, message)
        except RequestError as error:
            return (self._refuse(error),)
        except Exception:
            if self._step is _RESPONSE:
                raise  # too late for an answer
            _log.exception("an exchange failed", extra={"mode": self._mode, "model": self._model})
            self._take_back()
            return (self._refuse(RequestError("the picker failed on this request; its log says why")),)

    def told(self) -> None:
        """The last of what `receive` gave is about to be written: from here on Envoy may know it."""
        if self._code:
            seconds = self._desk.clock() - self._started_s
            self._desk.metrics.answered(self._mode, self._model, self._code, seconds, self._target_model)
            lines = self._desk.lines
            if self._code != "ok":
                lines.refused(self._asked, self._code, self._status, self._mode, seconds)
            elif lines.debug:
                endpoints = self._untold[1].endpoints if self._untold is not None else ()
                lines.placed(self._asked, endpoints, self._mode, seconds)
            self._code = ""
        if self._step is _PLACED:
            self._drop_body()
            self._untold = None
            self._step = _DONE if self._response is None else _RESPONSE

    def close(self) -> None:
        """The stream is over, for whatever reason: nothing stays taken that nobody will release."""
        if self._step is _DONE and self._untold is None and self._response is None:
            return
        if self._asked is not None and self._step in (_OPEN, _BODY, _PLACED):
            # Envoy ends the stream of a whole request before its decision when the client has gone.
            seconds = self._desk.clock() - self._started_s
            self._desk.metrics.left(self._mode, self._model, seconds, self._target_model)
            self._desk.lines.refused(self._asked, ClientGone.code, ClientGone.status, self._mode, seconds)
        self._take_back()

    def _take_back(self) -> None:
        self._step = _DONE
        self._drop_body()
        if self._untold is not None:
            request_id, placement = self._untold
            self._desk.gate.withdraw(request_id, placement)
            if placement.waited_s is not None:
                self._desk.metrics.waited(self._model, placement.waited_s, False, self._target_model)
        elif self._response is not None:
            self._response.cut()
        self._untold = self._response = None

    def give_up(self) -> ProcessingResponse:
        """The rest of the request does not come: nothing of it is kept; what to tell Envoy."""
        self._take_back()
        return self._refuse(BodyStalled("the rest of the body did not come"))

    def _begin(self, message: ProcessingRequest) -> bool:
        """Read the first message; says whether a body follows it.

        Raises:
            UnknownPath, TooManyReads: it is nothing that a model server may be asked, or not now.
            BadRequest: it has a body where it may not, or none where it must.
        """
        self._mode = mode_of(message)
        if message.HasField("metadata_context"):
            hint = codec.read_metadata(message, codec.SUBSET_HINT)
            if hint is not None and codec.SUBSET in hint:
                self._subset = read_subset(hint[codec.SUBSET])
        headers = message.request_headers
        self._headers = codec.read_headers(headers, self._desk.intake.headers)
        if self._is_read(headers.end_of_stream):
            return False
        self._forwarded_for = self._headers.pop(FORWARDED_FOR, b"")
        length = self._headers.pop(CONTENT_LENGTH, b"")
        if length.isdigit():
            self._length = int(length[:20])
            self._check_size(self._length)
        if self._mode == "headers":
            return False
        self._step = _BODY
        return True

    def _is_read(self, ended: bool) -> bool:
        """Whether it is a read, which has no body and is not admitted, and not inference."""
        method, path = self._headers.pop(METHOD, None), self._headers.pop(PATH, None)
        if method is None or path is None:
            raise Unsupported("Envoy tells no :method and :path; see forward_rules of the ext_proc filter")
        kind = self._desk.paths.kind(method, path)
        if kind is None:
            raise UnknownPath(NOT_LISTED)
        if kind == "inference":
            if ended:
                raise BadRequest("the request has no body; a JSON object with a model is needed")
            return False
        if not ended:
            raise BadRequest("a GET with a body is not served")
        wait_s = self._desk.reads.take()
        if wait_s:
            raise TooManyReads(
                f"more than {self._desk.settings.extproc.read_rate:g} reads a second",
                retry_after_s=max(1, math.ceil(wait_s)),
            )
        return True

    async def _place_headers(self, message: ProcessingRequest) -> Sequence[ProcessingResponse]:
        """Place a read, or a request whose body Envoy has read."""
        if message.request_headers.end_of_stream:
            placement = await self._desk.gate.route(self._subset)
            self._pressure = pressure(self._desk.fill(), 0.0, 1.0)
            if self._mode == "standard":
                self._response = self._answer_of("", None)
            return [self._placed(self._towards(placement))]
        fields = codec.read_metadata(message, codec.REQUEST)
        if fields is None:
            raise BadRequest("no model could be read from the body; is its content-type application/json?")
        ask = read_metadata(fields, max(self._length, 0))
        request = self._request(ask)
        if request.target_model != ask.model:
            raise Unsupported(
                f"headers mode cannot send model {ask.model} as {request.target_model}; lean and standard can"
            )
        placement = await self._admit(request, self._started_s)
        return [self._placed(self._towards(placement, request))]

    def _keep(self, part: HttpBody) -> bool:
        """Keep a chunk; whether it is marked as the last."""
        chunk = part.body
        if chunk:
            if self._ready is not None:
                raise BadRequest("the body is longer than its content-length")
            self._body_bytes += len(chunk)
            self._check_size(self._body_bytes)
            self._desk.bodies.take(len(chunk), self._body_bytes)
            self._held_bytes += len(chunk)
            self._body.append(chunk)
        return bool(part.end_of_stream)

    def _drop_body(self) -> None:
        """Hold nothing of the body any more."""
        self._body, self._ready = [], None
        if self._held_bytes:
            self._desk.bodies.give_back(self._held_bytes)
            self._held_bytes = 0

    async def _go_on(self, ended: bool) -> Iterable[ProcessingResponse]:
        """The answers once the body has ended.

        Envoy tells a body's end in a message of its own. By its content-length a body is whole before that:
        its placement begins then. Where one message answers, it goes out at once; else the mark of the end
        comes while the placement is under way.
        """
        if ended:
            return await self._answer_body()
        if self._ready is None and self._body_bytes == self._length:
            await self._place_body(self._whole())
            if self._in_one_message(self._body_bytes):
                return await self._answer_body()
        return ()

    def _whole(self) -> bytes:
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        return body

    async def _answer_body(self, *, trailed: bool = False) -> Iterable[ProcessingResponse]:
        """The answers to a whole body; `trailed` says that trailers have come after it.

        Then it goes back with the headers, in every mode, and Envoy sends the trailers on by itself. Given
        back in chunks, it would reach the model server twice wherever the route has retries: Envoy's router
        keeps a copy, which goes out when the answer to the trailers lets them pass (docs/decisions.md, 15).
        """
        if self._ready is None:
            await self._place_body(self._whole())
        ready, self._ready = self._ready, None
        assert ready is not None
        answer = ready.answer
        if self._mode != "standard":
            kept_s = self._desk.clock() - ready.placed_s
            if kept_s > KEPT_S:
                answer = await self._still_placed(ready, kept_s)
        if trailed or self._in_one_message(len(ready.body)):
            return [self._placed(codec.with_body(answer, ready.body))]
        return chain((self._placed(answer),), codec.request_body(ready.body))

    def _in_one_message(self, size_bytes: int) -> bool:
        """Whether headers and body go back together, lest one get lost alone (docs/decisions.md, 15).

        In `lean` alone, where the Envoy is one that this project configures.
        """
        return self._mode == "lean" and size_bytes <= codec.WHOLE_BYTES

    def _placed(self, answer: ProcessingResponse) -> ProcessingResponse:
        self._step = _PLACED
        self._code = "ok"
        return answer

    def _unexpected(self, part: str | None, message: ProcessingRequest) -> Sequence[ProcessingResponse]:
        if self._step is _OPEN:
            self._mode = mode_of(message)
        if part == "response_headers" and self._step in (_OPEN, _BODY) and self._mode == "standard":
            # an answer of Envoy's own to a request that never became whole, or had not begun: let it pass
            self._step = _RESPONSE
            self._drop_body()
            self._response = self._answer_of("", None)
            return self._pass_on(part, message)
        came = (part or "an empty message").replace("_", " ")
        wanted = "the request's headers" if self._step is _OPEN else "the rest of the request"
        raise Unsupported(f"{came} came where {wanted} should; see processing_mode of the ext_proc filter")

    def _pass_on(self, part: str | None, message: ProcessingRequest) -> Sequence[ProcessingResponse]:
        if self._response is None or part is None or not part.startswith("response_"):
            return ()  # the rest of a request that is answered already
        answers = self._response.pass_on(part, message)
        if self._response.ended:
            self._step = _DONE
        return answers

    def _refuse(self, error: RequestError) -> ProcessingResponse:
        self._step = _DONE
        self._drop_body()
        self._code = error.code
        overload = self._desk.settings.fair_request_queue.overload_status
        dropped = isinstance(error, Dropped)
        by_queue = dropped and not isinstance(error, ShuttingDown | TooManyFlows)
        told = FULL if by_queue else pressure(self._desk.fill(), 0.0, 1.0)
        self._status = overload if dropped else error.status
        return codec.refused(error, self._status, told)

    def _check_size(self, size_bytes: int) -> None:
        limit_bytes = self._desk.settings.extproc.max_body_bytes
        if size_bytes > limit_bytes:
            raise PayloadTooLarge(f"the body is larger than {limit_bytes} bytes")
