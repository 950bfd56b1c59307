"""State of the Responses API: a request that names an id reaches the server that created the id."""

import asyncio
import contextlib
import itertools
import json
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import pytest_asyncio
from fleet_load import at_rest
from model_servers import Ends, Received, http_answer, listening, static
from whole_fleet import running

SERVERS, CLIENTS = 3, 12
NAMED = re.compile("/v1/(responses|conversations)/([^/?]+)(/[a-z_]+)?")
_numbers = itertools.count(1)


class StateServer:
    """A model server that remembers the ids that it created, and answers 404 to requests for other ids."""

    def __init__(self) -> None:
        self.kept: set[str] = set()
        self.sessions: list[str] = []  # the field `user` of each request that had one

    async def serve(self, request: Received, ends: Ends) -> bool:
        _, writer = ends
        if request.headers.get("user-agent") == "picker":  # this request is a scrape or a health probe
            writer.write(http_answer(b""))
        else:
            writer.write(self._answer(request.path, json.loads(request.body or b"{}")))
        return True

    def _answer(self, path: str, asked: dict[str, Any]) -> bytes:
        self.sessions += [asked["user"]] if "user" in asked else []
        named = NAMED.fullmatch(path)
        conversation = asked.get("conversation")
        conversation = conversation["id"] if isinstance(conversation, dict) else conversation
        needed = {named[2]} if named else {asked.get("previous_response_id"), conversation} - {None}
        if not needed <= self.kept:
            return http_answer(json.dumps({"error": {"message": f"no {needed}"}}).encode(), 404)
        if named:
            return http_answer(json.dumps({"id": named[2], "object": "response"}).encode())
        made = f"{'resp' if path.endswith('responses') else 'conv'}_{next(_numbers)}:{id(self):x}"
        self.kept.add(made)
        answer: dict[str, Any] = {"id": made, "object": "response", "model": "llama"}
        answer["usage"] = {"input_tokens": 1}
        if conversation:
            answer["conversation"] = {"id": conversation}
        if not asked.get("stream"):
            return http_answer(json.dumps(answer, indent=1).encode())
        events = [
            f"event: {kind}\ndata: {json.dumps({'type': kind, 'response': answer})}\n\n"
            for kind in ("response.created", "response.in_progress", "response.completed")
        ]
        return http_answer("".join(events).encode(), kind="text/event-stream")


@dataclass
class Behind:
    fleet: Any
    servers: Sequence[StateServer]


@pytest_asyncio.fixture(params=["standard", "http"], scope="module", loop_scope="module")
async def behind(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Behind]:
    servers = [StateServer() for _ in range(SERVERS)]
    async with contextlib.AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(listening(server.serve)) for server in servers]
        config = {
            "discovery": static(addresses),
            "default_model": "llama",
            "request_queue_controller": {"watermark_per_backend": CLIENTS},
            "scheduling": {"scorers": {"session-affinity": 12}, "session_keys": ["user"]},
        }
        options = ("--mode", request.param, "--endpoints", "0", "--replicas", "2")
        async with running(tmp_path_factory.mktemp("state"), *options, config=config) as fleet:
            yield Behind(fleet, servers)
            await at_rest(fleet)


def made_id(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text = answer.text.rpartition("data:")[2]
    whole = json.loads(text)
    return str(whole.get("response", whole)["id"])


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("streams", [False, True])
async def test_a_request_that_names_an_id_reaches_the_server_that_created_the_id(
    behind: Behind, streams: bool
) -> None:
    async def talk() -> None:
        async with behind.fleet.client() as client:
            ask = {"input": "Hi", "stream": streams}
            made = made_id(await client.post("/v1/conversations", json={}))
            for conversation in (made, {"id": made}):
                made_id(await client.post("/v1/responses", json={**ask, "conversation": conversation}))
            first = made_id(await client.post("/v1/responses", json=ask))
            second = made_id(await client.post("/v1/responses", json={**ask, "previous_response_id": first}))
            assert second != first
            path = f"/v1/responses/{second}"
            for method, end in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
                assert made_id(await client.request(method, path + end)) == second
            assert made_id(await client.get(f"/v1/conversations/{made}")) == made

    await asyncio.gather(*(talk() for _ in range(CLIENTS)))
    assert all(server.kept for server in behind.servers)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_model_server_answers_a_request_that_names_an_unknown_id(behind: Behind) -> None:
    async with behind.fleet.client() as client:
        for answer in (
            await client.get("/v1/responses/resp_unknown"),
            await client.post("/v1/responses", json={"input": "x", "previous_response_id": "resp_unknown"}),
        ):
            assert (answer.status_code, answer.json()["error"]["message"]) == (404, "no {'resp_unknown'}")


@pytest.mark.asyncio(loop_scope="module")
async def test_requests_with_the_same_session_key_go_to_one_server(behind: Behind) -> None:
    async with behind.fleet.client() as client:
        for user in [f"user-{number}" for number in range(8)] * 3:
            made_id(await client.post("/v1/responses", json={"input": "Hi", "user": user}))
    for user in {each for server in behind.servers for each in server.sessions}:
        assert sum(user in server.sessions for server in behind.servers) == 1, user
