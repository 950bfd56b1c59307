"""A fleet without Envoy: a Valkey, replicas, simulated model servers, each a process of its own."""

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from picker_fleet.endpoints.metrics_page import samples
from picker_tools.local_fleet.network import get
from picker_tools.local_fleet.parts import Replica, SimOptions, Simulator, Valkey
from picker_tools.local_fleet.processes import Report, Supervisor

_READY_S = 60.0
_LOOK_S = 0.05
_GRACE_S = 10.0
_CALL_S = 10.0


class _Quiet(Report):
    def _say(self, word: str, colour: str, name: str, text: str) -> None:
        if word != "ready":
            super()._say(word, colour, name, text)


class _Variant(Replica):
    """A replica of `bench.prefix.replica`."""

    def __init__(self, number: int, folder: Path, tree: Mapping[str, Any], variant: str) -> None:
        super().__init__(number, 0, folder, lambda: tree)
        self._variant = variant

    def command(self) -> list[str]:
        config = super().command()[-1]
        return [sys.executable, "-m", "bench.prefix.replica", self._variant, config]


class _Server(Simulator):
    """A model server with flags of its own."""

    def __init__(self, number: int, flags: Sequence[str]) -> None:
        super().__init__(number, SimOptions(), ())
        self._flags = flags

    def command(self) -> list[str]:
        return [*super().command(), *self._flags]


@dataclass(frozen=True, slots=True)
class Running:
    """A fleet that is ready: gRPC addresses and admin URLs of its replicas, addresses of its endpoints."""

    grpc: tuple[str, ...]
    admin: tuple[str, ...]
    endpoints: tuple[str, ...]

    async def in_flight(self) -> dict[str, int]:
        """Requests of the whole fleet by endpoint."""
        async with httpx.AsyncClient(trust_env=False, timeout=_CALL_S) as client:
            state = (await client.get(f"{self.admin[0]}/api/v1/state")).json()
        found: dict[str, int] = state["in_flight"]
        return found

    async def counted(self, series: str) -> float:
        """The sum of a counter over the pages of all model servers."""
        async with httpx.AsyncClient(trust_env=False, timeout=_CALL_S) as client:
            pages = [(await client.get(f"http://{address}/metrics")).content for address in self.endpoints]
        return sum(sample.value for page in pages for sample in samples(page, series.encode()))


@contextlib.asynccontextmanager
async def running(
    replicas: int,
    config: Mapping[str, Any],
    *,
    variant: str = "product",
    servers: Sequence[Sequence[str]] = (),
    endpoints: Sequence[str] = (),
) -> AsyncIterator[Running]:
    """Start a fleet under `config`; it ends with the block.

    `servers` are the flags of one simulated model server each; `endpoints` addresses in their place.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        supervisor = Supervisor(folder, _Quiet())
        valkey = Valkey(folder)
        models = [_Server(number, flags) for number, flags in enumerate(servers, 1)]
        parts: list[Any] = [valkey, *models]
        try:
            await supervisor.bring_up([valkey], attempts=3)
            await supervisor.bring_up(models)
            addresses = tuple(endpoints) or tuple(model.address for model in models)
            tree = {
                **config,
                "redis": {"url": valkey.url, "silence": "5s"},
                "discovery": {"static": [{"address": address} for address in addresses]},
            }
            fleet = [_Variant(number, folder, tree, variant) for number in range(1, replicas + 1)]
            parts = [*fleet, *parts]
            await supervisor.bring_up(fleet)
            announced = [replica.announced for replica in fleet]
            for each in announced:
                await _ready(each.admin)
            yield Running(
                tuple(each.grpc for each in announced), tuple(each.admin for each in announced), addresses
            )
        finally:
            await supervisor.stop(parts, _GRACE_S)


async def _ready(admin: str) -> None:
    async with asyncio.timeout(_READY_S):
        while True:
            answer = await get(f"{admin}/readyz")
            if answer is not None and answer.status == 200:
                return
            await asyncio.sleep(_LOOK_S)
