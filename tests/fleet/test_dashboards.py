"""Checks the queries of Grafana's dashboards and rules, and the table of metrics, on a fleet under load."""

import asyncio
import contextlib
import json
import math
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from metrics_table import documented, families
from prometheus_server import Prometheus, metric_names, rules

GRAFANA = Path(__file__).parents[2] / "deploy" / "grafana"
CONFIG = {
    "models": [{"name": "llama", "target_models": [{"name": "llama-v2"}]}],
    "objectives": [
        {"name": "premium", "criticality": "Critical"},
        {"name": "batch", "criticality": "Sheddable"},
    ],
    "fair_request_queue": {"total_capacity": 12, "flow_capacity": 4, "queue_ttl": "4s"},
    "request_queue_controller": {"max_per_backend": 2, "initial_per_backend": 2},
    "scheduling": {"scorers": [{"name": "queue-depth", "weight": 2}, {"name": "kv-cache", "weight": 2}]},
}
WITHIN_S = 150.0


def targets() -> dict[str, dict[str, Any]]:
    """Every panel's queries as Grafana reads them, by dashboard, panel title and reference id."""
    return {
        f"{path.stem}: {panel['title']}: {target['refId']}": {"datasource": panel["datasource"]} | target
        for path in sorted(GRAFANA.glob("dashboards/*.json"))
        for panel in json.loads(path.read_text())["panels"]
        for target in panel["targets"]
    }


def queries() -> dict[str, str]:
    return {where: each["expr"].replace("$__rate_interval", "15s") for where, each in targets().items()}


@contextlib.asynccontextmanager
async def load(fleet: Any) -> AsyncIterator[None]:
    """Overload the fleet: requests are served, expire, are preempted or refused, or their clients leave."""

    async def ask(client: Any, headers: dict[str, str]) -> None:
        while True:
            body = {"model": "llama", "prompt": "hi", "max_tokens": random.randint(2, 8)}
            await client.post("/v1/completions", json=body, headers=headers)
            await asyncio.sleep(1.0)  # refusals are immediate: this pause limits their rate

    async def leave(client: Any, after_s: float) -> None:
        body = {"model": "llama", "prompt": "hi", "max_tokens": 4}
        while True:
            with contextlib.suppress(httpx.TimeoutException):
                await client.post("/v1/completions", json=body, timeout=after_s)

    clients = [
        *[("f0", "batch", ""), ("f1", "batch", ""), ("f2", "batch", "")] * 5,
        *[("gold", "premium", "")] * 4,
        *[("late", "batch", "100ms")] * 2,
    ]
    async with fleet.client() as client, asyncio.TaskGroup() as tasks:
        # On a busy machine a request may take 0.2 s to reach the queue.
        running = [tasks.create_task(leave(client, after_s)) for after_s in (0.2, 0.2, 0.5, 1.0)]
        for flow, objective, ttl in clients:
            headers = {"x-gateway-inference-fairness-id": flow, "x-gateway-inference-objective": objective}
            headers |= {"x-llm-d-inference-ttl": ttl} if ttl else {}
            running.append(tasks.create_task(ask(client, headers)))
        try:
            yield
        finally:
            for task in running:
                task.cancel()


@pytest.mark.timeout(360)
async def test_every_query_of_rules_and_dashboards_returns_a_number(fleet: Any, tmp_path: Path) -> None:
    options = ("--replicas", "2", "--endpoints", "2", "--sim-ttft", "200", "--sim-itl", "50")
    running = fleet(*options, config=CONFIG)
    state = running.state
    targets_of = {
        "picker": [replica["admin"].removeprefix("http://") for replica in state["replicas"]],
        "simulator": [endpoint["address"] for endpoint in state["endpoints"]],
        "envoy": [state["envoy_admin"].removeprefix("http://")],
    }
    prometheus = Prometheus(tmp_path, targets_of)
    wanted = queries() | {f"rule {name}": name for name in rules("record")}
    for alert, expression in rules("alert").items():
        wanted |= {f"{alert} reads {name}": name for name in metric_names(expression)}
    wanted["every target is up"] = "min(up) == 1"
    assert len(wanted) > 80
    try:
        await prometheus.ready()
        async with load(running):
            seen = await ask_all(prometheus, wanted)
        assert sorted(wanted.keys() - seen.keys()) == []
        # A label missing from a series would leave a gap in the panel's legend.
        for where, target in targets().items():
            assert set(re.findall(r"{{\s*(\w+)\s*}}", target.get("legendFormat", ""))) <= seen[where], where
        for expression in rules("alert").values():
            await prometheus.query(expression)
        table = documented()
        for replica in range(2):
            found = families((await running.admin("/metrics", replica)).text)
            assert {name: kind for name, (kind, _) in found.items()} == {
                name: row.kind for name, row in table.items()
            }
            for name, (_, labels) in found.items():
                assert not labels or labels == table[name].labels, name
    finally:
        prometheus.stop()


async def ask_all(prometheus: Prometheus, wanted: dict[str, str]) -> dict[str, set[str]]:
    """For each query that returns a number within WITHIN_S: the labels that all its series have."""
    seen: dict[str, set[str]] = {}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WITHIN_S):
            while len(seen) < len(wanted):
                missing = sorted(wanted.keys() - seen.keys())
                answers = await asyncio.gather(*(prometheus.query(wanted[where]) for where in missing))
                for where, answer in zip(missing, answers, strict=True):
                    if any(not math.isnan(float(each["value"][1])) for each in answer):
                        seen[where] = set.intersection(*(set(each["metric"]) for each in answer))
                await asyncio.sleep(0.5)
    return seen


def test_every_panel_queries_the_provisioned_data_source() -> None:
    given = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())
    known = {(each["type"], each["uid"]) for each in given["datasources"]}
    assert {(each["datasource"]["type"], each["datasource"]["uid"]) for each in targets().values()} == known
