"""A replica with several pools: settings, requests and their ends, byte budgets and metrics per pool."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
import yaml
from check_client import BODY, Connection, Reply, check
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from extproc_client import Counted, ScriptedGate, body, chosen_transport, exchange_context, headers, refusal
from hypothesis import given
from hypothesis import strategies as st
from metrics_page import samples
from prometheus_client.parser import text_string_to_metric_families
from tables import cases
from test_accesslog import FIELDS, Entry, bare, describe

from picker_fleet.admin.documents import MetricsText
from picker_fleet.cli import main
from picker_fleet.domain.budgets import POOL_HEADER, SMALL_BYTES, ByPool, body_budgets
from picker_fleet.domain.config import load, parse, pools_of
from picker_fleet.domain.errors import BufferFull, ConfigError, ShuttingDown
from picker_fleet.grpc.transport import RpcError, Status, Stream
from picker_fleet.ingress.context import Decision, ExchangeContext, OpenRequests, UploadDeadlines
from picker_fleet.ingress.ext_proc import accesslog
from picker_fleet.ingress.ext_proc.accesslog import Account
from picker_fleet.ingress.ext_proc.exchange import ExchangeService
from picker_fleet.ingress.ext_proc.server import SERVICE, Server
from picker_fleet.ingress.http.server import CheckServer
from picker_fleet.ingress.intake import read_body
from picker_fleet.state import accounting_token
from picker_fleet.state.accounting_token import Keyring
from picker_fleet.telemetry.metrics import Metrics
from picker_tools.local_fleet import network

UNKNOWN_POOL = "c"
TWO: dict[str, Any] = {
    "pool": "a",
    "fair_request_queue": {"queue_ttl": "9s", "band_weights": {"Critical": 50}},
    "discovery": {"dns": {"name": "servers", "port": 8000}},
    "pools": {"a": None, "b": {
        "fair_request_queue": {"total_capacity": 500},
        "discovery": {"static": [{"address": "10.0.0.1:8000"}]},
        "listen": "127.0.0.1:0",
    }},
}  # fmt: skip


def test_a_pool_has_the_shared_settings_and_the_settings_of_its_own_section() -> None:
    pools = pools_of(parse(TWO))
    assert list(pools) == ["a", "b"]
    assert {name: pool.pool for name, pool in pools.items()} == {"a": "a", "b": "b"}
    assert [pool.fair_request_queue.queue_ttl for pool in pools.values()] == [9, 9]
    assert [pool.fair_request_queue.total_capacity for pool in pools.values()] == [1000, 500]
    a, b = (pool.discovery for pool in pools.values())
    assert (a.dns is not None, a.static) == (True, None)
    assert (b.dns, len(b.static or ())) == (None, 1)  # pool b's own source replaces the shared source
    assert list(pools_of(parse({"pool": "alone"}))) == ["alone"]
    assert list(pools_of(parse({**TWO, "pool": "b"}))) == ["b", "a"]


def test_a_pool_section_resolves_relative_paths_and_accepts_environment_variables(tmp_path: Path) -> None:
    file = tmp_path / "picker.yaml"
    file.write_text("pool: a\npools:\n  a:\n  b: {discovery: {file: b.yaml}}\n")
    variable = "PICKER_POOLS__A__FAIR_REQUEST_QUEUE__TOTAL_CAPACITY"
    pools = pools_of(load(file, {variable: "700"}))
    assert pools["b"].discovery.file == tmp_path / "b.yaml"
    assert pools["a"].fair_request_queue.total_capacity == 700
    with pytest.raises(ConfigError, match=rf"{variable}: pools\.a\.fair_request_queue\.total_capacity: "):
        load(file, {variable: "0"})


@cases("changes, fault", {
    "no such pool": ({"pool": "c"}, "pool c is not one of pools, which are a, b"),
    "sections of the process": ({"pools": {"a": {"redis": {}, "extproc": {}}}},
                            "pools.a: redis, extproc: must be set at the top level"),
    "the key pool": ({"pools": {"a": {"pool": "x"}}}, "pools.a: pool: must be set at the top level"),
    "bad key": ({"pools": {"a": {"nonsense": 1}}}, "pools.a.nonsense: unknown key; valid here: discovery, "),
    "a number": ({"pools": {"a": 3}}, "pools.a: must be a mapping; valid here: discovery"),
    "a name with a slash": ({"pools": {"a/b": {}}}, "pools.a/b."),
    "a name of dots": ({"pool": "..", "pools": {"..": {}}}, "a name needs more than dots"),
    "names in two cases": ({"pools": {"a": {}, "A": {}}}, "two names differ in upper and lower case only"),
    "a limit": ({"pools": {"a": {"fair_request_queue": {"flow_capacity": 5000}}}},
                "pools.a.fair_request_queue: "),
    "few bytes": ({"extproc": {"max_buffered_bytes": 9_000_000}}, "more than half of max_buffered_bytes"),
    "too many": ({"pools": {f"p{number}": {} for number in range(33)}}, "pools: "),
})  # fmt: skip
def test_a_fault_in_the_section_of_a_pool_names_the_key(changes: Mapping[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({**TWO, **changes})
    assert fault in str(caught.value)


def test_a_fault_in_settings_shared_by_pools_is_reported_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse({**TWO, "redis": {"url": "nonsense"}, "scraping": {"interval": "never"}})
    told = [line.split(":")[0] for line in str(caught.value).splitlines()]
    assert told == ["redis.url", "scraping.interval"]


class Both:
    """Two pools behind one server; each pool has a gate, metrics and a context."""

    def __init__(self) -> None:
        self.gates = {"a": ScriptedGate(), "b": ScriptedGate()}
        for name, gate in self.gates.items():
            gate.placement = gate.placement._replace(endpoints=(f"10.0.0.{ord(name)}:80",))
        self.metrics = {"a": Counted(), "b": Counted()}
        extproc = {"transport": chosen_transport(), "listen": "127.0.0.1:0", "drain_grace": "0s"}
        self.settings, clock = parse({"extproc": extproc}), asyncio.get_running_loop().time
        each = {
            name: exchange_context(gate, self.metrics[name], self.settings, clock)
            for name, gate in self.gates.items()
        }
        opened = OpenRequests()
        each = {name: replace(context, open_requests=opened) for name, context in each.items()}
        self.contexts: ByPool[ExchangeContext] = ByPool(each, "a", replace(each["a"], paths=None))
        self.uploads = UploadDeadlines(clock, 60.0)

    def server(self, **more: Any) -> Server:
        exchanges = self.contexts.each(lambda context: ExchangeService(context, self.uploads))
        return Server(exchanges, self.settings.extproc, **{"services": {}, **more})

    @property
    def asked(self) -> dict[str, int]:
        return {name: len(gate.admitted) for name, gate in self.gates.items()}


async def asks(channel: grpc.aio.Channel, *metadata: tuple[str, str]) -> ProcessingResponse:
    call = channel.stream_stream(
        f"/{SERVICE}/Process", ProcessingRequest.SerializeToString, ProcessingResponse.FromString
    )(timeout=30, metadata=metadata)
    # A client can set the request header POOL_HEADER, so this header does not choose the pool.
    await call.write(headers("lean", {POOL_HEADER: "b"}))
    if (POOL_HEADER, UNKNOWN_POOL) not in metadata:  # an unknown pool is refused after the headers
        await call.write(body(BODY))
    return await call.read()


@contextlib.asynccontextmanager
async def serving(server: Server | CheckServer) -> AsyncIterator[int]:
    """Run the server `server`; yields the server's port."""
    try:
        port = await server.start()
        server.set_ready(True)
        yield port
    finally:
        await server.stop()


@pytest.mark.usefixtures("transport")
async def test_metadata_of_an_ext_proc_stream_names_the_pool_of_its_request() -> None:
    both = Both()
    async with serving(both.server()) as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for name, counts in (("", (1, 0)), ("b", (1, 1)), ("a", (2, 1)), ("b", (2, 2))):
            answer = await asks(channel, *([(POOL_HEADER, name)] if name else []))
            assert answer.WhichOneof("response") == "request_headers"
            assert tuple(both.asked.values()) == counts
        refused = refusal([await asks(channel, (POOL_HEADER, UNKNOWN_POOL))])
        assert (refused.status, refused.code) == (404, "unknown_pool")
        assert tuple(both.asked.values()) == (2, 2)
    # The refusal counts in the metrics of the default pool.
    assert [code for _, _, code in both.metrics["a"].answers] == ["ok", "ok", "unknown_pool"]
    assert [code for _, _, code in both.metrics["b"].answers] == ["ok", "ok"]


@pytest.mark.usefixtures("transport")
async def test_a_pool_is_the_default_on_its_port_unless_metadata_names_another_pool() -> None:
    async def of(name: bytes, stream: Stream) -> bytes:
        if not name:
            raise RpcError(Status.NOT_FOUND, "no such pool")
        return name

    both, own = Both(), network.free_port()
    whose_pool = ByPool({"a": partial(of, b"a"), "b": partial(of, b"b")}, "a", partial(of, b""))
    services = {"/test/Whose": whose_pool}
    server = both.server(services=services, own_listeners={"b": f"127.0.0.1:{own}"})
    async with serving(server) as port:
        for at, default in ((port, "a"), (own, "b")):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{at}") as channel:
                before = both.asked[default]
                await asks(channel)
                assert both.asked[default] == before + 1
                whose = channel.unary_unary("/test/Whose")
                assert await whose(b"", timeout=30) == default.encode()
                assert await whose(b"", timeout=30, metadata=((POOL_HEADER, "b"),)) == b"b"
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await whose(b"", timeout=30, metadata=((POOL_HEADER, "c"),))
                assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        await server.drain()  # drains all pools
        for name in (b"a", b"b"):
            decision = Decision(both.contexts.of(name), "lean")
            decision.read(read_body(BODY), {}, None, b"")
            with pytest.raises(ShuttingDown):
                await decision.admit()


async def http_asks(port: int, *requests: bytes) -> list[Reply]:
    """The replies to the check requests `requests`, all sent on one connection."""
    connection = Connection(*await asyncio.open_connection("127.0.0.1", port))
    replies = []
    for request in requests:
        connection.send(request)
        replies.append(await connection.reply())
    connection.leave()
    return replies


async def test_a_header_names_the_pool_of_each_check_on_a_connection() -> None:
    both = Both()
    asked = [check(**({POOL_HEADER: pool} if pool else {})) for pool in ("", "b", "c", "", "a", "b")]
    async with serving(CheckServer(both.contexts, "127.0.0.1:0")) as port:
        answers = await http_asks(port, *asked)
    assert [reply.status for reply in answers] == [200, 200, 404, 200, 200, 200]
    assert answers[2].error == "unknown_pool"
    assert both.asked == {"a": 3, "b": 2}
    assert {context.bodies.held_bytes for context in (both.contexts.of(b"a"), both.contexts.of(b"b"))} == {0}


def ended(request_id: str, keys: Keyring, kind: str = "DownstreamEnd", signed_for: str = "") -> Entry:
    message = bare(kind, request_id)
    token = accounting_token.signed(FIELDS, signed_for or request_id, keys)
    describe(message, {"picker": {"token": token}})
    return message


def test_an_access_log_entry_belongs_to_the_pool_that_signed_its_accounting_token() -> None:
    gates = [ScriptedGate(), ScriptedGate()]
    keys = [Keyring(), Keyring()]
    metrics = [Metrics(), Metrics()]
    accounts = [Account(*each, Mock()) for each in zip(gates, metrics, keys, strict=True)]
    gone = bare(request_id="gone", status=0)
    gone.common_properties.response_flags.downstream_connection_termination = True
    entries = [
        ended("r-1", keys[1]), ended("r-2", keys[0]), ended("r-3", keys[1], "DownstreamPeriodic"),
        ended("r-4", Keyring()),  # signed with a key of no pool
        ended("r-5", keys[1], signed_for="r-1"),  # forged
        gone,
    ]  # fmt: skip
    accesslog.Collector(accounts).take(entries)
    assert [[each.id for each in gate.reported] for gate in gates] == [["r-2"], ["r-1", "r-3"]]
    # An access-log entry without a token names no pool, so every pool checks the request id.
    assert [gate.suspected for gate in gates] == [["gone"], ["gone"]]
    page = samples(metrics[0])
    for reason in ("unknown-key", "bad-signature", "no-token"):
        assert page["epp_access_log_rejected_total", f"reason={reason}"] == 1


LIMIT = 64 * SMALL_BYTES


@given(
    st.integers(2, 5),
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3 * SMALL_BYTES), st.booleans()), max_size=80),
)
def test_no_pool_takes_body_bytes_reserved_for_another_pool(
    count: int, steps: list[tuple[int, int, bool]]
) -> None:
    budgets = list(body_budgets(LIMIT, [str(number) for number in range(count)]).values())
    kept: list[list[int]] = [[] for _ in budgets]
    own = LIMIT // (2 * count)
    for which, size, gives_back in steps:
        budget, bodies = budgets[which % count], kept[which % count]
        if gives_back and bodies:
            budget.give_back(bodies.pop())
            continue
        before = budget.held_bytes
        try:
            budget.take(size, size)
        except BufferFull:
            assert before + size > own, "a pool can always use its reserved bytes"
            assert budget.held_bytes == before
        else:
            bodies.append(size)
        assert sum(each.held_bytes for each in budgets) <= LIMIT
        assert [each.held_bytes for each in budgets] == [sum(each) for each in kept]


def test_one_pool_may_hold_all_body_bytes_not_reserved_for_other_pools() -> None:
    a, b = body_budgets(LIMIT, ["a", "b"]).values()
    for _ in range(LIMIT * 3 // 4 // SMALL_BYTES):
        a.take(SMALL_BYTES, SMALL_BYTES)
    with pytest.raises(BufferFull):
        a.take(1, 1)
    b.take(LIMIT // 4, LIMIT // 4)
    assert body_budgets(LIMIT, ["alone"])["alone"].held_bytes == 0


def test_the_metrics_of_all_pools_are_on_one_page_with_a_pool_label() -> None:
    pools = [Metrics(("llama",), {"pool": name}) for name in "ab"]
    pools[1].answered("lean", "llama", "ok", 0.01)
    page = b"".join(MetricsText(pools).pieces()).decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert page.count("# TYPE epp_requests_total ") == 1
    assert [sample.labels["pool"] for sample in families["epp_requests"].samples] == ["b"]
    own = [family for name, family in families.items() if name.startswith("epp_")]
    assert len(own) > 40
    assert all("pool" in sample.labels for family in own for sample in family.samples)
    assert {sample.labels["pool"] for sample in families["epp_stock_level"].samples} == {"a", "b"}


def test_picker_commands_know_all_pools_of_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "picker.yaml"
    file.write_text("pool: a\npools: {a: , b: {fair_request_queue: {total_capacity: 500}}}\n")
    assert main(["check", str(file)]) == 0
    summary = capsys.readouterr().out
    assert re.findall(r"pool: (\w)", summary) == ["a", "b"]
    assert re.findall(r"queue: (\d+) requests", summary) == ["1000", "500"]
    listen = ("envoy-config", "--config", str(file), "--pool-listen")
    assert main([*listen, "b=127.0.0.1:8090"]) == 0
    tree = yaml.safe_load(capsys.readouterr().out)["staticResources"]
    assert [each["name"] for each in tree["listeners"]] == ["lean", "lean-b"]
    assert [each["name"] for each in tree["clusters"]] == ["picker", "pool", "pool-b"]
    assert main([*listen, "c=127.0.0.1:8090"]) == 2
    assert "--pool-listen c: the configuration has no such pool, only a, b" in capsys.readouterr().err
