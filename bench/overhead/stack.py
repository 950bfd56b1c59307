"""One variant as running processes: Envoy, its picker, Valkey; and the shared model servers."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import yaml

from bench.rig.load import MODEL
from bench.rig.machine import cpu_ns
from picker_fleet.config import parse
from picker_fleet.errors import StartupError
from picker_fleet.units import split_host_port
from picker_tools.local_fleet.envoy import Envoy, Host
from picker_tools.local_fleet.network import LOOPBACK, until
from picker_tools.local_fleet.parts import Mode, Replica, SimOptions, Simulator, Valkey
from picker_tools.local_fleet.processes import READY_S, Child, Part, Report, Supervisor

_EXT_PROC = "envoy.filters.http.ext_proc"
_ENDPOINTS = 2
_SERVING_S = 30.0
_GRACE_S = 10.0
_VALKEY_ATTEMPTS = 3
_PLENTY = 100_000
_NO_REDIS = "redis://127.0.0.1:1/0"  # never used: this configuration only makes Envoy's


@dataclass(frozen=True, slots=True)
class Variant:
    """What answers Envoy: `none` (no picker; Envoy balances by itself), a constant picker, or `replicas`.

    `bound` is how many requests an endpoint may have in flight. `part` is what replicas do of their work, ''
    for all (bench/overhead/reduced_replica.py).
    """

    name: str
    mode: Mode
    kind: Literal["none", "constant", "terse", "replica"] = "replica"
    scorers: tuple[str, ...] = ()
    replicas: int = 1
    bound: int = _PLENTY
    part: str = ""


class ConstantPickerPart:
    """`bench.constant_picker`, which answers with one of `endpoints`."""

    name = "constant-picker"

    def __init__(self, endpoints: Sequence[str], *, terse: bool) -> None:
        self._endpoints = endpoints
        self._terse = terse
        self._grpc = f"{LOOPBACK}:0"

    @property
    def host(self) -> tuple[str, int]:
        """Its address for Envoy."""
        return split_host_port(self._grpc)

    def command(self) -> list[str]:
        arguments = [word for endpoint in self._endpoints for word in ("--endpoint", endpoint)]
        arguments += ["--terse"] * self._terse
        return [sys.executable, "-m", "bench.constant_picker", "--listen", self._grpc, *arguments]

    async def ready(self, child: Child) -> str:
        async def listening() -> str | None:
            lines = child.lines()
            return str(json.loads(lines[-1])["grpc"]) if lines else None

        self._grpc = await child.until(listening, within_s=READY_S, what="its ready line")
        return self._grpc


class LargeCacheSimulator(Simulator):
    """A model server with a cache for many 400 KB prompts at once."""

    def command(self) -> list[str]:
        return [*super().command(), "--kv-blocks", "1000000"]


class ReducedReplica(Replica):
    """A replica that does only a `part` of its work."""

    def __init__(self, part: str, *about: Any, **more: Any) -> None:
        super().__init__(*about, **more)
        self._part = part

    def command(self) -> list[str]:
        command = super().command()
        serve = command[command.index("serve") :]
        return [sys.executable, "-m", "bench.overhead.reduced_replica", self._part, *serve]


class QuietReport(Report):
    """Reports problems only."""

    def ready(self, name: str, where: str) -> None:
        pass


def _without_picker(bootstrap: str) -> str:
    """Envoy's bootstrap without the ext_proc filter."""

    tree = yaml.safe_load(bootstrap)
    for listener in tree["staticResources"]["listeners"]:
        manager = listener["filterChains"][0]["filters"][0]["typedConfig"]
        manager["httpFilters"] = [each for each in manager["httpFilters"] if each["name"] != _EXT_PROC]
    return str(yaml.safe_dump(tree, sort_keys=False))


class Stack:
    """The processes of one variant."""

    def __init__(
        self,
        supervisor: Supervisor,
        envoy: Envoy,
        pickers: Sequence[ConstantPickerPart | Replica],
        valkey: Valkey | None,
    ) -> None:
        self._supervisor, self._envoy, self._pickers, self._valkey = supervisor, envoy, pickers, valkey

    @property
    def url(self) -> str:
        return self._envoy.url

    def cpu_us(self) -> tuple[float, float, float]:
        """CPU time since start of pickers, Valkey (0 where there is none) and Envoy, in microseconds."""
        kinds = (self._pickers, [self._valkey] if self._valkey is not None else [], [self._envoy])
        picker, valkey, envoy = (cpu_ns(map(self._supervisor.pid, parts)) / 1000 for parts in kinds)
        return picker, valkey, envoy

    async def wait_until_serving(self, endpoints: int) -> None:
        """Wait until Envoy has all endpoints and healthy pickers.

        Raises:
            StartupError: not within half a minute.
        """
        why = ""

        async def serves() -> bool:
            nonlocal why
            why = await self._envoy.missing(endpoints) or ""
            return not why

        if not await until(serves, within_s=_SERVING_S):
            raise StartupError(f"Envoy does not serve: {why}")


class _ProcessGroup:
    """Child processes in a folder of their own; they end with the block."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.supervisor = Supervisor(folder, QuietReport())
        self._parts: list[Part] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(self.supervisor.stop(self._parts, _GRACE_S))

    async def bring_up(self, *parts: Part, attempts: int = 1) -> None:
        self._parts.extend(parts)
        await self.supervisor.bring_up(parts, attempts=attempts)


@contextlib.asynccontextmanager
async def model_servers(folder: Path, itl_ms: float) -> AsyncIterator[list[str]]:
    """Simulated model servers (`ip:port`) that begin to answer at once."""
    options = SimOptions(ttft_ms=0.0, itl_ms=itl_ms)
    parts = [LargeCacheSimulator(number + 1, options, (MODEL,)) for number in range(_ENDPOINTS)]
    async with _ProcessGroup(folder / "models") as group:
        await group.bring_up(*parts)
        yield [part.address for part in parts]


@contextlib.asynccontextmanager
async def stack(variant: Variant, endpoints: Sequence[str], folder: Path) -> AsyncIterator[Stack]:
    """The processes of `variant`, ready; they end with the block.

    Raises:
        StartupError: a part did not become ready.
    """
    own = folder / variant.name.replace(" ", "-")
    async with _ProcessGroup(own) as group:
        valkey, tree = None, _tree(variant, _NO_REDIS, endpoints)
        pickers: Sequence[ConstantPickerPart | Replica]
        http_pickers: list[Host] = []
        if variant.kind == "replica":
            valkey = Valkey(own)
            await group.bring_up(valkey, attempts=_VALKEY_ATTEMPTS)
            tree = _tree(variant, valkey.socket_url, endpoints)
            over_http = variant.mode == "http"
            make = partial(ReducedReplica, variant.part) if variant.part else Replica
            replicas = [make(1 + n, 0, own, lambda: tree, http=over_http) for n in range(variant.replicas)]
            await group.bring_up(*replicas)
            pickers, http_pickers = replicas, [each.http_host for each in replicas] if over_http else []
        else:  # for `none`, too: it serves endpoints and access logs
            pickers = [ConstantPickerPart(endpoints, terse=variant.kind == "terse")]
            await group.bring_up(*pickers)
        envoy = Envoy(
            parse(tree),
            variant.mode,
            0,
            [picker.host for picker in pickers],
            own,
            http_pickers=http_pickers,
            edit=_without_picker if variant.kind == "none" else str,
        )
        await group.bring_up(envoy)
        running = Stack(group.supervisor, envoy, pickers, valkey)
        await running.wait_until_serving(len(endpoints))
        yield running


def _tree(variant: Variant, redis_url: str, endpoints: Sequence[str]) -> dict[str, Any]:
    """The replicas' configuration."""
    return {
        "pool": "bench",
        "redis": {"url": redis_url},
        "discovery": {"static": [{"address": address} for address in endpoints]},
        "request_queue_controller": {
            "watermark_per_backend": variant.bound,
            "lower_bound_per_backend": variant.bound,
            "upper_bound_per_backend": variant.bound,
        },
        "fair_request_queue": {"total_capacity": _PLENTY, "flow_capacity": _PLENTY},
        "scheduling": {"scorers": [{"name": name} for name in variant.scorers]},
    }
