"""The fleet under attack: Valkey, replicas, simulators, two hostile model servers, and Envoy for strangers.

Envoy is as `picker envoy-config` prints it, with the flow by API key (deploy/examples); attackers have a key.
"""

import asyncio
import contextlib
import hashlib
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.hostile.target import ATTACKER, HONEST, MODEL, TRAP, Target
from picker_fleet.allowlist import FAIRNESS_ID
from picker_fleet.config import parse
from picker_tools.local_fleet.envoy import Envoy, build_bootstrap, to_yaml
from picker_tools.local_fleet.network import LOOPBACK
from picker_tools.local_fleet.parts import Replica, SimOptions, Simulator, Valkey
from picker_tools.local_fleet.processes import Report, Supervisor

MIB = 1024 * 1024
# What each process may have, of deploy/kubernetes and docker-compose.yml.
LIMITS_MIB = {"replica": 512, "envoy": 512, "valkey": 640, "endpoint": 256}

_EXAMPLE = Path(__file__).parents[2] / "deploy" / "examples" / "api_key.py"
_GRACE_S = 10.0
_READY_S = 60.0
_LOOK_S = 0.05
_HEAP_BYTES = 400 * MIB
_CONFIG: dict[str, Any] = {
    "extproc": {"trusted_headers": [FAIRNESS_ID[0]]},
    "models": [
        {"name": MODEL, "endpoint_labels": {"kind": "good"}},
        {"name": TRAP, "endpoint_labels": {"kind": "bad"}},
    ],
    "objectives": [{"name": "gold", "criticality": "Critical", "weight": 9.0}],
    "request_queue_controller": {"watermark_per_backend": 8},
    "scheduling": {"scorers": [{"name": "queue-depth", "weight": 2}, {"name": "kv-cache", "weight": 2}]},
}


class _Hostile(Simulator):
    """A model server of `bench.hostile.server`."""

    def __init__(self, number: int, kind: str) -> None:
        super().__init__(number, SimOptions(), ())
        self.name = f"hostile-{kind}"
        self._kind = kind

    def command(self) -> list[str]:
        return [sys.executable, "-m", "bench.hostile.server", self._kind]


class _Edge(Envoy):
    """Envoy for strangers, whose flow is that of their key."""

    def command(self) -> list[str]:
        command = super().command()
        keys = self._file.with_name("keys.yaml")
        keys.write_text(
            yaml.safe_dump({hashlib.sha256(key.encode()).hexdigest(): key for key in (HONEST, ATTACKER)})
        )
        plain = build_bootstrap(
            self._settings,
            mode=self._mode,
            listen=(LOOPBACK, self._port),
            admin=(LOOPBACK, self._admin_port),
            pickers=self._pickers,
            max_heap_bytes=_HEAP_BYTES,
        )
        made = subprocess.run(
            [sys.executable, str(_EXAMPLE), str(keys)],
            input=to_yaml(plain),
            capture_output=True,
            text=True,
            timeout=_READY_S,
            check=True,
        )
        self._file.write_text(made.stdout)
        return command


@dataclass(frozen=True, slots=True)
class Stage:
    """A running fleet. `target` is what attackers know; `pids` are its processes by name."""

    target: Target
    pids: dict[str, int]

    def peaks_mib(self) -> dict[str, float]:
        """The most memory that each process had in its life; 0 for one that has ended."""
        return {name: _peak_bytes(pid) / MIB for name, pid in self.pids.items()}


def limit_mib(name: str) -> int | None:
    """What the process `name` may have; None for those that are no part of the product."""
    return next((limit for kind, limit in LIMITS_MIB.items() if name.startswith(kind)), None)


def _peak_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)


@contextlib.asynccontextmanager
async def running(replicas: int, simulators: int) -> AsyncIterator[Stage]:
    """Start all of it; it ends with the block.

    Raises:
        StartupError: a part did not start, or ended within the block.
    """
    with tempfile.TemporaryDirectory(prefix="hostile-") as name:
        folder = Path(name)
        supervisor = Supervisor(folder, Report())
        valkey = Valkey(folder)
        options = SimOptions(ttft_ms=40, itl_ms=10, max_num_seqs=32)
        servers = [Simulator(number, options, (MODEL,)) for number in range(1, simulators + 1)]
        hostile = [_Hostile(number, kind) for number, kind in enumerate(("big", "slow"), 1)]
        parts: list[Any] = [valkey, *servers, *hostile]
        try:
            await supervisor.bring_up([valkey], attempts=3)
            await supervisor.bring_up([*servers, *hostile])
            endpoints = [
                *({"address": each.address, "labels": {"kind": "good"}} for each in servers),
                *({"address": each.address, "labels": {"kind": "bad"}} for each in hostile),
            ]
            tree = {**_CONFIG, "redis": {"url": valkey.url}, "discovery": {"static": endpoints}}
            pickers = [Replica(number, 0, folder, lambda: tree) for number in range(1, replicas + 1)]
            parts = [*pickers, *parts]
            await supervisor.bring_up(pickers)
            hosts = [each.host for each in pickers]
            envoy = _Edge(parse(tree), "lean", 0, hosts, folder, debug_headers=False)
            parts = [envoy, *parts]
            await supervisor.bring_up([envoy])
            async with asyncio.timeout(_READY_S):
                while await envoy.missing(len(endpoints)) is not None:
                    supervisor.check()
                    await asyncio.sleep(_LOOK_S)
            yield Stage(
                Target(
                    envoy.url.removeprefix("http://"),
                    tuple(each.announced.grpc for each in pickers),
                    tuple(each.announced.admin.removeprefix("http://") for each in pickers),
                ),
                {part.name: supervisor.pid(part) for part in parts},
            )
            supervisor.check()
        finally:
            await supervisor.stop(parts, _GRACE_S)
