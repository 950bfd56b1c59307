"""Every query of the Grafana dashboards and rules, and the table of metrics, against a fleet under load."""

import asyncio
import contextlib
import json
import math
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from metrics_table import documented, families
from prometheus_server import Prometheus, metric_names, rules

DASHBOARDS = sorted((Path(__file__).parents[2] / "deploy" / "grafana" / "dashboards").glob("*.json"))
CONFIG = {
    "models": [{"name": "llama", "target_models": [{"name": "llama-v2"}]}],
    "objectives": [
        {"name": "premium", "criticality": "Critical"},
        {"name": "batch", "criticality": "Sheddable"},
    ],
    "fair_request_queue": {"total_capacity": 12, "flow_capacity": 4, "queue_ttl": "4s"},
    "request_queue_controller": {"watermark_per_backend": 2},
    "scheduling": {"scorers": [{"name": "queue-depth", "weight": 2}, {"name": "kv-cache", "weight": 2}]},
}
WITHIN_S = 75.0


def queries() -> dict[str, str]:
    """Every panel's queries by dashboard and title."""
    return {
        f"{path.stem}: {panel['title']}: {target['refId']}": target["expr"].replace("$__rate_interval", "15s")
        for path in DASHBOARDS
        for panel in json.loads(path.read_text())["panels"]
        for target in panel["targets"]
    }


@contextlib.asynccontextmanager
async def load(fleet: Any) -> AsyncIterator[None]:
    """More load than the fleet can take: requests served, expired, preempted, refused and abandoned."""

    async def ask(client: Any, headers: dict[str, str]) -> None:
        while True:
            body = {"model": "llama", "prompt": "hi", "max_tokens": random.randint(2, 8)}
            await client.post("/v1/completions", json=body, headers=headers)
            await asyncio.sleep(0.05)  # refusals come back at once

    async def leave(client: Any) -> None:
        body = {"model": "llama", "prompt": "hi", "max_tokens": 4}
        while True:
            with contextlib.suppress(httpx.TimeoutException):
                await client.post("/v1/completions", json=body, timeout=0.2)

    def headers(flow: str, objective: str, **more: str) -> dict[str, str]:
        return {
            "x-gateway-inference-fairness-id": flow,
            "x-gateway-inference-objective": objective,
            **{name.replace("_", "-"): value for name, value in more.items()},
        }

    async with fleet.client() as client, asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(ask(client, headers(f"f{n % 3}", "batch"))) for n in range(15)]
        running += [tasks.create_task(ask(client, headers("gold", "premium"))) for _ in range(4)]
        running += [
            tasks.create_task(ask(client, headers("late", "batch", x_llm_d_inference_ttl="100ms")))
            for _ in range(2)
        ]
        running += [tasks.create_task(leave(client)) for _ in range(2)]
        try:
            yield
        finally:
            for task in running:
                task.cancel()


@pytest.mark.timeout(240)
async def test_every_query_of_rules_and_dashboards_returns_a_number(fleet: Any, tmp_path: Path) -> None:
    running = fleet(
        *("--replicas", "2", "--endpoints", "2", "--sim-ttft", "40", "--sim-itl", "15"), config=CONFIG
    )
    state = running.state
    prometheus = Prometheus(
        tmp_path,
        {
            "picker": [replica["admin"].removeprefix("http://") for replica in state["replicas"]],
            "simulator": [endpoint["address"] for endpoint in state["endpoints"]],
            "envoy": [state["envoy_admin"].removeprefix("http://")],
        },
    )
    wanted = queries() | {f"rule {name}": name for name in rules("record")}
    for alert, expression in rules("alert").items():
        wanted |= {f"{alert} reads {name}": name for name in metric_names(expression)}
    wanted["every part is read"] = "min(up) == 1"
    assert len(wanted) > 80
    try:
        await prometheus.ready()
        async with load(running):
            unanswered = await ask_all(prometheus, wanted)
        assert not unanswered
        for expression in rules("alert").values():
            await prometheus.query(expression)
        table = documented()
        for replica in range(2):
            found = families((await running.admin("/metrics", replica)).text)
            assert {name: kind for name, (kind, _) in found.items()} == {
                name: row.kind for name, row in table.items()
            }
            labels = {name: table[name].labels for name, (_, seen) in found.items() if seen}
            assert {name: seen for name, (_, seen) in found.items() if seen} == labels
    finally:
        prometheus.stop()


async def ask_all(prometheus: Prometheus, wanted: dict[str, str]) -> dict[str, str]:
    """The queries of `wanted` that have returned no number within WITHIN_S."""
    left = dict(wanted)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WITHIN_S):
            while left:
                for where, expression in list(left.items()):
                    answer = await prometheus.query(expression)
                    if any(not math.isnan(float(each["value"][1])) for each in answer):
                        del left[where]
                await asyncio.sleep(0.5)
    return left
