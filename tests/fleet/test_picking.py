"""A whole fleet picks by scores: its replicas share the routes of prompts."""

from typing import Any

import pytest
from fleet_load import at_rest, complete, explanation

WEIGHTS = {"queue-depth": 1, "kv-cache": 1, "prefix-affinity": 6, "latency": 0.1, "session-affinity": 12}
CONFIG = {"scheduling": {"scorers": [{"name": name, "weight": weight} for name, weight in WEIGHTS.items()]}}
LONG = "The quick brown fox jumps over the lazy dog. " * 100


async def routes(fleet: Any) -> int:
    """Number of entries in the route stream."""
    async with fleet.redis() as redis:
        return int(await redis.xlen("epp:{default}:routes"))


@pytest.fixture(scope="module")
def scored(shared_fleet: Any) -> Any:
    """Three replicas and four endpoints; every test leaves the fleet at rest."""
    return shared_fleet("--sim-ttft", "5", "--sim-itl", "1", config=CONFIG)


async def test_prompts_with_a_common_prefix_go_to_one_endpoint_through_any_replica(scored: Any) -> None:
    before = await routes(scored)
    first = await complete(scored.url, LONG, 2)
    assert first.served
    await scored.eventually(lambda: routes(scored), lambda n: n > before, what="a new route")
    turns = [await complete(scored.url, LONG + f"And then {turn}. " * turn, 2) for turn in range(1, 13)]
    assert {turn.endpoint for turn in turns} == {first.endpoint}
    await at_rest(scored)


async def test_requests_with_one_session_token_go_to_the_same_endpoint(scored: Any) -> None:
    ask = {"model": "llama", "prompt": "Hello.", "max_tokens": 1}
    async with scored.client() as client:
        # The fleet ignores a token that it has not signed.
        first = await client.post("/v1/completions", json=ask, headers={"x-session-token": "alice"})
        token = first.headers["x-session-token"]
        client.headers["x-session-token"] = token
        asks = [{**ask, "prompt": f"Turn {turn}."} for turn in range(12)]
        turns = [await client.post("/v1/completions", json=each) for each in asks]
    assert {turn.headers["x-served-by"] for turn in turns} == {first.headers["x-served-by"]}
    assert {turn.headers["x-session-token"] for turn in turns} == {token}
    await at_rest(scored)


async def test_the_replica_that_chose_an_endpoint_explains_the_choice(scored: Any) -> None:
    await at_rest(scored)
    answer = await complete(scored.url, f"Explain this. {LONG}", 2)
    _, explained = await explanation(scored)
    assert explained["chosen"][0] == answer.endpoint
    assert set(explained["candidates"][0]["parts"]) == {"in-flight", *WEIGHTS}
    assert len(explained["candidates"]) == 4
    # The chosen endpoint has the highest final score, which includes the live load found by the script.
    assert [one["live"] for one in explained["candidates"]] == [0, 0, 0, 0]
    final = {one["address"]: one["final"] for one in explained["candidates"]}
    assert final[answer.endpoint] >= max(final.values()) - 0.0002  # scores are rounded for the Lua script
