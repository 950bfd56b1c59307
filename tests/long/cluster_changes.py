"""Measures how soon changes of a Kubernetes cluster take effect under load.

tests/kubernetes/seat.py runs two replicas with a chart's flags, a gateway's Envoy, and simulators as pods
around a real API server; eight clients send requests. With `--go FILE`, every other run uses the Go
picker whose binary is FILE, for comparison (see bench/overhead/gateway.py). The report has median and maximum
of the seconds until model servers see a change.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

from api_server import NAMESPACE, PODS, POOLS, ApiServer
from api_server import started as started_api
from changes import APP, HOSTS, Found, change_everything, started
from seat import Seat, opened, publish

from bench.rig.report import table
from long.findings import Findings
from picker_tools.local_fleet.network import until
from picker_tools.local_fleet.processes import picker_command

_READY_S = 120.0
_MOST_S = 1.0
_OURS, _GO = "this picker, two replicas", "the Go picker"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--away", type=float, default=30.0, metavar="S", help="API server's downtime")
    parser.add_argument("--go", metavar="FILE", help="a Go picker's binary")


def run(options: argparse.Namespace, findings: Findings) -> None:
    pickers: dict[str, tuple[Callable[..., list[str]], int]] = {_OURS: (picker_command, 2)}
    if options.go:
        pickers[_GO] = (lambda _, *flags: [options.go, *flags]), 1
    found: dict[str, list[Found]] = {name: [] for name in pickers}
    with tempfile.TemporaryDirectory() as folder, started_api(Path(folder) / "cluster") as server:
        for number in range(options.rounds):
            for name, (launch, replicas) in pickers.items():
                place = Path(folder) / f"{number}-{replicas}"
                found[name].append(asyncio.run(_measure(place, server, launch, replicas, options.away)))
                print(name, found[name][-1], flush=True)
    rows = []
    for what in found[_OURS][0].seconds:
        seconds = [[each.seconds[what] for each in runs] for runs in found.values()]
        rows.append([what, *(f"{median(each):.2f} ({max(each):.2f})" for each in seconds)])
        findings.check(f"{what} within {_MOST_S:g} s", max(seconds[0]) <= _MOST_S, f"{max(seconds[0]):.2f} s")
    rows.append(["errors", *(str(sum(len(each.errors) for each in runs)) for runs in found.values())])
    errors = [error for each in found[_OURS] for error in each.errors]
    findings.check("no client sees an error", not errors, "; ".join(map(str, errors[:3])))
    findings.add(table(["change", *found], rows))


async def _measure(
    folder: Path, cluster: ApiServer, launch: Callable[..., list[str]], replicas: int, away_s: float
) -> Found:
    """Start new pickers, make every change once, and measure each."""
    for pod in cluster.call("GET", PODS)["items"]:
        cluster.delete_pod(pod["metadata"]["name"], grace_s=0)
    for pool in cluster.call("GET", POOLS)["items"]:
        cluster.call("DELETE", f"{POOLS}/{pool['metadata']['name']}")
    await asyncio.to_thread(folder.mkdir)
    async with opened(folder) as here:
        cluster.put_pool("llm", [here.port], APP)
        for _ in range(replicas):
            await here.start_picker(cluster.kubeconfig("admin"), "llm", NAMESPACE, launch=launch)
        await started(cluster, here)
        # Envoy does not check health: not every picker answers health checks on its ext_proc port.
        publish(discovery := folder / "pickers.json", [picker.grpc for picker in here.pickers])
        await here.start_gateway(discovery=discovery)
        await _all_serve(here)
        return await change_everything(cluster, here, away_s)


async def _all_serve(here: Seat) -> None:
    """Wait until each model server has received a request."""

    async def asked() -> bool:
        await asyncio.gather(*(here.ask() for _ in range(8)))
        return all([await here.received(host) > 0 for host in HOSTS])

    assert await until(asked, within_s=_READY_S), "a model server gets no request"
