"""Reads and controls the compose fleet from outside, through Envoy's listeners and the container engine."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx

from long.compose.engine import Engine
from picker_tools.load.generator import Answer
from picker_tools.local_fleet.network import until

REQUESTS = "http://127.0.0.1:8080"
ADMIN = "http://127.0.0.1:8081"
LOCUST = "http://127.0.0.1:8089"
PROMETHEUS = "http://127.0.0.1:9090"
_WAIT_S = 90.0
_READS = 5


class Broken(Exception):
    """A check of the fleet failed, or a wait timed out; the message says which."""


class Fleet:
    """A client of the compose fleet. Every wait raises Broken after 90 s."""

    def __init__(self, engine: Engine, client: httpx.AsyncClient, token: str) -> None:
        self.engine = engine
        self._client = client
        self._bearer = {"authorization": f"Bearer {token}"}

    async def state(self) -> dict[str, Any]:
        """The JSON of /api/v1/state through Envoy's admin listener; empty if no replica answers."""
        try:
            answer = await self._client.get(f"{ADMIN}/api/v1/state", headers=self._bearer)
        except httpx.HTTPError:
            return {}
        state: dict[str, Any] = answer.json() if answer.status_code == 200 else {}
        return state

    async def until_state(self, what: str, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until `condition` accepts the state. `what` describes the condition in Broken."""
        state: dict[str, Any] = {}

        async def fulfilled() -> bool:
            nonlocal state
            state = await self.state()
            return bool(state) and condition(state)

        try:
            await self.until(what, fulfilled)
        except Broken as fault:
            kept = {
                key: state.get(key) for key in ("replicas", "ready_backends", "stock", "queued", "degraded")
            }
            raise Broken(f"{fault}; the state: {kept}") from None

    async def until_live(self, count: int) -> None:
        """Wait until the fleet lists `count` live replicas, and Envoy considers `count` replicas healthy."""
        await self.until_state(f"{count} live replicas", lambda state: len(state["replicas"]) == count)

        async def known() -> bool:
            return await self.healthy_pickers() == count

        await self.until(f"Envoy has {count} healthy replicas", known)

    async def healthy_pickers(self) -> int:
        """The number of healthy replicas on Envoy's admin page."""
        envoy = self.engine.containers("envoy")[0]
        read = (
            "import urllib.request as u;"
            "print(u.urlopen('http://127.0.0.1:9901/clusters', timeout=5).read().decode())"
        )
        page = await asyncio.to_thread(self.engine.run, "exec", envoy, "python", "-c", read)
        return len(re.findall(r"(?m)^picker::[^:]+:\d+::health_flags::healthy$", page))

    async def until(self, what: str, condition: Callable[[], Awaitable[bool]]) -> None:
        if not await until(condition, within_s=_WAIT_S, pause_s=0.2):
            raise Broken(f"timed out after {_WAIT_S:g} s: {what}")

    async def admin_api(self) -> str:
        """Check that every page of the admin API answers, and that changes require the token."""
        for path in ("state", "flows", "queue", "inflight", "workloads", "endpoints", "replicas", "config"):
            answer = await self._read(f"{ADMIN}/api/v1/{path}")
            if answer.status_code != 200:
                raise Broken(f"/api/v1/{path} answers {answer.status_code}: {answer.text[:200]}")
        if "<html" not in (await self._client.get(f"{ADMIN}/")).text:
            raise Broken("no dashboard at /")
        token = self._bearer
        async with self._client.stream("GET", f"{ADMIN}/api/v1/events", headers=token) as events:
            first = [line async for line in _lines(events, 2)]
        if "event: snapshot" not in first:
            raise Broken(f"the event stream begins with {first}")
        for change, headers, status in (("pause", {}, 401), ("pause", token, 200), ("resume", token, 200)):
            done = await self._client.post(f"{ADMIN}/api/v1/{change}", headers=headers)
            if done.status_code != status:
                raise Broken(f"{change} answers {done.status_code}, not {status}: {done.text[:200]}")
        return "8 pages, dashboard, events, a change with the token (401 without)"

    async def _read(self, url: str) -> httpx.Response:
        """GET `url`. On a 503 with `retry-after` (Redis was slow), wait and retry up to _READS times."""
        for _ in range(_READS):
            answer = await self._client.get(url, headers=self._bearer)
            if answer.status_code != 503 or "retry-after" not in answer.headers:
                break
            await asyncio.sleep(float(answer.headers["retry-after"]))
        return answer

    async def prometheus(self, expected: Counter[str]) -> str:
        """Wait until Prometheus scrapes the expected number of targets for each job."""
        up: Counter[str] = Counter()

        async def scraped() -> bool:
            answer = await self._client.get(f"{PROMETHEUS}/api/v1/query", params={"query": "up == 1"})
            up.clear()
            up.update(row["metric"]["job"] for row in answer.json()["data"]["result"])
            return up == expected

        try:
            await self.until(f"Prometheus scrapes {dict(expected)}", scraped)
        except Broken as fault:
            raise Broken(f"{fault}; it scrapes {dict(up)}") from None
        return ", ".join(f"{count} {job}" for job, count in sorted(up.items()))

    async def locust(self, requests: int) -> str:
        """Start a Locust run through Locust's web API, and stop the run after `requests` requests."""
        users = {"user_count": 8, "spawn_rate": 8, "user_classes": "NoisyNeighbourUser"}
        begun = await self._client.post(f"{LOCUST}/swarm", data=users | {"host": "http://envoy:8080"})
        if not begun.json()["success"]:
            raise Broken(f"Locust: {begun.text[:200]}")
        page: dict[str, Any] = {}

        async def enough() -> bool:
            nonlocal page
            page = (await self._client.get(f"{LOCUST}/stats/requests")).json()
            return sum(_of_tenants(page).values()) >= requests

        await self.until(f"{requests} requests by Locust", enough)
        await self._client.post(f"{LOCUST}/stop")
        if page["errors"]:
            raise Broken(f"Locust: {page['errors'][:3]}")
        return ", ".join(f"{count} of {name}" for name, count in sorted(_of_tenants(page).items()))


async def _lines(answer: httpx.Response, count: int) -> AsyncIterator[str]:
    """The first `count` non-empty lines."""
    async for line in answer.aiter_lines():
        if line:
            yield line
            count -= 1
        if not count:
            return


def _of_tenants(page: dict[str, Any]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for row in page["stats"]:
        if row["name"] != "Aggregated" and row["method"] != "TTFT":
            counts[row["name"]] += row["num_requests"]
    return counts


def is_allowed(record: Answer, outage: tuple[float, float]) -> bool:
    """Whether G8 allows this refusal: a 503 with a reason and `retry-after`, to a request that overlapped the
    Redis outage (start and end by the client's clock).
    """
    began_s, ended_s = outage
    meanwhile = record.sent_s <= ended_s and record.done_s >= began_s
    return meanwhile and record.status == 503 and bool(record.reason and record.retry_after)
