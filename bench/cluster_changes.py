"""`make bench-cluster-changes`: how soon they are in force; writes bench/results/cluster-changes.md.

A real API server, and around it what tests/kubernetes/seat.py has: pickers by the flags of a chart, an Envoy
as gateways configure it, simulators as pods, clients in closed loops. `--go FILE` is a Go picker (cmd/epp of
sigs.k8s.io/gateway-api-inference-extension) that takes the same place, in turns.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from api_server import NAMESPACE, PODS, POOLS, ApiServer
from api_server import started as started_api
from changes import APP, HOSTS, Found, change_everything, started
from seat import Seat, opened, publish

from bench.rig.machine import Machine, describe_machine
from bench.rig.page import options_parser, table, write_page
from picker_tools.local_fleet.network import until
from picker_tools.local_fleet.processes import picker_command

_READY_S = 120.0
_MOST_S = 1.0
OURS, GO = "this picker, two replicas", "the Go picker"


async def measure(
    folder: Path, cluster: ApiServer, launch: Callable[..., list[str]], replicas: int, away_s: float
) -> Found:
    """All changes once, with fresh pickers."""
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
        # Envoy checks no health: not every picker answers checks where it takes requests.
        publish(discovery := folder / "pickers.json", [picker.grpc for picker in here.pickers])
        await here.start_gateway(discovery=discovery)
        await all_serve(here)
        return await change_everything(cluster, here, away_s)


async def all_serve(here: Seat) -> None:
    """Wait until each model server has been asked."""

    async def asked() -> bool:
        await asyncio.gather(*(here.ask() for _ in range(8)))
        return all([await here.received(host) > 0 for host in HOSTS])

    assert await until(asked, within_s=_READY_S), "not every model server is asked"


def faults(found: Mapping[str, Sequence[Found]]) -> list[str]:
    """What is not as it must be with this picker."""
    late = [
        f"{what}: {seconds:.2f} s"
        for each in found[OURS]
        for what, seconds in each.seconds.items()
        if seconds > _MOST_S
    ]
    return late + [f"error: {error}" for each in found[OURS] for error in each.errors[:3]]


def page(found: Mapping[str, Sequence[Found]], here: Machine, options: argparse.Namespace) -> str:
    rows = []
    for what in found[OURS][0].seconds:
        seconds = [[each.seconds[what] for each in runs] for runs in found.values()]
        rows.append([what, *(f"{median(each):.2f} ({max(each):.2f})" for each in seconds)])
    rows.append(["errors", *(str(sum(len(each.errors) for each in runs)) for runs in found.values())])
    return (
        "# Behind a gateway: how soon changes of a cluster are in force\n\n"
        f"`{here.command}`, {here.date}, {here.cores} cores ({here.processor}), load {here.load:.1f} before "
        f"the run. Seconds until clients see a change, as the model servers notice it: median of "
        f"{options.rounds} runs, and the longest. Eight clients ask all the time; the API server is gone for "
        f"{options.away:g} s. Wanted: each within {_MOST_S:g} s, no error. "
        f"Here: {'; '.join(faults(found)) or 'everything holds'}.\n\n"
        + table(["change", *found], rows)
        + "\n"
    )


def main(arguments: Sequence[str]) -> int:
    parser = options_parser("make bench-cluster-changes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--away", type=float, default=30.0, metavar="S", help="of the API server")
    parser.add_argument("--go", metavar="FILE", help="a Go picker")
    options = parser.parse_args(arguments)
    here = describe_machine("bench.cluster_changes", ["--go FILE"] if options.go else [])
    pickers: dict[str, tuple[Callable[..., list[str]], int]] = {OURS: (picker_command, 2)}
    if options.go:
        pickers[GO] = (lambda _, *flags: [options.go, *flags]), 1
    found: dict[str, list[Found]] = {name: [] for name in pickers}
    with tempfile.TemporaryDirectory() as folder, started_api(Path(folder) / "cluster") as server:
        for number in range(options.rounds):
            for name, (launch, replicas) in pickers.items():
                run = Path(folder) / f"{number}-{replicas}"
                found[name].append(asyncio.run(measure(run, server, launch, replicas, options.away)))
                print(name, found[name][-1], flush=True)
    write_page(options.out / "cluster-changes.md", page(found, here, options))
    return 1 if faults(found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
