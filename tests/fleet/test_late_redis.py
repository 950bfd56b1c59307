"""Replicas start while Redis is unavailable, and get requests once Redis answers."""

import asyncio
import signal
from pathlib import Path
from typing import Any

from extproc_client import parts, set_headers
from fleet_load import one_token
from own_replica import served
from redis_servers import Server, redis_server
from whole_fleet import exact_bounds, running

from picker_fleet.ingress.ext_proc.server import SERVICE
from picker_tools.load.generator import closed_loop


def restore_sighup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` makes its children ignore SIGHUP


async def test_a_replica_that_starts_without_redis_refuses_every_stream_until_redis_answers(
    valkey: Server, tmp_path: Path
) -> None:
    valkey.kill()
    async with served(valkey.url, tmp_path, preexec_fn=restore_sighup) as replica:
        healthy = await replica.admin.get("/healthz")
        assert (healthy.status_code, healthy.json()["status"]) == (200, "degraded")
        unready = await replica.admin.get("/readyz")
        assert (unready.status_code, unready.json()["status"]) == (503, "unready")
        assert unready.json()["components"]["redis"] != "ok"
        health = [await replica.health(name) for name in ("", SERVICE, "readiness", "liveness")]
        assert health == ["NOT_SERVING"] * 3 + ["SERVING"]
        # The replica does not know the pool's bound, so it refuses the stream.
        assert await replica.hands_on()
        await asyncio.to_thread(valkey.revive)
        await replica.ready()
        assert await replica.health(SERVICE) == "SERVING"
        placed = await replica.decide()
        assert parts([placed]) == ["request_headers"]
        mutation = placed.request_headers.response.header_mutation
        assert set_headers(mutation)["x-gateway-destination-endpoint"] == replica.endpoint
        state = (await replica.admin.get("/api/v1/state")).json()
        assert (state["degraded"], len(state["replicas"])) == (False, 1)
        assert await replica.stopped(signal.SIGHUP) == 0


async def test_no_request_fails_if_a_replica_restarts_while_redis_is_down(tmp_path: Path) -> None:
    options = ("--mode", "http", "--sim-ttft", "100", "--sim-itl", "1")
    config = {"request_queue_controller": exact_bounds(30), "extproc": {"drain_grace": "1s"}}
    with redis_server(tmp_path / "valkey") as valkey:
        async with running(tmp_path, *options, "--redis", valkey.url, config=config) as here:
            await here.until_counted()
            valkey.kill()
            for replica in range(3):
                await here.until_state(replica=replica, within_s=20, degraded=True)

            def process() -> Any:
                return here.state["replicas"][1]["pid"]

            async with closed_loop(here.url, clients=6, make_request=one_token) as load:
                former = process()
                here.replica(1).terminate()
                await here.eventually(process, lambda pid: pid != former, within_s=60, what="a new process")
                served = len(load.history)
                await here.eventually(lambda: len(load.history) > served + 100, within_s=60, what="answers")
                assert (await here.admin("/readyz", 1)).status_code == 503
            assert {record.status for record in load.history} == {200}
            await asyncio.to_thread(valkey.revive)
            for replica in range(3):
                await here.until_state(replica=replica, within_s=30, degraded=False)
