"""One variant standing: Envoy, the pickers behind it, and what these need; shared model servers."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bench.overhead.cases import MODEL, QUEUED_WATERMARK, Variant
from bench.overhead.parts import Constant, EnvoyAlone, QuietReport, RoomySimulator
from bench.overhead.processes import cpu_ns
from picker_fleet.config import parse
from picker_fleet.errors import StartupError
from picker_tools.local_fleet.envoy import Envoy
from picker_tools.local_fleet.network import get, until
from picker_tools.local_fleet.parts import Mode, Replica, SimOptions, Valkey
from picker_tools.local_fleet.processes import Part, Supervisor

_ENDPOINTS = 2
_QUEUED_TTFT_MS = 4.0  # long enough that the bound, not the machine, is what requests wait for
_SERVES_S = 30.0
_GRACE_S = 10.0
_VALKEY_ATTEMPTS = 3
_PLENTY = 100_000
_NO_REDIS = "redis://127.0.0.1:1/0"  # never asked: part of a configuration that only Envoy's is made of
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
        pickers: Sequence[Constant | Replica],
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

    async def bypasses(self) -> int:
        """How many requests went past the queue so far, by the replicas' own count."""
        total = 0.0
        for part in self._pickers:
            if isinstance(part, Replica):
                page = await get(f"{part.announced.admin}/metrics")
                if page is None:
                    raise StartupError(f"{part.name}: its metrics page does not answer")
                total += sum(float(count) for count in _BYPASSES.findall(page.body))
        return int(total)

    async def serves(self) -> None:
        """Wait until Envoy has all pickers healthy and all endpoints.

        Raises:
            StartupError: it has not within half a minute.
        """
        why = ""

        async def look() -> bool | None:
            nonlocal why
            why = await self._envoy.missing(_ENDPOINTS) or ""
            return None if why else True

        if await until(look, within_s=_SERVES_S) is None:
            raise StartupError(f"{self.variant} does not serve: {why}")


class _Crew:
    """Children in a folder of their own, which are gone after the block."""

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
    parts = [RoomySimulator(number + 1, options, (MODEL,)) for number in range(_ENDPOINTS)]
    async with _Crew(folder / ("models-slow" if slow else "models")) as crew:
        await crew.bring_up(*parts)
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
    async with _Crew(own) as crew:
        if valkey is not None:
            await crew.bring_up(valkey, attempts=_VALKEY_ATTEMPTS)
        tree = _tree(variant, valkey.socket_url if valkey is not None else _NO_REDIS, endpoints)
        pickers: Sequence[Constant | Replica]
        if valkey is not None:
            pickers = [Replica(number, 0, own, lambda: tree) for number in numbers]
        else:  # `none` too: somebody has to tell Envoy its endpoints and to take its access log
            pickers = [Constant(number, endpoints, terse=variant == "terse") for number in numbers]
        await crew.bring_up(*pickers)
        kind = EnvoyAlone if variant == "none" else Envoy
        hosts = [picker.host for picker in pickers]
        envoy = kind(parse(tree), mode, 0, hosts, own, debug_headers=False)
        await crew.bring_up(envoy)
        standing = Stack(variant, crew.supervisor, envoy, pickers, valkey)
        await standing.serves()
        yield standing


def _tree(variant: Variant, redis_url: str, endpoints: Sequence[str]) -> dict[str, Any]:
    """The replicas' configuration: room for all, or for `queued` a low bound and a long queue."""
    return {
        "pool": "bench",
        "redis": {"url": redis_url},
        "discovery": {"static": [{"address": address} for address in endpoints]},
        "request_queue_controller": {
            "watermark_per_backend": QUEUED_WATERMARK if variant == "queued" else _PLENTY
        },
        "fair_request_queue": {"total_capacity": _PLENTY, "flow_capacity": _PLENTY},
    }
