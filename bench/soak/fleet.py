"""`picker up` as a child, and what it, its Redis and its model servers count."""

import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from redis.asyncio import Redis

_READY_S = 90.0
_STOP_S = 60.0
_CALL_S = 10.0
_CONFIG: Mapping[str, Any] = {
    "request_queue_controller": {"watermark_per_backend": 4},
    "fair_request_queue": {"flow_capacity": 500},
}
_SIM = ("--sim-ttft", "20", "--sim-itl", "5")


@dataclass(frozen=True, slots=True)
class Reading:
    """`at_s` since the load began. Sizes in bytes: of the largest replica, of Envoy, of Redis's data.

    `keys` Redis has, `files` the replicas have open, `served` clients were until then. `drift` is by how much
    the fleet's counts differ from the simulators' own, all endpoints' differences added: looked at in a pause
    of the load, when both must be 0.
    """

    at_s: float
    replica_bytes: int
    envoy_bytes: int
    redis_bytes: int
    keys: int
    files: int
    served: int
    drift: int


class Fleet:
    """A running fleet; see `running`."""

    def __init__(self, state: dict[str, Any], process: psutil.Process, client: httpx.AsyncClient) -> None:
        self.url = str(state["envoy"])
        self._state = state
        self._client = client
        self._redis = Redis.from_url(state["redis"], socket_timeout=_CALL_S)
        self.replicas = [psutil.Process(replica["pid"]) for replica in state["replicas"]]
        children = process.children(recursive=True)
        self._envoy = next(child for child in children if "envoy" in child.name())
        self.redis = next(child for child in children if "valkey" in child.name())

    async def read(self, at_s: float, served: int) -> Reading:
        """Everything now."""
        memory = await self._redis.info("memory")
        return Reading(
            at_s,
            max(replica.memory_info().rss for replica in self.replicas),
            self._envoy.memory_info().rss,
            int(memory["used_memory"]),
            int(await self._redis.dbsize()),
            sum(replica.num_fds() for replica in self.replicas),
            served,
            await self.drift(),
        )

    async def drift(self) -> int:
        """Differences between what the fleet and each simulator count as in flight, and what is left over."""
        state = (await self._client.get(f"{self._state['replicas'][0]['admin']}/api/v1/state")).json()
        differences = 0
        for endpoint in self._state["endpoints"]:
            address = endpoint["address"]
            page = (await self._client.get(f"http://{address}/metrics")).text
            differences += abs(state["in_flight"].get(address, 0) - _busy(page))
        return int(differences + state["stock"] + state["queued"] + state["leases"])

    async def engaged(self) -> int:
        """Requests that the simulators have at this moment, by their own pages."""
        pages = await asyncio.gather(
            *(self._client.get(f"http://{each['address']}/metrics") for each in self._state["endpoints"])
        )
        return sum(_busy(page.text) for page in pages)

    async def page(self, replica: int) -> str:
        """A replica's metrics."""
        return (await self._client.get(f"{self._state['replicas'][replica]['admin']}/metrics")).text

    async def finished(self) -> int:
        """Requests that the simulators themselves count as finished."""
        total = 0.0
        for endpoint in self._state["endpoints"]:
            page = (await self._client.get(f"http://{endpoint['address']}/metrics")).text
            total += sum(_values(page, "vllm:request_success_total"))
        return int(total)

    async def close(self) -> None:
        await self._redis.aclose()


@contextlib.asynccontextmanager
async def running(config: Mapping[str, Any] = _CONFIG, options: Sequence[str] = _SIM) -> AsyncIterator[Fleet]:
    """Three replicas, four simulators, Envoy in `lean`, a Valkey, unless `options` of `picker up` say
    otherwise; ended with the block.

    Raises:
        RuntimeError: it did not become ready, or did not end well.
    """
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        (folder / "config.yaml").write_text(yaml.safe_dump(dict(config)), encoding="utf-8")
        files = ["--config", str(folder / "config.yaml"), "--state-file", str(folder / "state.json")]
        arguments = ["--port", "0", *files, "--debug-headers", *options]
        with (folder / "up.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "picker_fleet.cli", "up", *arguments), stdout=log, stderr=log
            )
        try:
            state = await _until_ready(process, folder)
            async with httpx.AsyncClient(trust_env=False, timeout=_CALL_S) as client:
                fleet = Fleet(state, psutil.Process(process.pid), client)
                try:
                    yield fleet
                finally:
                    await fleet.close()
        finally:
            if process.returncode is None:
                process.terminate()
            async with asyncio.timeout(_STOP_S):
                code = await process.wait()
        if code:
            raise RuntimeError(f"picker up exited with {code}")


async def _until_ready(process: asyncio.subprocess.Process, folder: Path) -> dict[str, Any]:
    """What its state file says, once it is there."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_READY_S):
            while process.returncode is None:
                if state := _text(folder / "state.json"):
                    return dict(json.loads(state))
                await asyncio.sleep(0.1)
    raise RuntimeError(f"the fleet did not become ready: {_text(folder / 'up.log')[-2000:]}")


def _text(file: Path) -> str:
    """What is in `file`; '' if there is none."""
    return file.read_text(encoding="utf-8") if file.exists() else ""


def _busy(page: str) -> int:
    return int(sum(_values(page, "vllm:num_requests_running") + _values(page, "vllm:num_requests_waiting")))


def _values(page: str, name: str) -> list[float]:
    return [float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(f"{name}{{")]
