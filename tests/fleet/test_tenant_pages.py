"""Operators of a real fleet see and change tenants, and export the usage of their requests."""

import asyncio
import csv
import re
from typing import Any

import pytest
from admin_calls import ask
from fleet_load import metric

SLOW = ("--endpoints", "1", "--sim-ttft", "20", "--sim-itl", "1")
LIMIT = {"tokens": 120_000, "per": "1m", "burst": 100_000}
NODES = [
    {"path": "acme", "weight": 3, "limits": [LIMIT]},
    {"path": "acme/*", "limits": [{"requests": 600, "per": "1m"}]},
    {"path": "acme/.."},
    {"path": "umbra"},
    *({"path": f"umbra/{number}"} for number in range(60)),
]
pytestmark = pytest.mark.asyncio(loop_scope="module")  # tests use the browser's event loop
LEAVES = ("acme/search/k1", "acme/chat/k2", "umbra/k3")


async def test_operators_see_and_change_tenants_and_export_their_usage(fleet: Any, dashboard: Any) -> None:
    here = fleet(*SLOW, config={"tenants": {"nodes": NODES, "prices": {"llama": {"prompt": 2, "answer": 3}}}})
    async with here.client() as client:
        for leaf in LEAVES * 2:
            assert (await ask(client, leaf)).status_code == 200

        def is_settled(found: Any) -> bool:
            return [each["served_cost"] for each in found["children"]] == [4.0, 2.0]

        top = await here.until("tenants", is_settled)
        acme, umbra = top["children"]
        assert (acme["path"], acme["weight"], acme["limits"][0]["burst"]) == ("acme", 3.0, 100_000.0)
        assert (umbra["path"], umbra["limits"]) == ("umbra", [])
        # A change by one replica is in force at the next request, and every replica records it.
        stop = {"over_limit": "reject", "limits": [{"tokens": 1, "per": "1d"}]}
        made = await here.admin("/api/v1/tenants/umbra", 1, method="PUT", json=stop)
        assert made.json()["new"]["over_limit"] == "reject"
        refused = await ask(client, "umbra/k3")
        assert (refused.status_code, "umbra" in refused.json()["error"]["message"]) == (429, True)
        (change,) = (await here.get("changes", 2))["changes"]
        assert (change["change"], change["outcome"]) == ("PUT /api/v1/tenants/umbra", "made")
        assert '"old":{' in change["detail"]
        assert '"over_limit":"reject"' in change["detail"]
        assert (await here.admin("/api/v1/tenants/umbra", method="DELETE")).json()["new"] == {}
        assert (await ask(client, "umbra/k3")).status_code == 200
        # A request that waits for its tenant's limit says so.
        await here.admin(
            "/api/v1/tenants/umbra", method="PUT", json={"limits": [{"requests": 1, "per": "1d"}]}
        )
        assert (await ask(client, "umbra/k3")).status_code == 200
        waiting = asyncio.create_task(ask(client, "umbra/k3"))
        (queued,) = (await here.until("queue", lambda found: found["requests"]))["requests"]
        why = (await here.get(f"requests/{queued['id']}"))["why"]
        assert "no request before it; a limit of tenant umbra does not suffice for 86" in why
        await here.admin("/api/v1/tenants/umbra", method="DELETE")
        assert (await waiting).status_code == 200

        # Usage: two requests of each leaf, and three more of one leaf.
        async def billed() -> dict[str, tuple[int, float]]:
            text = (await here.admin("/api/v1/usage?format=csv")).text
            rows = [row for row in csv.DictReader(text.splitlines()) if row["tenant"]]
            for row in rows:
                tokens = 2 * int(row["prompt_tokens"]) + 3 * int(row["answer_tokens"])
                assert (float(row["cost"]), row["unreported"]) == (tokens, "0")
            return {row["tenant"]: (int(row["requests"]), int(row["answer_tokens"])) for row in rows}

        wanted = {LEAVES[0]: (2, 4), LEAVES[1]: (2, 4), LEAVES[2]: (5, 10)}
        await here.eventually(billed, lambda found: found == wanted)
    assert await metric(here, "epp_tenant_over_limit_total", tenant="umbra", action="reject") == 1
    async with dashboard(here) as page:
        await page.until("() => document.querySelectorAll('#rows-tenants tr').length === 2")
        await page.page.click("#rows-tenants tr:first-child button")
        # The page shows acme/* and acme/.. too; a browser would read the children of `acme/..` at the root.
        await page.until("() => document.querySelectorAll('#rows-tenants tr').length === 4")
        assert await page.page.locator("#rows-tenants button:visible").count() == 2
        shown = (await page.text("#rows-tenants")).replace("\u202f", " ")
        assert "100 000 tokens left, 120 000 per 1m" in shown
        await page.page.click("#rows-tenants tr:last-child button")
        await page.until("() => document.querySelectorAll('#rows-tenants tr').length === 54")
        assert re.search(r"umbra \(50 of 6[01] shown\)", await page.text("#rows-tenants"))
