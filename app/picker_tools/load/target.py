"""The fleet that a load goes to, and how it is found."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from picker_fleet.errors import ConfigError
from picker_fleet.units import is_loopback
from picker_tools.load.scenario import Scenario
from picker_tools.local_fleet.network import get

USUAL = "http://127.0.0.1:8080"  # where `picker up` puts its Envoy
USUAL_ADMIN = "http://127.0.0.1:8081"


@dataclass(frozen=True, slots=True)
class Target:
    """`admins` are the replicas' admin addresses, `endpoints` (`ip:port`) their model servers.

    `redis` is where the decision log is; '' where it is not known. `mode` is '' for a fleet that was found.
    `own` says that this run has started it.
    """

    url: str
    model: str
    admins: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    redis: str = ""
    mode: str = ""
    own: bool = False


def check_url(url: str, option: str, *, allow_remote: bool) -> str:
    """`url` without what follows its port.

    Raises:
        ConfigError: it is no http://host:port, or not on the loopback and `allow_remote` is not set.
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
            f"{option}: {parts.hostname} is not this machine's loopback. A load can harm whoever uses that "
            "fleet; if it is yours to load, say so with --allow-remote"
        )
    return f"http://{parts.netloc}"


async def usual() -> bool:
    """Whether the fleet of a `picker up` with its usual ports answers."""
    envoy, replica = await asyncio.gather(get(f"{USUAL}/v1/models"), get(f"{USUAL_ADMIN}/readyz"))
    said = replica.json() if replica is not None else None
    return envoy is not None and envoy.status == 200 and isinstance(said, dict) and "replica" in said


def envoy_of(state_file: Path) -> str:
    """Where the fleet of `state_file` takes requests. Raises ConfigError if it is no state file."""
    return str(_read(state_file)["envoy"])


async def found(url: str, *, admin: str | None, state_file: Path | None, allow_remote: bool) -> Target:
    """The running fleet at `url`, with what `state_file` or `admin` tell of it.

    Raises:
        ConfigError: it does not answer, or the file is no state file.
    """
    state = _read(state_file) if state_file is not None else {}
    admins = [str(replica["admin"]) for replica in state.get("replicas", ())]
    if admin is not None:
        admins = [admin, *(each for each in admins if each != admin)]
    for address in admins:
        check_url(address, "--state-file", allow_remote=allow_remote)
    models = await get(f"{url}/v1/models")
    if models is None or models.status != 200:
        said = "nothing" if models is None else f"{models.status}"
        raise ConfigError(f"--target: GET {url}/v1/models answered {said}; is a fleet running there?")
    listed = models.json() or {}
    model = next((str(each["id"]) for each in listed.get("data", ())), "")
    if not model:
        raise ConfigError(f"--target: {url}/v1/models lists no model")
    endpoints = tuple(str(endpoint["address"]) for endpoint in state.get("endpoints", ()))
    return Target(url, model, tuple(admins), endpoints, str(state.get("redis", "")))


async def check_needs(target: Target, scenario: Scenario) -> None:
    """Whether a fleet that was found is configured for what `scenario` is about; unknown counts as yes.

    Raises:
        ConfigError: it is not; the message says what is missing.
    """
    reply = await get(f"{target.admins[0]}/api/v1/config") if target.admins else None
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


def _read(path: Path) -> Mapping[str, Any]:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        raise ConfigError(f"--state-file: {path} cannot be read: {fault}") from None
    if not isinstance(state, dict) or "envoy" not in state:
        raise ConfigError(f"--state-file: {path} is not what `picker up --state-file` writes")
    return state
