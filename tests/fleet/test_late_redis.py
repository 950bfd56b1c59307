"""A real replica (`picker serve`) that starts before its Redis does."""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from extproc_client import body, headers, parts, set_headers
from grpc_health.v1 import health_pb2, health_pb2_grpc
from own_valkey import OwnValkey
from page_server import serving

from app.extproc.service import SERVICE
from app.fleet import probe

ASK = json.dumps({"model": "llama", "prompt": "hi"}).encode()
PATIENT_S = 60.0  # what has not happened by then on a busy machine will not


class Replica:
    """A replica's process, and the two ways in."""

    def __init__(
        self, process: asyncio.subprocess.Process, channel: grpc.aio.Channel, admin: httpx.AsyncClient
    ) -> None:
        self.process = process
        self.admin = admin
        self._health = health_pb2_grpc.HealthStub(channel)
        self._process = channel.stream_stream(
            f"/{SERVICE}/Process", ProcessingRequest.SerializeToString, ProcessingResponse.FromString
        )

    async def health(self, name: str) -> str:
        request = health_pb2.HealthCheckRequest(service=name)
        answer = await self._health.Check(request, timeout=PATIENT_S)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    async def decide(self) -> ProcessingResponse:
        """The first answer to a small request in lean mode."""
        call = self._process(timeout=PATIENT_S)
        for message in (headers("lean"), body(ASK)):
            await call.write(message)
        answer = await call.read()
        call.cancel()
        return answer


@contextlib.asynccontextmanager
async def served(config: dict[str, Any], folder: Path) -> AsyncIterator[Replica]:
    """`picker serve` under `config`, gone at the end."""
    file = folder / "replica.yaml"
    file.write_text(json.dumps(config))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "app.cli", "serve", "--config", str(file)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(PATIENT_S):
            bound = json.loads(await process.stdout.readline())
        async with (
            grpc.aio.insecure_channel(bound["grpc"]) as channel,
            httpx.AsyncClient(
                base_url=bound["admin"], trust_env=False, verify=False, timeout=PATIENT_S
            ) as admin,
        ):
            yield Replica(process, channel, admin)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_replica_that_starts_before_its_redis_refuses_until_it_comes_and_then_joins(
    tmp_path: Path,
) -> None:
    # Given a replica, a model server, and nothing where Redis should be
    valkey = OwnValkey(tmp_path)
    async with serving() as page:
        config = {
            "redis": {"url": valkey.url},
            "extproc": {"listen": "127.0.0.1:0", "drain_grace": "0s"},
            "admin": {"listen": "127.0.0.1:0"},
            "discovery": {"static": [{"address": page.address}]},
        }
        async with served(config, tmp_path) as replica:
            # When it is asked how it is, then it lives, and says that it is to get no traffic, and why
            healthy = await replica.admin.get("/healthz")
            assert (healthy.status_code, healthy.json()["status"]) == (200, "degraded")
            unready = await replica.admin.get("/readyz")
            assert (unready.status_code, unready.json()["status"]) == (503, "unready")
            assert unready.json()["components"]["redis"] != "ok"
            health = [await replica.health(name) for name in ("", SERVICE, "readiness", "liveness")]
            assert health == ["NOT_SERVING"] * 3 + ["SERVING"]
            # And who comes all the same is told at once to come again: no bound is known
            refused = (await replica.decide()).immediate_response
            assert refused.status.code == 503
            assert json.loads(refused.body)["error"]["code"] == "state_unavailable"
            assert int(set_headers(refused.headers)["retry-after"]) >= 1
            # When Redis starts
            await valkey.start()
            try:
                await _ready(replica)
                # Then it has joined, and serves
                assert await replica.health(SERVICE) == "SERVING"
                placed = await replica.decide()
                assert parts([placed]) == ["request_headers"]
                mutation = placed.request_headers.response.header_mutation
                assert set_headers(mutation)["x-gateway-destination-endpoint"] == page.address
                state = (await replica.admin.get("/api/v1/state")).json()
                assert (state["degraded"], len(state["replicas"])) == (False, 1)
                # And goes in good order
                replica.process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(PATIENT_S):
                    assert await replica.process.wait() == 0
            finally:
                valkey.kill()


async def _ready(replica: Replica) -> None:
    """Wait until both who ask for readiness are told so."""

    async def both() -> bool | None:
        page = await replica.admin.get("/readyz")
        return (page.status_code == 200 and await replica.health("readiness") == "SERVING") or None

    assert await probe.until(both, within_s=PATIENT_S), (await replica.admin.get("/readyz")).text
