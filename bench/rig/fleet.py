"""A fleet of `picker up` for a bench or a long test: started with a configuration, waited for, ended."""

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
from picker_fleet.errors import StartupError
from picker_tools.local_fleet.processes import Child, picker_command, start_process

_READY_S = 150.0  # of fifty replicas
_STOP_S = 60.0
_CALL_S = 120.0
_FOLLOWED_S, _POLL_S = 30.0, 0.1


class RunningFleet:
    """What a fleet's state file says, its processes, and what its replicas say by `client`."""

    def __init__(self, state_file: Path, child: Child, client: httpx.AsyncClient) -> None:
        self.state_file, self.child, self.client = state_file, child, client

    @cached_property
    def parts(self) -> dict[str, Any]:
        return dict(json.loads(self.state_file.read_text(encoding="utf-8")))

    @property
    def url(self) -> str:
        """Where clients send requests: Envoy."""
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
        """Its only process with `program` in its name: `envoy`, or `server` for Valkey or Redis."""
        children = psutil.Process(self.child.pid).children(recursive=True)
        (found,) = (child for child in children if program in child.name())
        return found

    def cpu_us(self) -> tuple[float, float, float]:
        """CPU time of replicas, Valkey and Envoy since they started, in microseconds."""
        replicas, valkey, envoy = (
            cpu_ns(process.pid for process in processes) / 1000
            for processes in (self.replicas, [self.process("server")], [self.process("envoy")])
        )
        return replicas, valkey, envoy

    async def read(self, page: str) -> Any:
        """A page of the first replica's admin API."""
        return (await self.client.get(f"{self.admins[0]}/api/v1/{page}")).json()

    async def counted(self, series: str, **labels: str) -> float:
        """The sum of a counter over the replicas."""
        pages = [(await self.client.get(f"{admin}/metrics")).text for admin in self.admins]
        return sum(total(page, series, **labels) for page in pages)

    async def drift(self) -> int:
        """Differences of the fleet's and the simulators' in-flight counts, plus all other counts."""
        state = await self.read("state")
        pages = zip(self.endpoints, await self._simulator_pages(), strict=True)
        differences = sum(abs(state["in_flight"].get(address, 0) - _busy(page)) for address, page in pages)
        return int(differences + state["stock"] + state["queued"] + state["leases"])

    async def at_model_servers(self) -> int:
        """Requests that the simulators have at this moment, by their own pages."""
        return sum(map(_busy, await self._simulator_pages()))

    async def finished(self) -> int:
        """Requests that the simulators themselves count as finished."""
        return int(sum(total(page, "vllm:request_success_total") for page in await self._simulator_pages()))

    async def _simulator_pages(self) -> list[str]:
        calls = [self.client.get(f"http://{address}/metrics") for address in self.endpoints]
        return [answer.text for answer in await asyncio.gather(*calls)]

    async def wait_for_rest(self, within_s: float) -> None:
        """Wait until all counts agree. TimeoutError if they do not."""
        async with asyncio.timeout(within_s):
            while await self.drift():  # noqa: ASYNC110 - the fleet notifies nobody of it
                await asyncio.sleep(0.2)

    async def change(self, tree: dict[str, Any]) -> None:
        """Change the live configuration, and wait until all replicas have the change.

        Raises:
            httpx.HTTPError: the change was refused, or a replica did not answer.
            TimeoutError: a replica did not follow.
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
    """A fleet with `config` and `options` of `picker up`, ready, on ports of its own; it ends with the block.

    `command` runs the `picker up` of another version.

    Raises:
        StartupError: it did not become ready, or did not end well; with the end of its output.
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
