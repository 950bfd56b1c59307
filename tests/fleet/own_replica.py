"""A real replica (`picker serve`) without a fleet and without Envoy."""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
from crowd import http_client
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from extproc_client import body, headers
from grpc_health.v1 import health_pb2, health_pb2_grpc
from page_server import serving
from script_fleet import until

from picker_fleet.domain.config import parse
from picker_fleet.ingress.ext_proc.server import SERVICE
from picker_fleet.serve import Bound, new_incarnation, serve

ASK = json.dumps({"model": "llama", "prompt": "hi"}).encode()
PATIENT_S = 120.0  # timeout in seconds, for a busy machine


def exchange_on(channel: grpc.aio.Channel) -> Any:
    """Open an ext_proc stream on `channel`."""
    method = f"/{SERVICE}/Process"
    serializers = (ProcessingRequest.SerializeToString, ProcessingResponse.FromString)
    return channel.stream_stream(method, *serializers)(timeout=PATIENT_S)


class Replica:
    """A replica's process, its gRPC services and its admin API."""

    def __init__(
        self,
        process: Any,
        bound: Mapping[str, str],
        channel: grpc.aio.Channel,
        admin: httpx.AsyncClient,
        endpoint: str,
    ) -> None:
        self.process = process
        self.bound = bound  # the addresses of the replica's listeners
        self.admin = admin
        self.endpoint = endpoint  # the address of the replica's model server
        self._health = health_pb2_grpc.HealthStub(channel)
        self._channel = channel

    async def health(self, name: str) -> str:
        request = health_pb2.HealthCheckRequest(service=name)
        answer = await self._health.Check(request, timeout=PATIENT_S)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    def exchange(self) -> Any:
        """Open an ext_proc stream."""
        return exchange_on(self._channel)

    async def stopped(self, number: int = signal.SIGTERM) -> int:
        """Send the signal `number` to the replica; return the exit status."""
        self.process.send_signal(number)
        async with asyncio.timeout(PATIENT_S):
            return await self.process.wait()

    async def ready(self) -> None:
        """Wait until the admin API and the gRPC health service report readiness."""

        async def both() -> bool:
            page = await self.admin.get("/readyz")
            return page.status_code == 200 and await self.health("readiness") == "SERVING"

        await until(both, PATIENT_S)

    async def hands_on(self) -> bool:
        """Whether the replica refuses a stream (UNAVAILABLE), so that Envoy tries another replica."""
        return bool(await self.exchange().code() is grpc.StatusCode.UNAVAILABLE)

    async def decide(self) -> ProcessingResponse:
        """Send a small request in lean mode; return the first answer."""
        call = self.exchange()
        for message in (headers("lean"), body(ASK)):
            await call.write(message)
        answer = await call.read()
        call.cancel()
        return answer


@contextlib.asynccontextmanager
async def served(
    redis_url: str,
    folder: Path,
    *,
    command: Sequence[str] = (sys.executable, "-m", "picker_fleet.cli"),
    config: Mapping[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Replica]:
    """Run `COMMAND serve` with one model server; kill the replica at the end.

    `config` adds configuration sections, `options` go to subprocess.Popen.
    """
    async with serving() as page:
        tree = {
            "redis": {"url": redis_url},
            "extproc": {"listen": "127.0.0.1:0", "drain_grace": "0s"},
            "admin": {"listen": "127.0.0.1:0"},
            "discovery": {"static": [{"address": page.address}]},
            **(config or {}),
        }
        file = folder / "replica.yaml"
        file.write_text(json.dumps(tree))
        process = await asyncio.create_subprocess_exec(
            *command, "serve", "--config", str(file), stdout=asyncio.subprocess.PIPE, **options
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(PATIENT_S):
                bound = json.loads(await process.stdout.readline())
            async with (
                grpc.aio.insecure_channel(bound["grpc"]) as channel,
                http_client(bound["admin"]) as admin,
            ):
                yield Replica(process, bound, channel, admin, page.address)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


@contextlib.asynccontextmanager
async def served_here(tree: Mapping[str, Any]) -> AsyncIterator[Bound]:
    """Run a replica in this process with the configuration `tree`, on free ports; yield its addresses."""
    listen = {"listen": "127.0.0.1:0"}
    whole = {**tree, "extproc": {**tree.get("extproc", {}), **listen}, "admin": listen}
    bound: asyncio.Future[Bound] = asyncio.get_running_loop().create_future()
    replica = asyncio.create_task(serve(parse(whole), new_incarnation(), bound.set_result))
    try:
        async with asyncio.timeout(PATIENT_S):
            await asyncio.wait((replica, bound), return_when=asyncio.FIRST_COMPLETED)
        yield bound.result() if bound.done() else replica.result()
    finally:
        replica.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await replica
