"""A real replica (`picker serve`) that starts before its Redis."""

import asyncio
import json
from pathlib import Path

from extproc_client import parts, set_headers
from own_replica import served
from redis_servers import Server

from picker_fleet.extproc.server import SERVICE


async def test_a_replica_without_redis_at_its_start_refuses_until_redis_answers_and_then_joins(
    valkey: Server, tmp_path: Path
) -> None:
    valkey.kill()
    async with served(valkey.url, tmp_path) as replica:
        healthy = await replica.admin.get("/healthz")
        assert (healthy.status_code, healthy.json()["status"]) == (200, "degraded")
        unready = await replica.admin.get("/readyz")
        assert (unready.status_code, unready.json()["status"]) == (503, "unready")
        assert unready.json()["components"]["redis"] != "ok"
        health = [await replica.health(name) for name in ("", SERVICE, "readiness", "liveness")]
        assert health == ["NOT_SERVING"] * 3 + ["SERVING"]
        # It knows no bound, so it refuses at once.
        refused = (await replica.decide()).immediate_response
        assert refused.status.code == 503
        assert json.loads(refused.body)["error"]["code"] == "state_unavailable"
        assert int(set_headers(refused.headers)["retry-after"]) >= 1
        await asyncio.to_thread(valkey.revive)
        await replica.ready()
        assert await replica.health(SERVICE) == "SERVING"
        placed = await replica.decide()
        assert parts([placed]) == ["request_headers"]
        mutation = placed.request_headers.response.header_mutation
        assert set_headers(mutation)["x-gateway-destination-endpoint"] == replica.endpoint
        state = (await replica.admin.get("/api/v1/state")).json()
        assert (state["degraded"], len(state["replicas"])) == (False, 1)
        assert await replica.stopped() == 0
