"""The bench's own parts beside those of the local fleet: the constant picker, and Envoy without a picker."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from picker_fleet.units import split_host_port
from picker_tools.local_fleet.envoy import Envoy
from picker_tools.local_fleet.network import LOOPBACK
from picker_tools.local_fleet.parts import Simulator
from picker_tools.local_fleet.processes import READY_S, Child, Report

_EXT_PROC = "envoy.filters.http.ext_proc"


class Constant:
    """The floor: `bench.constant_picker` number `number`, which answers with one of `endpoints`."""

    def __init__(self, number: int, endpoints: Sequence[str], *, terse: bool) -> None:
        self.name = f"constant-{number}"
        self._endpoints = endpoints
        self._terse = terse
        self._grpc = f"{LOOPBACK}:0"

    @property
    def host(self) -> tuple[str, int]:
        """Where Envoy reaches it."""
        return split_host_port(self._grpc)

    def command(self) -> list[str]:
        told = [word for endpoint in self._endpoints for word in ("--endpoint", endpoint)]
        told += ["--terse"] * self._terse
        return [sys.executable, "-m", "bench.constant_picker", "--listen", self._grpc, *told]

    async def ready(self, child: Child) -> str:
        async def listening() -> str | None:
            lines = child.lines()
            return str(json.loads(lines[-1])["grpc"]) if lines else None

        self._grpc = await child.until(listening, within_s=READY_S, what="its ready line")
        return self._grpc


class EnvoyAlone(Envoy):
    """The same Envoy with the same bootstrap, but that no picker is asked: it balances by itself."""

    def command(self) -> list[str]:
        words = super().command()
        file = Path(words[words.index("--config-path") + 1])
        bootstrap = yaml.safe_load(file.read_text(encoding="utf-8"))
        file.write_text(yaml.safe_dump(_without(bootstrap, _EXT_PROC), sort_keys=False), encoding="utf-8")
        return words


class RoomySimulator(Simulator):
    """A model server whose cache is large enough for many 400 KB prompts at once."""

    def command(self) -> list[str]:
        return [*super().command(), "--kv-blocks", "1000000"]


class QuietReport(Report):
    """Tells of trouble only."""

    def ready(self, name: str, where: str) -> None:
        pass


def _without(tree: Any, name: str) -> Any:
    """`tree` less every listed entry called `name`."""
    if isinstance(tree, dict):
        return {key: _without(each, name) for key, each in tree.items()}
    if isinstance(tree, list):
        named = (each for each in tree if not (isinstance(each, dict) and each.get("name") == name))
        return [_without(each, name) for each in named]
    return tree
