"""A fleet of `picker up` for a benchmark: started with a configuration, waited for, ended."""

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

from bench.rig.page import total
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

    async def read(self, page: str) -> Any:
        """A page of the first replica's admin API."""
        return (await self.client.get(f"{self.admins[0]}/api/v1/{page}")).json()

    async def counted(self, series: str, **labels: str) -> float:
        """The sum of a counter over the replicas."""
        pages = [(await self.client.get(f"{admin}/metrics")).text for admin in self.admins]
        return sum(total(page, series, **labels) for page in pages)

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
