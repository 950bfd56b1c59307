"""How a request that waits may end, as clients and metrics of a fleet tell it: its time is up, its
client's deadline passes, its client leaves, an operator takes it out.
"""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from counting_servers import counting_servers
from edge_envoy import Tree, edge
from fleet_load import PATIENT, Caller, at_rest, decisions, fresh, shared
from metrics_page import samples_of
from own_valkey import own_valkey
from whole_fleet import started

DROPPED = "x-llm-d-request-dropped-reason"
BODY = {"model": "llama", "prompt": "x", "max_tokens": 1}
ENDS = {
    "x-request-timeout": ("300ms", 504, "rejected-context-cancelled"),
    "grpc-timeout": ("300m", 504, "rejected-context-cancelled"),
    # From a client it is not: Envoy removes it, and the request waits for its other time.
    "x-envoy-expected-rq-timeout-ms": ("1", 503, "rejected-ttl-expired"),
    "x-llm-d-inference-ttl": ("300ms", 503, "rejected-ttl-expired"),
}


LASTED = {
    ("epp_queue_latency_seconds_count", "success", "true"): 8,
    ("epp_queue_latency_seconds_count", "success", "false"): 0,
    ("epp_bypass_total", "model", "llama"): 1,
    ("epp_requests_total", "code", "client_gone"): 0,
    ("epp_completions_total", "outcome", "completed"): 9,
    ("epp_requests_cancelled_total", "model", "llama"): 0,
}


async def page_of(fleet: Any) -> str:
    return str((await fleet.admin("/metrics")).text)


def total(page: str, name: str, **labels: str) -> float:
    """A counter of a metrics page, over all series with these labels."""
    wanted = {f"{key}={value}" for key, value in labels.items()}
    return sum(value for key, value in samples_of(page).items() if key[0] == name and wanted <= set(key[1:]))


async def counted(fleet: Any, name: str) -> float:
    """A counter of the fleet's one replica, over all series."""
    return total(await page_of(fleet), name)


@pytest.mark.parametrize("mode", ["lean", "standard"])
async def test_each_way_for_a_wait_to_end_is_told_apart(mode: str, shared_fleet: Any) -> None:
    # Given a fleet of one replica that lets nothing go
    options = ("--mode", mode, "--replicas", "1", "--endpoints", "1", "--sim-ttft", "1", "--sim-itl", "1")
    here = shared_fleet(*options, config={"decision_log": {"enabled": True}})
    assert (await here.admin("/api/v1/pause", method="POST")).status_code == 200

    async def queued(count: int) -> None:
        async def look() -> bool:
            return bool((await shared(here))["queued"] == count)

        await here.eventually(look, what=f"{count} queued")

    async with here.client(**PATIENT) as client:
        # When requests wait past their clients' deadlines, and one past its time in the queue
        for header, (value, status, reason) in ENDS.items():
            headers = {"x-llm-d-inference-ttl": "900ms", header: value}
            answer = await client.post("/v1/completions", json=BODY, headers=headers)
            # Then each is answered as what it is
            assert (answer.status_code, answer.headers[DROPPED]) == (status, reason), header
        # When one is taken out by an operator, and the client of another leaves
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(client.post("/v1/completions", json=BODY))
            await queued(1)
            name = next(entry.request for entry in reversed(await decisions(here)) if entry.event == "queued")
            assert (await here.admin(f"/api/v1/requests/{name}/evict", method="POST")).status_code == 200
        assert (asked.result().status_code, asked.result().json()["error"]["code"]) == (503, "evicted")
        caller = await Caller.ask(here.url, tokens=1)
        await queued(1)
        await caller.leave()
        await queued(0)
        # And one is served in the end
        served = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await queued(1)
        assert (await here.admin("/api/v1/resume", method="POST")).status_code == 200
        assert (await served).status_code == 200
    await at_rest(here)

    # Then each of the seven waits was counted once, by how it ended, and nothing as what it is not
    async def waited() -> bool:
        return await counted(here, "epp_queue_latency_seconds_count") == 7

    await here.eventually(waited, what="seven waits")
    expected = {
        ("epp_queue_latency_seconds_count", "success", "true"): 1,
        ("epp_requests_total", "code", "deadline_exceeded"): 2,
        ("epp_requests_total", "code", "expired_ttl"): 2,
        ("epp_requests_total", "code", "evicted"): 1,
        ("epp_requests_total", "code", "client_gone"): 1,
        ("epp_responses_total", "status", "499"): 1,
        ("epp_requests_expired_total", "model", "llama"): 2,
        ("epp_requests_cancelled_total", "model", "llama"): 1,
        ("epp_evictions_total", "band", "Default"): 1,
        ("epp_preemptions_total", "band", "Default"): 0,
        ("epp_bypass_total", "model", "llama"): 0,
    }
    page = await fresh(lambda: page_of(here))
    found = {key: total(page, key[0], **{key[1]: key[2]}) for key in expected}
    assert found == expected


async def test_the_route_timeout_that_another_envoy_tells_is_a_clients_deadline(
    shared_fleet: Any, tmp_path: Path
) -> None:
    # Given a paused fleet, and its Envoy set to take what an Envoy on this host tells it
    options = ("--replicas", "1", "--endpoints", "1", "--sim-ttft", "1", "--sim-itl", "1")
    here = shared_fleet(*options, config={"decision_log": {"enabled": True}})
    assert (await here.admin("/api/v1/pause", method="POST")).status_code == 200

    def trust_this_host(tree: Tree) -> None:
        manager = tree["staticResources"]["listeners"][0]["filterChains"][0]["filters"][0]["typedConfig"]
        manager["internalAddressConfig"]["cidrRanges"] = [{"addressPrefix": "127.0.0.1", "prefixLen": 32}]

    with edge(here, tmp_path / "inner", edit=trust_this_host) as inner:
        async with httpx.AsyncClient(base_url=inner.url, trust_env=False, timeout=90.0) as client:
            # When a request comes by a route of that one with a timeout
            headers = {"x-envoy-expected-rq-timeout-ms": "300"}
            answer = await client.post("/v1/completions", json=BODY, headers=headers)
    # Then it is answered when that has passed
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert (await here.admin("/api/v1/resume", method="POST")).status_code == 200
    await at_rest(here)


async def test_a_wait_through_the_loss_and_the_return_of_redis_counts_once_and_no_client_has_left(
    tmp_path: Path,
) -> None:
    # Given a replica with one place, of which nine requests want it
    async with own_valkey(tmp_path) as valkey, counting_servers(1, service_s=0.6) as servers:
        config = {
            "discovery": {"static": [{"address": servers.addresses[0]}]},
            "request_queue_controller": {
                "watermark_per_backend": 1,
                "upper_bound_per_backend": 1,
                "lower_bound_per_backend": 1,
            },
        }
        options = ("--replicas", "1", "--endpoints", "0", "--redis", valkey.url)
        folder = tmp_path / "fleet"
        folder.mkdir()
        here = await asyncio.to_thread(started, folder, options, config, None, "Redis is lost on purpose")
        try:
            async with here.client(**PATIENT) as client, asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(client.post("/v1/completions", json=BODY)) for _ in range(9)]

                async def queued() -> bool:
                    return bool((await shared(here))["queued"] == 8)

                await here.eventually(queued, what="8 queued")

                async def degraded(wanted: bool) -> bool:
                    return (await shared(here)).get("degraded") is wanted

                # When Redis is lost while they wait, and comes back, empty, while some still do
                valkey.kill()
                await here.eventually(lambda: degraded(True), what="a replica alone")
                served = servers.served

                async def alone() -> bool:
                    return servers.served >= served + 2

                await here.eventually(alone, what="two served alone")
                await valkey.start()
                await here.eventually(lambda: degraded(False), what="a return")
            assert [task.result().status_code for task in asked] == [200] * 9

            async def waited() -> bool:
                return await counted(here, "epp_queue_latency_seconds_count") >= 8

            # Then each of the eight waits is one, and a success, and nobody is said to have left
            await here.eventually(waited, what="eight waits")
            page = await fresh(lambda: page_of(here))
            found = {key: total(page, key[0], **{key[1]: key[2]}) for key in LASTED}
            assert found == LASTED
        finally:
            await asyncio.to_thread(here.stop)
