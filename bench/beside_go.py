"""`make bench-beside-go`: what a request costs beside a Go picker; writes bench/results/beside-go.md.

The Go picker (`--go FILE`, cmd/epp of sigs.k8s.io/gateway-api-inference-extension) and this one by the same
flags are behind an Envoy each as gateways configure it, with one real API server and the same model servers
(tests/kubernetes/seat.py). Modes that a gateway does not have are beside them, behind the Envoy of
`picker envoy-config`.
"""

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from api_server import NAMESPACE, ApiServer
from api_server import started as started_api
from seat import APP, Seat, opened, publish

from bench.overhead.measure import LARGE, LONG, SCORERS, SHORT, Reading, compare, send
from bench.overhead.stack import Variant, stack
from bench.rig.load import Driver
from bench.rig.machine import Machine, cpu_ns, describe_machine
from bench.rig.page import options_parser, table, write_page
from picker_tools.local_fleet.network import until
from picker_tools.local_fleet.processes import picker_command

_HOSTS = ("127.0.0.71", "127.0.0.72")
_MODEL = ("--ttft", "0", "--itl", "2", "--max-num-seqs", "256", "--kv-blocks", "1000000")
# Of both pickers. The configuration is the Go picker's default, and its chart's.
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
_FLAGS = ("--secure-serving=false", "--tracing=false", "--v=1", "--config-text", _CONFIG)
_SERVING_S = 60.0
_CASES = (SHORT, LONG, LARGE)
GO, OURS = "the Go picker", "this picker"
_HOW = " ".join((__doc__ or "").split("\n\n", 1)[1].split())
Readings = dict[str, dict[str, list[Reading]]]  # by case and variant, one a round


@dataclass(frozen=True, slots=True)
class Behind:
    """A picker behind an Envoy as gateways configure it, as the load sees it; the Go picker has no Valkey."""

    seat: Seat
    url: str
    has_valkey: bool

    def cpu_us(self) -> tuple[float, float, float]:
        """As `Stack.cpu_us`."""
        seat = self.seat
        processes = seat.pickers[0].process, seat.redis.process if self.has_valkey else None, seat.envoy
        picker, valkey, envoy = (cpu_ns([process.pid] if process else []) / 1000 for process in processes)
        return picker, valkey, envoy


async def behind(cluster: ApiServer, here: Seat, launch: Callable[..., list[str]]) -> Behind:
    """Start a picker by `launch`, and the Envoy in front of it."""
    here.tls = False
    await here.start_picker(cluster.kubeconfig("admin"), "llm", NAMESPACE, *_FLAGS, launch=launch)
    # Envoy checks no health: not every picker answers checks where it takes requests.
    publish(discovery := here.folder / "pickers.json", [here.pickers[0].grpc])
    gateway = await here.start_gateway(discovery=discovery)

    async def serves() -> bool:
        return (await here.ask()).status_code == 200

    assert await until(serves, within_s=_SERVING_S), f"nothing is served: {here.folder}"
    return Behind(here, str(gateway.base_url), has_valkey=launch is picker_command)


async def measure(folder: Path, cluster: ApiServer, go: str, rounds: int) -> Readings:
    """All cases with each variant; each round starts new processes."""
    found: Readings = {case.name: {} for case in _CASES}
    async with Driver.started() as driver, opened(folder / "models") as models:
        cluster.put_pool("llm", [models.port], APP)
        for number, host in enumerate(_HOSTS):
            await models.start_model(host, *_MODEL)
            cluster.put_pod(f"p{number}", host, APP)
        endpoints = [f"{host}:{models.port}" for host in _HOSTS]
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", flush=True)
            async with contextlib.AsyncExitStack() as stacks:
                own = folder / str(number)
                ours, theirs = [
                    await stacks.enter_async_context(opened(own / name)) for name in ("ours", "go")
                ]
                targets = {
                    f"{OURS}, standard": await behind(cluster, ours, picker_command),
                    GO: await behind(cluster, theirs, lambda _, *flags: [go, *flags]),
                } | {
                    f"{OURS}, {mode}": await stacks.enter_async_context(
                        stack(Variant(mode, mode, scorers=SCORERS), endpoints, own)
                    )
                    for mode in ("lean", "http")
                }
                none = Variant("none", "standard", "none")
                targets["no picker"] = await stacks.enter_async_context(stack(none, endpoints, own))
                for case in _CASES:
                    for target in targets.values():
                        await send(driver, target, case, case.busy // 3)
                    for name, reading in (await compare(driver, targets, case, number)).items():
                        found[case.name].setdefault(name, []).append(reading)
    return found


def _compared(readings: Mapping[str, Sequence[Reading]], name: str) -> list[str]:
    """A line of the table: medians, and the CPU by that of the Go picker, median and extremes."""
    own, go, none = readings[name], readings[GO], readings["no picker"]
    picker, valkey, envoy, rate = (
        median(getattr(each, what) for each in own)
        for what in ("picker_us", "valkey_us", "envoy_us", "requests_per_s")
    )
    added = median(a.p50_ms - b.p50_ms for a, b in zip(own, none, strict=True))
    ratios = [(a.picker_us + a.valkey_us) / b.picker_us for a, b in zip(own, go, strict=True)]
    alone = [a.picker_us / b.picker_us for a, b in zip(own, go, strict=True)]
    return [
        *(f"{each:.0f}" for each in (picker, valkey, envoy, rate)),
        f"{added:.2f}" if own[0].p50_ms else "–",
        *(f"{median(each):.2f} ({min(each):.2f}–{max(each):.2f})" for each in (alone, ratios)),
    ]


def page(found: Readings, here: Machine, rounds: int) -> str:
    """The page as Markdown."""
    head = ["request", "picker", "picker µs", "Valkey µs", "Envoy µs", "requests/s", "added p50 ms"]
    head += ["picker's CPU by the Go picker's", "with Valkey's"]
    rows = [
        [case, name, *_compared(readings, name)]
        for case, readings in found.items()
        for name in readings
        if name != "no picker"
    ]
    return (
        "# What a request costs beside the Go picker\n\n"
        f"`{here.command}`, {here.date}, {rounds} rounds, {here.cores} cores ({here.processor}), load "
        f"{here.load:.2f} before the run. {_HOW}\n\n"
        "All run side by side on the same cores and take turns; each round starts new processes. CPU is that "
        "of a pass at full speed (16 connections for 300 B, 8 else), added latency that of two connections "
        "up to the answer's headers, less that without a picker. Both pickers score endpoints by queue, KV "
        "cache and prefixes, as the Go picker's chart configures it; neither uses TLS or traces, nothing "
        "waits in a queue, and the model servers answer at once, 100 tokens with 2 ms between two. Ratios "
        "are medians of the rounds, with the lowest and the highest.\n\n" + table(head, rows) + "\n"
    )


def main(arguments: Sequence[str]) -> int:
    parser = options_parser("make bench-beside-go")
    parser.add_argument("--go", metavar="FILE", required=True, help="the Go picker")
    parser.add_argument("--rounds", type=int, choices=range(1, 101), default=3, metavar="N")
    options: argparse.Namespace = parser.parse_args(arguments)
    here = describe_machine("bench.beside_go", ["--go FILE", f"--rounds {options.rounds}"])
    with tempfile.TemporaryDirectory() as folder, started_api(Path(folder) / "cluster") as cluster:
        found = asyncio.run(measure(Path(folder), cluster, options.go, options.rounds))
    write_page(options.out / "beside-go.md", page(found, here, options.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
