"""The parts of a local fleet except Envoy: the embedded Valkey, simulated model servers, and replicas."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import quote

import msgspec
import yaml

from picker_fleet.domain.allowlist import FAIRNESS_ID, OBJECTIVE
from picker_fleet.domain.config import Settings, parse
from picker_fleet.domain.units import split_host_port
from picker_tools.local_fleet.network import LOOPBACK, free_port, redis_answers
from picker_tools.local_fleet.processes import READY_S, Child, picker_command, valkey_binary

# The mode in which Envoy calls the picker (docs/protocol.md).
Mode = Literal["standard", "lean", "http"]
MODES: tuple[Mode, ...] = get_args(Mode)


def trusted_headers(settings: Settings) -> tuple[str, ...]:
    """The headers that a local fleet trusts: those that `settings` name, and more, since its user is both
    tenant and operator. The workload header needs no trust."""
    return tuple(dict.fromkeys((FAIRNESS_ID[0], OBJECTIVE[0], *settings.extproc.trusted_headers)))


@dataclass(frozen=True, slots=True)
class SimOptions:
    """Options that each simulator gets; the value None keeps the simulator's default."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    max_num_seqs: int | None = None
    seed: int | None = None


# The settings that docs/redis.md recommends for any Redis server.
VALKEY_SETTINGS = (
    *("--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"),
    *("--zset-max-listpack-entries", "32"),
)

_LONGEST_SOCKET_PATH = 100  # maximum bytes of a socket's path; Linux allows 108, other systems 104


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read, since it may contain a password."""
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(text, encoding="utf-8")


class Valkey:
    """A Valkey on a free port of the loopback; if it does not start, the next attempt takes another port."""

    name = "valkey"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket = folder.absolute() / "valkey.sock"
        self._port = free_port()
        self._tried = False
        self._settled = False

    @property
    def url(self) -> str:
        return f"redis://{LOOPBACK}:{self._port}/0"

    @property
    def socket_url(self) -> str:
        """The URL of the Unix socket, which costs replicas less CPU time than TCP; `url` if its path is too
        long."""
        return f"unix://{quote(str(self._socket))}" if self._has_socket else self.url

    @property
    def _has_socket(self) -> bool:
        return len(bytes(self._socket)) <= _LONGEST_SOCKET_PATH

    def command(self) -> list[str]:
        if self._tried and not self._settled:
            self._port = free_port()
        self._tried = True
        return [
            valkey_binary(),
            *("--bind", LOOPBACK, "--port", str(self._port)),
            *(("--unixsocket", str(self._socket)) if self._has_socket else ()),
            *VALKEY_SETTINGS,
            *("--dir", str(self._folder)),
        ]

    async def ready(self, child: Child) -> str:
        async def answers() -> bool:
            return await redis_answers(LOOPBACK, self._port)

        await child.until(answers, within_s=READY_S, what="an answer to PING")
        self._settled = True
        return self.url


ROLE = "llm-d.ai/role"
_LISTENING = re.compile(r"listening on http://(\S+:\d+)")


class Simulator:
    """Simulator number `number`, which serves the first of `models` as base model, the rest as adapters.
    `role` is the value of the simulator's label `llm-d.ai/role`; '' without this label."""

    def __init__(self, number: int, options: SimOptions, models: Sequence[str], role: str = "") -> None:
        self.name = f"endpoint-{number}"
        self.role = role
        self._options = options
        self._models = models
        self._address = ""

    @property
    def address(self) -> str:
        """The simulator's `ip:port`; '' before the simulator is ready for the first time."""
        return self._address

    @property
    def entry(self) -> dict[str, Any]:
        """The simulator's entry of static discovery."""
        return {"address": self._address, **({"labels": {ROLE: self.role}} if self.role else {})}

    def command(self) -> list[str]:
        port = self._address.rpartition(":")[2] or "0"
        given = {
            "--ttft": self._options.ttft_ms,
            "--itl": self._options.itl_ms,
            "--max-num-seqs": self._options.max_num_seqs,
            "--seed": self._options.seed,
            "--model": self._models[0] if self._models else None,
            "--loras": ",".join(self._models[1:]) or None,
        }
        flags = [word for key, value in given.items() if value is not None for word in (key, f"{value}")]
        return picker_command("sim", "--port", port, *flags)

    async def ready(self, child: Child) -> str:
        async def listening() -> str | None:
            return next((match[1] for line in child.lines() if (match := _LISTENING.search(line))), None)

        self._address = await child.until(listening, within_s=READY_S, what="its address")
        return f"http://{self._address}"


def overlaid(
    settings: Settings, *, redis_url: str, endpoints: Mapping[str, Sequence[dict[str, Any]]] | None
) -> dict[str, Any]:
    """The keys that are set in `settings` as a plain tree, with `redis_url` and each pool's `endpoints`
    (entries of static discovery).

    If `endpoints` is None, the discovery of `settings` stays. The replicas trust the same headers as this
    fleet's Envoy. `settings` already includes PICKER_* variables, so the replicas start without variables.

    Raises:
        ConfigError: the resulting configuration is not valid.
    """
    tree: dict[str, Any] = _plain(settings.model_dump(exclude_unset=True))
    tree["extproc"] = {**tree.get("extproc", {}), "trusted_headers": list(trusted_headers(settings))}
    tree["redis"] = {**tree.get("redis", {}), "url": redis_url}
    if settings.pools:
        tree["pools"] = {name: _plain(pool.own) for name, pool in settings.pools.items()}
    for pool, entries in (endpoints or {}).items():
        section = tree["pools"][pool] if settings.pools else tree
        section["discovery"] = {"static": list(entries)}
    parse(tree)
    return tree


def served_models(settings: Settings) -> tuple[str, ...]:
    """The models that `settings` require of model servers, base models first; () if any model will do."""
    names = [target.name for model in settings.models for target in (model.target_models or (model,))]
    return tuple(dict.fromkeys((*names, *settings.scheduling.adapters))) if names else ()


def _plain(value: Any) -> Any:
    """The value `value` converted to types that YAML can represent."""
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Enum):
        return value.name.capitalize()
    if isinstance(value, Path):
        return str(value.absolute())  # the replica's configuration file is in another folder
    return value


@dataclass(frozen=True, slots=True)
class Announcement:
    """The JSON line `{"ready": true, "id", …}` that a replica prints once its listeners are bound."""

    id: str
    grpc: str  # host:port of the gRPC listener
    admin: str  # http://host:port of the admin API
    http: str | None = None  # host:port for the mode `http`; None if the mode is off


class Replica:
    """Replica number `number`. Each start calls `tree`, which returns the configuration without listeners.

    If `http`, the replica also serves the mode `http`.
    """

    def __init__(
        self,
        number: int,
        admin_port: int,
        folder: Path,
        tree: Callable[[], Mapping[str, Any]],
        *,
        http: bool = False,
    ) -> None:
        self.name = f"replica-{number}"
        self._file = folder / f"{self.name}.yaml"
        self._tree = tree
        self._admin = f"{LOOPBACK}:{admin_port}"
        self._grpc = f"{LOOPBACK}:0"
        self._http = f"{LOOPBACK}:0" if http else None
        self._announced = Announcement(id="", grpc=self._grpc, admin="")

    @property
    def announced(self) -> Announcement:
        """The last announcement of the replica. Each start has a new id, but the same addresses."""
        return self._announced

    @property
    def host(self) -> tuple[str, int]:
        """The host and port by which Envoy reaches the replica's gRPC listener."""
        return split_host_port(self._announced.grpc)

    @property
    def http_host(self) -> tuple[str, int]:
        """The host and port by which Envoy reaches the replica in the mode `http`."""
        assert self._announced.http is not None
        return split_host_port(self._announced.http)

    def command(self) -> list[str]:
        tree = dict(self._tree())
        tree["extproc"] = {**tree.get("extproc", {}), "listen": self._grpc}
        tree["admin"] = {**tree.get("admin", {}), "listen": self._admin, "tls": None}  # loopback: no TLS
        if self._http is not None:
            tree["http"] = {**tree.get("http", {}), "listen": self._http}
        write_private(self._file, yaml.safe_dump(tree, sort_keys=False))
        return picker_command("serve", "--config", str(self._file))

    async def ready(self, child: Child) -> str:
        async def announced() -> Announcement | None:
            return next(filter(None, map(_announcement, child.lines())), None)

        self._announced = await child.until(announced, within_s=READY_S, what="its ready line")
        self._grpc = self._announced.grpc
        self._admin = self._announced.admin.removeprefix("http://")
        self._http = self._announced.http
        return f"grpc {self._announced.grpc}, admin {self._announced.admin}"


def _announcement(line: str) -> Announcement | None:
    if not line.startswith('{"ready"'):  # a line that is no announcement is a log entry
        return None
    try:
        return msgspec.json.decode(line, type=Announcement)
    except msgspec.MsgspecError:
        return None
