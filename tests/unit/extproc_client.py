"""Envoy's side of ext_proc for tests: messages as Envoy builds them, and a scripted gate."""

import asyncio
import copy
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar
from unittest.mock import Mock

from background import running
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse

from picker_fleet.admission.ledger import Ledger
from picker_fleet.domain.budgets import ByPool
from picker_fleet.domain.config import Settings, parse
from picker_fleet.domain.errors import ShuttingDown
from picker_fleet.domain.request import Alive, Completion, Fault, InferenceRequest, Placement
from picker_fleet.grpc.certificates import Certificates
from picker_fleet.grpc.native import NativeTransport
from picker_fleet.grpc.transport import GrpcioTransport, Handler
from picker_fleet.ingress import context
from picker_fleet.ingress.context import ExchangeContext
from picker_fleet.ingress.ext_proc.exchange import Exchange
from picker_fleet.ingress.ext_proc.server import Transport
from picker_fleet.ingress.intake import Intake
from picker_fleet.state import accounting_token
from picker_fleet.state.accounting_token import Keyring
from picker_fleet.telemetry.logs import DecisionLines

MODES = {"standard": (4, 4), "lean": (4, 0)}
MAX_MESSAGE_BYTES = 1024 * 1024
PLACEMENT = Placement(endpoints=("10.0.0.1:8000", "[fd00::2]:8000"), accounting_token="ticket-1")


class ScriptedGate:
    """A gate that places each request at `placement` or raises `error`; requests wait until `open` is set."""

    is_cut_off = False

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.ledger = Ledger(lambda: 0.0)
        self.open = asyncio.Event()
        self.open.set()
        self.asked = asyncio.Event()
        self.admitted: list[tuple[InferenceRequest, bool]] = []
        self.routed: list[tuple[str, ...] | None] = []
        self.wanted: list[tuple[str, str]] = []  # origin and session of each routed request
        self.cancelled: list[str] = []
        self.ages_s: list[float] = []  # age in seconds of each admitted request
        self.confirmed: list[tuple[str, float]] = []
        self.keeping = True  # answer of the method `confirm`: whether the lease is valid
        self.placement = PLACEMENT
        self.withdrawn: list[str] = []
        self.settled: list[Completion] = []
        self.renewed: list[Alive] = []
        self.suspected: list[str] = []
        self.faults: list[Fault] = []
        self.prefilled_ids: list[str] = []
        self.reported: list[Completion | Alive] = []  # calls of the methods `settle` and `renew`, in order

    async def admit(self, request: InferenceRequest, *, stream_owned: bool, age_s: float = 0.0) -> Placement:
        self.admitted.append((request, stream_owned))
        self.ages_s.append(age_s)
        self.asked.set()
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.id)
            raise
        if self.error is not None:
            raise self.error
        return self.placement

    def prefilled(self, request_id: str) -> None:
        self.prefilled_ids.append(request_id)

    def shut_down(self) -> None:
        self.error = ShuttingDown()
        self.open.set()

    def route(self, subset: tuple[str, ...] | None, *, origin: str = "", session: str = "") -> Placement:
        self.routed.append(subset)
        self.wanted.append((origin, session))
        if self.error is not None:
            raise self.error
        return Placement(endpoints=self.placement.endpoints, accounting_token="")

    async def confirm(self, request_id: str, placement: Placement, age_s: float) -> bool:
        assert placement == self.placement
        self.confirmed.append((request_id, age_s))
        if self.error is not None:
            raise self.error
        return self.keeping

    def withdraw(self, request_id: str, placement: Placement) -> None:
        assert placement == self.placement
        self.withdrawn.append(request_id)

    def settle(self, completion: Completion) -> None:
        self.settled.append(completion)
        self.reported.append(completion)

    def answered(self, completion: Completion) -> None:
        self.reported.append(completion)

    def renew(self, alive: Alive) -> None:
        self.renewed.append(alive)
        self.reported.append(alive)

    def fault(self, fault: Fault) -> None:
        self.faults.append(fault)

    def suspect(self, request_id: str) -> None:
        self.suspected.append(request_id)


class KnownOrigins:
    """Stands for Origins: `known` maps ids of stored state to endpoints; `noted` records the calls of
    `note`."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        self.noted: list[tuple[tuple[str, ...], str | None]] = []

    async def find(self, ids: Iterable[str], most_s: float = 1.0) -> str:
        return next((self.known[each] for each in ids if each in self.known), "")

    def note(self, ids: Iterable[str], endpoint: str | None) -> None:
        self.noted.append((tuple(ids), endpoint))

    def read_token(self, request_id: str) -> str:
        return accounting_token.of_read(request_id, Keyring())


class Counted:
    """Stands for the class Metrics and records each call."""

    def __init__(self) -> None:
        self.answers: list[tuple[str, str, str]] = []
        self.waits: list[tuple[str, float, bool, str]] = []

    def answered(self, mode: str, model: str, code: str, seconds: float, target_model: str = "") -> None:
        assert seconds >= 0
        self.answers.append((mode, model, code))

    def split(self, mode: str, model: str, target_model: str) -> None: ...

    def client_gone(self, mode: str, model: str, seconds: float, target_model: str = "") -> None:
        self.answered(mode, model, "client_gone", seconds, target_model)

    def waited(self, model: str, seconds: float, success: bool, target_model: str = "") -> None:
        self.waits.append((model, seconds, success, target_model))


def exchange_context(
    gate: ScriptedGate,
    metrics: Any = None,
    settings: Settings | None = None,
    clock: Callable[[], float] | None = None,
    origins: KnownOrigins | None = None,
) -> ExchangeContext:
    """The context of a replica: request ids are `made-1`, `made-2`, …; each read of the default clock adds 1
    s."""
    settings = settings or parse({})
    ids, ticks = itertools.count(1), itertools.count()
    return ExchangeContext(
        lines=DecisionLines(lambda: 0.0),
        settings=settings,
        paths=context.AllowedPaths(settings.extproc.paths, passes=settings.extproc.unknown_paths == "pass"),
        reads=context.read_limit(settings.extproc, lambda: 0.0),
        bodies=context.BodyBudget(settings.extproc.max_buffered_bytes),
        new_flows=context.new_flow_limit(settings, lambda: 0.0),
        intake=Intake(settings, new_id=lambda: f"made-{next(ids)}", keys=Mock(variant_key=b"the pool's")),
        gate=gate,
        chooser=gate,  # type: ignore[arg-type]
        origins=origins or KnownOrigins(),  # type: ignore[arg-type]
        open_requests=context.OpenRequests(),
        metrics=metrics or Counted(),
        clock=clock or (lambda: float(next(ticks))),
        fill=lambda: 0.25,
    )


_Each = TypeVar("_Each")


def of_one_pool(thing: _Each) -> ByPool[_Each]:
    """Map every pool name to `thing`, as a replica with a single pool does."""
    return ByPool({"default": thing}, "default", thing)


def headers(
    mode: str | tuple[int, int] | None = "lean",
    fields: Mapping[str, str | bytes] | Sequence[tuple[str, str | bytes]] = (),
    *,
    ended: bool = False,
    metadata: Mapping[str, Mapping[str, Any]] | None = None,
    ask: tuple[str | bytes, str | bytes] | None = None,
) -> ProcessingRequest:
    """The first message of an exchange. `mode` is a name in MODES or two body modes; with None, the message
    has no `protocol_config`.

    `ask` is method and path, by default GET /v1/models if the headers end the request, else POST
    /v1/completions.
    """
    message = ProcessingRequest(request_headers={"end_of_stream": ended})
    pairs = fields.items() if isinstance(fields, Mapping) else fields
    method, path = ask or (("GET", "/v1/models") if ended else ("POST", "/v1/completions"))
    _fill(message.request_headers, [(":method", method), (":path", path), *pairs])
    if mode is not None:
        message.protocol_config.SetInParent()
        config = message.protocol_config
        config.request_body_mode, config.response_body_mode = MODES[mode] if isinstance(mode, str) else mode
    describe(message, metadata or {})
    return message


def mode_of(message: ProcessingRequest) -> str:
    """The name of the mode that `message` asks for; '' if no mode has the message's body modes."""
    if not message.HasField("protocol_config"):
        return "standard"
    modes = (message.protocol_config.request_body_mode, message.protocol_config.response_body_mode)
    return "lean" if modes == (0, 0) else next((name for name, mode in MODES.items() if mode == modes), "")


def body(chunk: bytes = b"", *, ended: bool = True) -> ProcessingRequest:
    return _chunk("request_body", chunk, ended)


def response_body(chunk: bytes = b"", *, ended: bool = False) -> ProcessingRequest:
    return _chunk("response_body", chunk, ended)


def trailers(part: str = "request_trailers") -> ProcessingRequest:
    return ProcessingRequest(**{part: {}})


def response_trailers() -> ProcessingRequest:
    return trailers("response_trailers")


def _chunk(part: str, chunk: bytes, ended: bool) -> ProcessingRequest:
    return ProcessingRequest(**{part: {"body": chunk, "end_of_stream": ended}})


def response_headers(
    status: int = 200, fields: Mapping[str, str] | None = None, *, ended: bool = False, served: str = ""
) -> ProcessingRequest:
    message = ProcessingRequest(response_headers={"end_of_stream": ended})
    _fill(message.response_headers, [(":status", str(status)), *(fields or {}).items()])
    if served:
        describe(message, {"envoy.lb": {"x-gateway-destination-endpoint-served": served}})
    return message


def describe(message: ProcessingRequest, metadata: Mapping[str, Mapping[str, Any]]) -> None:
    """Put filter metadata into `message`."""
    for namespace, fields in metadata.items():
        message.metadata_context.filter_metadata[namespace].update(dict(fields))


async def converse(exchange: Exchange, *messages: ProcessingRequest) -> list[ProcessingResponse]:
    """Feed `messages` to `exchange`; return all answers. AssertionError if the exchange ends too early."""
    said: list[ProcessingResponse] = []
    for message in messages:
        assert not exchange.done, "Envoy's messages after the end would not be read"
        if exchange.answered:
            answers, _ = exchange.pass_on(message.SerializeToString())
            said.extend(map(ProcessingResponse.FromString, answers))
        else:
            said.extend(map(ProcessingResponse.FromString, await exchange.receive(message)))
    return said


class Refusal(NamedTuple):
    """Status, error and headers of an immediate response."""

    status: int
    error: dict[str, Any]
    headers: dict[str, str]

    @property
    def code(self) -> str:
        return str(self.error["code"])


def refusal(answers: Sequence[ProcessingResponse]) -> Refusal:
    """The refusal in `answers`, whose only message must be an immediate response."""
    assert parts(answers) == ["immediate_response"]
    immediate = answers[0].immediate_response
    error = json.loads(immediate.body)["error"]
    return Refusal(immediate.status.code, error, set_headers(immediate.headers))


class Talk:
    """An exchange over a scripted gate, in the context of a replica with the configuration `settings`."""

    def __init__(
        self,
        gate: ScriptedGate | None = None,
        settings: Mapping[str, Any] | None = None,
        origins: KnownOrigins | None = None,
    ) -> None:
        self.gate, self.metrics = gate or ScriptedGate(), Counted()
        self.here = exchange_context(self.gate, self.metrics, parse(settings or {}), origins=origins)
        self.exchange = Exchange(self.here)

    def another(self) -> "Talk":
        """A second exchange at the replica of this exchange."""
        other = copy.copy(self)
        other.exchange = Exchange(self.here)
        return other

    async def say(self, *messages: ProcessingRequest) -> list[ProcessingResponse]:
        return await converse(self.exchange, *messages)

    async def refused(self, *messages: ProcessingRequest) -> Refusal:
        """The refusal that answers the last of `messages`; earlier messages get no answer."""
        answer = refusal(await self.say(*messages))
        assert self.exchange.done
        return answer

    async def leave(self, *messages: ProcessingRequest, once: asyncio.Event) -> None:
        """Send `messages`; when the event `once` is set, cancel their handling and end the stream."""
        async with running(self.say(*messages)):
            await once.wait()
        self.close()

    def wait_s(self, seconds: int) -> None:
        for _ in range(seconds):
            self.here.clock()

    def close(self) -> None:
        """End the stream; ending the stream again changes nothing."""
        self.exchange.close()
        self.exchange.close()


def parts(answers: Sequence[ProcessingResponse]) -> list[str]:
    """The kind of each message in `answers`, in order."""
    return [answer.WhichOneof("response") or "" for answer in answers]


def set_headers(mutation: Any) -> dict[str, str]:
    """The headers that a HeaderMutation sets; each must overwrite an existing header."""
    options = list(mutation.set_headers)
    assert all(option.append_action == option.OVERWRITE_IF_EXISTS_OR_ADD for option in options)
    return {option.header.key: option.header.raw_value.decode() for option in options}


def echoed(answers: Sequence[ProcessingResponse], part: str = "request_body") -> list[Any]:
    """The StreamedBodyResponses in `answers` for one direction, `request_body` or `response_body`."""
    of_part = [getattr(answer, part).response for answer in answers if answer.WhichOneof("response") == part]
    return [each.body_mutation.streamed_response for each in of_part]


def given_back(answers: Sequence[ProcessingResponse]) -> list[tuple[bytes, bool]]:
    """The request body that Envoy forwards, as pairs (bytes, is last): a single pair, or one for each
    chunk."""
    with_headers = [answer.request_headers.response for answer in answers]
    replaced = [each for each in with_headers if each.status == each.CONTINUE_AND_REPLACE]
    whole = [(each.body_mutation.body, True) for each in replaced]
    return whole + [(chunk.body, chunk.end_of_stream) for chunk in echoed(answers)]


def whole(answers: Sequence[ProcessingResponse]) -> bytes:
    """The request body that Envoy forwards; only the last chunk may end the body."""
    given_parts = given_back(answers)
    assert [ended for _, ended in given_parts] == [False] * (len(given_parts) - 1) + [True]
    return b"".join(part for part, _ in given_parts)


_transports = {"chosen": "grpcio"}


def choose_transport(name: str) -> None:
    """Set the gRPC transport of later calls of `serving_on`."""
    _transports["chosen"] = name


def chosen_transport() -> str:
    return _transports["chosen"]


@asynccontextmanager
async def serving_on(
    handlers: Mapping[str, Handler], certificates: Certificates | None = None
) -> AsyncIterator[str]:
    """Serve `handlers` on the chosen transport, over TLS if there are `certificates`; yields the address."""
    transport: Transport = GrpcioTransport(handlers, MAX_MESSAGE_BYTES, certificates)
    if chosen_transport() == "native":
        transport = NativeTransport(handlers, {}, MAX_MESSAGE_BYTES, certificates=certificates)
    try:
        yield f"127.0.0.1:{await transport.start('127.0.0.1:0')}"
    finally:
        await transport.stop(None)


def _fill(target: Any, pairs: Sequence[tuple[str, str | bytes]]) -> None:
    for key, value in pairs:
        raw = value.encode() if isinstance(value, str) else value
        target.headers.headers.add(key=key, raw_value=raw)
