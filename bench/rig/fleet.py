"""Starts a fleet with `picker up` for a bench or a long test, waits until it is ready, and stops it."""

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from bench.rig.report import cpu_ns, total
from picker_fleet.domain.errors import StartupError
from picker_tools.local_fleet.processes import Child, picker_command, start_process

_READY_S = 150.0  # suffices for fifty replicas
_STOP_S = 60.0
_CALL_S = 120.0
_FOLLOWED_S, _POLL_S = 30.0, 0.1


class RunningFleet:
    """A running fleet: its state file, its processes, and its replicas' admin APIs, read with `client`."""

    def __init__(self, state_file: Path, child: Child, client: httpx.AsyncClient) -> None:
        self.state_file, self.child, self.client = state_file, child, client

    @cached_property
    def parts(self) -> dict[str, Any]:
        return dict(json.loads(self.state_file.read_text(encoding="utf-8")))

    @property
    def url(self) -> str:
        """The URL of the fleet's Envoy, to which clients send requests."""
        return str(self.parts["envoy"])

    @property
    def redis_url(self) -> str:
        return str(self.parts["redis"])

    @property
    def admins(self) -> list[str]:
        """The admin API's URL of each replica."""
        return [str(replica["admin"]) for replica in self.parts["replicas"]]

    @property
    def endpoints(self) -> list[str]:
        """`ip:port` of each simulator."""
        return [str(endpoint["address"]) for endpoint in self.parts["endpoints"]]

    @property
    def replicas(self) -> list[psutil.Process]:
        return [psutil.Process(replica["pid"]) for replica in self.parts["replicas"]]

    def process(self, program: str) -> psutil.Process:
        """The fleet's only process with `program` in its name: `envoy`, or `server` for Valkey or Redis."""
        children = psutil.Process(self.child.pid).children(recursive=True)
        (found,) = (child for child in children if program in child.name())
        return found

    def cpu_us(self) -> tuple[float, float, float]:
        """CPU time in µs of the replicas, Valkey and Envoy since they started."""
        replicas, valkey, envoy = (
            cpu_ns(process.pid for process in processes) / 1000
            for processes in (self.replicas, [self.process("server")], [self.process("envoy")])
        )
        return replicas, valkey, envoy

    async def read(self, page: str) -> Any:
        """GET `page` from the first replica's admin API."""
        return (await self.client.get(f"{self.admins[0]}/api/v1/{page}")).json()

    async def counted(self, series: str, **labels: str) -> float:
        """The sum of a counter over all replicas."""
        pages = [(await self.client.get(f"{admin}/metrics")).text for admin in self.admins]
        return sum(total(page, series, **labels) for page in pages)

    async def drift(self) -> int:
        """Differences between the fleet's and the simulators' in-flight counts, plus all other counts."""
        state = await self.read("state")
        pages = zip(self.endpoints, await self._simulator_pages(), strict=True)
        differences = sum(abs(state["in_flight"].get(address, 0) - _busy(page)) for address, page in pages)
        return int(differences + state["stock"] + state["queued"] + state["leases"])

    async def at_model_servers(self) -> int:
        """Requests running or waiting at the simulators, by their metrics pages."""
        return sum(map(_busy, await self._simulator_pages()))

    async def finished(self) -> int:
        """Finished requests, by the simulators' metrics pages."""
        return int(sum(total(page, "vllm:request_success_total") for page in await self._simulator_pages()))

    async def _simulator_pages(self) -> list[str]:
        calls = [self.client.get(f"http://{address}/metrics") for address in self.endpoints]
        return [answer.text for answer in await asyncio.gather(*calls)]

    async def wait_for_rest(self, within_s: float) -> None:
        """Wait until no request is in flight and all counts agree. Raises TimeoutError."""
        async with asyncio.timeout(within_s):
            while await self.drift():  # noqa: ASYNC110 - the fleet notifies nobody of it
                await asyncio.sleep(0.2)

    async def change(self, tree: dict[str, Any]) -> None:
        """Change the live configuration, and wait until all replicas have the change.

        Raises:
            httpx.HTTPError: the fleet refused the change, or a replica did not answer.
            TimeoutError: a replica did not get the change in time.
        """
        answer = await self.client.patch(f"{self.admins[0]}/api/v1/config", json=tree)
        wanted = answer.raise_for_status().json()["tuned_version"]
        async with asyncio.timeout(_FOLLOWED_S):
            for admin in self.admins:
                version = None
                while version != wanted:
                    await asyncio.sleep(_POLL_S)
                    version = (await self.client.get(f"{admin}/api/v1/config")).json()["tuned_version"]


def _busy(page: str) -> int:
    return int(total(page, "vllm:num_requests_running") + total(page, "vllm:num_requests_waiting"))


@contextlib.asynccontextmanager
async def picker_up(
    config: Mapping[str, Any],
    *options: str,
    command: Sequence[str] = picker_command("up"),
    environment: Mapping[str, str] = os.environ,
) -> AsyncIterator[RunningFleet]:
    """Run `picker up` with `config` and `options` on free ports until the block ends; yields the ready fleet.

    `command`: the command line of another version's `picker up`.

    Raises:
        StartupError: the fleet did not become ready, or failed at its end; with the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="picker-bench-") as name:
        file, state_file, log = (Path(name) / each for each in ("picker.yaml", "state.json", "up.log"))
        file.write_text(yaml.safe_dump(dict(config)), encoding="utf-8")
        arguments = ("--port", "0", "--config", str(file), "--state-file", str(state_file), *options)
        environment = {**environment, "TMPDIR": name}
        with log.open("wb") as output:
            process = await start_process((*command, *arguments), output, environment)
        child = Child("picker up", log, process, 0)

        async def ready() -> bool:
            return state_file.exists()

        try:
            await child.until(ready, within_s=_READY_S, what="its state file")
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(trust_env=False, timeout=_CALL_S, limits=limits) as client:
                yield RunningFleet(state_file, child, client)
        finally:
            await child.stop(_STOP_S)
        if (how := await child.ended()) != "exited with 0":
            raise StartupError(child.fault(how))
