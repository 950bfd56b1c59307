"""Runs cases of the picking table on a real replica with a real Valkey and
small HTTP servers as model servers."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    CommonResponse,
    ProcessingRequest,
    ProcessingResponse,
)
from extproc_client import body, headers, response_body, response_headers, set_headers
from fleet_load import fresh
from page_server import PageServer, answered, serving
from picking_case import LAST_TOKEN, Case, Request, Server

from picker_fleet.allowlist import STEERING
from picker_fleet.config import parse
from picker_fleet.extproc import accesslog
from picker_fleet.extproc.server import SERVICE
from picker_fleet.scheduling.chooser import REFRESH_S
from picker_fleet.serve import Bound, new_incarnation, serve

PATIENT_S = 30.0
_POLL_S = 0.02
_TOKEN_FIELDS = (
    "flow", "band", "weight", "cost", "workload", "criticality", "model", "endpoint", "limit", "signature",
)  # fmt: skip


@dataclass(slots=True)
class Outcome:
    """What Envoy received for one request; `picked` are letters of servers, best first."""

    status: int = 200
    reason: str = ""
    retry_after: str = ""
    message: str = ""
    picked: str = ""
    header: str = ""
    metadata: str = ""  # the same endpoints, in dynamic metadata
    id: str = ""
    token: dict[str, str] = field(default_factory=dict)
    raw_token: str = ""
    content_length: str | None = None
    chunks: list[bytes] = field(default_factory=list)
    one_message: bool = False  # the body came with the headers' response
    reply: bytes = b""

    @property
    def forwarded(self) -> bytes:
        """The body that goes on to the model server."""
        return b"".join(self.chunks)


class Names:
    """The letters of a case's model servers, and the session token of the last answer."""

    def __init__(self, addresses: Sequence[str] = ()) -> None:
        self.addresses = addresses
        self.session = ""

    def in_hint(self, hint: object) -> object:
        """`hint` with addresses in place of letters."""
        if isinstance(hint, list):
            return [self.address(each) for each in hint]
        return ",".join(map(self.address, hint.split(","))) if isinstance(hint, str) else hint

    def letter_of(self, address: str) -> str:
        return chr(ord("A") + self.addresses.index(address))

    def address(self, name: str) -> str:
        """Of the server called `name`; `name` itself if there is none."""
        at = ord(name) - ord("A") if len(name) == 1 else -1
        return self.addresses[at] if 0 <= at < len(self.addresses) else name


class Exchange:
    """One ext_proc stream, as Envoy uses it for `request`."""

    def __init__(self, channel: grpc.aio.Channel, names: Names, request: Request, number: int) -> None:
        self._channel = channel
        self._names = names
        self._request = request
        self._call = channel.stream_stream(
            f"/{SERVICE}/Process", ProcessingRequest.SerializeToString, ProcessingResponse.FromString
        )()
        self._number = number
        self.outcome = Outcome()

    async def begin(self) -> None:
        """Send the whole request."""
        request = self._request
        metadata: dict[str, Mapping[str, Any]] = {}
        if request.subset is not None:
            hint = self._names.in_hint(request.subset)
            metadata["envoy.lb.subset_hint"] = {"x-gateway-destination-endpoint-subset": hint}
        if request.metadata is not None:
            metadata["picker.request"] = request.metadata
        fields = {"x-request-id": f"request-{self._number}", **request.headers}
        if fields.get("x-session-token") == LAST_TOKEN:
            fields["x-session-token"] = self._names.session
        await self._call.write(headers(request.mode, fields, ended=request.get, metadata=metadata))
        if not self._has_body:
            return
        raw = request.raw
        size = max(1, -(-len(raw) // request.chunks))
        pieces = [raw[at : at + size] for at in range(0, len(raw), size)] or [b""]
        for at, piece in enumerate(pieces):
            await self._call.write(body(piece, ended=at == len(pieces) - 1))

    async def decided(self) -> Outcome:
        """Read the decision, to its last message."""
        async with asyncio.timeout(PATIENT_S):
            answer = await self._call.read()
            assert answer is not grpc.aio.EOF, "the stream ended without an answer"
            outcome = self._read(answer)
            if answer.request_headers.response.status == CommonResponse.CONTINUE_AND_REPLACE:
                outcome.chunks.append(answer.request_headers.response.body_mutation.body)
                outcome.one_message = True
                return outcome
            while outcome.status == 200 and self._has_body:
                echo = (await self._call.read()).request_body.response.body_mutation.streamed_response
                outcome.chunks.append(echo.body)
                if echo.end_of_stream:
                    break
        return outcome

    async def finish(self) -> None:
        """End the request as Envoy does: by its response, or by the access log."""
        async with asyncio.timeout(PATIENT_S):
            if self.outcome.status == 200 and self._request.mode == "standard":
                await self._respond()
            elif self.outcome.status == 200 and self.outcome.id:
                await self._log_end()
            assert await self._call.read() is grpc.aio.EOF

    @property
    def _has_body(self) -> bool:
        return not self._request.get and self._request.mode != "headers"

    def _read(self, answer: ProcessingResponse) -> Outcome:
        outcome = self.outcome
        if answer.WhichOneof("response") == "immediate_response":
            refusal = answer.immediate_response
            fields = set_headers(refusal.headers)
            outcome.status = refusal.status.code
            outcome.reason = fields.get("x-llm-d-request-dropped-reason", "")
            outcome.retry_after = fields.get("retry-after", "")
            outcome.message = json.loads(refusal.body)["error"]["message"]
            return outcome
        common = answer.request_headers.response
        assert common.clear_route_cache
        fields = set_headers(common.header_mutation)
        outcome.header = fields["x-gateway-destination-endpoint"]
        outcome.content_length = fields.get("content-length")
        spaces = {name: dict(space.struct_value) for name, space in answer.dynamic_metadata.fields.items()}
        outcome.metadata = spaces["envoy.lb"]["x-gateway-destination-endpoint"]
        attempts = outcome.header.split(",")
        named = list(dict.fromkeys(attempts))
        # With fewer than three endpoints the names repeat, so that each of Envoy's three attempts has one.
        assert attempts == named or attempts == [*named, *named, *named][:3]
        outcome.picked = "".join(map(self._names.letter_of, named))
        if "id" in spaces.get("picker", {}):  # absent for a request without a body
            outcome.id, outcome.raw_token = spaces["picker"]["id"], spaces["picker"]["ticket"]
            self._names.session = spaces["picker"].get("session", "")
            outcome.token = dict(zip(_TOKEN_FIELDS, outcome.raw_token.split("\t"), strict=True))
        return outcome

    async def _respond(self) -> None:
        served = self.outcome.header.split(",")[0]
        await self._call.write(response_headers(served=served))
        (await self._call.read()).response_headers  # noqa: B018
        parts = self._request.answer
        for at, part in enumerate(parts):
            await self._call.write(response_body(part, ended=at == len(parts) - 1))
            echo = (await self._call.read()).response_body.response.body_mutation.streamed_response
            self.outcome.reply += echo.body

    async def _log_end(self) -> None:
        """Send the access-log entry of a request that was answered."""
        outcome = self.outcome
        entry = accesslog_pb2.HTTPAccessLogEntry()
        entry.response.response_code.value = 200
        entry.common_properties.access_log_type = accesslog_pb2.AccessLogType.Value("DownstreamEnd")
        metadata = entry.common_properties.metadata.filter_metadata
        metadata["picker"].update({"id": outcome.id, "ticket": outcome.raw_token})
        metadata["envoy.lb"].update({accesslog.SERVED_KEY: outcome.header.split(",")[0]})
        message = als_pb2.StreamAccessLogsMessage()
        message.http_logs.log_entry.append(entry)
        stream = self._channel.stream_unary(
            f"/{accesslog.SERVICE}/StreamAccessLogs",
            als_pb2.StreamAccessLogsMessage.SerializeToString,
            als_pb2.StreamAccessLogsResponse.FromString,
        )
        await stream(iter([message]))


class PickingReplica:
    """A running replica, and the model servers of the current case."""

    def __init__(self, channel: grpc.aio.Channel, admin: httpx.AsyncClient, file: Path) -> None:
        self._channel = channel
        self._admin = admin
        self._file = file
        self._servers: tuple[Server, ...] | None = None
        self._names = Names()
        self._open = contextlib.AsyncExitStack()
        self._numbers = iter(range(1, 1_000_000))

    async def run(self, case: Case) -> tuple[list[Outcome], list[Outcome]]:
        """Outcomes of the case's request, and of those that were running."""
        await self._set(case.servers)
        for letter in case.drained:
            await self._drain(letter, "drain")
        for each in case.before:
            exchange = await self._begun(each)
            await exchange.decided()
            await exchange.finish()
        exchanges = [await self._begun(each) for each in case.running]
        running = [await exchange.decided() for exchange in exchanges]
        outcomes = []
        for _ in range(case.times):
            exchange = await self._begun(case.request)
            if case.expected.queued:
                await self._until(self._is_queued, "the request in the queue")
                await exchanges.pop(0).finish()
            outcomes.append(await exchange.decided())
            await exchange.finish()
        for exchange in exchanges:
            await exchange.finish()
        for letter in case.drained:
            await self._drain(letter, "undrain")
        await self._until(self._at_rest, "rest")
        return outcomes, running

    async def usage(self) -> tuple[int, int]:
        """Prompt and completion tokens counted so far."""

        async def read() -> str:
            return (await self._admin.get("/metrics")).text

        page = (await fresh(read)).splitlines()
        counted = [
            sum(float(line.split()[-1]) for line in page if line.startswith(f"epp_{kind}_tokens_total{{"))
            for kind in ("input", "output")
        ]
        return int(counted[0]), int(counted[1])

    async def ready(self) -> None:
        """Wait until the replica is ready."""

        async def is_ready() -> bool:
            return (await self._admin.get("/readyz")).is_success

        await self._until(is_ready, "readiness")

    async def aclose(self) -> None:
        """End the model servers, after the replica."""
        await self._open.aclose()

    async def _begun(self, request: Request) -> Exchange:
        exchange = Exchange(self._channel, self._names, request, next(self._numbers))
        await exchange.begin()
        return exchange

    async def _set(self, servers: tuple[Server, ...]) -> None:
        """Replace the model servers; returns when the replica has their figures."""
        if servers == self._servers:
            return
        old, self._open, self._servers = self._open, contextlib.AsyncExitStack(), servers
        pages = [await self._open.enter_async_context(_served(server)) for server in servers]
        self._names = Names([address for address, _ in pages])
        listed = zip(self._names.addresses, servers, strict=True)
        self._file.write_text(
            json.dumps([{"address": address, "labels": dict(server.labels)} for address, server in listed])
        )
        await old.aclose()
        for server, (_, page) in zip(servers, pages, strict=True):
            if server.state in ("stale", "failing") and page is not None:
                await page.until(lambda page=page: len(page.requests) > 1)
                if server.state == "stale":
                    page.act = page.hang
                page.answer = answered(b"", status="500 Internal Server Error")
        await self._until(self._known, "the figures of the servers")
        # The chooser refreshes its figures every REFRESH_S.
        clock = asyncio.get_running_loop().time
        known_s = clock()

        async def refreshed() -> bool:
            return clock() > known_s + 1.1 * REFRESH_S

        await self._until(refreshed, "a refresh")

    async def _known(self) -> bool:
        rows = {each["address"]: each for each in (await self._admin.get("/api/v1/endpoints")).json()}
        assert self._servers is not None
        return rows.keys() == set(self._names.addresses) and all(
            _is_known(server, rows[address])
            for address, server in zip(self._names.addresses, self._servers, strict=True)
        )

    async def _drain(self, letter: str, action: str) -> None:
        path = f"/api/v1/endpoints/{self._names.address(letter)}/{action}"
        assert (await self._admin.post(path)).is_success

    async def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = (await self._admin.get("/api/v1/state")).json()
        return state

    async def _is_queued(self) -> bool:
        return bool((await self._state())["queued"] == 1)

    async def _at_rest(self) -> bool:
        state = await self._state()
        return not (state["stock"] or state["queued"] or state["leases"] or any(state["in_flight"].values()))

    async def _until(self, holds: Callable[[], Awaitable[bool]], what: str) -> None:
        try:
            async with asyncio.timeout(PATIENT_S):
                while not await holds():  # noqa: ASYNC110 - it asks over HTTP
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            endpoints = (await self._admin.get("/api/v1/endpoints")).text
            raise AssertionError(f"{what} did not come: {await self._state()}, {endpoints}") from None


def _is_known(server: Server, row: Mapping[str, Any]) -> bool:
    match server.state:
        case "down":
            return bool(row["status"] == "down")
        case "broken" | "failing":
            return row["scrape_fault"] is not None
        case "stale":
            return row["scraped_s_ago"] is not None and row["waiting"] is None
        case _:
            return row["scraped_s_ago"] is not None and row["scrape_fault"] is None


@contextlib.asynccontextmanager
async def _served(server: Server) -> AsyncIterator[tuple[str, PageServer | None]]:
    if server.state == "down":
        with socket.socket() as bound:  # it does not listen, so connections are refused
            bound.bind((server.host, 0))
            yield f"{server.host}:{bound.getsockname()[1]}", None
        return
    async with serving(server.host) as page:
        page.answer = answered(server.page, status=server.status)
        yield page.address, page


@contextlib.asynccontextmanager
async def picking_replica(
    redis_url: str, config: Mapping[str, Any], folder: Path, pool: str
) -> AsyncIterator[PickingReplica]:
    """A ready replica of its own pool under `config`, without model servers yet."""
    file = folder / "endpoints.json"
    file.write_text("[]")
    settings = parse(
        {
            "pool": pool,
            "redis": {"url": redis_url, "silence": "5s"},
            "extproc": {"listen": "127.0.0.1:0", "trusted_headers": [pair[0] for pair in STEERING]},
            "admin": {"listen": "127.0.0.1:0"},
            "discovery": {"file": str(file)},
            **config,
        }
    )
    bound: asyncio.Future[Bound] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(settings, new_incarnation(), bound.set_result))
    async with contextlib.AsyncExitStack() as servers:
        try:
            async with asyncio.timeout(PATIENT_S):
                await asyncio.wait((task, bound), return_when=asyncio.FIRST_COMPLETED)
                at = task.result() or bound.result() if task.done() else bound.result()
            async with (
                grpc.aio.insecure_channel(at.grpc) as channel,
                httpx.AsyncClient(
                    base_url=at.admin, trust_env=False, verify=False, timeout=PATIENT_S
                ) as admin,
            ):
                replica = PickingReplica(channel, admin, file)
                servers.push_async_callback(replica.aclose)  # after the replica, which is connected to them
                await replica.ready()
                yield replica
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
