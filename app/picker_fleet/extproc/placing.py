"""The part of an exchange that puts its request to the gate, and keeps what it gets until Envoy is told."""

from typing import NamedTuple

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse

from picker_fleet.extproc import codec
from picker_fleet.extproc.desk import Desk
from picker_fleet.extproc.pressure import HEADER as PRESSURE
from picker_fleet.extproc.pressure import pressure
from picker_fleet.extproc.rename import ModelRename
from picker_fleet.extproc.response import Response
from picker_fleet.intake import Ask, read_body
from picker_fleet.request import InferenceRequest, Placement
from picker_fleet.scheduling.session import HEADER as SESSION

KEPT_S = 1.0  # how long a place waits for the end of its body unasked; shorter than any lease


class Ready(NamedTuple):
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


class Placing:
    """One request on its way to its place. `_untold` is what Envoy does not know of yet: `Exchange` takes it
    back where the stream ends before that."""

    __slots__ = (
        "_asked",
        "_desk",
        "_forwarded_for",
        "_headers",
        "_mode",
        "_model",
        "_placed_s",
        "_pressure",
        "_ready",
        "_response",
        "_started_s",
        "_subset",
        "_target_model",
        "_untold",
    )

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._started_s = desk.clock()
        self._mode = ""
        self._headers: dict[str, bytes] = {}
        self._forwarded_for = b""
        self._subset: tuple[str, ...] | None = None
        self._ready: Ready | None = None
        self._asked: InferenceRequest | None = None
        self._model = ""
        self._target_model = ""
        self._untold: tuple[str, Placement] | None = None  # placed, and Envoy does not know it yet
        self._response: Response | None = None
        self._placed_s = 0.0
        self._pressure = ""  # as the client is told, once it is placed

    async def _place_body(self, body: bytes) -> None:
        """Place the request of a whole body; `_ready` has what comes of it."""
        ask = read_body(body)
        request = self._request(ask)
        length = rename = None
        if request.target_model != ask.model:
            body = ask.renamed(request.target_model)
            length = len(body)
            rename = ModelRename(request.target_model, ask.model)
        del ask  # a long wait should not hold the parsed body too
        came_s = self._desk.clock()
        placement = await self._admit(request, came_s)
        if self._mode == "standard":
            self._response = self._answer_of(request.id, rename, placement)
        answer = self._towards(placement, request, length)
        self._ready = Ready(answer, body, request, placement, length, came_s, self._placed_s)

    async def _still_placed(self, ready: Ready, kept_s: float) -> ProcessingResponse:
        """The answer of one placed `kept_s` ago: nobody renews its lease before Envoy is told, so its place
        may be another's by now. It then waits for a new one where it stood by its arrival (G4)."""
        request, gate = ready.request, self._desk.gate
        if await gate.confirm(request.id, ready.placement, kept_s):
            return ready.answer
        gate.withdraw(request.id, ready.placement)
        self._untold = None
        placement = await self._admit(request, ready.came_s, self._desk.clock() - ready.came_s)
        return self._towards(placement, request, ready.length)

    def _request(self, ask: Ask) -> InferenceRequest:
        self._model = ask.model
        trusted = self._mode != "standard"
        request = self._desk.intake.request(ask, self._headers, subset=self._subset, trusted=trusted)
        self._model, self._target_model = request.model, request.target_model
        self._asked = request
        self._desk.newcomers.check(request.flow, self._forwarded_for)
        return request

    async def _admit(self, request: InferenceRequest, came_s: float, age_s: float = 0.0) -> Placement:
        desk = self._desk
        placement = await desk.door.admit(request, held=self._mode == "standard", age_s=age_s)
        self._untold = (request.id, placement)
        self._placed_s = desk.clock()
        self._pressure = pressure(desk.fill(), self._placed_s - came_s, request.ttl_s)
        return placement

    def _towards(
        self, placement: Placement, request: InferenceRequest | None = None, length: int | None = None
    ) -> ProcessingResponse:
        """The answer that sends the request to `placement`; without `request`, one that was not admitted."""
        return codec.placed(
            placement,
            "" if request is None else request.id,
            length,
            self._tries(request),
            "" if request is None else request.target_model,
            namespace=self._desk.settings.extproc.metadata_namespace,
            pressure=self._pressure,
        )

    def _tries(self, request: InferenceRequest | None) -> int:
        """How many endpoints the answer names at least: as many as Envoy tries, where only some may serve."""
        if self._subset is None and (request is None or not request.selector):
            return 0
        return 1 + self._desk.settings.scheduling.fallbacks

    def _answer_of(
        self, request_id: str, rename: ModelRename | None, placement: Placement | None = None
    ) -> Response:
        desk = self._desk
        settle = desk.gate.settle
        return Response(
            *(request_id, rename),
            settle=settle,
            clock=desk.clock,
            started_s=self._started_s,
            placed_s=desk.clock(),
            namespace=desk.settings.extproc.metadata_namespace,
            told={SESSION: placement.session if placement is not None else "", PRESSURE: self._pressure},
            waited_s=placement.waited_s if placement is not None else None,
            target_model=self._target_model,
        )
