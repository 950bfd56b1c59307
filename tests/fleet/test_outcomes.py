"""Each outcome of a queued request has its own answer and its own metrics."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from crowd import http_client
from edge_envoy import Tree, edge, http_manager
from fleet_load import Caller, at_rest, decisions, fresh, total

DROPPED = "x-llm-d-request-dropped-reason"
BODY = {"model": "llama", "prompt": "x", "max_tokens": 1}
SMALL = ("--replicas", "1", "--endpoints", "1", "--sim-ttft", "1", "--sim-itl", "1")
Key = tuple[str, str, str]


async def assert_counts(fleet: Any, waits: int, expected: dict[Key, float]) -> None:
    """Wait until the metrics count `waits` queued requests; assert each counter's `expected` sum by label."""

    async def page() -> str:
        return str((await fleet.admin("/metrics")).text)

    name = "epp_queue_latency_seconds_count"
    await fleet.eventually(page, lambda page: total(page, name) >= waits, what=f"{waits} queued requests")
    final = await fresh(page)
    assert {key: total(final, key[0], **{key[1]: key[2]}) for key in expected} == expected
    assert total(final, name) == waits


@pytest.mark.parametrize("mode", ["lean", "http", "standard"])  # the next test uses the last fleet
async def test_each_exit_from_the_queue_has_its_own_status_and_counter(mode: str, shared_fleet: Any) -> None:
    here = shared_fleet("--mode", mode, *SMALL)
    await here.post("pause")
    async with here.client() as client:
        for header, value, status, reason in (
            ("x-request-timeout", "300ms", 504, "rejected-context-cancelled"),
            ("grpc-timeout", "300m", 504, "rejected-context-cancelled"),
            # Envoy removes this header from clients' requests, so the TTL of 900 ms applies.
            ("x-envoy-expected-rq-timeout-ms", "1", 503, "rejected-ttl-expired"),
            ("x-llm-d-inference-ttl", "300ms", 503, "rejected-ttl-expired"),
        ):
            headers = {"x-llm-d-inference-ttl": "900ms", header: value}
            answer = await client.post("/v1/completions", json=BODY, headers=headers)
            assert (answer.status_code, answer.headers[DROPPED]) == (status, reason), header
        async with asyncio.TaskGroup() as tasks:
            evicted = tasks.create_task(client.post("/v1/completions", json=BODY))
            await here.until_state(queued=1)
            name = next(entry.request for entry in reversed(await decisions(here)) if entry.event == "queued")
            await here.post(f"requests/{name}/evict")
        assert (evicted.result().status_code, evicted.result().json()["error"]["code"]) == (503, "evicted")
        caller = await Caller.ask(here.url, tokens=1)
        await here.until_state(queued=1)
        await caller.leave()
        await here.until_state(queued=0)
        served = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await here.until_state(queued=1)
        await here.post("resume")
        assert (await served).status_code == 200
    await at_rest(here)
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
    await assert_counts(here, 7, expected)


async def test_the_route_timeout_of_a_trusted_envoy_is_the_requests_deadline(
    shared_fleet: Any, tmp_path: Path
) -> None:
    here = shared_fleet("--mode", "standard", *SMALL)
    await here.post("pause")

    def trust_this_host(tree: Tree) -> None:
        addresses = [{"addressPrefix": "127.0.0.1", "prefixLen": 32}]
        http_manager(tree)["internalAddressConfig"]["cidrRanges"] = addresses

    with edge(here, tmp_path / "inner", edit=trust_this_host) as inner:
        async with http_client(inner.url) as client:
            headers = {"x-envoy-expected-rq-timeout-ms": "300"}
            answer = await client.post("/v1/completions", json=BODY, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    await here.post("resume")
    await at_rest(here)
