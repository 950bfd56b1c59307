"""A fleet of `picker up` for a benchmark: started with a configuration, waited for, ended."""

import contextlib
import json
import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import yaml

from picker_fleet.errors import StartupError
from picker_tools.local_fleet.processes import Child, picker_command, start_process

_READY_S = 150.0  # of fifty replicas
_STOP_S = 60.0


class RunningFleet:
    """What a fleet's state file says, and its processes. `log` is the output of `picker up`."""

    def __init__(self, state_file: Path, child: Child) -> None:
        self.state_file, self.child = state_file, child

    @cached_property
    def state(self) -> dict[str, Any]:
        return dict(json.loads(self.state_file.read_text(encoding="utf-8")))

    @property
    def url(self) -> str:
        """Where clients send requests: Envoy."""
        return str(self.state["envoy"])

    @property
    def redis_url(self) -> str:
        return str(self.state["redis"])

    @property
    def admins(self) -> list[str]:
        """The admin API's URL of each replica."""
        return [str(replica["admin"]) for replica in self.state["replicas"]]

    @property
    def endpoints(self) -> list[str]:
        """`ip:port` of each simulator."""
        return [str(endpoint["address"]) for endpoint in self.state["endpoints"]]

    @property
    def replicas(self) -> list[psutil.Process]:
        return [psutil.Process(replica["pid"]) for replica in self.state["replicas"]]

    def process(self, program: str) -> psutil.Process:
        """Its only process with `program` in its name: `envoy`, or `server` for Valkey or Redis."""
        children = psutil.Process(self.child.pid).children(recursive=True)
        (found,) = (child for child in children if program in child.name())
        return found


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

        async def ready() -> bool | None:
            return state_file.exists() or None

        try:
            await child.until(ready, within_s=_READY_S, what="its state file")
            yield RunningFleet(state_file, child)
        finally:
            await child.stop(_STOP_S)
        if (how := await child.ended()) != "exited with 0":
            raise StartupError(child.fault(how))
