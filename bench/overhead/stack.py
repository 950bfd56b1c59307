"""One variant as running processes: Envoy, its pickers, Valkey; shared model servers."""

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from bench.overhead.cases import MODEL, QUEUED_WATERMARK, Variant
from bench.rig.machine import cpu_ns
from picker_fleet.config import parse
from picker_fleet.errors import StartupError
from picker_fleet.units import split_host_port
from picker_tools.local_fleet.envoy import Envoy
from picker_tools.local_fleet.network import LOOPBACK, get, until
from picker_tools.local_fleet.parts import Mode, Replica, SimOptions, Simulator, Valkey
from picker_tools.local_fleet.processes import READY_S, Child, Part, Report, Supervisor

_EXT_PROC = "envoy.filters.http.ext_proc"


class ConstantPickerPart:
    """The baseline: `bench.constant_picker` number `number`, which answers with one of `endpoints`."""

    def __init__(self, number: int, endpoints: Sequence[str], *, terse: bool) -> None:
        self.name = f"constant-{number}"
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


class EnvoyWithoutPicker(Envoy):
    """The same Envoy and bootstrap without ext_proc: it balances by itself."""

    def command(self) -> list[str]:
        words = super().command()
        file = Path(words[words.index("--config-path") + 1])
        bootstrap = yaml.safe_load(file.read_text(encoding="utf-8"))
        file.write_text(
            yaml.safe_dump(_remove_entries(bootstrap, _EXT_PROC), sort_keys=False), encoding="utf-8"
        )
        return words


class LargeCacheSimulator(Simulator):
    """A model server with a cache for many 400 KB prompts at once."""

    def command(self) -> list[str]:
        return [*super().command(), "--kv-blocks", "1000000"]


class QuietReport(Report):
    """Reports problems only."""

    def ready(self, name: str, where: str) -> None:
        pass


def _remove_entries(tree: Any, name: str) -> Any:
    """`tree` without the list entries called `name`."""
    if isinstance(tree, dict):
        return {key: _remove_entries(each, name) for key, each in tree.items()}
    if isinstance(tree, list):
        named = (each for each in tree if not (isinstance(each, dict) and each.get("name") == name))
        return [_remove_entries(each, name) for each in named]
    return tree


_ENDPOINTS = 2
_QUEUED_TTFT_MS = 4.0  # so long that requests wait for the bound and not for the machine
_SERVING_S = 30.0
_GRACE_S = 10.0
_VALKEY_ATTEMPTS = 3
_PLENTY = 100_000
_NO_REDIS = "redis://127.0.0.1:1/0"  # never used: this configuration only makes Envoy's
_BYPASSES = re.compile(rb"^epp_bypass_total(?:\{[^}]*\})? (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CpuTime:
    """CPU time since start, in nanoseconds, of each kind of process; Valkey's is 0 where there is none."""

    picker_ns: int = 0
    envoy_ns: int = 0
    valkey_ns: int = 0

    def __add__(self, other: "CpuTime") -> "CpuTime":
        return CpuTime(
            self.picker_ns + other.picker_ns,
            self.envoy_ns + other.envoy_ns,
            self.valkey_ns + other.valkey_ns,
        )

    def __sub__(self, earlier: "CpuTime") -> "CpuTime":
        return CpuTime(
            self.picker_ns - earlier.picker_ns,
            self.envoy_ns - earlier.envoy_ns,
            self.valkey_ns - earlier.valkey_ns,
        )

    def __truediv__(self, parts: int) -> "CpuTime":
        return CpuTime(self.picker_ns // parts, self.envoy_ns // parts, self.valkey_ns // parts)


class Stack:
    """The processes of one variant. `pickers` are all of its replicas."""

    def __init__(
        self,
        variant: Variant,
        supervisor: Supervisor,
        envoy: Envoy,
        pickers: Sequence[ConstantPickerPart | Replica],
        valkey: Valkey | None,
    ) -> None:
        self.variant = variant
        self._supervisor = supervisor
        self._envoy = envoy
        self._pickers = pickers
        self._valkey = valkey

    @property
    def url(self) -> str:
        return self._envoy.url

    @property
    def picker_pids(self) -> list[int]:
        return [self._supervisor.pid(part) for part in self._pickers]

    @property
    def valkey_pid(self) -> int | None:
        return self._supervisor.pid(self._valkey) if self._valkey is not None else None

    def cpu(self) -> CpuTime:
        return CpuTime(
            picker_ns=cpu_ns(self.picker_pids),
            envoy_ns=cpu_ns([self._supervisor.pid(self._envoy)]),
            valkey_ns=cpu_ns([self.valkey_pid]) if self.valkey_pid is not None else 0,
        )

    async def bypass_count(self) -> int:
        """How many requests bypassed the queue so far, by the replicas' metrics."""
        total = 0.0
        for part in self._pickers:
            if isinstance(part, Replica):
                page = await get(f"{part.announced.admin}/metrics")
                if page is None:
                    raise StartupError(f"{part.name}: its metrics page does not answer")
                total += sum(float(count) for count in _BYPASSES.findall(page.body))
        return int(total)

    async def wait_until_serving(self) -> None:
        """Wait until Envoy has all endpoints and healthy pickers.

        Raises:
            StartupError: not within half a minute.
        """
        why = ""

        async def probe() -> bool | None:
            nonlocal why
            why = await self._envoy.missing(_ENDPOINTS) or ""
            return None if why else True

        if await until(probe, within_s=_SERVING_S) is None:
            raise StartupError(f"{self.variant} does not serve: {why}")


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
async def model_servers(folder: Path, *, slow: bool) -> AsyncIterator[list[str]]:
    """Simulated model servers (`ip:port`) that answer at once, or `slow` after a few milliseconds."""
    options = SimOptions(ttft_ms=_QUEUED_TTFT_MS if slow else 0.0, itl_ms=0.0)
    parts = [LargeCacheSimulator(number + 1, options, (MODEL,)) for number in range(_ENDPOINTS)]
    async with _ProcessGroup(folder / ("models-slow" if slow else "models")) as group:
        await group.bring_up(*parts)
        yield [part.address for part in parts]


@contextlib.asynccontextmanager
async def stack(
    variant: Variant, mode: Mode, replicas: int, endpoints: Sequence[str], folder: Path
) -> AsyncIterator[Stack]:
    """The processes of `variant`, ready; they end with the block.

    Raises:
        StartupError: a part did not become ready.
    """
    own = folder / variant
    numbers = range(1, replicas + 1)
    valkey = None if variant in ("none", "constant", "terse") else Valkey(own)
    async with _ProcessGroup(own) as group:
        if valkey is not None:
            await group.bring_up(valkey, attempts=_VALKEY_ATTEMPTS)
        tree = _tree(variant, valkey.socket_url if valkey is not None else _NO_REDIS, endpoints)
        pickers: Sequence[ConstantPickerPart | Replica]
        if valkey is not None:
            pickers = [Replica(number, 0, own, lambda: tree) for number in numbers]
        else:  # for `none`, too: it serves endpoints and access logs
            pickers = [ConstantPickerPart(number, endpoints, terse=variant == "terse") for number in numbers]
        await group.bring_up(*pickers)
        kind = EnvoyWithoutPicker if variant == "none" else Envoy
        hosts = [picker.host for picker in pickers]
        envoy = kind(parse(tree), mode, 0, hosts, own, debug_headers=False)
        await group.bring_up(envoy)
        running = Stack(variant, group.supervisor, envoy, pickers, valkey)
        await running.wait_until_serving()
        yield running


def _tree(variant: Variant, redis_url: str, endpoints: Sequence[str]) -> dict[str, Any]:
    """The replicas' configuration: no limits, or for `queued` a low bound and a long queue."""
    return {
        "pool": "bench",
        "redis": {"url": redis_url},
        "discovery": {"static": [{"address": address} for address in endpoints]},
        "request_queue_controller": {
            "watermark_per_backend": QUEUED_WATERMARK if variant == "queued" else _PLENTY
        },
        "fair_request_queue": {"total_capacity": _PLENTY, "flow_capacity": _PLENTY},
    }
