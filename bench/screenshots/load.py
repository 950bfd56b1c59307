"""A small company on one fleet: flows of several bands and weights, more of it than the fleet can take."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

CONFIG = {
    "decision_log": {"enabled": True},
    "objectives": [
        {"name": "interactive", "criticality": "Critical", "weight": 1},
        {"name": "premium", "criticality": "Default", "weight": 3},
        {"name": "standard", "criticality": "Default", "weight": 1},
        {"name": "batch", "criticality": "Sheddable", "weight": 1},
    ],
    "fair_request_queue": {
        "band_policy": "weighted",
        "ordering": "workload-aware",
        "queue_ttl": "60s",
        "starvation_after": "12s",
    },
    "scheduling": {
        "scorers": [
            {"name": "queue-depth", "weight": 2},
            {"name": "kv-cache", "weight": 2},
            {"name": "latency", "weight": 1},
        ]
    },
}


@dataclass(frozen=True, slots=True)
class Team:
    """`clients` that each ask again as soon as they are answered, `pause_s` later."""

    flow: str
    objective: str
    clients: int
    criticality: int
    pause_s: float = 0.0


TEAMS = (
    Team("checkout-assistant", "interactive", 3, 5, 0.5),
    Team("support-chat", "premium", 10, 4),
    Team("search-rerank", "premium", 9, 4),
    Team("code-review", "standard", 8, 3),
    Team("sales-notes", "standard", 6, 3),
    Team("docs-translation", "standard", 2, 2, 1.0),
    Team("nightly-embeddings", "batch", 12, 1),
    Team("eval-suite", "batch", 6, 1),
)


@contextmanager
def load(envoy: str) -> Iterator[None]:
    """All teams ask until this is left."""
    done = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_all(envoy, done)), name="load")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


async def _all(envoy: str, done: threading.Event) -> None:
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=envoy, timeout=90.0, trust_env=False, limits=limits) as http,
        asyncio.TaskGroup() as tasks,
    ):
        clients = [tasks.create_task(_ask(http, team, n)) for team in TEAMS for n in range(team.clients)]
        await asyncio.to_thread(done.wait)
        for client in clients:
            client.cancel()


async def _ask(http: httpx.AsyncClient, team: Team, number: int) -> None:
    headers = {
        "x-gateway-inference-fairness-id": team.flow,
        "x-gateway-inference-objective": team.objective,
        "x-workload-context": f'{{"workload_id": "{team.flow}", "criticality": {team.criticality}}}',
    }
    tokens = 20 + 10 * (number % 4)
    body = {"model": "llama", "prompt": f"{team.flow} {number}: " + "hello " * 40, "max_tokens": tokens}
    while True:
        await http.post("/v1/completions", json=body, headers=headers)
        await asyncio.sleep(team.pause_s)
