"""Endpoints that prefill or encode for others, behind a real Envoy: headers, counts, a lost stage."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from crowd import http_client
from dashboard_page import browser, opened
from edge_envoy import edge
from fleet_load import at_rest
from model_servers import COMPLETION, Ends, Received, http_answer, listening
from whole_fleet import Fleet, running

from picker_fleet.domain.allowlist import OF_SIDECAR

PREFILLER, ENCODERS = "x-prefiller-host-port", "x-encoder-hosts-ports"
LONG, SHORT = "a long prompt " * 100, "short"
CONFIG = {
    "scheduling": {"stages": {"threshold": 100}},
    "request_queue_controller": {"watermark_per_backend": 8},
}
CLIENTS = 8
HOST = "127.0.0.57"  # no other test uses this address, so none can take a killed server's port


class Servers:
    """Two servers that decode, as behind llm-d's sidecar, two that only prefill, and two that only encode.

    The sidecar makes the prefill server of the header compute the prompt. If the prefill server fails, the
    sidecar's own engine computes the prompt, counted in `fallbacks`. The sidecar makes the encoders of the
    header encode the images in turn; if one fails, the client gets 502.
    """

    def __init__(self) -> None:
        self.decoders: list[str] = []
        self.prefillers: list[str] = []
        self.encoders: list[str] = []
        self.named_encoders: list[list[str]] = []  # for each request to a decode server: its encoders
        self.encoded = 0  # images
        self.values: set[str] = set()  # header values that reached decode servers
        self.headers: list[tuple[str, str | None]] = []  # headers of each request to a decode server
        self.prefilled = self.fallbacks = 0
        self.prefill_s = 0.01
        self._http = http_client(timeout=5.0)
        self._stacks: dict[str, contextlib.AsyncExitStack] = {}

    async def decode(self, request: Received, ends: Ends) -> bool:
        if request.method == "GET":
            ends[1].write(http_answer(b"", kind="text/plain"))
            return True
        prefiller = request.headers.get(PREFILLER)
        asked = json.loads(request.body)
        self.values |= set(request.headers.values())
        self.headers.append((asked.get("prompt", ""), prefiller))
        encoders = request.headers.get(ENCODERS, "").split(",")
        self.named_encoders.append([each for each in encoders if each])
        images = [each for part in asked.get("messages", ()) for each in part["content"][1:]]
        try:
            for image, encoder in zip(images if encoders[0] else (), itertools.cycle(encoders)):
                await self._http.post(f"http://{encoder}{request.path}", json={"messages": [image]})
        except httpx.HTTPError:
            ends[1].write(http_answer(b"", 502))
            return True
        if prefiller is not None:
            try:
                await self._http.post(f"http://{prefiller}{request.path}", content=request.body)
            except httpx.HTTPError:
                self.fallbacks += 1
        ends[1].write(http_answer(COMPLETION))
        return True

    async def prefill(self, request: Received, ends: Ends) -> bool:
        if request.method == "POST":
            self.prefilled += 1
            await asyncio.sleep(self.prefill_s)
        ends[1].write(http_answer(COMPLETION if request.method == "POST" else b""))
        return True

    async def encode(self, request: Received, ends: Ends) -> bool:
        self.encoded += request.method == "POST"
        ends[1].write(http_answer(COMPLETION if request.method == "POST" else b""))
        return True

    async def kill(self, address: str) -> None:
        await self._stacks.pop(address).aclose()

    @classmethod
    @contextlib.asynccontextmanager
    async def started(cls) -> AsyncIterator["Servers"]:
        servers = cls()
        async with contextlib.AsyncExitStack() as stack, servers._http:
            for listed, serve in (
                (servers.decoders, servers.decode),
                (servers.prefillers, servers.prefill),
                (servers.encoders, servers.encode),
            ):
                for _ in range(2):
                    own = await stack.enter_async_context(contextlib.AsyncExitStack())
                    address = await own.enter_async_context(listening(serve, HOST))
                    servers._stacks[address] = own
                    listed.append(address)
            yield servers

    def entries(self, *, prefill: bool = True) -> str:
        """The endpoints file, with or without the servers that prefill."""
        roles = dict.fromkeys(self.decoders, "decode") | dict.fromkeys(self.encoders, "encode")
        roles |= dict.fromkeys(self.prefillers if prefill else (), "prefill")
        labels = {address: {"llm-d.ai/role": role} for address, role in roles.items()}
        return json.dumps([{"address": address, "labels": each} for address, each in labels.items()])


def write(file: Path, text: str) -> None:
    draft = file.with_suffix(".new")
    draft.write_text(text)
    draft.replace(file)


async def ask(client: httpx.AsyncClient, prompt: str, **headers: str) -> int:
    body = {"model": "llama", "prompt": prompt, "max_tokens": 1}
    return (await client.post("/v1/completions", json=body, headers=headers)).status_code


async def show(client: httpx.AsyncClient, images: int, **headers: str) -> int:
    """Ask about images."""
    parts = [{"type": "image_url", "image_url": {"url": f"http://x/{n}.png"}} for n in range(images)]
    message = {"role": "user", "content": [{"type": "text", "text": "what is it?"}, *parts]}
    body = {"model": "llama", "messages": [message], "max_tokens": 1}
    return (await client.post("/v1/chat/completions", json=body, headers=headers)).status_code


async def rests(here: Fleet) -> None:
    """Wait until both stages have nothing in flight."""
    await at_rest(here)

    def is_idle(rows: list[dict[str, Any]]) -> bool:
        return not any(row["in_flight"] or row["prefills"] for row in rows)

    await here.eventually(lambda: here.get("endpoints"), is_idle, within_s=30, what="no prefill in flight")


@contextlib.asynccontextmanager
async def fleet_of(servers: Servers, folder: Path, mode: str) -> AsyncIterator[tuple[Fleet, Path]]:
    file = folder / "endpoints.json"
    write(file, servers.entries())
    config = {"discovery": {"file": str(file)}, **CONFIG}
    options = ("--mode", mode, "--endpoints", "0", "--replicas", "2")
    async with running(folder, *options, config=config, unaudited="x") as here:
        await here.until_state(ready_backends=2)
        yield here, file


@pytest.mark.parametrize("mode", ["standard", "http"])
async def test_long_prompts_are_split_and_clients_cannot_choose_the_prefill_server(
    tmp_path: Path, mode: str
) -> None:
    async with (
        Servers.started() as servers,
        fleet_of(servers, tmp_path, mode) as (here, file),
        http_client(here.url) as client,
    ):
        forged = {"X-Prefiller-Host-Port": "127.0.0.1:1"}
        for prompt in (LONG, SHORT) * 16:
            assert await ask(client, prompt, **forged) == 200
        named = {prefiller for prompt, prefiller in servers.headers if prompt == LONG}
        assert named == set(servers.prefillers)
        assert {prefiller for prompt, prefiller in servers.headers if prompt == SHORT} == {None}
        assert (servers.prefilled, servers.fallbacks) == (16, 0)
        await rests(here)
        rows = {row["address"]: row for row in await here.get("endpoints")}
        assert {row["address"] for row in rows.values() if row["prefills"] is not None} == set(
            servers.prefillers
        )
        assert rows[servers.prefillers[0]]["stages"] == ["prefill"]
        assert rows[servers.prefillers[0]]["prefill_limit"] == 8

        # While a prompt is computed, the views show where and why.
        servers.prefill_s = 5.0
        slow = asyncio.create_task(ask(client, LONG))
        running = await here.eventually(
            lambda: here.get("inflight"),
            lambda found: any(row["prefiller"] for row in found["requests"]),
            within_s=60,
            what="a request in its prefill",
        )
        [row] = running["requests"]
        assert row["endpoint"] in servers.decoders
        shown = [await here.get(f"requests/{row['id']}", replica) for replica in range(2)]
        assert {each["prefiller"] for each in shown} == {row["prefiller"]} < set(servers.prefillers)
        [why] = [each["explanation"] for each in shown if each["explanation"]]
        assert why["stages"].startswith("split: 3")
        assert why["prefillers"][0] == row["prefiller"]
        servers.prefill_s = 0.01
        assert await slow == 200

        # The stage prefill is scaled to zero and back, and then loses a server, under load.
        stop, statuses = asyncio.Event(), []

        async def send(prompts: "itertools.cycle[str]") -> None:
            while not stop.is_set():
                statuses.append(await ask(client, next(prompts)))
                await asyncio.sleep(0.05)  # faster requests would only cost CPU

        clients = [asyncio.create_task(send(itertools.cycle((LONG, SHORT)))) for _ in range(CLIENTS)]

        async def until_split(is_split: bool) -> None:
            """Wait until the last 20 long prompts had a prefill server, or none had."""
            async with asyncio.timeout(60):
                begin = len(servers.headers)
                while True:
                    await asyncio.sleep(0.05)
                    last = [prefiller for prompt, prefiller in servers.headers[begin:] if prompt == LONG]
                    if len(last) >= 20 and {each is not None for each in last[-20:]} == {is_split}:
                        return

        await until_split(True)
        write(file, servers.entries(prefill=False))
        await until_split(False)
        write(file, servers.entries())
        await until_split(True)
        # A live change raises the threshold of splitting; then the change is undone.
        await here.patch({"scheduling": {"stages": {"threshold": 100_000}}})
        await until_split(False)
        await here.patch({"scheduling": {"stages": {"threshold": None}}}, 1)
        await until_split(True)
        await servers.kill(servers.prefillers[0])
        await until_split(True)
        stop.set()
        await asyncio.gather(*clients)
        assert set(statuses) == {200}
        await rests(here)


@pytest.mark.parametrize("mode", ["standard", "lean", "http"])
async def test_media_are_encoded_by_ready_servers_that_clients_cannot_name(tmp_path: Path, mode: str) -> None:
    async with (
        Servers.started() as servers,
        fleet_of(servers, tmp_path, mode) as (here, _),
        http_client(here.url) as client,
    ):
        forged = dict.fromkeys((ENCODERS.title(), "X-Prefiller-URL"), "127.0.0.1:1")
        for images in (0, 1, 2, 5):
            assert await show(client, images, **forged) == 200
        assert [len(each) for each in servers.named_encoders] == [0, 1, 2, 2]
        assert set(itertools.chain(*servers.named_encoders)) == set(servers.encoders)
        assert servers.encoded == 8
        assert "127.0.0.1:1" not in servers.values
        rows = {row["address"]: row for row in await here.get("endpoints")}
        assert {rows[each]["stages"] == ["encode"] for each in servers.encoders} == {True}
        if mode == "standard":
            async with browser() as chromium, opened(chromium, here) as page:
                shown = await page.page.locator("#rows-endpoints").inner_text()
                assert [shown.count(stage) for stage in ("decode", "prefill", "encode")] == [2, 4, 2]

        # Failed encoders are no longer named; without encoders the decode server encodes itself.
        for left, killed in ((1, servers.encoders[0]), (0, servers.encoders[1])):
            await servers.kill(killed)
            async with asyncio.timeout(60):
                while killed in itertools.chain(*servers.named_encoders[-8:]):
                    await show(client, 3)
                    await asyncio.sleep(0.05)
            assert [await show(client, 3) for _ in range(8)] == [200] * 8
            assert [len(each) for each in servers.named_encoders[-8:]] == [left] * 8
        await rests(here)
        assert {row["in_flight"] for row in await here.get("endpoints")} == {0}


async def test_the_bootstrap_also_removes_a_prefill_header_of_a_configured_name(tmp_path: Path) -> None:
    own = {
        "scheduling": {
            "stages": {"threshold": 100, "header": "x-prefill-at", "encode": {"header": "x-encode-at"}}
        }
    }
    async with Servers.started() as servers:
        file = tmp_path / "endpoints.json"
        write(file, servers.entries())
        config = {"discovery": {"file": str(file)}, **CONFIG, **own}
        async with running(
            tmp_path, "--endpoints", "0", "--replicas", "1", config=config, unaudited="x"
        ) as here:
            await here.until_state(ready_backends=2)
            with edge(here, tmp_path / "edge", settings=own) as strangers:
                async with http_client(strangers.url) as client:
                    others = ("x-prefill-at", "x-encode-at", "x-picker-request-id")
                    for name in (PREFILLER, ENCODERS, *others, *OF_SIDECAR):
                        assert await ask(client, SHORT, **{name: "127.0.0.1:1"}) == 200
            assert servers.headers == [(SHORT, None)] * 8
            assert servers.named_encoders == [[]] * 8
            assert "127.0.0.1:1" not in servers.values
