"""The simulated model server over HTTP and with the official OpenAI client, and as a process."""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from picker_tools.simulator.command import add_arguments, bind, profile_of, run
from picker_tools.simulator.server import MAX_BODY_BYTES, ModelServer

COMMAND = (
    "import argparse, sys; from picker_tools.simulator.command import add_arguments, run; "
    "parser = argparse.ArgumentParser(); add_arguments(parser); sys.exit(run(parser.parse_args()))"
)
AN_HOUR = ("--ttft", "3600000")
AT_ONCE = ("--ttft", "0", "--itl", "0")
HI = [{"role": "user", "content": "hi"}]


@contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a simulated model server on a free port; yields the process and the server's URL."""
    command = [sys.executable, "-c", COMMAND, "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server, server.stdout.readline().removeprefix("listening on ").strip()
        finally:
            server.kill()


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


@asynccontextmanager
async def sim(*arguments: str) -> AsyncIterator[httpx.AsyncClient]:
    """Serve as `picker sim ARGUMENTS` does, in this event loop; yields an HTTP client of the server."""
    app = ModelServer(profile_of(parsed("--port", "0", *arguments)))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, log_level="critical"))
    server.force_exit = True
    with bind("127.0.0.1", 0) as listener:
        serving = asyncio.create_task(server._serve([listener]))
        async with client_of(f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
            yield client
        server.should_exit = True
        await serving


def client_of(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=30, limits=limits, trust_env=False, verify=False)


def official(client: httpx.AsyncClient) -> Any:
    import openai  # imported here because the import takes half a second

    url = f"{str(client.base_url).rstrip('/')}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)


async def metrics(client: httpx.AsyncClient) -> dict[str, float]:
    """Values on the metrics page by the name of the sample, summed over labels."""
    values = Counter[str]()
    for family in (await families(client)).values():
        for sample in family.samples:
            values[sample.name.removeprefix("vllm:")] += sample.value
    return dict(values)


async def families(client: httpx.AsyncClient) -> dict[str, Any]:
    page = (await client.get("/metrics")).text
    return {family.name: family for family in text_string_to_metric_families(page)}


async def until_queue(client: httpx.AsyncClient, running: int, waiting: int) -> None:
    """Wait until the metrics page shows these numbers of running and waiting requests."""
    async with asyncio.timeout(30):
        while True:
            page = await metrics(client)
            if (page["num_requests_running"], page["num_requests_waiting"]) == (running, waiting):
                return
            await asyncio.sleep(0.01)


def ask(**keys: object) -> dict[str, object]:
    return {"model": "llama", "prompt": "tell me", **keys}


async def test_the_official_openai_client_gets_whole_answers_from_the_simulated_server() -> None:
    async with sim(*AT_ONCE) as client, official(client) as api:
        completion = await api.completions.create(model="llama", prompt="tell me more", max_tokens=5)
        answer = await api.chat.completions.create(model="llama", messages=HI, max_completion_tokens=7)
        assert len(completion.choices[0].text.split()) == 5
        assert completion.choices[0].finish_reason == "length"
        tokens = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
        usage = {**tokens, "prompt_tokens_details": {"cached_tokens": 0}}
        assert completion.usage.model_dump(exclude_unset=True) == usage
        assert answer.model == "llama"
        assert len((answer.choices[0].message.content or "").split()) == 7
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 7
        assert [model.id async for model in api.models.list()] == ["llama"]
        page = await metrics(client)
        assert (page["generation_tokens_total"], page["request_success_total"]) == (12, 2)


async def test_the_official_openai_client_gets_streams_of_one_event_per_token() -> None:
    async with sim("--ttft", "1", "--itl", "0.1") as client, official(client) as api:
        whole = await api.completions.create(model="llama", prompt="count", max_tokens=600)
        options = {"include_usage": True}
        stream = await api.completions.create(
            model="llama", prompt="count", max_tokens=600, stream=True, stream_options=options
        )
        events = [event async for event in stream]
        assert [len(event.choices) for event in events] == [1] * 600 + [0]
        assert "".join(event.choices[0].text for event in events[:-1]) == whole.choices[0].text
        assert events[-2].choices[0].finish_reason == "length"
        assert events[-1].usage == whole.usage


async def test_a_streamed_chat_has_token_usage_on_its_last_choice_by_default() -> None:
    async with sim(*AT_ONCE) as client, official(client) as api:
        stream = await api.chat.completions.create(model="llama", messages=HI, stream=True, max_tokens=4)
        events = [event async for event in stream]
        assert events[0].choices[0].delta.role == "assistant"
        assert len("".join(event.choices[0].delta.content or "" for event in events).split()) == 4
        assert [event.usage is None for event in events] == [True] * 4 + [False]
        assert events[-1].choices[0].finish_reason == "length"


async def test_requests_beyond_max_num_seqs_wait_and_disconnects_free_slots() -> None:
    async with sim(*AN_HOUR, "--max-num-seqs", "2", "--kv-blocks", "100") as client:
        # Five requests, some of them streamed, compete for two slots.
        responses = [
            asyncio.create_task(client.post("/v1/completions", json=ask(stream=bool(number % 2))))
            for number in range(5)
        ]
        await until_queue(client, running=2, waiting=3)
        assert (await metrics(client))["kv_cache_usage_perc"] == pytest.approx(0.02)
        # As clients disconnect one by one, first the queue gets shorter and then the running batch.
        for running, waiting in ((2, 2), (2, 1), (2, 0), (1, 0), (0, 0)):
            responses.pop().cancel()
            await until_queue(client, running=running, waiting=waiting)
        page = await metrics(client)
        assert (page["kv_cache_usage_perc"], page["request_success_total"]) == (0, 0)


async def test_a_change_of_a_running_server_holds_from_the_next_step() -> None:
    async with sim("--slowdown", "0.001", "--max-num-seqs", "1") as client:
        for stream in (False, True):
            answer = await client.post("/v1/completions", json=ask(stream=stream, max_tokens=40))
            assert '"completion_tokens":40' in answer.text
        # With 0.4 s for a step, each answer takes longer than this test waits.
        assert (await client.post("/sim", json={"slowdown": 20, "max_num_seqs": 2})).status_code == 200
        asked = [asyncio.create_task(client.post("/v1/completions", json=ask())) for _ in range(3)]
        await until_queue(client, running=2, waiting=1)
        for one in asked:
            one.cancel()
        await until_queue(client, running=0, waiting=0)
        for body in ({"slowdown": 0}, {"max_num_seqs": 0}, {"itl": 1}):
            assert (await client.post("/sim", json=body)).status_code == 400
    async with sim(*AT_ONCE) as client:
        assert (await client.post("/sim", json={"max_num_seqs": 1})).status_code == 400


async def test_answers_have_headers_with_the_servers_address_and_the_request_id() -> None:
    async with sim(*AT_ONCE) as client:
        answer = await client.post("/v1/completions", json=ask(), headers={"x-request-id": "r-1"})
        health = await client.get("/health")
        assert (answer.json()["id"], health.status_code) == ("cmpl-r-1", 200)
        served_by = {each.headers["x-served-by"] for each in (answer, health)}
        assert served_by == {client.base_url.netloc.decode()}


async def test_lora_adapters_are_models_with_a_limited_number_of_slots() -> None:
    async with sim(*AN_HOUR, "--loras", "a,b", "--max-loras", "1") as client:
        listed = (await client.get("/v1/models")).json()["data"]
        cards = {card["id"]: card["parent"] for card in listed}
        assert (cards, len(listed)) == ({"llama": None, "a": "llama", "b": "llama"}, 3)
        first = asyncio.create_task(client.post("/v1/completions", json=ask(model="a")))
        await until_queue(client, running=1, waiting=0)
        second = asyncio.create_task(client.post("/v1/completions", json=ask(model="b")))
        await until_queue(client, running=1, waiting=1)
        (info,) = (await families(client))["vllm:lora_requests_info"].samples
        assert info.labels == {"max_lora": "1", "running_lora_adapters": "a", "waiting_lora_adapters": "b"}
        assert info.value > 1_000_000_000
        first.cancel()
        await until_queue(client, running=1, waiting=0)
        second.cancel()


async def test_the_simulated_servers_metrics_page_has_the_metric_names_of_vllm() -> None:
    async with sim("--kv-blocks", "77", "--model", 'odd"name\\') as client:
        page = await families(client)
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            (sample,) = page[f"vllm:{name}"].samples
            assert (sample.labels, sample.value) == ({"model_name": 'odd"name\\'}, 0)
        (cache,) = page["vllm:cache_config_info"].samples
        assert (cache.labels["block_size"], cache.labels["num_gpu_blocks"]) == ("16", "77")
        assert "vllm:lora_requests_info" not in page


async def test_failures_are_injected_by_seed_before_the_first_byte_of_an_answer() -> None:
    runs: list[list[int]] = []
    for _ in range(2):
        async with sim(*AT_ONCE, "--failure-rate", "0.5", "--seed", "3") as client:
            answers = [await client.post("/v1/completions", json=ask(stream=True)) for _ in range(40)]
        runs.append([answer.status_code for answer in answers])
        failed = answers[runs[-1].index(500)]
        assert failed.json()["error"]["code"] == "injected_failure"
    # The same requests fail in both runs of the server.
    assert set(runs[0]) == {200, 500}
    assert runs[0] == runs[1]


async def test_the_simulated_server_answers_bad_requests_in_openais_error_format() -> None:
    import openai

    async with sim(*AT_ONCE, "--kv-blocks", "4") as client, official(client) as api:
        for content, status in ((b"{", 400), (b'{"model": "gpt", "prompt": "x"}', 404)):
            answer = await client.post("/v1/completions", content=content)
            assert answer.status_code == status
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        with pytest.raises(openai.NotFoundError, match="'gpt' does not exist") as refused:
            await api.completions.create(model="gpt", prompt="x")
        assert refused.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError, match="max_tokens: "):
            await api.completions.create(model="llama", prompt="x", max_tokens=0)
        with pytest.raises(openai.BadRequestError, match="KV blocks"):
            await api.completions.create(model="llama", prompt="x" * 400)
        assert (await client.get("/v1/nothing")).status_code == 404
        assert (await client.get("/v1/completions")).status_code == 405
        # The next valid request is served.
        assert (await client.post("/v1/completions", json=ask())).status_code == 200


async def test_a_prompt_of_400_kb_is_answered_and_a_prompt_of_40_mb_refused() -> None:
    async with sim(*AT_ONCE) as client:
        answer = await client.post("/v1/completions", json=ask(prompt="x" * 400_000))
        assert answer.json()["usage"]["prompt_tokens"] == 100_000
        async with asyncio.timeout(30):
            reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 40000000\r\n\r\n")
            writer.write(b"x" * (MAX_BODY_BYTES + 1))
            assert b" 413 " in await reader.readline()
            writer.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_process_with_exit_status_0_amid_requests(number: signal.Signals) -> None:
    with process("--ttft", "0", "--itl", "3600000", "--max-num-seqs", "1") as (server, url):
        async with client_of(url) as client:
            # One answer has begun; the other request waits for its first token.
            stream = ask(stream=True, max_tokens=1000)
            async with client.stream("POST", "/v1/completions", json=stream) as begun:
                lines = begun.aiter_lines()
                assert (await anext(lines)).startswith("data: ")
                responses = asyncio.create_task(client.post("/v1/completions", json=ask()))
                await until_queue(client, running=1, waiting=1)
                os.kill(server.pid, number)
                assert await asyncio.to_thread(server.wait, 30) == 0
                # The answer that had begun is cut off; a gateway may retry the other request.
                with pytest.raises(httpx.RemoteProtocolError):
                    assert [line async for line in lines]
                assert (await responses).status_code == 503


def test_picker_sim_reports_a_port_in_use_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with process() as (_, url):
        assert run(parsed("--port", url.rpartition(":")[2])) == 1
    assert capsys.readouterr().err.startswith("picker sim: cannot listen on 127.0.0.1:")


@pytest.mark.parametrize(
    "words", ["--failure-rate 2", "--itl -1", "--ttft nan", "--max-num-seqs 0", "--port 70000"]
)
def test_impossible_simulator_arguments_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--port", "0", *words.split())
    assert words.split()[0] in capsys.readouterr().err


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_and_the_metrics_page_count_the_prompt_tokens_that_were_cached(stream: bool) -> None:
    async with sim(*AT_ONCE) as client:
        body = ask(prompt="x" * 400, max_tokens=1, stream=stream)
        texts = [(await client.post("/v1/completions", json=body)).text for _ in range(2)]
        # For the second request all whole blocks of the prompt are cached, except the last token's block.
        assert '"prompt_tokens_details":{"cached_tokens":0}' in texts[0]
        assert '"prompt_tokens_details":{"cached_tokens":96}' in texts[1]
        page = await metrics(client)
        assert (page["prefix_cache_queries_total"], page["prefix_cache_hits_total"]) == (200, 96)
