"""Simulated servers that prefill for others and wait for the KV cache: the engine, and real HTTP."""

import asyncio
import re
from typing import Any

import httpx
import pytest
from test_sim_server import AT_ONCE, ask, client_of, metrics, process, sim, until_queue

from picker_tools.local_fleet.network import LOOPBACK, free_port
from picker_tools.simulator.engine import Engine, Limits, Phase, Sequence

# Each token of a prompt takes 0.8 s to transfer: longer than a test waits.
SLOW_LINK = ("--kv-bandwidth", "0.000001")
PROMPT = "x" * 400


def prefiller_header(client: httpx.AsyncClient) -> dict[str, str]:
    return {"x-prefiller-host-port": client.base_url.netloc.decode()}


def words(answer: httpx.Response) -> list[str]:
    return "".join(re.findall(r'"text":"([^"]*)"', answer.text)).split()


async def until_kv_usage(client: httpx.AsyncClient, usage: float) -> None:
    async with asyncio.timeout(30):
        while (await metrics(client))["kv_cache_usage_perc"] != pytest.approx(usage):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("pace", "stream"), [(AT_ONCE, False), (("--slowdown", "0.001"), True)])
async def test_a_split_request_gets_the_same_answer_as_a_whole_one_and_frees_both_servers(
    pace: tuple[str, ...], stream: bool
) -> None:
    async with sim(*pace) as prefiller, sim(*pace) as decoder:
        body = ask(prompt=PROMPT, max_tokens=7, stream=stream)
        url, headers = "/v1/completions", {"x-request-id": "r"}
        split = await decoder.post(url, json=body, headers={**headers, **prefiller_header(prefiller)})
        assert split.headers["x-served-by"] == decoder.base_url.netloc.decode()
        # The prefill server generates one token; the decode server generates this token again and the others.
        pages = [await metrics(prefiller), await metrics(decoder)]
        assert [page["generation_tokens_total"] for page in pages] == [1, 7]
        await until_kv_usage(prefiller, 0)
        await until_kv_usage(decoder, 0)
        async with sim(*pace) as alone:
            whole = await alone.post(url, json=body, headers=headers)
        assert words(split) == words(whole) != []
        # The prompt is now cached at the prefill server; the client gets that server's count.
        again = await decoder.post(url, json=body, headers=prefiller_header(prefiller))
        assert '"cached_tokens":96' in again.text


@pytest.mark.parametrize("pace", [AT_ONCE, ("--slowdown", "0.001")])
async def test_blocks_stay_at_the_prefill_server_until_the_transfer_or_the_end_of_the_request(
    pace: tuple[str, ...],
) -> None:
    async with sim(*pace, "--kv-blocks", "100") as prefiller, sim(*pace, *SLOW_LINK) as decoder:
        body = ask(prompt=PROMPT, stream=True)
        asked = asyncio.create_task(
            decoder.post("/v1/completions", json=body, headers=prefiller_header(prefiller))
        )
        await until_queue(decoder, running=1, waiting=0)
        await until_queue(prefiller, running=0, waiting=0)
        await until_kv_usage(prefiller, 0.07)  # the share of the blocks of 101 tokens
        assert (await metrics(decoder))["generation_tokens_total"] == 0
        asked.cancel()
        await until_queue(decoder, running=0, waiting=0)
        await until_kv_usage(prefiller, 0)


async def test_a_client_that_leaves_during_the_prefill_ends_the_prefill() -> None:
    async with sim("--ttft", "3600000") as prefiller, sim(*AT_ONCE) as decoder:
        headers = prefiller_header(prefiller)
        asked = asyncio.create_task(decoder.post("/v1/completions", json=ask(), headers=headers))
        await until_queue(prefiller, running=1, waiting=0)
        assert (await metrics(decoder))["num_requests_running"] == 0
        asked.cancel()
        await until_queue(prefiller, running=0, waiting=0)


@pytest.mark.parametrize("pace", [AT_ONCE, ("--slowdown", "0.001")])
async def test_the_decode_server_computes_the_prompt_when_the_prefill_server_does_not(
    pace: tuple[str, ...],
) -> None:
    async with sim(*pace, "--failure-rate", "1") as failing, sim(*pace) as decoder:
        closed = {"x-prefiller-host-port": f"{LOOPBACK}:{free_port()}"}
        nowhere = {"x-prefiller-host-port": "nowhere"}
        for headers in (closed, nowhere, prefiller_header(failing)):
            answer = await decoder.post("/v1/completions", json=ask(max_tokens=3), headers=headers)
            assert answer.json()["usage"]["completion_tokens"] == 3
        # A sidecar in front of the server may name blocks that the prefill server no longer has.
        lost: dict[str, Any] = {"do_remote_prefill": True, "remote_request_id": "gone"}
        lost |= {"remote_host": LOOPBACK, "remote_port": failing.base_url.port}
        answer = await decoder.post("/v1/completions", json=ask(max_tokens=3, kv_transfer_params=lost))
        assert answer.json()["usage"]["completion_tokens"] == 3
        bad = await decoder.post("/v1/completions", json=ask(kv_transfer_params={"remote_port": "x"}))
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "kv_transfer_params")


async def test_a_prefill_server_killed_amid_a_prefill_costs_no_error() -> None:
    with process("--ttft", "3600000") as (server, url):
        async with client_of(url) as prefiller, sim(*AT_ONCE) as decoder:
            headers = prefiller_header(prefiller)
            asked = asyncio.create_task(decoder.post("/v1/completions", json=ask(), headers=headers))
            await until_queue(prefiller, running=1, waiting=0)
            server.kill()
            assert (await asked).json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("arrived", [False, True])
def test_a_sequence_waits_for_its_kv_cache_and_then_computes_the_missing_tokens(arrived: bool) -> None:
    engine = Engine(Limits(kv_blocks=8, block_size_tokens=4))
    sequence, other = Sequence(8, 2, pulls=True), Sequence(8, 2)
    for each in (sequence, other):
        engine.submit(each)
    step = engine.begin_step(100)
    assert (step.pulling, list(step.tokens), engine.load().running) == ([sequence], [other], 2)
    engine.end_step(step)
    assert engine.begin_step(100).pulling == []
    engine.pulled(sequence, arrived=arrived)
    assert engine.begin_step(100).tokens == {sequence: 1 if arrived else 8, other: 1}


def test_a_sequence_that_waits_for_its_kv_cache_is_not_preempted() -> None:
    engine = Engine(Limits(kv_blocks=5, block_size_tokens=4))
    oldest, newer, pulling = Sequence(3, 9), Sequence(3, 9), Sequence(8, 1, pulls=True)
    for each in (oldest, newer, pulling):
        engine.submit(each)
    engine.end_step(engine.begin_step(100))
    while newer.phase is not Phase.WAITING:
        engine.end_step(engine.begin_step(100))
    assert (oldest.phase, pulling.phase, pulling.blocks) == (Phase.RUNNING, Phase.RUNNING, 3)
