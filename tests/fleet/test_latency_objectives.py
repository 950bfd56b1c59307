"""A fleet learns its endpoints' latencies, and refuses requests that would miss their latency objective."""

import asyncio
import re
from typing import Any

import pytest
from fleet_load import at_rest

SCORES = {"models": [{"name": "llama"}], "scheduling": {"scorers": {"slo-headroom": 3}}}
BATCH = {"objectives": [{"name": "batch", "criticality": "Sheddable"}]}
ASK = {"model": "llama", "prompt": "Hello.", "max_tokens": 12, "stream": True}


@pytest.mark.parametrize("mode", ["http", "standard"])
async def test_sheddable_requests_are_refused_once_their_objective_is_predicted_to_be_missed(
    mode: str, shared_fleet: Any
) -> None:
    here = shared_fleet(
        "--mode", mode, "--replicas", "2", "--endpoints", "2", "--sim-ttft", "20", "--sim-itl", "1",
        config=SCORES | BATCH,
    )  # fmt: skip
    async with here.client() as client:

        async def status(ttft_ms: str, objective: str = "batch") -> tuple[int, str]:
            headers = {"x-slo-ttft-ms": ttft_ms, "x-gateway-inference-objective": objective}
            answer = await client.post("/v1/completions", json=ASK, headers=headers)
            if answer.status_code == 429:
                message = answer.json()["error"]["message"]
                assert re.search(r"objective \(TTFT 1 ms\) by \d+ ms or more$", message), message
            return answer.status_code, answer.headers.get("x-llm-d-request-dropped-reason", "")

        assert (await status("1"))[0] == 200, "no latency is known yet"
        assert (await status("fast"))[0] == 400
        for _ in range(6):
            await asyncio.gather(*(client.post("/v1/completions", json=ASK) for _ in range(16)))

        async def refusals() -> list[tuple[int, str]]:
            return [await status("1") for _ in range(8)]

        refused = (429, "rejected-latency-objective")
        await here.eventually(
            refusals, lambda found: found == [refused] * 8, what="refusals by both replicas"
        )
        assert (await status("60000"))[0] == 200
        assert (await status("1", objective=""))[0] == 200, "only sheddable requests are refused"
    await at_rest(here)
