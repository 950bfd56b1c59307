"""One ext_proc exchange as a state machine: messages of Envoy in, answers out; no gRPC.

    OPEN ── headers ──► BODY ── whole body ──► PLACED ── told, standard ──► RESPONSE ──► DONE
      └─ header-only request, headers mode ──────▲  └─── told, lean and headers ──────────▲

The mode is what Envoy says it will send (`protocol_config` of the first message, ENVOY.md):

    request body           response body          mode
    FULL_DUPLEX_STREAMED   FULL_DUPLEX_STREAMED   standard (also if Envoy says nothing)
    FULL_DUPLEX_STREAMED   NONE                   lean
    NONE                   NONE                   headers

Nothing goes out until the whole body has come and the request is placed: until then Envoy can take the
exchange to another replica (G7). A placed request whose whole answer cannot have reached Envoy is withdrawn,
one that is held through its response is settled, exactly once (G6); the access log settles the others.
"""

import enum
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    ProcessingRequest,
    ProcessingResponse,
)

from app.admission.gate import Gate
from app.config import Settings
from app.errors import BadRequest, BodyStalled, Dropped, PayloadTooLarge, RequestError, Unsupported
from app.extproc import codec
from app.extproc.door import Door
from app.extproc.rename import ModelRename
from app.extproc.response import Response
from app.intake import CONTENT_LENGTH, Ask, Intake, read_body, read_metadata, read_subset
from app.request import InferenceRequest, Placement
from app.telemetry.decisions import DecisionLines
from app.telemetry.metrics import Metrics

_log = logging.getLogger(__name__)

_NONE = ProcessingMode.NONE
_DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED
_MODES = {(_DUPLEX, _DUPLEX): "standard", (_DUPLEX, _NONE): "lean", (_NONE, _NONE): "headers"}


class Step(enum.Enum):
    """Where an exchange is; the drawing above."""

    OPEN = enum.auto()
    BODY = enum.auto()
    PLACED = enum.auto()
    RESPONSE = enum.auto()
    DONE = enum.auto()


_KEPT_S = 1.0  # how long a place waits for the end of its body unasked; shorter than any lease
_OPEN, _BODY, _PLACED, _RESPONSE, _DONE = Step  # looked up often; a member through its class costs double


@dataclass(frozen=True, slots=True)
class Desk:
    """What all exchanges of a replica share. `clock` is in seconds and only its differences count."""

    settings: Settings
    intake: Intake
    gate: Gate
    door: Door
    metrics: Metrics
    lines: DecisionLines
    clock: Callable[[], float]


class _Ready(NamedTuple):
    """What was placed before the end of its body was told. `length` is the body's, where it was rewritten.

    A tuple, since each request makes one and a frozen dataclass takes three times as long to make.
    """

    answer: ProcessingResponse
    body: bytes
    request: InferenceRequest
    placement: Placement
    length: int | None
    came_s: float
    placed_s: float


class Exchange:
    """One request of Envoy: `receive` a message, write what it gives, at the end `close`.

    `told` is said before the last answer of a `receive` is written, not after: Envoy ends the stream as soon
    as it has that one, often before the write returns, and would have its request taken back otherwise.
    """

    __slots__ = (
        "_asked",
        "_body",
        "_body_bytes",
        "_code",
        "_desk",
        "_headers",
        "_length",
        "_mode",
        "_model",
        "_ready",
        "_response",
        "_started_s",
        "_step",
        "_subset",
        "_target_model",
        "_untold",
    )

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._step = _OPEN
        self._started_s = desk.clock()
        self._mode = ""
        self._headers: dict[str, bytes] = {}
        self._subset: tuple[str, ...] | None = None
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._length = -1  # of the body, if its header says so
        self._ready: _Ready | None = None
        self._asked: InferenceRequest | None = None
        self._model = ""
        self._target_model = ""
        self._code = ""  # of a decision that is not counted yet
        self._untold: tuple[str, Placement] | None = None  # placed, and Envoy does not know it yet
        self._response: Response | None = None

    @property
    def done(self) -> bool:
        """Nothing more is to be read; what `receive` gave last is still to be written."""
        return self._step is _DONE

    @property
    def uploading(self) -> bool:
        """More of the request is to come, and nothing else is awaited."""
        return self._step is _BODY

    async def receive(self, message: ProcessingRequest) -> Sequence[ProcessingResponse]:
        """Take Envoy's next message; the answers to write now, in order.

        Raises:
            CancelledError: the client went away while the request waited.
        """
        try:
            part = message.WhichOneof("request")
            if self._step is _BODY and part == "request_body":
                return await self._take_body(message.request_body)
            if self._step is _OPEN and part == "request_headers":
                return () if self._begin(message) else await self._place_headers(message)
            if self._step is _RESPONSE:
                return self._pass_on(part, message)
            if self._step is _BODY and part == "request_trailers":
                return [*await self._answer_body(ended=False), codec.REQUEST_TRAILERS]
            return self._unexpected(part, message)
        except RequestError as error:
            return self._refuse(error)
        except Exception:
            if self._step is _RESPONSE:
                raise  # too late for an answer
            _log.exception("an exchange failed", extra={"mode": self._mode, "model": self._model})
            self.close()
            return self._refuse(RequestError("the picker failed on this request; its log says why"))

    def told(self) -> None:
        """The last of what `receive` gave is about to be written: from here on Envoy may know it."""
        if self._code:
            seconds = self._desk.clock() - self._started_s
            self._desk.metrics.answered(self._mode, self._model, self._code, seconds, self._target_model)
            lines = self._desk.lines
            if self._code != "ok":
                lines.refused(self._asked, self._code, self._mode, seconds)
            elif lines.debug:
                endpoints = self._untold[1].endpoints if self._untold is not None else ()
                lines.placed(self._asked, endpoints, self._mode, seconds)
            self._code = ""
        if self._step is _PLACED:
            self._untold = None
            self._step = _DONE if self._response is None else _RESPONSE

    def close(self) -> None:
        """The stream is over, for whatever reason: nothing stays taken that nobody will release."""
        self._step = _DONE
        if self._untold is not None:
            self._desk.gate.withdraw(*self._untold)
        elif self._response is not None:
            self._response.cut()
        self._untold = self._response = None

    def give_up(self) -> Sequence[ProcessingResponse]:
        """The rest of the body does not come: nothing of it is kept; what to tell Envoy."""
        self.close()
        self._body, self._ready = [], None
        return self._refuse(BodyStalled("the rest of the body did not come"))

    def _begin(self, message: ProcessingRequest) -> bool:
        """Read the first message; says whether a body follows it."""
        self._mode = _mode(message)
        if message.HasField("metadata_context"):
            hint = codec.read_metadata(message, codec.SUBSET_HINT)
            if hint is not None and codec.SUBSET in hint:
                self._subset = read_subset(hint[codec.SUBSET])
        headers = message.request_headers
        if headers.end_of_stream:
            return False
        self._headers = codec.read_headers(headers, self._desk.intake.headers)
        length = self._headers.pop(CONTENT_LENGTH, b"")
        if length.isdigit():
            self._length = int(length[:20])
            self._check_size(self._length)
        if self._mode == "headers":
            return False
        self._step = _BODY
        return True

    async def _place_headers(self, message: ProcessingRequest) -> Sequence[ProcessingResponse]:
        """Place a request that has no body, or whose body Envoy has read."""
        if message.request_headers.end_of_stream:
            placement = await self._desk.gate.route(self._subset)
            if self._mode == "standard":
                self._response = self._answer_of("", None)
            return [self._placed(codec.placed(placement, "", None, self._tries(None)))]
        fields = codec.read_metadata(message, codec.REQUEST)
        if fields is None:
            raise BadRequest("no model could be read from the body; is its content-type application/json?")
        request = self._request(read_metadata(fields, max(self._length, 0)))
        if request.target_model != request.model:
            raise Unsupported(
                f"headers mode cannot send model {request.model} as {request.target_model}; "
                "lean and standard can"
            )
        placement = await self._admit(request)
        return [self._placed(codec.placed(placement, request.id, None, self._tries(request)))]

    async def _take_body(self, part: HttpBody) -> Sequence[ProcessingResponse]:
        """Keep a chunk; the answers once the body has ended.

        Envoy tells a body's end in a message of its own. By its content-length a body is whole before that:
        its placement begins then, and the mark of its end comes while it is under way.
        """
        chunk = part.body
        if chunk and self._ready is not None:
            raise BadRequest("the body is longer than its content-length")
        self._body.append(chunk)
        self._body_bytes += len(chunk)
        self._check_size(self._body_bytes)
        if part.end_of_stream:
            return await self._answer_body(ended=True)
        if self._ready is None and self._body_bytes == self._length:
            await self._place_body()
        return ()

    async def _place_body(self) -> None:
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        ask = read_body(body)
        request = self._request(ask)
        length = rename = None
        if request.target_model != request.model:
            body = ask.renamed(request.target_model)
            length = len(body)
            rename = ModelRename(request.target_model, request.model)
        del ask  # a long wait should not hold the parsed body too
        came_s = self._desk.clock()
        placement = await self._admit(request)
        if self._mode == "standard":
            self._response = self._answer_of(request.id, rename)
        answer = codec.placed(placement, request.id, length, self._tries(request))
        self._ready = _Ready(answer, body, request, placement, length, came_s, self._desk.clock())

    async def _answer_body(self, *, ended: bool) -> Sequence[ProcessingResponse]:
        if self._ready is None:
            await self._place_body()
        ready, self._ready = self._ready, None
        assert ready is not None
        answer = ready.answer
        if self._mode != "standard":
            kept_s = self._desk.clock() - ready.placed_s
            if kept_s > _KEPT_S:
                answer = await self._still_placed(ready, kept_s)
        return [self._placed(answer), *codec.request_body(ready.body, ended=ended)]

    async def _still_placed(self, ready: _Ready, kept_s: float) -> ProcessingResponse:
        """The answer of one placed `kept_s` ago: nobody renews its lease before Envoy is told, so its place
        may be another's by now. It then waits for a new one where it stood by its arrival (G4)."""
        request, gate = ready.request, self._desk.gate
        if await gate.confirm(request.id, ready.placement, kept_s):
            return ready.answer
        gate.withdraw(request.id, ready.placement)
        self._untold = None
        placement = await self._admit(request, self._desk.clock() - ready.came_s)
        return codec.placed(placement, request.id, ready.length, self._tries(request))

    def _request(self, ask: Ask) -> InferenceRequest:
        self._model = ask.model
        trusted = self._mode != "standard"
        request = self._desk.intake.request(ask, self._headers, subset=self._subset, trusted=trusted)
        self._target_model = request.target_model
        self._asked = request
        return request

    async def _admit(self, request: InferenceRequest, age_s: float = 0.0) -> Placement:
        placement = await self._desk.door.admit(request, held=self._mode == "standard", age_s=age_s)
        self._untold = (request.id, placement)
        return placement

    def _tries(self, request: InferenceRequest | None) -> int:
        """How many endpoints the answer names at least: as many as Envoy tries, where only some may serve."""
        if self._subset is None and (request is None or not request.selector):
            return 0
        return 1 + self._desk.settings.scheduling.fallbacks

    def _placed(self, answer: ProcessingResponse) -> ProcessingResponse:
        self._step = _PLACED
        self._code = "ok"
        return answer

    def _unexpected(self, part: str | None, message: ProcessingRequest) -> Sequence[ProcessingResponse]:
        if part == "response_headers" and self._step is _BODY and self._mode == "standard":
            # an answer of Envoy's own to a request that never became whole: let it pass
            self._step = _RESPONSE
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

    def _answer_of(self, request_id: str, rename: ModelRename | None) -> Response:
        desk = self._desk
        settle = desk.gate.settle
        return Response(
            *(request_id, rename),
            settle=settle,
            clock=desk.clock,
            started_s=self._started_s,
            placed_s=desk.clock(),
        )

    def _refuse(self, error: RequestError) -> Sequence[ProcessingResponse]:
        self._step = _DONE
        self._code = error.code
        overload = self._desk.settings.fair_request_queue.overload_status
        return [codec.refused(error, overload if isinstance(error, Dropped) else error.status)]

    def _check_size(self, size_bytes: int) -> None:
        limit_bytes = self._desk.settings.extproc.max_body_bytes
        if size_bytes > limit_bytes:
            raise PayloadTooLarge(f"the body is larger than {limit_bytes} bytes")


def _mode(message: ProcessingRequest) -> str:
    """The mode that Envoy speaks.

    Raises:
        Unsupported: it would send bodies in a way that is none of the three modes.
    """
    if not message.HasField("protocol_config"):
        return "standard"
    config = message.protocol_config
    request, response = config.request_body_mode, config.response_body_mode
    mode = _MODES.get((request, response))
    if mode is None:
        names = {number: name for name, number in ProcessingMode.BodySendMode.items()}
        asked, answered = names.get(request, request), names.get(response, response)
        raise Unsupported(
            f"request_body_mode {asked} with response_body_mode {answered} is not supported; "
            "FULL_DUPLEX_STREAMED or NONE is, for both or with NONE for the response"
        )
    return mode
