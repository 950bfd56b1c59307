"""A real Valkey with a long queue, real replicas, and endpoints that only have a metrics page.

The stock counts tokens, and the room that is left in it is less than any request in the queue takes. So the
queue stays as long as it is, while small requests of a higher band find room at once.
"""

import asyncio
import contextlib
import json
import random
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.lifecycle.server import Server
from picker_fleet.state.arrival import pack
from picker_tools.local_fleet.network import LOOPBACK

POOL = "bench"
ENDPOINTS = 10
REPLICAS = 3
RUNNING = 200
_PER_ENDPOINT_TOKENS = 20_000
_COST_TOKENS, _LAST_TOKENS = 1000, 500  # of each that waits or runs, but for the last of those that run
_FILLER = "zz-filler"  # never the least of the ids, so that a real replica publishes
KEY = "epp:{bench}:pool"
_BATCH = 64
_TTL_MS = 3_600_000
_READY_S = 120.0
_ENDS_S = 20.0
_PAGE = b"vllm:num_requests_waiting 0\nvllm:num_requests_running 1\nvllm:kv_cache_usage_perc 0.1\n"


@dataclass(frozen=True, slots=True)
class Bound:
    """Where the replica listens."""

    id: str
    grpc: str  # host:port
    admin: str  # http://host:port
    pid: int


@contextlib.asynccontextmanager
async def endpoints() -> AsyncIterator[list[str]]:
    """Addresses (`ip:port`) that answer each request with a metrics page."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n" % len(_PAGE)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(head + _PAGE)
        writer.close()

    listeners = [await asyncio.start_server(serve, LOOPBACK, 0) for _ in range(ENDPOINTS)]
    try:
        yield [f"{LOOPBACK}:{each.sockets[0].getsockname()[1]}" for each in listeners]
    finally:
        for each in listeners:
            each.close()


@contextlib.asynccontextmanager
async def replica(redis_port: int, addresses: list[str]) -> AsyncIterator[Bound]:
    """A replica of the pool as a process, ready; RuntimeError if it does not get so far."""
    tree: dict[str, Any] = {
        "pool": POOL,
        "redis": {"url": f"redis://{LOOPBACK}:{redis_port}/0", "silence": "5s"},
        "extproc": {"listen": f"{LOOPBACK}:0", "drain_grace": "0s"},
        "admin": {"listen": f"{LOOPBACK}:0"},
        "discovery": {"static": [{"address": address} for address in addresses]},
        "objectives": [{"name": "gold", "criticality": "Critical"}],
        "fair_request_queue": {"total_capacity": 10**7, "flow_capacity": 10**6, "queue_ttl": "3600s"},
        "request_queue_controller": {
            "unit": "tokens",
            "watermark_per_backend": _PER_ENDPOINT_TOKENS,
            "lower_bound_per_backend": _PER_ENDPOINT_TOKENS,
            "upper_bound_per_backend": _PER_ENDPOINT_TOKENS,
        },
        "leases": {"inflight": "3600s", "replica_silence": "60s"},
        "scraping": {"interval": "1s", "stale_after": "10s"},
        "decision_log": {"enabled": True},
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(yaml.safe_dump(tree), encoding="utf-8")
        process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "picker_fleet.cli",
                "serve",
                "--config",
                str(file),
                "--log-level",
                "ERROR",
            ),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_READY_S):
                said = json.loads(await process.stdout.readline() or b"{}")
            if "admin" not in said:
                raise RuntimeError("the replica did not start")
            yield Bound(said["id"], said["grpc"], said["admin"], process.pid)
        finally:
            if process.returncode is None:
                process.terminate()
            async with asyncio.timeout(_ENDS_S):
                await process.wait()


class Filler:
    """Another replica, by its words only: it fills stock and queue, and keeps its requests alive."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._random = random.Random(7)
        self._made = 0

    def fill(self, queued: int, flows: int, workloads: int) -> None:
        """Take the stock but for little, and let `queued` Sheddable requests wait. RuntimeError if not so."""
        self._call("heartbeat", _FILLER, "{}", 60_000)
        self._expect(self._admit(RUNNING - 1, flows, workloads), b"placed")
        self._expect(self._admit(1, flows, workloads, _LAST_TOKENS), b"placed")
        for at in range(0, queued, _BATCH):
            self._expect(self._admit(min(_BATCH, queued - at), flows, workloads), b"queued")

    async def keep_alive(self) -> None:
        """Beat each second until cancelled. RuntimeError if the queue is served after all."""
        while True:
            reply = await asyncio.to_thread(self._call, "heartbeat", _FILLER, "{}", 60_000)
            if any(item.startswith(b"granted") for item in reply[1]):
                raise RuntimeError("requests of the queue were served, which was to stay as it is")
            await asyncio.sleep(1.0)

    def _admit(self, count: int, flows: int, workloads: int, cost: int = _COST_TOKENS) -> list[bytes]:
        args: list[bytes] = []
        replies: list[bytes] = []
        for _ in range(count):
            self._made += 1
            id = f"{self._random.getrandbits(64):016x}-{self._made:019d}"
            flow = f"tenant-{self._made % flows}"
            workload = f"workload-{self._made % workloads}"
            args.append(pack((id, "1", flow, workload, "llama", "*"), (2, 1, cost, _TTL_MS, 0, 3, 0, 0)))
        for at in range(0, len(args), _BATCH):
            replies += self._call("admit", _FILLER, *args[at : at + _BATCH])[4:]
        return replies

    def _expect(self, replies: list[bytes], what: bytes) -> None:
        other = [reply for reply in replies if not reply.startswith(what)]
        if other:
            raise RuntimeError(f"{len(other)} requests were not {what.decode()}, but: {other[0].decode()}")

    def _call(self, name: str, *args: Any) -> Any:
        return self._server.client.execute_command(
            "FCALL", self._server.library.function(name), 1, KEY, *args
        )
