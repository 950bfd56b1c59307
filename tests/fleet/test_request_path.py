"""Traced requests run through exactly the files that docs/architecture.md lists."""

import asyncio
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
import redis.asyncio
from extproc_client import body, headers
from own_replica import ASK, exchange_on, served_here
from page_server import serving
from redis_servers import Server
from script_fleet import until

import picker_fleet
from picker_fleet.state.scripts import load_library

ROOT = Path(__file__).parents[2]
PACKAGE = Path(picker_fleet.__file__).parent
PAGE = ROOT / "docs" / "architecture.md"
HEADING = "## The path of one request"
REQUESTS = 5  # a file is on the path if it runs in each of these requests
MOST_FILES = {"app/": 17, "lua/": 8}
TRACED = "traced-lua-files"
_FUNCTION = re.compile(r"(\bfunction\b(?! builtins)[^\n(]*\([^)\n]*\))$", re.MULTILINE)


def listed_files() -> set[str]:
    """The paths in the page's section HEADING, each at the start of an item: `app/...` or `lua/...`."""
    section = PAGE.read_text(encoding="utf-8").split(f"{HEADING}\n", 1)[1].split("\n## ", 1)[0]
    return set(re.findall(r"^\d+\. `((?:app|lua)/[\w/.]+)`", section, re.MULTILINE))


def instrumented_library() -> str:
    """The Lua library with each function changed to add its file to the Redis set TRACED."""
    source = load_library().source
    for file in (ROOT / "lua").rglob("*.lua"):
        text = file.read_text(encoding="utf-8")
        assert text in source, f"the library does not contain {file} unchanged"
        # While Redis loads the library, `pcall` does not exist yet (lua/lib/storage.lua).
        note = f"if pcall then redis.call('SADD', '{TRACED}', '{file.relative_to(ROOT)}') end"
        source = source.replace(text, _FUNCTION.sub(rf"\1 {note}", text))
    return source.replace("flags={'no-writes'}", "flags={}")  # because SADD writes


# Long intervals keep background tasks out of the trace.
QUIET: dict[str, Any] = {
    "scraping": {"interval": "300s"},
    "request_queue_controller": {"expiry_cleanup_interval": "300s", "watermark_per_backend": 1000},
    "leases": {"heartbeat": "60s", "replica_silence": "300s"},
    "logging": {"level": "WARNING"},
}


async def ask(channel: grpc.aio.Channel, request_id: str) -> bool:
    """Place one request in lean mode and end its stream as Envoy does; return whether it was placed."""
    call = exchange_on(channel)
    try:
        await call.write(headers("lean", {"x-request-id": request_id}))
        await call.write(body(ASK))
        answer = await call.read()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return False  # the replica is not ready yet
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    return bool(answer.WhichOneof("response") == "request_headers")


async def test_the_architecture_page_lists_the_files_that_one_request_runs_through(valkey: Server) -> None:
    async with serving() as server, redis.asyncio.Redis.from_url(valkey.url) as client:
        await client.execute_command("FUNCTION", "LOAD", "REPLACE", instrumented_library())
        endpoints = {"static": [{"address": server.address}]}
        async with (
            served_here({"redis": {"url": valkey.url}, "discovery": endpoints, **QUIET}) as address,
            grpc.aio.insecure_channel(address.grpc) as channel,
        ):
            await until(lambda: ask(channel, "the first"), 60)
            python, lua = [], []
            for number in range(REQUESTS):
                ran: set[str] = set()

                def note(frame: FrameType, event: str, argument: object, ran: set[str] = ran) -> None:
                    if event == "call":
                        ran.add(frame.f_code.co_filename)

                await client.delete(TRACED)
                sys.setprofile(note)
                try:
                    assert await ask(channel, f"request-{number}")
                finally:
                    sys.setprofile(None)
                python.append({name for name in ran if name.startswith(str(PACKAGE))})
                lua.append({name.decode() for name in await client.smembers(TRACED)})
    files = {str(Path(name).relative_to(ROOT)) for name in set.intersection(*python)}
    files |= set.intersection(*lua)
    assert files == listed_files()
    for folder, most in MOST_FILES.items():
        assert len([name for name in files if name.startswith(folder)]) <= most
