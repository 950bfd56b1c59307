"""The server of mode `http` over real sockets: checks, refusals, clients that leave, malformed requests."""

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop
from background import until
from check_client import BODY, PATIENT_S, Connection, Reply, check
from extproc_client import PLACEMENT, Counted, ScriptedGate, exchange_context, of_one_pool
from hypothesis import given, settings
from hypothesis import strategies as st

from picker_fleet.domain.allowlist import ENCODERS, OF_SIDECAR, PREFILLER
from picker_fleet.domain.config import parse
from picker_fleet.domain.errors import ExpiredTtl
from picker_fleet.ingress.context import STALLED_S, ExchangeContext
from picker_fleet.ingress.http.check import CARRIED
from picker_fleet.ingress.http.server import CheckServer


@dataclass
class Stage:
    """The server of mode `http` around `gate`, and the server's port."""

    server: CheckServer
    gate: ScriptedGate
    context: ExchangeContext
    metrics: Counted
    port: int
    now_s: list[float]
    connections: list[Connection] = field(default_factory=list)

    async def send(self, *chunks: bytes, address: str = "127.0.0.1") -> Connection:
        """Open a connection from `address` and send `chunks`."""
        opened = asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0))
        connection = Connection(*await opened)
        self.connections.append(connection)
        connection.send(*chunks)
        return connection

    async def ask(self, *chunks: bytes) -> Reply:
        connection = await self.send(*chunks)
        return await connection.reply()

    async def wait(self, ask: bytes) -> Connection:
        """Open a connection, send the request `ask`, and return once it waits in the queue."""
        self.gate.open.clear()
        self.gate.asked.clear()
        connection = await self.send(ask)
        await until(self.gate.asked.is_set)
        return connection


@contextlib.asynccontextmanager
async def staged(gate: ScriptedGate | None = None, server: Any = None, **config: Any) -> AsyncIterator[Stage]:
    """Serve with the configuration `config`; `server` has more arguments for the class CheckServer."""
    gate, metrics, now_s = gate or ScriptedGate(), Counted(), [0.0]
    context = exchange_context(gate, metrics, parse(config), lambda: now_s[0])
    checks = CheckServer(of_one_pool(context), "127.0.0.1:0", **(server or {}))
    stage = Stage(checks, gate, context, metrics, await checks.start(), now_s)
    checks.set_ready(True)
    try:
        yield stage
    finally:
        for connection in stage.connections:
            await connection.close()
        await checks.stop()


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with staged() as made:
        yield made


async def test_the_answer_for_a_split_request_names_its_prefill_endpoint() -> None:
    async with staged(scheduling={"stages": {"header": "x-own"}}) as stage:
        stage.gate.placement = PLACEMENT._replace(prefillers=("10.0.0.7:8000",), prefill_s=0.0)
        reply = await stage.ask(check())
        assert reply.headers["x-own"] == "10.0.0.7:8000"
        assert reply.headers["x-envoy-auth-headers-to-remove"] == ",".join((ENCODERS, *OF_SIDECAR))
        await until(lambda: stage.gate.prefilled_ids == ["req-1"])


async def test_the_answer_to_a_placement_has_endpoints_and_fields_for_the_access_log(stage: Stage) -> None:
    stage.gate.placement = PLACEMENT._replace(session="session-1", waited_s=1.5, quota="tokens=9,5,1500")
    reply = await stage.ask(check())
    assert reply.status == 200
    assert reply.headers == {
        "x-gateway-destination-endpoint": "10.0.0.1:8000,[fd00::2]:8000",
        "x-envoy-auth-headers-to-remove": ",".join((PREFILLER, ENCODERS, *OF_SIDECAR)),
        "x-queue-pressure": "0.25",
        "x-picker-request-id": "req-1",
        "x-picker-accounting-token": f"={PLACEMENT.accounting_token}",
        "x-session-token": "session-1",
        "x-picker-waited": "1.500000",
        "x-ratelimit-limit-tokens": "9",
        "x-ratelimit-remaining-tokens": "5",
        "x-ratelimit-reset-tokens": "1.5s",
        "x-picker-target-model": "=llama",
        "content-length": "0",
    }
    [(request, stream_owned)] = stage.gate.admitted
    assert (request.id, request.model, stream_owned) == ("req-1", "llama", False)
    assert stage.metrics.answers == [("http", "llama", "ok")]


async def test_flow_ttl_and_endpoint_subset_are_read_from_headers_in_mode_http() -> None:
    async with staged(extproc={"trusted_headers": ["x-llm-d-inference-fairness-id"]}) as stage:
        hint = '["10.0.0.1:8000","10.0.0.2:8000"]'
        named = {"x_llm_d_inference_fairness_id": "tenant", "x_llm_d_inference_ttl": "3s"}
        await stage.ask(check(x_gateway_destination_endpoint_subset=hint, **named))
    [(request, _)] = stage.gate.admitted
    assert (request.flow, request.ttl_s) == ("tenant", 3.0)
    assert request.subset == ("10.0.0.1:8000", "10.0.0.2:8000")


async def test_a_client_in_mode_http_receives_the_error_with_which_admission_refuses() -> None:
    async with staged(ScriptedGate(ExpiredTtl("late", retry_after_s=7))) as stage:
        reply = await stage.ask(check())
    assert (CARRIED[503], "expired_ttl") == (reply.status, reply.error)
    assert reply.headers["retry-after"] == "7"
    assert reply.headers["x-llm-d-request-dropped-reason"] == "rejected-ttl-expired"
    assert reply.headers["x-queue-pressure"] == "1.00"
    assert stage.metrics.answers == [("http", "llama", "expired_ttl")]


CHUNKED = b"POST /check/v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
REFUSED = [
    (check(body=b""), 400, "bad_request"),
    (check(body=b"{"), 400, "bad_request"),
    (check(body=b'{"prompt": "hi"}'), 400, "bad_request"),
    (check(path="/metrics"), 404, "unknown_path"),
    (check(path="/v1/load_lora_adapter"), 404, "unknown_path"),
    (check(path="//v1/completions"), 404, "unknown_path"),
    (check(method="GET", path="/v1/completions"), 404, "unknown_path"),
    (check(content_encoding="gzip"), 415, "unsupported_encoding"),
    (check(x_llm_d_inference_ttl="soon"), 400, "bad_request"),
    (check(body=b"x" * 5000), 413, "payload_too_large"),
    (check(content_length="-1"), 400, "bad_request"),
    (check(content_length="99999999999999999999999"), 400, "bad_request"),
    (check(body=b"{" * 100_000, content_length="999999999"), 413, "payload_too_large"),
    (b"POST /check/../healthz HTTP/1.1\r\nhost: a\r\n\r\n", 404, "unknown_path"),
    (b"POST /check HTTP/1.1\r\nhost: a\r\n\r\n", 400, "bad_request"),
    (b"POST /check?a=b HTTP/1.1\r\nhost: a\r\n\r\n", 400, "bad_request"),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01", 400, "bad_request"),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "bad_request"),
    (b"GET /check/ HTTP/1.1\r\nx: " + b"a" * 70_000, 400, "bad_request"),
    (check(x_long="a" * 70_000), 400, "bad_request"),
    (check(path="/v1/completions?" + "a" * 70_000), 400, "bad_request"),
    (check().replace(b"HTTP/1.1", b"HTTP/2.0"), 400, "bad_request"),
    (check().replace(b"HTTP/1.1", b"HTTP/0.9"), 400, "bad_request"),
    (CHUNKED + b"0\r\n" + b"x: y\r\n" * 20_000, 400, "bad_request"),
    (check().replace(b"\r\n", b"\r\n" + b"a:\r\n" * 3000, 1), 400, "bad_request"),
    (CHUNKED + b"0\r\nx: " + b"y" * 70_000, 400, "bad_request"),
    (CHUNKED + b"1\r\n{\r\n" * 1000 + b"1;" + b"x" * 70_000, 400, "bad_request"),
]


@pytest.mark.parametrize(("request_bytes", "status", "code"), REFUSED)
async def test_an_invalid_request_is_refused_and_the_server_continues(
    request_bytes: bytes, status: int, code: str
) -> None:
    async with staged(extproc={"max_body_bytes": 4096}) as stage:
        reply = await stage.ask(request_bytes)
        assert (reply.status, reply.error) == (status, code)
        assert stage.gate.admitted == []
        assert (await stage.ask(check())).status == 200
        await until(lambda: stage.context.bodies.held_bytes == 0)


async def test_the_length_of_a_chunked_body_is_limited_while_the_body_arrives() -> None:
    async with staged(extproc={"max_body_bytes": 4096}) as stage:
        assert (await stage.ask(CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))).status == 200
        endless = b"ffffff\r\n" + b"x" * 2_000_000
        for chunk in (b"1388\r\n" + b"x" * 5000 + b"\r\n0\r\n\r\n", endless):
            reply = await stage.ask(CHUNKED + chunk)
            assert (reply.status, reply.error) == (413, "payload_too_large")
        await until(lambda: stage.context.bodies.held_bytes == 0)


async def test_a_model_with_a_different_target_model_is_refused_by_name() -> None:
    models = [{"name": "llama", "target_models": [{"name": "llama-v2", "weight": 1}]}]
    async with staged(models=models) as stage:
        reply = await stage.ask(check())
    assert reply.status == CARRIED[500]
    assert b"http mode cannot send model llama as llama-v2" in reply.body


async def test_a_head_request_gets_no_body_with_a_refusal(stage: Stage) -> None:
    connection = await stage.send(check("/metrics", b"", "HEAD"))
    connection.send_end()
    assert (await connection.ended()).endswith(b"\r\n\r\n")


async def test_reads_pass_without_admission_and_are_rate_limited() -> None:
    async with staged(extproc={"read_rate": 1}) as stage:
        replies = [await stage.ask(check("/v1/models", b"", "GET")) for _ in range(3)]
        assert stage.gate.admitted == []
    assert [reply.status for reply in replies] == [200, 200, 429]
    assert not any("x-picker-accounting-token" in reply.headers for reply in replies)


async def test_a_client_that_disconnects_cancels_the_wait_in_the_queue(stage: Stage) -> None:
    (await stage.wait(check())).leave()
    await until(lambda: stage.gate.cancelled == ["req-1"])
    await until(lambda: stage.metrics.answers == [("http", "llama", "client_gone")])


async def test_a_request_in_the_queue_holds_no_bytes_of_its_body(stage: Stage) -> None:
    connection = await stage.wait(check(body=b'{"model": "llama", "prompt": "%b"}' % (b"x" * 1_000_000)))
    assert stage.context.bodies.held_bytes == 0
    stage.gate.open.set()
    assert (await connection.reply()).status == 200


def test_a_connection_of_mode_http_carries_one_request_right_after_another() -> None:
    """Run on uvloop, as a replica does; a thread sends each request right after the last answer."""

    def ask(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENT_S) as connection:
            for number in range(500):
                connection.sendall(check(x_request_id=f"req-{number}"))
                answer = connection.recv(65536)
                assert answer.startswith(b"HTTP/1.1 200")
                assert b"x-picker-request-id: req-%d\r\n" % number in answer

    async def main() -> None:
        async with staged() as stage:
            await asyncio.to_thread(ask, stage.port)

    uvloop.run(main())


async def test_a_draining_server_refuses_new_checks_and_answers_waiting_checks(stage: Stage) -> None:
    waiting = await stage.wait(check())
    stage.context.open_requests.closed = True
    for ask in (check(), check("/v1/models", b"", "GET")):
        assert await (await stage.send(ask)).ended() == b""
    assert stage.context.open_requests.count == 1
    stage.gate.open.set()
    assert (await waiting.reply()).status == 200


@pytest.mark.parametrize("apart", [True, False])
async def test_a_second_request_before_the_first_answer_closes_the_connection(
    stage: Stage, apart: bool
) -> None:
    if apart:
        connection = await stage.wait(check())
        connection.send(check())
    else:
        stage.gate.open.clear()
        connection = await stage.send(check() * 2)
    assert await connection.ended() == b""
    await until(lambda: not stage.gate.admitted or stage.gate.cancelled == ["req-1"])


HEALTH = b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n"


async def test_health_follows_readiness_and_an_unready_server_closes_the_connection(stage: Stage) -> None:
    assert (await stage.ask(HEALTH)).status == 200
    stage.server.set_ready(False)
    assert (await stage.ask(HEALTH)).status == 503
    assert await (await stage.send(check())).ended() == b""


@pytest.mark.parametrize("unit", [HEALTH, b"HEAD /healthz HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"])
async def test_only_one_of_many_requests_sent_at_once_is_answered(stage: Stage, unit: bytes) -> None:
    answers = await (await stage.send(unit * 1000)).ended()
    assert answers.count(b"HTTP/1.1 ") <= 2  # the second answer refuses the second request
    assert stage.context.open_requests.count == 0
    assert (await stage.ask(HEALTH)).status == 200


@pytest.mark.parametrize("part", [b"POST /check/v1/comp", check()[:-5]])
async def test_a_connection_whose_request_stalls_is_closed(stage: Stage, part: bytes) -> None:
    connection = await stage.send(part)
    await until(lambda: stage.context.open_requests.count)
    stage.now_s[0] = STALLED_S - 1
    stage.server.close_stalled()
    assert stage.context.open_requests.count
    stage.now_s[0] = STALLED_S + 1
    stage.server.close_stalled()
    reply = await connection.reply()
    assert (reply.status, reply.error) == (408, "body_stalled")
    assert await connection.ended() == b""
    await until(lambda: stage.context.bodies.held_bytes == 0)


async def test_an_idle_connection_is_closed_after_its_timeout(stage: Stage) -> None:
    connection = await stage.send(check())
    await connection.reply()
    stage.now_s[0] = 1000.0
    stage.server.close_stalled()
    assert await connection.ended() == b""


async def test_at_the_connection_limit_only_an_idle_connection_is_closed_for_a_new_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with staged(server={"max_connections": 2}) as stage:
        waiting = await stage.wait(check())
        idle = await stage.send(HEALTH)
        assert (await idle.reply()).status == 200
        second = await stage.wait(check())
        assert await idle.ended() == b""
        assert await (await stage.send()).ended() == b""
        stage.gate.open.set()
        assert [(await each.reply()).status for each in (waiting, second)] == [200, 200]
    assert any("connections of the http mode's port" in line for line in caplog.messages)


async def test_one_address_cannot_take_all_connections() -> None:
    async with staged(server={"max_connections": 8}) as stage:
        # The gateway has been idle for longest when another address sends requests that never end.
        gateway = await stage.send(HEALTH, address="127.0.0.2")
        assert (await gateway.reply()).status == 200
        for number in range(1, 7):
            await stage.send(check()[:-5])
            await until(lambda number=number: stage.context.open_requests.count == number)
        assert await (await stage.send(HEALTH)).ended() == b""
        gateway.send(check())
        assert (await gateway.reply()).status == 200
        assert stage.server.full == ""
        gateway.send(check()[:-5])
        await stage.send(check()[:-5], address="127.0.0.3")
        await until(lambda: stage.context.open_requests.count == 8)
        assert stage.server.full == "all 8 connections of the http mode's port are taken"
    await until(lambda: not stage.server.connections.all)
    assert not stage.server.connections._by_address


async def test_a_connection_whose_answers_are_not_read_is_paused_and_then_closed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, ended = [0], stage.server.connections.idle

    def count(connection: Any) -> None:
        answers[0] += 1
        ended(connection)

    monkeypatch.setattr(stage.server.connections, "idle", count)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    await asyncio.to_thread(client.connect, ("127.0.0.1", stage.port))
    _, writer = await asyncio.open_connection(sock=client, limit=1)
    await until(lambda: stage.server.connections.all)
    [connection] = stage.server.connections.all
    connection._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
    connection._transport.set_write_buffer_limits(high=2048)
    stage.now_s[0] = 1.0
    for number in itertools.count(1):
        writer.write(HEALTH)
        await until(lambda number=number: answers[0] == number)
        if connection._unread_s:
            break
    assert number < 100_000
    writer.write(HEALTH)
    stage.now_s[0] = STALLED_S + 2.0
    stage.server.close_stalled()
    await until(lambda: not stage.server.connections.all)
    assert answers[0] == number
    writer.close()


@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, len(check())), max_size=6))
async def test_a_check_request_may_arrive_in_any_pieces(cuts: list[int]) -> None:
    async with staged() as stage:
        connection = await stage.send()
        for start, end in itertools.pairwise([0, *sorted(cuts), len(check())]):
            connection.send(check()[start:end])
            await asyncio.sleep(0)
        assert (await connection.reply()).status == 200
