"""Runs the Go picker and this picker behind an Envoy each, configured like a gateway, with the same flags and
one real API server (tests/kubernetes/seat.py), and measures both with 100 endpoints.

The Go picker is cmd/epp of sigs.k8s.io/gateway-api-inference-extension v1.5.0, built in an empty folder by:

    go mod init build
    go mod edit -require=sigs.k8s.io/gateway-api-inference-extension@v1.5.0
    printf 'package main\\n\\nimport _ "sigs.k8s.io/gateway-api-inference-extension/cmd/epp"\\n' >epp.go
    go mod tidy -e
    CGO_ENABLED=0 go build -o FILE sigs.k8s.io/gateway-api-inference-extension/cmd/epp
"""

import asyncio
import contextlib
import itertools
import random
import statistics
import string
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from api_server import NAMESPACE, ApiServer
from seat import APP, Seat, opened, publish

from bench.large_pool.child import address, start_servers
from bench.rig.report import cpu_ns, percentile
from picker_tools.load.generator import Client, Load, Request, steady
from picker_tools.local_fleet.network import until
from picker_tools.local_fleet.processes import picker_command

GO, OURS = "the Go picker", "this picker, standard"
# The configuration of both pickers: the default of the Go picker and of the Go picker's chart.
_CONFIG = """\
apiVersion: inference.networking.x-k8s.io/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorer
- type: kv-cache-utilization-scorer
- type: prefix-cache-scorer
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: queue-scorer
    weight: 2
  - pluginRef: kv-cache-utilization-scorer
    weight: 2
  - pluginRef: prefix-cache-scorer
    weight: 3
"""
_FLAGS = ("--secure-serving=false", "--tracing=false", "--v=1")
_SERVING_S = 60.0


@dataclass(frozen=True, slots=True)
class Behind:
    """A picker behind a gateway's Envoy, to which the benchmark sends load. The Go picker has no Valkey."""

    seat: Seat
    url: str
    has_valkey: bool

    def cpu_us(self) -> tuple[float, float, float]:
        """CPU time in µs of the picker, Valkey and Envoy since they started."""
        seat = self.seat
        processes = seat.pickers[0].process, seat.redis.process if self.has_valkey else None, seat.envoy
        picker, valkey, envoy = (cpu_ns([process.pid] if process else []) / 1000 for process in processes)
        return picker, valkey, envoy


@contextlib.asynccontextmanager
async def behind_gateway(
    cluster: ApiServer, folder: Path, pool: str, go: str = "", *, config: str = _CONFIG
) -> AsyncIterator[Behind]:
    """Run a picker for `pool` behind an Envoy: the Go picker's binary `go`, else this picker. `config` is the
    text of an EndpointPickerConfig."""
    launch: Callable[..., list[str]] = (lambda _, *flags: [go, *flags]) if go else picker_command
    async with opened(folder) as here:
        here.tls = False
        flags = (*_FLAGS, "--config-text", config)
        await here.start_picker(cluster.kubeconfig("admin"), pool, NAMESPACE, *flags, launch=launch)
        # Envoy does not check health: not every picker answers health checks on its ext_proc port.
        publish(discovery := folder / "pickers.json", [here.pickers[0].grpc])
        gateway = await here.start_gateway(discovery=discovery)

        async def serves() -> bool:
            return (await here.ask()).status_code == 200

        assert await until(serves, within_s=_SERVING_S), f"no request is served; logs in {here.folder}"
        yield Behind(here, str(gateway.base_url), has_valkey=not go)


def put_pods(cluster: ApiServer, endpoints: Sequence[str], pool: str) -> None:
    """Create an InferencePool with a ready pod at each of `endpoints`, which all have the same port."""
    labels = {**APP, "pool": pool}
    cluster.put_pool(pool, [int(endpoints[0].rpartition(":")[2])], labels)
    for number, endpoint in enumerate(endpoints):
        cluster.put_pod(f"{pool}-{number}", endpoint.rpartition(":")[0], labels)


_HUNDRED = 100
_PAGE = Path(__file__).parents[2] / "tests" / "data" / "pages" / "vllm-0.10-lora.prom"
_SETTLE_S, _REST_S = 5.0, 10.0
_PER_S, _SENT_S = 20, 15
_BODIES = 40  # number of different prompts
_WHAT = {"at rest": 0, f"{_PER_S}/s of 1 KB": 1000, f"{_PER_S}/s of 400 KB": 400_000}  # bytes a body


@dataclass(slots=True)
class Hundred:
    """Figures with 100 endpoints, by kind of load: cores of picker and Valkey, ms to an answer's end."""

    picker: dict[str, list[float]] = field(default_factory=lambda: {what: [] for what in _WHAT})
    valkey: dict[str, list[float]] = field(default_factory=lambda: {what: [] for what in _WHAT})
    took_ms: dict[str, list[float]] = field(default_factory=lambda: {what: [] for what in _WHAT})
    unserved: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_WHAT, 0))

    HEAD = ("100 endpoints", "target", "picker, cores", "Valkey, cores", "p50 ms", "p99 ms", "unserved")

    async def measure(self, target: Behind) -> None:
        dice = random.Random(29)
        for what, size in _WHAT.items():
            await asyncio.sleep(_SETTLE_S)
            before, began_s = target.cpu_us(), time.monotonic()
            if size:
                took_ms, unserved = await _at_rate(target.url, [_request(dice, size) for _ in range(_BODIES)])
                self.took_ms[what] += took_ms
                self.unserved[what] += unserved
            else:
                await asyncio.sleep(_REST_S)
            lasted_us = (time.monotonic() - began_s) * 1e6
            picker, valkey, _ = (
                (now - then) / lasted_us for now, then in zip(target.cpu_us(), before, strict=True)
            )
            self.picker[what].append(picker)
            self.valkey[what].append(valkey)

    def rows(self, name: str) -> list[list[str]]:
        """Rows of the table, one per kind of load: median cores of the rounds, latencies of all requests."""
        return [
            [
                what,
                name,
                *(f"{statistics.median(each[what]):.3f}" for each in (self.picker, self.valkey)),
                *(f"{percentile(self.took_ms[what], share):.1f}" if size else "–" for share in (0.5, 0.99)),
                f"{self.unserved[what]}",
            ]
            for what, size in _WHAT.items()
        ]


def _request(dice: random.Random, size: int) -> Request:
    room = size - len(Request("", 1).body())
    return Request("".join(dice.choices(string.ascii_lowercase + " ", k=room)), 1)


async def _at_rate(url: str, requests: Sequence[Request]) -> tuple[list[float], int]:
    """Send `requests` in turn, `_PER_S` a second. Returns the ms from each due time to a served answer's end,
    and the number of unserved requests."""
    plan = steady(_PER_S, lambda _, number: requests[number % len(requests)])
    with Client(url) as client:
        load = Load(client)
        await load.send_open(itertools.islice(plan, _PER_S * _SENT_S))
    return [1000 * (each.done_s - each.due_s) for each in load.history if each.served], len(load.unserved)


async def hundred_endpoints(seat: Seat) -> list[str]:
    """Start 100 model servers that answer at once, with vLLM's metrics page; return their addresses."""
    await start_servers(seat, _HUNDRED, str(_PAGE))
    return [f"{address(number)}:{seat.port}" for number in range(_HUNDRED)]
