"""A local fleet whose queue is filled while dispatch is paused, so that what is served when does not depend
on how fast the machine is.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from picker_tools.audit.entry import Entry
from picker_tools.audit.stream import LogStream

REPLICAS = ENDPOINTS = 2
SERVICE_MS = 300  # one token after this long: an answer's whole time
SLOW_MS = 4000  # where many are to arrive before the first has its answer
_CONFIG: Mapping[str, Any] = {
    "objectives": [
        {"name": "critical", "criticality": "Critical"},
        {"name": "sheddable", "criticality": "Sheddable"},
    ],
    "fair_request_queue": {"queue_ttl": "600s"},  # on a slow machine, too, nobody is overdue by chance
    "decision_log": {"enabled": True},
}
_READY_S = 120.0
_CALL_S = 30.0
_SETTLED_S = 300.0
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Group:
    """`count` requests alike, sent at once. `objective` is '' for Default; `ttl` '' for the fleet's own."""

    flow: str
    count: int
    objective: str = ""
    workload: str = ""
    criticality: int = 3
    ttl: str = ""
    max_tokens: int = 1

    def headers(self) -> dict[str, str]:
        headers = {"x-gateway-inference-fairness-id": self.flow}
        if self.objective:
            headers["x-gateway-inference-objective"] = self.objective
        if self.workload:
            context = {"workload_id": self.workload, "criticality": self.criticality}
            headers["x-workload-context"] = json.dumps(context)
        if self.ttl:
            headers["x-llm-d-inference-ttl"] = self.ttl
        return headers


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client was told; `code` is '' for an answer of the model server."""

    flow: str
    status: int
    code: str
    retry_after: str


@dataclass(frozen=True, slots=True)
class Seen:
    """The log of one run, from its first arrival on, and what its clients were told."""

    entries: Sequence[Entry]
    answers: Sequence[Answer]

    def served(self) -> list[Entry]:
        """Grants in the order of dispatch."""
        return [entry for entry in self.entries if entry.event == "granted"]

    def codes(self) -> Counter[tuple[str, str]]:
        """Answers by flow and code."""
        return Counter((answer.flow, answer.code or "ok") for answer in self.answers)

    @property
    def highest_stock(self) -> float:
        return max(entry.stock for entry in self.entries)


class Fleet:
    """A `picker up` that runs; made by `running`."""

    def __init__(self, state: Mapping[str, Any], model: str, client: httpx.AsyncClient) -> None:
        self._envoy = state["envoy"]
        self._admin = state["replicas"][0]["admin"]
        self._redis = state["redis"]
        self._model = model
        self._client = client

    async def run(
        self, change: Mapping[str, Any], groups: Sequence[Group], *, paused: bool = True, hold_s: float = 0.0
    ) -> Seen:
        """Change settings, let each group arrive after the former is in (while paused), serve all, undo.

        `change` is a partial settings tree, as `PATCH /api/v1/config` takes it; dispatch stays paused for
        `hold_s` once all are in.
        """
        before = len(self._entries())
        await self._patch(change)
        if paused:
            await self._call("POST", "/api/v1/pause")
        async with asyncio.TaskGroup() as tasks:
            sent: list[asyncio.Task[Answer]] = []
            for group in groups:
                sent += [tasks.create_task(self._ask(group)) for _ in range(group.count)]
                await self._decided(before, len(sent))
            if paused:
                await asyncio.sleep(hold_s)
                await self._call("POST", "/api/v1/resume")
        await self._at_rest()
        await self._patch(_undone(change))
        entries = self._entries()[before:]
        return Seen([entry for entry in entries if entry.event != "tuned"], [task.result() for task in sent])

    async def _ask(self, group: Group) -> Answer:
        body = {"model": self._model, "prompt": "Hello", "max_tokens": group.max_tokens}
        answer = await self._client.post(
            f"{self._envoy}/v1/completions", json=body, headers=group.headers(), timeout=_SETTLED_S
        )
        code = "" if answer.status_code == 200 else str(answer.json()["error"]["code"])
        return Answer(group.flow, answer.status_code, code, answer.headers.get("retry-after", ""))

    async def _decided(self, before: int, wanted: int) -> None:
        """Wait until `wanted` requests have had their first decision."""
        first = ("queued", "bypassed", "refused")
        async with asyncio.timeout(_SETTLED_S):
            while True:
                if sum(entry.event in first for entry in self._entries()[before:]) >= wanted:
                    return
                await asyncio.sleep(_LOOK_S)

    async def _at_rest(self) -> None:
        async with asyncio.timeout(_SETTLED_S):
            while True:
                state = await self._call("GET", "/api/v1/state")
                if state["stock"] == 0 and state["queued"] == 0:
                    return
                await asyncio.sleep(_LOOK_S)

    async def _patch(self, change: Mapping[str, Any]) -> None:
        if change:
            await self._call("PATCH", "/api/v1/config", change)

    async def _call(self, method: str, path: str, body: object = None) -> Any:
        answer = await self._client.request(method, self._admin + path, json=body, timeout=_CALL_S)
        answer.raise_for_status()
        return answer.json()

    def _entries(self) -> list[Entry]:
        with LogStream(self._redis, "default") as log:
            return [Entry.parse(raw) for page in log.pages() for raw in page.entries]


def _undone(change: Mapping[str, Any]) -> dict[str, Any]:
    return {section: dict.fromkeys(keys) for section, keys in change.items()}


@contextlib.asynccontextmanager
async def running(settings: Mapping[str, Any], service_ms: int) -> AsyncIterator[Fleet]:
    """A fleet of two replicas and two simulated model servers under these settings, gone at the end."""
    with tempfile.TemporaryDirectory() as folder:
        config, state = Path(folder) / "config.yaml", Path(folder) / "state.json"
        config.write_text(json.dumps({**_CONFIG, **settings}), encoding="utf-8")
        command = [
            *(sys.executable, "-m", "picker_fleet.cli", "up", "--port", "0", "--config", str(config)),
            *("--replicas", str(REPLICAS), "--endpoints", str(ENDPOINTS), "--state-file", str(state)),
            *("--sim-ttft", str(service_ms), "--sim-itl", "0", "--seed", "1"),
        ]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        try:
            async with asyncio.timeout(_READY_S):
                while not state.exists():
                    if process.returncode is not None:
                        raise RuntimeError("the fleet did not start; what it said is above")
                    await asyncio.sleep(_LOOK_S)
            limits = httpx.Limits(
                max_connections=None, max_keepalive_connections=0
            )  # none goes stale between runs
            async with httpx.AsyncClient(limits=limits) as client:
                parts = json.loads(state.read_text(encoding="utf-8"))
                endpoint = parts["endpoints"][0]["address"]
                models = await client.get(f"http://{endpoint}/v1/models", timeout=_CALL_S)
                yield Fleet(parts, models.json()["data"][0]["id"], client)
        finally:
            if process.returncode is None:
                os.kill(process.pid, signal.SIGTERM)
            async with asyncio.timeout(_READY_S):
                await process.wait()
