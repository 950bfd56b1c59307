"""How the picker reads and changes model servers' answers, behind a real Envoy in each mode."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from counting_servers import CountingServers, counting_servers
from fleet_load import fresh, total
from whole_fleet import running

TYPE = {"plain": b"application/json", "stream": b"text/event-stream"}
CLAUDE = {"input_tokens": 150, "cache_read_input_tokens": 700, "cache_creation_input_tokens": 50}
INPUT = {"usage": {"input_tokens": 1}, "model": "big-v2"}  # input of a tool call, not of the answer
ANSWERS: dict[str, tuple[str, list[object], tuple[int, int]]] = {
    "chat": ("plain", [{"usage": {"prompt_tokens": 7, "completion_tokens": 9, "total_tokens": 16}}], (7, 9)),
    "embeddings": ("plain", [{"data": [], "usage": {"prompt_tokens": 7, "total_tokens": 7}}], (7, 0)),
    "rerank": ("plain", [{"results": [], "usage": {"total_tokens": 7}}], (7, 0)),
    "Anthropic": (
        "plain",
        [{"content": [{"input": INPUT}], "usage": {**CLAUDE, "output_tokens": 9}}],
        (900, 9),
    ),
    "Anthropic, streamed": (
        "stream",
        [
            {
                "type": "message_start",
                "message": {"model": "big-v2", "usage": {**CLAUDE, "output_tokens": 1}},
            },
            {"type": "content_block_start", "content_block": {"type": "tool_use", "input": INPUT}},
            {"type": "message_delta", "usage": {"input_tokens": 0, "output_tokens": 9}},
        ],
        (900, 9),
    ),
    "Ollama": ("plain", [{"done": True, "prompt_eval_count": 7, "eval_count": 9}], (7, 9)),
    "TGI, streamed": (
        "stream",
        [{"token": {}}, {"details": {"generated_tokens": 9, "input_length": 7}}],
        (7, 9),
    ),
}


TOKENS = ("epp_input_tokens_total", "epp_output_tokens_total")


def all_have_ended(page: str) -> bool:
    return all(total(page, "epp_completions_total", model=name) for name in ANSWERS)


def written(kind: str, documents: list[object]) -> bytes:
    if kind == "plain":
        return json.dumps(documents[0]).encode()
    return b"".join(b"data: %s\n\n" % json.dumps(each).encode() for each in documents)


@pytest_asyncio.fixture(params=["lean", "http", "standard"], scope="module", loop_scope="module")
async def behind(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Any, CountingServers, str]]:
    async with counting_servers(1, 0.0) as servers:
        config = {
            "discovery": {"static": [{"address": each} for each in servers.addresses]},
            "models": [{"name": "big", "target_models": [{"name": "big-v2"}]}],
        }
        options = ("--mode", request.param, "--endpoints", "0", "--replicas", "1")
        async with running(tmp_path_factory.mktemp("answers"), *options, config=config) as here:
            yield here, servers, request.param


@pytest.mark.asyncio(loop_scope="module")
async def test_the_tokens_of_each_apis_answer_are_counted(
    behind: tuple[Any, CountingServers, str],
) -> None:
    here, servers, _ = behind

    async def page() -> str:
        return str((await here.admin("/metrics")).text)

    async with here.client() as client:
        for name, (kind, documents, _) in ANSWERS.items():
            servers.answer, servers.kind = written(kind, documents), TYPE[kind]
            answer = await client.post("/v1/messages", json={"model": name, "messages": []})
            assert answer.content == servers.answer
    await here.eventually(page, all_have_ended)
    after = await fresh(page)
    for name, (_, _, counts) in ANSWERS.items():
        assert tuple(total(after, each, model=name) for each in TOKENS) == counts, name


@pytest.mark.asyncio(loop_scope="module")
async def test_a_rename_changes_the_model_alone_in_what_the_server_and_the_client_get(
    behind: tuple[Any, CountingServers, str],
) -> None:
    here, servers, mode = behind
    tool = {"role": "assistant", "content": [{"type": "tool_use", "input": {"model": "big", "m": "big-v2"}}]}
    ask = {"messages": [tool], "metadata": {"model": "big"}, "tools": [{"input_schema": {"model": "big"}}]}
    kind, documents, _ = ANSWERS["Anthropic, streamed"]
    servers.answer, servers.kind = written(kind, documents), TYPE[kind]
    async with here.client() as client:
        headers = {"accept-encoding": "gzip"}
        answer = await client.post("/v1/messages", json={**ask, "model": "big"}, headers=headers)
    if mode == "http":  # mode `http` cannot change a body
        assert (answer.status_code, answer.json()["type"]) == (500, "error")
        return
    assert json.loads(servers.last_body) == {**ask, "model": "big-v2"}
    assert "accept-encoding" not in servers.last_headers
    # Only mode `standard` processes the answer.
    renamed = servers.answer.replace(b'"model": "big-v2"', b'"model": "big"', 1)
    assert answer.content == (renamed if mode == "standard" else servers.answer)
    async with here.client() as client:
        answer = await client.post("/v1/messages", content=b"{", headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", "invalid_request_error")
