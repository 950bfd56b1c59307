"""The replica's gRPC server with a real client: exchanges, health, and drain."""

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import extproc_client as envoy
import grpc
import pytest
from background import running, until
from clocks import Clock
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from extproc_client import Counted, ScriptedGate, body, headers, parts, response_body
from grpc_health.v1 import health_pb2, health_pb2_grpc

from picker_fleet.domain.config import parse
from picker_fleet.domain.errors import StartupError
from picker_fleet.domain.request import Outcome
from picker_fleet.grpc.transport import Handler, Stream
from picker_fleet.ingress.context import MAX_UPLOADS, STALLED_S, ExchangeContext, UploadDeadlines
from picker_fleet.ingress.ext_proc import server
from picker_fleet.ingress.ext_proc.codec import WHOLE_BYTES
from picker_fleet.ingress.ext_proc.exchange import ExchangeService
from picker_fleet.ingress.ext_proc.server import SERVICE, Server

ASK = b'{"model": "m"}'
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


pytestmark = pytest.mark.usefixtures("transport")


@dataclass
class Replica:
    """A gRPC server on a free port, and a client channel to that server."""

    gate: ScriptedGate
    server: Server
    channel: grpc.aio.Channel
    metrics: Counted
    context: ExchangeContext

    def exchange(self) -> Any:
        return self.channel.stream_stream(
            f"/{SERVICE}/Process", ProcessingRequest.SerializeToString, ProcessingResponse.FromString
        )()

    async def begin(self, *messages: ProcessingRequest) -> Any:
        """Open an exchange and send `messages`."""
        call = self.exchange()
        await talk(call, *messages, answers=0)
        return call

    async def health(self, name: str) -> Any:
        stub = health_pb2_grpc.HealthStub(self.channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status

    def watch(self, name: str) -> Any:
        stub = health_pb2_grpc.HealthStub(self.channel)
        return stub.Watch(health_pb2.HealthCheckRequest(service=name), timeout=10)


@asynccontextmanager
async def replica(
    services: Mapping[str, Handler] | None = None,
    *,
    stalled_s: float = STALLED_S,
    clock: Callable[[], float] | None = None,
    most_uploads: int = MAX_UPLOADS,
    **extproc: object,
) -> AsyncIterator[Replica]:
    """A ready replica; `extproc` overrides settings of that section; `clock` measures the time of uploads."""
    quick = {"listen": "127.0.0.1:0", "drain_grace": "0s", "drain_timeout": "30s"}
    settings = parse({"extproc": {**quick, "transport": envoy.chosen_transport(), **extproc}})
    gate, metrics = ScriptedGate(), Counted()
    clock = clock or asyncio.get_running_loop().time
    context = envoy.exchange_context(gate, metrics, settings, clock)
    uploads = UploadDeadlines(clock, settings.extproc.body_timeout, stalled_s, most_uploads)
    server = Server(envoy.of_one_pool(ExchangeService(context, uploads)), settings.extproc, services or {})
    port = await server.start()
    server.set_ready(True)
    try:
        async with running(uploads.run()), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Replica(gate, server, channel, metrics, context)
    finally:
        await server.stop()


@pytest.fixture
async def fleet(transport: str) -> AsyncIterator[Replica]:
    async with replica() as made:
        yield made


class StoppedClock(Clock):
    """A clock that stands still until the test sets `now_s` or calls `start()`, so that no pause of the host
    counts."""

    _running = False

    def __call__(self) -> float:
        return self.now_s + (asyncio.get_running_loop().time() if self._running else 0.0)

    def start(self) -> None:
        self._running, self.now_s = True, -asyncio.get_running_loop().time()


async def talk(call: Any, *messages: ProcessingRequest, answers: int) -> list[ProcessingResponse]:
    """Send `messages`, then read `answers` answers."""
    async with asyncio.timeout(30):
        for message in messages:
            await call.write(message)
        return [await call.read() for _ in range(answers)]


async def rest(call: Any) -> list[ProcessingResponse]:
    """All remaining answers of the stream `call`."""
    said = []
    async with asyncio.timeout(30):
        while (answer := await call.read()) is not grpc.aio.EOF:
            said.append(answer)
    return said


async def test_in_standard_mode_a_stream_lasts_until_the_response_has_ended(fleet: Replica) -> None:
    call = fleet.exchange()
    await talk(call, headers("standard"), body(ASK), answers=2)
    answer = [envoy.response_headers(), response_body(b"a"), response_body(b"b", ended=True)]
    said = await talk(call, *answer, answers=3)
    assert parts(said) == ["response_headers", "response_body", "response_body"]
    assert await call.code() is grpc.StatusCode.OK
    assert [completion.outcome for completion in fleet.gate.settled] == [Outcome.COMPLETED]


@pytest.mark.parametrize("begun", [[], [body(ASK, ended=False)]], ids=["headers only", "half a body"])
@pytest.mark.parametrize("mode", ["standard", "lean"])
async def test_a_stalled_upload_is_refused_and_its_bytes_are_released(
    mode: str, begun: list[ProcessingRequest]
) -> None:
    clock = StoppedClock()
    async with replica(stalled_s=0.3, clock=clock) as fleet:
        fields = {"content-length": str(2 * len(ASK))}
        half = await fleet.begin(headers(mode, fields), *begun)
        await until(lambda: fleet.context.open_requests.count == 1)
        clock.start()
        assert envoy.refusal(await rest(half)).status == 408
        assert await half.code() is grpc.StatusCode.OK
        assert fleet.metrics.answers == [(mode, "", "body_stalled")]
        assert fleet.context.bodies.held_bytes == 0


@pytest.mark.parametrize(("mode", "ask"), [
    ("standard", ASK), ("lean", ASK), ("lean", ASK.ljust(WHOLE_BYTES + 1)), ("lean", b'{"model": '),
])  # fmt: skip
async def test_a_body_of_full_content_length_is_answered_before_the_end_flag(mode: str, ask: bytes) -> None:
    async with replica() as fleet:
        fields = {"content-length": str(len(ask))}
        call = await fleet.begin(headers(mode, fields), body(ask, ended=False))
        answer = await call.read()
        kind = "request_headers" if ask.startswith(ASK) else "immediate_response"
        assert answer.WhichOneof("response") == kind
        call.cancel()


async def test_above_the_limit_the_oldest_half_sent_request_ends_and_complete_ones_are_served() -> None:
    async with replica(most_uploads=2) as fleet:
        halves = []
        for number in range(4):
            halves.append(await fleet.begin(headers("lean"), body(b"{", ended=False)))
            await until(lambda number=number: fleet.context.open_requests.count == min(number + 1, 2))
        for call in halves[:2]:
            assert envoy.refusal(await rest(call)).status == 408
        whole = fleet.exchange()
        assert parts(await talk(whole, headers("lean"), body(ASK), answers=1)) == ["request_headers"]


@pytest.mark.parametrize("mode", ["standard", "lean"])
async def test_a_request_whose_upload_takes_too_long_is_refused(mode: str) -> None:
    async with replica(stalled_s=30, body_timeout="300ms") as fleet:
        call = await fleet.begin(headers(mode))

        async def drip() -> None:
            while True:
                await call.write(body(b" ", ended=False))

        dripping = asyncio.create_task(drip())
        # Wait for the metric, because the client's reads race with the client's writes.
        await until(lambda: fleet.metrics.answers == [(mode, "", "body_stalled")])
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)
        assert fleet.context.bodies.held_bytes == 0


async def test_the_wait_in_the_queue_does_not_count_as_upload_time() -> None:
    clock = StoppedClock()
    async with replica(body_timeout="200ms", clock=clock) as fleet:
        fleet.gate.open.clear()
        long = ASK.ljust(WHOLE_BYTES + 1)
        call = await fleet.begin(headers("lean", {"content-length": str(len(long))}), body(long, ended=False))
        await until(fleet.gate.asked.is_set)
        other = await fleet.begin(headers("lean"))  # the upload of this second request times out
        await until(lambda: fleet.context.open_requests.count == 2)
        clock.now_s = 1.0
        assert envoy.refusal(await rest(other)).status == 408
        fleet.gate.open.set()
        assert parts(await talk(call, body(), answers=1)) == ["request_headers"]


@pytest.mark.parametrize("mode", ["standard", "lean"])
async def test_a_streams_end_of_any_kind_releases_its_body(fleet: Replica, mode: str) -> None:
    long = ASK.ljust(2 * WHOLE_BYTES)
    chunks = [body(long[at : at + WHOLE_BYTES], ended=False) for at in range(0, len(long), WHOLE_BYTES)]
    fleet.gate.open.clear()
    waiting = await fleet.begin(headers(mode), *chunks, body())
    half = await fleet.begin(headers(mode), chunks[0])
    await talk(fleet.exchange(), headers(mode), body(b"{"), answers=1)
    await until(lambda: fleet.gate.asked.is_set() and fleet.context.bodies.held_bytes == 3 * WHOLE_BYTES)
    waiting.cancel()
    half.cancel()
    await until(lambda: fleet.context.bodies.held_bytes == 0)
    fleet.gate.open.set()
    await talk(fleet.exchange(), headers(mode), *chunks, body(), answers=3)
    await until(lambda: fleet.context.bodies.held_bytes == 0)


@pytest.mark.parametrize("mode", ["standard", "lean"])
async def test_a_client_that_disconnects_cancels_its_queued_request(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with replica() as fleet:
        fleet.gate.open.clear()
        call = await fleet.begin(headers(mode, {"x-request-id": "made-1"}), body(ASK))
        await until(fleet.gate.asked.is_set)

        call.cancel()
        await until(lambda: fleet.gate.cancelled == ["made-1"])
        # Metrics and the log record the status 499 and the code `client_gone`.
        await until(lambda: fleet.metrics.answers == [(mode, "m", "client_gone")])
        assert (fleet.gate.withdrawn, fleet.gate.settled) == ([], [])
        [line] = [record for record in caplog.records if record.getMessage() == "refused"]
        assert (vars(line)["decision"], vars(line)["status"]) == ("client_gone", 499)


@pytest.mark.parametrize("mode", ["standard", "lean"])
async def test_a_stream_that_ends_before_its_body_ends_is_not_admitted(fleet: Replica, mode: str) -> None:
    call = await fleet.begin(headers(mode), body(b"{", ended=False))
    await call.done_writing()
    assert await rest(call) in ([], [ProcessingResponse()])  # grpcio has to send an answer on this stream
    assert await call.code() is grpc.StatusCode.OK
    assert (fleet.gate.admitted, fleet.gate.withdrawn, fleet.gate.settled) == ([], [], [])


@pytest.mark.parametrize("part", ["headers", "metadata", "more than the body", "empty headers", "attributes"])
async def test_a_message_with_too_many_bytes_or_parts_besides_its_body_ends_its_stream(
    fleet: Replica, part: str
) -> None:
    large = headers("lean") if part != "more than the body" else body(bytes(300_000))
    if part == "headers":
        for _ in range(30_000):
            large.request_headers.headers.headers.add(key="x-a", raw_value=b"1")
    elif part == "empty headers":
        for _ in range(10_000):
            large.request_headers.headers.headers.add()
    elif part == "attributes":
        for number in range(4000):
            large.attributes[str(number)].Clear()
    else:
        large.metadata_context.filter_metadata["a"].fields["b"].string_value = "x" * 300_000
    call = await fleet.begin(headers("lean"), large)
    async with asyncio.timeout(10):
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert fleet.gate.admitted == []


@pytest.mark.parametrize("mode", ["standard", "lean"])
async def test_a_body_of_32_mib_is_refused_at_its_limit_while_its_client_sends_on(
    fleet: Replica, mode: str
) -> None:
    call, piece = await fleet.begin(headers(mode)), body(bytes(1024 * 1024), ended=False)

    async def pour() -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for _ in range(32):
                await call.write(piece)

    pouring = asyncio.create_task(pour())
    await until(lambda: fleet.metrics.answers == [(mode, "", "payload_too_large")])
    await pouring
    assert fleet.context.bodies.held_bytes == 0
    # The connection still serves other streams: the refused body does not take the flow-control window.
    [answer] = await talk(fleet.exchange(), headers("lean"), body(ASK), answers=1)
    assert parts([answer]) == ["request_headers"]


async def test_endless_health_watches_are_limited_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MOST_ENDLESS", 2)
    async with replica() as fleet:
        watches = [fleet.watch("") for _ in range(2)]
        assert [(await watch.read()).status for watch in watches] == [SERVING] * 2
        assert await fleet.watch("").code() is grpc.StatusCode.UNAVAILABLE
        assert await fleet.health("") == SERVING
        watches[0].cancel()
        await until(lambda: fleet.server.streams_by_peer().total() < 2)
        assert (await fleet.watch("").read()).status == SERVING


async def test_health_of_an_unknown_service_is_not_found_by_a_check_or_a_watch(fleet: Replica) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await fleet.health("unknown")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watch = fleet.watch("unknown")
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


async def test_the_health_service_follows_readiness_and_liveness_does_not(fleet: Replica) -> None:
    names = ("", SERVICE, "readiness", "liveness")
    assert [await fleet.health(name) for name in names] == [SERVING] * 4
    fleet.server.set_ready(False)
    assert [await fleet.health(name) for name in names] == [NOT_SERVING] * 3 + [SERVING]


async def test_a_drain_finishes_waiting_requests_and_refuses_new_requests(fleet: Replica) -> None:
    fleet.gate.open.clear()
    waiting = await fleet.begin(headers("lean"), body(ASK))
    late = await fleet.begin(headers("lean"))
    await until(lambda: fleet.gate.asked.is_set() and fleet.context.open_requests.count == 2)

    # A draining replica first announces by its health that new requests are refused.
    watch = fleet.watch("readiness")
    assert (await watch.read()).status == SERVING
    drain = asyncio.create_task(fleet.server.drain())
    assert (await watch.read()).status == NOT_SERVING
    # A pool that becomes ready does not make the draining replica ready.
    fleet.server.set_ready(True)
    assert await fleet.health("readiness") == NOT_SERVING

    # A new request is refused so that Envoy asks another replica.
    refused = fleet.exchange()
    async with asyncio.timeout(30):
        assert await refused.code() is grpc.StatusCode.UNAVAILABLE
    assert len(fleet.metrics.answers) == 0

    # A request whose upload had begun is refused with a reason.
    [answer] = await talk(late, body(ASK), answers=1)
    assert envoy.refusal([answer]).status == 503
    assert envoy.refusal([answer]).headers["x-llm-d-request-dropped-reason"] == "rejected-shutting-down"
    assert not drain.done()
    fleet.gate.open.set()
    assert parts(await talk(waiting, answers=1)) == ["request_headers"]
    async with asyncio.timeout(30):
        await drain
    assert fleet.gate.cancelled == []


async def test_requests_that_wait_past_the_drain_timeout_are_refused() -> None:
    async with replica(drain_timeout="50ms") as fleet:
        fleet.gate.open.clear()
        call = await fleet.begin(headers("lean"), body(ASK))
        await until(fleet.gate.asked.is_set)
        async with asyncio.timeout(30):
            await fleet.server.drain()
        assert envoy.refusal(await talk(call, answers=1)).code == "shutting_down"
        assert fleet.gate.cancelled == []
        assert fleet.metrics.answers == [("lean", "m", "shutting_down")]


async def test_a_drain_does_not_wait_for_streams_without_end() -> None:
    begun = asyncio.Event()

    async def endless(stream: Stream) -> None:
        await stream.read()
        begun.set()
        await stream.read()

    async with replica({"/test.Logs/Stream": endless}) as fleet:
        call = fleet.channel.stream_stream("/test.Logs/Stream")()
        await call.write(b"first")
        async with asyncio.timeout(30):
            await begun.wait()
            await fleet.server.drain()
        assert await call.code() is not grpc.StatusCode.OK


async def test_the_startup_error_names_an_address_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StartupError, match=address):
            async with replica(listen=address):
                pass


async def test_a_malformed_message_ends_its_own_stream_only(
    fleet: Replica, caplog: pytest.LogCaptureFixture
) -> None:
    good = await fleet.begin(headers("lean"))
    bad = fleet.channel.stream_stream(f"/{SERVICE}/Process")()
    await bad.write(b"\xff\xff\xff")

    assert await bad.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []

    assert parts(await talk(good, body(ASK), answers=1)) == ["request_headers"]


@pytest.mark.parametrize("transport", ["grpcio"], indirect=True)  # the native transport starts no threads
async def test_grpcio_threads_do_not_preempt_the_event_loop(fleet: Replica) -> None:
    await talk(fleet.exchange(), headers("lean"), body(ASK), answers=1)
    own = threading.get_native_id()
    threads = [int(name) for name in os.listdir("/proc/self/task")]
    assert {os.sched_getscheduler(thread) for thread in threads if thread != own} == {os.SCHED_BATCH}
    assert os.sched_getscheduler(own) == os.SCHED_OTHER


UNKNOWN = [
    *(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo" for version in ("v1", "v1alpha")),
    *(f"/{SERVICE}/Other", "/grpc.health.v1.Health/List", "/no.such.Service/Method", "/"),
]


async def test_a_call_of_an_unknown_grpc_method_gets_the_status_unimplemented(fleet: Replica) -> None:
    for path in UNKNOWN:
        streamed = fleet.channel.stream_stream(path)()
        with pytest.raises(grpc.aio.AioRpcError) as fault:
            await fleet.channel.unary_unary(path)(b"", timeout=10)
        async with asyncio.timeout(30):
            found = await streamed.code(), fault.value.code()
        assert found == (grpc.StatusCode.UNIMPLEMENTED,) * 2, path
    assert await fleet.health("") == SERVING


async def test_a_malformed_health_check_gets_the_status_invalid_argument(fleet: Replica) -> None:
    ask = fleet.channel.unary_unary("/grpc.health.v1.Health/Check")
    with pytest.raises(grpc.aio.AioRpcError) as fault:
        await ask(b"\xff\xff", timeout=10)
    assert fault.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_every_watch_of_health_receives_a_change_of_readiness(fleet: Replica) -> None:
    watches = [fleet.watch(name) for name in ("", SERVICE, "readiness") * 20]
    assert [(await watch.read()).status for watch in watches] == [SERVING] * 60
    fleet.server.set_ready(False)
    assert [(await watch.read()).status for watch in watches] == [NOT_SERVING] * 60


async def test_open_streams_are_counted_by_the_address_of_their_envoy(fleet: Replica) -> None:
    native = envoy.chosen_transport() == "native"  # grpcio does not report addresses
    calls = [await fleet.begin(headers()) for _ in range(3)]
    await until(lambda: fleet.server.streams_by_peer() == ({"127.0.0.1": 3} if native else {}))
    for call in calls:
        call.cancel()
    await until(lambda: not fleet.server.streams_by_peer().total())
