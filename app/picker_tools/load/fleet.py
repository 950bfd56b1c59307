"""The fleet under load: a fleet that already runs, or a local fleet that `picker load` starts for the run."""

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from picker_fleet.domain import config
from picker_fleet.domain.errors import ConfigError
from picker_fleet.domain.units import is_loopback
from picker_tools.load.scenarios import Scenario
from picker_tools.local_fleet.local_fleet import LocalFleet, UpOptions
from picker_tools.local_fleet.network import ADMIN_TOKEN, get
from picker_tools.local_fleet.parts import Valkey
from picker_tools.local_fleet.processes import Report, Supervisor

DEFAULT_URL = "http://127.0.0.1:8080"  # the URL of the Envoy that `picker up` starts by default
DEFAULT_ADMIN = "http://127.0.0.1:8081"


@dataclass(frozen=True, slots=True)
class Target:
    """The fleet under load. `admins` has the replicas' admin URLs, `endpoints` the model servers' addresses
    (`ip:port`).

    `redis` is the URL of the Redis with the decision log; '' if unknown. `mode` says how Envoy calls the
    picker; '' for a fleet that already ran. `own`: whether this run started the fleet.
    """

    url: str
    model: str
    admins: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    redis: str = ""
    mode: str = ""
    own: bool = False


def check_url(url: str, option: str, *, allow_remote: bool) -> str:
    """The URL `url` without its path.

    Raises:
        ConfigError: `url` is no http://host:port, or it is not on the loopback and not `allow_remote`.
    """
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme != "http" or not parts.hostname or port == -1 or parts.path not in ("", "/"):
        raise ConfigError(f"{option}: {url!r} is no http://host:port")
    if not allow_remote and not (parts.hostname == "localhost" or is_loopback(parts.hostname)):
        raise ConfigError(
            f"{option}: {parts.hostname} is not this machine's loopback. A load can harm the users of that "
            "fleet; --allow-remote permits it"
        )
    return f"http://{parts.netloc}"


async def default_fleet_answers() -> bool:
    """Whether a fleet started by `picker up` with the default ports answers."""
    envoy, replica = await asyncio.gather(get(f"{DEFAULT_URL}/v1/models"), get(f"{DEFAULT_ADMIN}/readyz"))
    answer = replica.json() if replica is not None else None
    return envoy is not None and envoy.status == 200 and isinstance(answer, dict) and "replica" in answer


async def found(
    *, target: str | None, admin: str | None, state_file: Path | None, allow_remote: bool
) -> Target:
    """The running fleet at the URL `target`, else the fleet that `state_file` describes, else the fleet at
    the default ports of `picker up`.

    Raises:
        ConfigError: the fleet does not answer, a URL is not allowed, or the file is no state file.
    """
    state = _read_state(state_file) if state_file is not None else {}
    url = target or state.get("envoy")
    if url is None:
        url, admin = DEFAULT_URL, admin or DEFAULT_ADMIN
    url = check_url(str(url), "--target", allow_remote=allow_remote)
    replicas = [str(replica["admin"]) for replica in state.get("replicas", ())]
    admins = [check_url(each, "--state-file", allow_remote=allow_remote) for each in replicas]
    if admin is not None:
        admins.insert(0, check_url(admin, "--admin", allow_remote=allow_remote))
    models = await get(f"{url}/v1/models")
    if models is None or models.status != 200:
        answer = "nothing" if models is None else f"{models.status}"
        raise ConfigError(f"--target: GET {url}/v1/models answered {answer}; is a fleet running there?")
    listed = models.json() or {}
    model = next((str(each["id"]) for each in listed.get("data", ())), "")
    if not model:
        raise ConfigError(f"--target: {url}/v1/models lists no model")
    endpoints = tuple(str(endpoint["address"]) for endpoint in state.get("endpoints", ()))
    return Target(url, model, tuple(dict.fromkeys(admins)), endpoints, str(state.get("redis", "")))


async def check_needs(target: Target, scenario: Scenario) -> None:
    """Check that a running fleet has the settings that `scenario` needs; an unknown setting passes.

    Raises:
        ConfigError: the fleet lacks a setting, which the message names.
    """
    token = os.environ.get(ADMIN_TOKEN, "")
    reply = await get(f"{target.admins[0]}/api/v1/config", token) if target.admins else None
    page = reply.json() if reply is not None and reply.status == 200 else None
    if not isinstance(page, dict):
        return
    config = page["config"]
    known = {str(entry["name"]) for entry in config.get("objectives", ())}
    faults = [f"an objective {name!r}" for name in sorted(scenario.objectives - known)]
    for key, wanted in scenario.needs:
        value: Any = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value != wanted:
            faults.append(f"{key}: {wanted} (it has {value})")
    if faults:
        raise ConfigError(f"{scenario.name} needs a fleet with {', '.join(faults)}; --own starts one")


def _read_state(path: Path) -> Mapping[str, Any]:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        raise ConfigError(f"--state-file: {path} unreadable: {getattr(fault, 'strerror', fault)}") from None
    if not isinstance(state, dict) or "envoy" not in state:
        raise ConfigError(f"--state-file: {path} is not a state file of `picker up`")
    return state


_LOG_ENTRIES = 1_000_000  # more log entries than a run can write, so that the audit finds all entries
_VALKEY_ATTEMPTS = 3
_VALKEY_GRACE_S = 4.0


class OwnFleet:
    """A local fleet for one run, started and stopped once. The fleet's files and logs are in `folder`."""

    def __init__(self, scenario: Scenario, options: UpOptions, folder: Path, report: Report) -> None:
        self._scenario = scenario
        self._options = options
        self._folder = folder
        self._report = report
        # The local fleet must not supervise this Valkey: it would restart the Valkey after `stop_redis`.
        self._valkey = Valkey(folder)
        self._valkeys = Supervisor(folder, report)
        self._fleet: LocalFleet | None = None

    @property
    def settings(self) -> config.Settings:
        """The settings of the fleet's replicas, except for addresses."""
        tree: dict[str, Any] = {
            "decision_log": {"enabled": True, "max_entries": _LOG_ENTRIES},
            "extproc": {"drain_grace": "100ms"},  # when the fleet stops, it has no requests
            # The load can be planned only for a known capacity.
            "request_queue_controller": {"watermark_per_backend": 2},
            **self._scenario.config,
        }
        return config.parse(tree)

    async def start(self) -> Target:
        """Start all processes of the fleet. Raises StartupError if a process does not become ready."""
        await self._valkeys.bring_up([self._valkey], attempts=_VALKEY_ATTEMPTS)
        options = replace(self._options, redis=self._valkey.url)
        self._fleet = LocalFleet(options, self.settings, self._folder, self._report)
        await self._fleet.start()
        state = self._fleet.state()
        return Target(
            url=self._fleet.envoy_url,
            model=await self._fleet.model(),
            admins=tuple(replica["admin"] for replica in state["replicas"]),
            endpoints=tuple(endpoint["address"] for endpoint in state["endpoints"]),
            redis=self._valkey.url,
            mode=options.mode,
            own=True,
        )

    async def watch(self) -> None:
        """Restart each process of the fleet that dies, until cancelled."""
        assert self._fleet is not None
        await self._fleet.watch()

    async def stop(self) -> None:
        """Stop the fleet; return once every child process has ended."""
        if self._fleet is not None:
            await self._fleet.stop()
        await self._valkeys.stop([self._valkey], _VALKEY_GRACE_S)

    def kill(self) -> None:
        """Kill all child processes now, so that the method `stop` returns soon."""
        if self._fleet is not None:
            self._fleet.kill()
        self._valkeys.kill()

    def kill_replica(self, number: int) -> str | None:
        """Kill replica number `number` (from 0). Returns the replica's name, or None if it is not running."""
        assert self._fleet is not None
        try:
            os.kill(self._fleet.state()["replicas"][number]["pid"], signal.SIGKILL)
        except ProcessLookupError:
            return None
        return f"replica-{number + 1}"

    async def stop_redis(self) -> None:
        """Kill the Valkey, whose data is then lost."""
        await self._valkeys.stop([self._valkey], 0.0)

    async def start_redis(self) -> None:
        """Start the Valkey again, without data, at the same address. Raises StartupError, like `start`."""
        await self._valkeys.bring_up([self._valkey], attempts=_VALKEY_ATTEMPTS)


async def stop_shielded(fleet: OwnFleet) -> None:
    """Stop the fleet `fleet`; if the caller is cancelled meanwhile, kill the fleet."""
    ending = asyncio.ensure_future(fleet.stop())
    try:
        await asyncio.shield(ending)
    except asyncio.CancelledError:
        fleet.kill()
        await ending
        raise
