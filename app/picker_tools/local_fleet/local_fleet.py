"""The local fleet of `picker up`: Valkey, simulators, replicas and Envoy as children of this process.

Valkey and the simulators start first, then the replicas, which need the addresses of both, then Envoy, which
needs the replicas' addresses. The parts stop in reverse order, so that a part that stops gets no requests.
"""

import asyncio
import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picker_fleet.domain import config
from picker_fleet.domain.errors import StartupError
from picker_tools.local_fleet.envoy import Envoy
from picker_tools.local_fleet.network import can_connect, ensure_free, get, until
from picker_tools.local_fleet.parts import (
    Mode,
    Replica,
    SimOptions,
    Simulator,
    Valkey,
    overlaid,
    served_models,
    write_private,
)
from picker_tools.local_fleet.processes import Part, Report, Supervisor, envoy_binary, together

_SERVES_S = 30.0
_ENVOY_GRACE_S = 3.0
_REPLICA_GRACE_S = 10.0  # seconds for replicas to leave the pool; Envoy has already stopped
_REST_GRACE_S = 4.0
_STARTED_TOGETHER = 10  # start at most so many replicas at once, so that each starts fast
_VALKEY_ATTEMPTS = 3  # attempts to start Valkey, since another process may take the chosen port first


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The options of `picker up`. Ports are on the loopback; port 0 is any free port. Without `redis` the
    fleet has an embedded Valkey.

    `prefill`: how many of the `endpoints` prefill for the other endpoints, which decode; 0: no roles.
    """

    replicas: int
    endpoints: int
    mode: Mode
    sim: SimOptions
    prefill: int = 0
    redis: str | None = None
    state_file: Path | None = None
    port: int = 0
    admin_port: int = 0
    restart: bool = True
    debug_headers: bool = False


class LocalFleet:
    """One local fleet. The files and logs of the fleet's parts are in `folder`."""

    def __init__(self, options: UpOptions, settings: config.Settings, folder: Path, report: Report) -> None:
        self._options = options
        self._settings = settings
        self._folder = folder
        self._report = report
        self._supervisor = Supervisor(folder, report)
        self._valkey = None if options.redis else Valkey(folder)
        numbers = itertools.count(1)
        self._simulators_of = {
            name: [
                Simulator(next(numbers), options.sim, served_models(its), role) for role in _roles(options)
            ]
            for name, its in config.pools_of(settings).items()
        }
        self._simulators = list(itertools.chain(*self._simulators_of.values()))
        fixed_ports = options.port and options.admin_port
        self._replicas = [
            Replica(
                number + 1,
                options.admin_port + number if fixed_ports else 0,
                folder,
                self._tree,
                http=options.mode == "http",
            )
            for number in range(options.replicas)
        ]
        self._envoy: Envoy | None = None

    async def start(self) -> None:
        """Start all parts; return once the fleet serves requests and the state file is written.

        Raises:
            MissingExtra: the binary of Envoy is not installed.
            StartupError: a port is in use, or a part did not become ready.
            ConfigError: the configuration is not valid for this fleet.
        """
        envoy_binary()  # raises MissingExtra before any part starts
        ensure_free(self._wanted_ports())
        self._tree()  # raises ConfigError before any part starts
        if self._valkey is None and not await can_connect(self._redis_url):
            raise StartupError("redis: nothing accepts connections at the URL of --redis")
        await self._bring_up_pickers()
        await self._bring_up_envoy()
        await self._until_it_serves()
        self._write_state()

    async def watch(self) -> None:
        """Report parts that end, and restart them if the option `restart` is set, until cancelled."""
        await self._supervisor.watch(restart=self._options.restart, changed=self._write_state)
        await asyncio.Event().wait()  # every part has ended; wait for Ctrl-C

    async def stop(self) -> None:
        """Stop all parts; return once every child has ended."""
        if self._envoy is not None:
            await self._supervisor.stop([self._envoy], _ENVOY_GRACE_S)
        await self._supervisor.stop(self._replicas, _REPLICA_GRACE_S)
        await self._supervisor.stop(self._first_parts(), _REST_GRACE_S)

    def kill(self) -> None:
        """Kill all children now, so that the method `stop` returns soon."""
        self._supervisor.kill()

    async def model(self) -> str:
        """The name of a model that the fleet serves."""
        if self._settings.models:
            return self._settings.models[0].name
        reply = await get(f"{self._started_envoy.url}/v1/models")
        listed = (reply.json() if reply is not None else None) or {}
        return next((str(model["id"]) for model in listed.get("data", [])), "MODEL")

    @property
    def envoy_url(self) -> str:
        return self._started_envoy.url

    @property
    def other_pools(self) -> list[str]:
        """The pools other than the default pool."""
        return list(self._simulators_of)[1:]

    @property
    def dashboard(self) -> str:
        """The URL of the dashboard, at the first replica's admin address."""
        return self._replicas[0].announced.admin

    @property
    def _started_envoy(self) -> Envoy:
        assert self._envoy is not None
        return self._envoy

    @property
    def _redis_url(self) -> str:
        return self._valkey.url if self._valkey is not None else self._options.redis or ""

    def _first_parts(self) -> list[Part]:
        return [*([self._valkey] if self._valkey is not None else []), *self._simulators]

    def _wanted_ports(self) -> dict[int, str]:
        wanted: dict[int, str] = {}
        if not self._options.port:
            return wanted
        wanted[self._options.port] = "Envoy (--port)"
        if self._options.admin_port:
            for number in range(self._options.replicas):
                port = self._options.admin_port + number
                purpose = f"the admin API of replica-{number + 1} (--admin-port)"
                if port in wanted:
                    raise StartupError(f"port {port} is wanted for {wanted[port]} and for {purpose}")
                wanted[port] = purpose
        return wanted

    def _tree(self) -> dict[str, Any]:
        endpoints = {
            name: [each.entry for each in simulators if each.address]
            for name, simulators in self._simulators_of.items()
        }
        nearest = self._valkey.socket_url if self._valkey is not None else self._redis_url
        return overlaid(self._settings, redis_url=nearest, endpoints=endpoints if self._simulators else None)

    async def _bring_up_pickers(self) -> None:
        """Start the simulators and Valkey, then the replicas, which need the addresses of both parts."""
        works = [self._supervisor.bring_up(self._simulators)]
        if self._valkey is not None:
            works.append(self._supervisor.bring_up([self._valkey], attempts=_VALKEY_ATTEMPTS))
        await together(*works)
        for first in range(0, len(self._replicas), _STARTED_TOGETHER):
            await self._supervisor.bring_up(self._replicas[first : first + _STARTED_TOGETHER])

    async def _bring_up_envoy(self) -> None:
        self._envoy = Envoy(
            self._settings,
            self._options.mode,
            self._options.port,
            [replica.host for replica in self._replicas],
            self._folder,
            http_pickers=[each.http_host for each in self._replicas] if self._options.mode == "http" else (),
            debug_headers=self._options.debug_headers,
        )
        await self._supervisor.bring_up([self._envoy])

    async def _until_it_serves(self) -> None:
        why = "nothing answered yet"

        async def serves() -> bool:
            nonlocal why
            self._supervisor.check()
            missing = await self._missing()
            why = missing or why
            return missing is None

        if not await until(serves, within_s=_SERVES_S):
            raise StartupError(f"the parts are up, but the fleet does not serve: {why}")

    async def _missing(self) -> str | None:
        decoding = self._options.endpoints - self._options.prefill
        missing = await self._started_envoy.missing(decoding or None)
        if missing is not None:
            return missing
        for replica in self._replicas:
            ready = await get(f"{replica.announced.admin}/readyz")
            if ready is None or ready.status != 200:
                answer = ready.body.decode(errors="replace")[:300] if ready is not None else "nothing"
                return f"{replica.name} is not ready and says {answer}"
        if self._simulators:
            reply = await get(f"{self.envoy_url}/v1/models")
            if reply is None or reply.status != 200:
                answer = f"{reply.status}" if reply is not None else "nothing"
                return f"GET {self.envoy_url}/v1/models answered {answer}"
        return None

    def state(self) -> dict[str, Any]:
        """The addresses and process ids of the started parts, in the form of the state file."""
        return {
            "envoy": self._started_envoy.url,
            "envoy_admin": self._started_envoy.admin,
            "redis": self._redis_url,
            "replicas": [
                {
                    "id": replica.announced.id,
                    "pid": self._supervisor.pid(replica),
                    "grpc": replica.announced.grpc,
                    "admin": replica.announced.admin,
                    **({} if replica.announced.http is None else {"http": replica.announced.http}),
                }
                for replica in self._replicas
            ],
            "endpoints": [
                {
                    "pid": self._supervisor.pid(simulator),
                    "address": simulator.address,
                    **({"role": simulator.role} if simulator.role else {}),
                    **({"pool": name} if self._settings.pools else {}),
                }
                for name, simulators in self._simulators_of.items()
                for simulator in simulators
            ],
        }

    def _write_state(self) -> None:
        path = self._options.state_file
        if path is not None:
            draft = path.with_name(f"{path.name}.{os.getpid()}.new")
            write_private(draft, json.dumps(self.state(), indent=2) + "\n")
            draft.replace(path)  # a reader sees either the whole new file or the whole former file


def _roles(options: UpOptions) -> list[str]:
    """The role of each simulator of a pool."""
    if not options.prefill:
        return [""] * options.endpoints
    return ["prefill"] * options.prefill + ["decode"] * (options.endpoints - options.prefill)
