"""Plays cases of the picking table on a real replica: its gRPC services, its admin API, a real Valkey, and
small HTTP servers for the metrics pages."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import httpx
from fleet_load import fresh
from page_server import PageServer, answered, serving
from picking_case import Ask, Case, Server
from picking_talk import PATIENT_S, Names, Played, Talk

from picker_fleet.allowlist import STEERING
from picker_fleet.config import parse
from picker_fleet.scheduling.chooser import REFRESH_S
from picker_fleet.serve import Bound, new_incarnation, serve

_POLL_S = 0.02


class Stage:
    """A running replica, and the model servers of the case at hand."""

    def __init__(self, channel: grpc.aio.Channel, admin: httpx.AsyncClient, file: Path) -> None:
        self._channel = channel
        self._admin = admin
        self._file = file
        self._servers: tuple[Server, ...] | None = None
        self._names = Names()
        self._open = contextlib.AsyncExitStack()
        self._numbers = iter(range(1, 1_000_000))

    async def play(self, case: Case) -> tuple[list[Played], list[Played], list[Played]]:
        """What came of the case's request, each time; of those before it; of those held meanwhile."""
        await self._set(case.servers)
        for letter in case.drained:
            await self._drain(letter, "drain")
        before = [await self._one(each) for each in case.before]
        held = [await self._started(each) for each in case.held]
        held_played = [await talk.decided() for talk in held]
        played = []
        for _ in range(case.times):
            talk = await self._started(case.ask)
            if case.want.queued:
                await self._until(self._is_queued, "the request in the queue")
                await held.pop(0).finish()
            played.append(await talk.decided())
            await talk.finish()
        for talk in held:
            await talk.finish()
        for letter in case.drained:
            await self._drain(letter, "undrain")
        await self._until(self._at_rest, "rest")
        return played, before, held_played

    async def tokens(self) -> tuple[int, int]:
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
        """Wait until the replica is."""

        async def is_ready() -> bool:
            return (await self._admin.get("/readyz")).is_success

        await self._until(is_ready, "readiness")

    async def aclose(self) -> None:
        """End the model servers; the replica must have ended."""
        await self._open.aclose()

    async def _one(self, ask: Ask) -> Played:
        talk = await self._started(ask)
        played = await talk.decided()
        await talk.finish()
        return played

    async def _started(self, ask: Ask) -> Talk:
        talk = Talk(self._channel, self._names, ask, next(self._numbers))
        await talk.begin()
        return talk

    async def _set(self, servers: tuple[Server, ...]) -> None:
        """Replace the model servers; returns when the replica knows of each what it can."""
        if servers == self._servers:
            return
        old, self._open, self._servers = self._open, contextlib.AsyncExitStack(), servers
        pages = [await self._open.enter_async_context(_served(server)) for server in servers]
        self._names = Names([address for address, _ in pages])
        told = [
            {"address": address, "labels": dict(server.labels)}
            for address, server in zip(self._names.addresses, servers, strict=True)
        ]
        self._file.write_text(json.dumps(told))
        await old.aclose()
        for server, (_, page) in zip(servers, pages, strict=True):
            if server.state == "stale" and page is not None:
                await page.until(lambda page=page: len(page.requests) > 1)
                page.act = page.hang
            elif server.state == "failing" and page is not None:
                await page.until(lambda page=page: len(page.requests) > 1)
                page.answer = answered(b"", status="500 Internal Server Error")
        await self._until(self._known, "what is known of the servers")
        # Picks go by what was known up to so long ago.
        loop = asyncio.get_running_loop()
        known_s = loop.time()

        async def taken_up() -> bool:
            return loop.time() > known_s + 1.1 * REFRESH_S

        await self._until(taken_up, "a look at it")

    async def _known(self) -> bool:
        told = {each["address"]: each for each in (await self._admin.get("/api/v1/endpoints")).json()}
        assert self._servers is not None
        return told.keys() == set(self._names.addresses) and all(
            _is_known(server, told[address])
            for address, server in zip(self._names.addresses, self._servers, strict=True)
        )

    async def _drain(self, letter: str, what: str) -> None:
        path = f"/api/v1/endpoints/{self._names.address(letter)}/{what}"
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
                while not await holds():  # noqa: ASYNC110 - it is asked for over HTTP
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            endpoints = (await self._admin.get("/api/v1/endpoints")).text
            raise AssertionError(f"{what} did not come: {await self._state()}, {endpoints}") from None


def _is_known(server: Server, told: Mapping[str, Any]) -> bool:
    match server.state:
        case "down":
            return bool(told["status"] == "down")
        case "broken" | "failing":
            return told["scrape_fault"] is not None
        case "stale":
            return told["scraped_s_ago"] is not None and told["waiting"] is None
        case _:
            return told["scraped_s_ago"] is not None and told["scrape_fault"] is None


@contextlib.asynccontextmanager
async def _served(server: Server) -> AsyncIterator[tuple[str, PageServer | None]]:
    if server.state == "down":
        with socket.socket() as taken:  # bound and not listening: connections are refused
            taken.bind((server.host, 0))
            yield f"{server.host}:{taken.getsockname()[1]}", None
        return
    async with serving(server.host) as page:
        page.answer = answered(server.page, status=server.status)
        yield page.address, page


@contextlib.asynccontextmanager
async def staged(redis_url: str, config: Mapping[str, Any], folder: Path, pool: str) -> AsyncIterator[Stage]:
    """A replica of its own pool under `config`, ready, with no model server yet."""
    file = folder / "endpoints" / "list.json"
    file.parent.mkdir(parents=True)
    file.write_text("[]")
    settings = parse(
        {
            "pool": pool,
            "redis": {"url": redis_url, "silence": "5s"},
            "extproc": {
                "listen": "127.0.0.1:0",
                "trusted_headers": [pair[0] for pair in STEERING],  # the cases are a gateway that says them
            },
            "admin": {"listen": "127.0.0.1:0"},
            "discovery": {"file": str(file)},
            **config,
        }
    )
    open_pages = contextlib.AsyncExitStack()
    bound: asyncio.Future[Bound] = asyncio.get_running_loop().create_future()
    replica = asyncio.create_task(serve(settings, new_incarnation(), bound.set_result))
    try:
        async with asyncio.timeout(PATIENT_S):
            await asyncio.wait((replica, bound), return_when=asyncio.FIRST_COMPLETED)
            at = replica.result() or bound.result() if replica.done() else bound.result()
        async with (
            grpc.aio.insecure_channel(at.grpc) as channel,
            httpx.AsyncClient(base_url=at.admin, trust_env=False, verify=False, timeout=PATIENT_S) as admin,
        ):
            stage = await open_pages.enter_async_context(contextlib.aclosing(Stage(channel, admin, file)))
            await stage.ready()
            yield stage
    finally:
        replica.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await replica
        await open_pages.aclose()  # now that nobody is connected to them
