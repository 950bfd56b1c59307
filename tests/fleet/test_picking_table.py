"""Runs each case of `picking_table.TABLE`: a request must get the case's endpoints or its refusal.

The replica uses a real Valkey. The model servers are small HTTP servers with a metrics page.
"""

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from crowd import http_client
from extproc_client import body, headers, response_body, response_headers, set_headers
from fleet_load import counts
from own_replica import PATIENT_S, exchange_on, served_here
from page_server import answered, serving
from picking_table import GROUPS, TABLE, Ask, Case, Server
from redis_servers import redis_server

from picker_fleet.domain.allowlist import STEERING
from picker_fleet.scheduling.endpoint_states import REFRESH_S
from picker_tools.local_fleet import network


class PickingReplica:
    """A running replica and the model servers of the current case."""

    def __init__(self, channel: grpc.aio.Channel, admin: httpx.AsyncClient, file: Path) -> None:
        self._channel = channel
        self._admin = admin
        self._file = file
        self._servers: tuple[Server, ...] | None = None
        self._addresses: list[str] = []
        self._session = ""
        self._open = contextlib.AsyncExitStack()

    async def run(self, case: Case) -> tuple[str, list[str]]:
        """The letters of the endpoints picked for the case's request, or the reason of its refusal; and the
        letters picked for each request in `running`.
        """
        await self._set(case.servers)
        for letter in case.drained:
            await self._drain(letter, "drain")
        for each in case.before:
            call = await self._begun(each)
            await self._picked(call)
            await self._end(call)
        calls = [await self._begun(each) for each in case.running]
        running = [await self._picked(call) for call in calls]
        asked = await self._begun(case.ask)
        if case.waits:
            await self._until_state(lambda state: state["queued"] == 1)
            await self._end(calls.pop(0))
        picked = await self._picked(asked)
        for call in (asked, *calls):
            await self._end(call)
        for letter in case.drained:
            await self._drain(letter, "undrain")
        await self._until_state(lambda state: not any(counts(state)))
        return picked, running

    async def ready(self) -> None:
        async def is_ready() -> bool:
            return (await self._admin.get("/readyz")).is_success

        await self._until(is_ready)

    async def aclose(self) -> None:
        """Stop the model servers; call this after the replica has stopped."""
        await self._open.aclose()

    async def _begun(self, ask: Ask) -> Any:
        """Open an ext_proc stream and send the whole request on it, as Envoy does in mode `standard`."""
        call = exchange_on(self._channel)
        metadata: dict[str, Mapping[str, Any]] = {}
        if ask.subset is not None:
            hint = self._in_hint(ask.subset)
            metadata["envoy.lb.subset_hint"] = {"x-gateway-destination-endpoint-subset": hint}
        session = {"x-session-token": self._session} if ask.same_session else {}
        await call.write(headers("standard", session, ended=ask.get, metadata=metadata))
        if not ask.get:
            text = {"model": ask.model, "prompt": ask.prompt, "max_tokens": 4, "cache_salt": ask.salt or None}
            await call.write(body(json.dumps(text).encode()))
        return call

    async def _picked(self, call: Any) -> str:
        answer = await call.read()
        assert answer is not grpc.aio.EOF, "the stream ended without an answer"
        if answer.WhichOneof("response") == "immediate_response":
            fields = set_headers(answer.immediate_response.headers)
            assert (answer.immediate_response.status.code, bool(fields["retry-after"])) == (503, True)
            return fields["x-llm-d-request-dropped-reason"]
        fields = set_headers(answer.request_headers.response.header_mutation)
        spaces = {name: dict(space.struct_value) for name, space in answer.dynamic_metadata.fields.items()}
        chosen = fields["x-gateway-destination-endpoint"]
        assert spaces["envoy.lb"]["x-gateway-destination-endpoint"] == chosen
        self._session = spaces.get("picker", {}).get("session", "")
        attempts = chosen.split(",")
        named = list(dict.fromkeys(attempts))
        # With fewer than three endpoints the addresses repeat: each of Envoy's three attempts has one.
        assert attempts == named or attempts == [*named, *named, *named][:3]
        return "".join(chr(ord("A") + self._addresses.index(address)) for address in named)

    async def _end(self, call: Any) -> None:
        """Send the model server's response to a request; does nothing if the request was refused."""
        with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            await call.write(response_headers())
            await call.write(response_body(b"{}", ended=True))
            await call.done_writing()
            while await call.read() is not grpc.aio.EOF:
                pass

    def _address(self, name: str) -> str:
        """The address of the server with letter `name`; `name` itself if it is not a letter."""
        return self._addresses[ord(name) - ord("A")] if len(name) == 1 else name

    def _in_hint(self, hint: object) -> object:
        """The text `hint` with each letter replaced by the server's address."""
        if isinstance(hint, list):
            return [self._address(each) for each in hint]
        return ",".join(map(self._address, hint.split(","))) if isinstance(hint, str) else hint

    async def _set(self, servers: tuple[Server, ...]) -> None:
        """Replace the model servers, and wait until the replica has their metrics."""
        if servers == self._servers:
            return
        old, self._open, self._servers = self._open, contextlib.AsyncExitStack(), servers
        self._addresses = [await self._open.enter_async_context(_served(server)) for server in servers]
        rows = [
            {"address": address, "labels": dict(server.labels)}
            for address, server in zip(self._addresses, servers, strict=True)
        ]
        self._file.write_text(json.dumps(rows))
        await old.aclose()
        await self._until(self._are_known)
        await asyncio.sleep(1.1 * REFRESH_S)  # the chooser refreshes its metrics every REFRESH_S

    async def _are_known(self) -> bool:
        rows = {each["address"]: each for each in (await self._admin.get("/api/v1/endpoints")).json()}
        assert self._servers is not None
        return rows.keys() == set(self._addresses) and all(
            _is_known(server, rows[address])
            for address, server in zip(self._addresses, self._servers, strict=True)
        )

    async def _drain(self, letter: str, action: str) -> None:
        path = f"/api/v1/endpoints/{self._address(letter)}/{action}"
        assert (await self._admin.post(path)).is_success

    async def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = (await self._admin.get("/api/v1/state")).json()
        return state

    async def _until_state(self, holds: Callable[[dict[str, Any]], bool]) -> None:
        async def state_holds() -> bool:
            return holds(await self._state())

        await self._until(state_holds)

    async def _until(self, holds: Callable[[], Awaitable[bool]]) -> None:
        async def look() -> bool | None:
            return await holds() or None

        assert await network.until(look, within_s=PATIENT_S), f"{holds.__name__}: {await self._state()}"


def _is_known(server: Server, row: Mapping[str, Any]) -> bool:
    if server.state == "down":
        return bool(row["status"] == "down")
    if server.state == "broken":
        return row["scrape_fault"] is not None
    if server.state == "unready":
        return row["status"] == "down" and row["unready"] is not None
    return row["scraped_s_ago"] is not None and row["scrape_fault"] is None


@contextlib.asynccontextmanager
async def _served(server: Server) -> AsyncIterator[str]:
    if server.state == "down":
        with socket.socket() as bound:  # this socket is bound but does not listen: connections are refused
            bound.bind((server.host, 0))
            yield f"{server.host}:{bound.getsockname()[1]}"
        return
    async with serving(server.host) as page:
        page.answer, page.health = answered(server.page), answered(b"", status=server.health)
        yield page.address


@contextlib.asynccontextmanager
async def picking_replica(redis_url: str, folder: Path, group: str) -> AsyncIterator[PickingReplica]:
    """A replica with its own pool and the configuration of `group`, without model servers at first."""
    file = folder / "endpoints.json"
    file.write_text("[]")
    tree = {
        "pool": group,
        "redis": {"url": redis_url, "silence": "5s"},
        "extproc": {"trusted_headers": [pair[0] for pair in STEERING]},
        "discovery": {"file": str(file)},
        **GROUPS[group],
    }
    async with (
        contextlib.AsyncExitStack() as servers,
        served_here(tree) as at,
        grpc.aio.insecure_channel(at.grpc) as channel,
        http_client(at.admin) as admin,
    ):
        replica = PickingReplica(channel, admin, file)
        servers.push_async_callback(replica.aclose)  # the servers stop after the replica, which scrapes them
        await replica.ready()
        yield replica


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server.url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica_of(
    redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Callable[[str], Awaitable[PickingReplica]]]:
    """Starts the replica of a group and stops the previous one; pytest orders the cases by group."""
    running: dict[str, PickingReplica] = {}
    async with contextlib.AsyncExitStack() as stack:

        async def replica(group: str) -> PickingReplica:
            if group not in running:
                running.clear()
                await stack.aclose()
                started = picking_replica(redis_url, tmp_path_factory.mktemp("replica"), group)
                running[group] = await stack.enter_async_context(started)
            return running[group]

        yield replica


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in TABLE])
async def test_a_request_goes_to_the_expected_endpoints_or_is_refused(replica_of: Any, case: Case) -> None:
    replica = await replica_of(case.group)
    picked, running = await replica.run(case)
    assert re.fullmatch(case.expected, picked), picked
    assert not case.waits or picked[0] == running[0][0]
