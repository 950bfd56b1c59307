"""Limits of tenants through Envoy, over two replicas, with answers for OpenAI's and Anthropic's clients."""

import asyncio
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from fleet_load import at_rest
from model_servers import counting_servers, static

from picker_tools.load.generator import flow_header

SENT, SERVED = 12, 5  # the limits are per day, so that none regains a whole request while the test runs
LIMITS = [{"requests": SERVED, "per": "1d"}, {"tokens": 10_000, "per": "1d", "burst": 2_000}]
NODES: list[dict[str, Any]] = [
    {"path": "acme", "over_limit": "reject", "limits": LIMITS},
    {"path": "acme/batch", "weight": 2},
    {"path": "night", "over_limit": "demote", "limits": [{"requests": SERVED, "per": "1d"}]},
    {"path": "claude", "over_limit": "reject", "limits": LIMITS},
]
ASK = {"model": "llama", "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


@pytest.mark.parametrize("mode", ["lean", "standard"])
async def test_tenants_get_their_limits_and_answers_say_how_much_remains(fleet: Any, mode: str) -> None:
    async with counting_servers(2, service_s=0.05) as servers:
        config = {
            "discovery": static(servers.addresses),
            "default_model": "llama",
            "tenants": {"headers": ["x-tenant"], "nodes": NODES},
            "extproc": {"trusted_headers": ["x-tenant"]},
        }
        here = fleet("--mode", mode, "--replicas", "2", "--endpoints", "0", config=config)
        async with here.client() as client:

            async def ask(flow: str, path: str = CHAT, **more: Any) -> httpx.Response:
                return await client.post(path, json=ASK | more, headers=dict(flow_header(flow)))

            # Flows of one tenant share its limit, also over several replicas.
            flows = [f"acme/{leaf}" for _ in range(SENT // 3) for leaf in ("search", "batch", "batch/x")]
            others = asyncio.gather(*(ask("other/x") for _ in range(SENT)))
            answers = await asyncio.gather(*map(ask, flows))
            assert {each.status_code for each in await others} == {200}
            served = [each for each in answers if each.status_code == 200]
            refused = [each for each in answers if each.status_code == 429]
            assert (len(served), len(refused)) == (SERVED, SENT - SERVED)
            remaining = sorted(int(each.headers["x-ratelimit-remaining-requests"]) for each in served)
            assert remaining == list(range(SERVED))
            assert {each.headers["x-ratelimit-limit-requests"] for each in served} == {str(SERVED)}
            for each in refused:
                error = each.json()["error"]
                assert (error["type"], error["code"]) == ("rate_limit_error", "over_limit")
                assert "acme" in error["message"]
                assert f"{SERVED} requests per 1d" in error["message"]
                # One request of the daily limit comes back in 4.8 hours.
                assert 0.9 < int(each.headers["retry-after"]) / (86_400 / SERVED) <= 1
                assert each.headers["x-should-retry"] == "false"
                assert each.headers["x-ratelimit-remaining-requests"] == "0"
            by_header = await client.post(CHAT, json=ASK, headers={"x-tenant": "acme"})
            assert by_header.status_code == 429

            too_large = await ask("claude/key", MESSAGES, max_tokens=5_000)
            assert too_large.status_code == 429
            told = too_large.json()["error"]["message"]
            assert re.search(r"about 5\d\d\d tokens; claude allows 2000 at once", told), told
            assert too_large.headers["x-should-retry"] == "false"
            messages = [await ask("claude/key", MESSAGES) for _ in range(SERVED + 1)]
            assert [each.status_code for each in messages] == [200] * SERVED + [429]
            assert messages[0].headers["anthropic-ratelimit-requests-remaining"] == str(SERVED - 1)
            reset = datetime.fromisoformat(messages[0].headers["anthropic-ratelimit-requests-reset"])
            assert timedelta(hours=4) < reset - datetime.now(UTC) < timedelta(hours=5)
            assert messages[-1].headers["anthropic-ratelimit-requests-remaining"] == "0"
            error = messages[-1].json()
            assert (error["type"], error["error"]["type"]) == ("error", "rate_limit_error")

            demoted = [await ask("night") for _ in range(SERVED + 1)]
            assert [each.status_code for each in demoted] == [200] * (SERVED + 1)
            assert [each.headers.get("x-picker-demoted") for each in demoted] == [None] * SERVED + ["true"]
        await at_rest(here)
