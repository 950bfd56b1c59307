"""Compares limits that this picker finds with the Go picker's two saturation detectors.

The Go picker (cmd/epp of sigs.k8s.io/gateway-api-inference-extension v1.5.0) runs with its flow control, once
with each detector at its defaults and once with the best threshold that a search finds. Each picker, one
replica in `standard`, runs behind the same Envoy, in front of the simulated servers of `__main__.py`.
"""

import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from api_server import ApiServer, started
from seat import APP

from bench.limits.kinds import Kind
from bench.limits.servers import (
    COMPARED_S,
    SEARCHED_S,
    SLOTS,
    Figures,
    Record,
    Servers,
    best_bound,
    median,
    run,
    servers,
)
from bench.overhead.gateway import behind_gateway
from bench.rig.report import table
from picker_tools.local_fleet.network import LOOPBACK

_POOL, _SERVERS = "limits", 4
_GOOD_S = 2.0  # an answer counts as goodput if its first token comes within this time
# The threshold of each detector, its default, and the values that the search tries.
_DETECTORS: Mapping[str, tuple[str, int, tuple[int, ...]]] = {
    "utilization-detector": ("queueDepthThreshold", 5, (1, 2, 5, 16)),
    "concurrency-detector": ("maxConcurrency", 100, (8, 16, 23, 32, 100)),
}
_OURS = "this picker, nothing configured"
# Scorers of the Go picker's chart, and their weights.
_SCORERS = {"queue-scorer": 2, "kv-cache-utilization-scorer": 2, "prefix-cache-scorer": 3}


def _config(detector: str = "", threshold: int = 0) -> str:
    """An EndpointPickerConfig with the scorers of the Go picker's chart, and perhaps a detector."""
    plugins: list[dict[str, Any]] = [{"type": name} for name in _SCORERS]
    picked: list[dict[str, Any]] = [{"pluginRef": name, "weight": most} for name, most in _SCORERS.items()]
    tree: dict[str, Any] = {
        "apiVersion": "inference.networking.x-k8s.io/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": plugins,
        "schedulingProfiles": [{"name": "default", "plugins": picked}],
    }
    if detector:  # gates the queue and filters endpoints by the producer's counts of requests
        plugins.append({"type": detector, "parameters": {_DETECTORS[detector][0]: threshold}})
        plugins.append({"type": "inflight-load-producer"})
        picked.append({"pluginRef": detector})
        tree |= {"featureGates": ["flowControl"], "saturationDetector": {"pluginRef": detector}}
    return yaml.safe_dump(tree)


async def compare(kind: Kind, go: str, rounds: int) -> str:
    """A table of medians of `rounds` for this picker, and for the Go picker (binary `go`) by detector."""
    with tempfile.TemporaryDirectory() as name, started(Path(name) / "cluster") as cluster:
        async with servers(Path(name), [SLOTS] * _SERVERS) as them:
            cluster.put_pool(_POOL, [int(each.rpartition(":")[2]) for each in them.addresses], APP)
            cluster.put_pod("server", LOOPBACK, APP)
            rig = _Rig(cluster, them, kind, Path(name))
            targets = {_OURS: ("", _config())}
            for detector, (setting, default, tried) in _DETECTORS.items():
                found: dict[int, Figures] = {}
                for each in tried:
                    record = await rig.measure(go, _config(detector, each), 0, SEARCHED_S[1])
                    found[each] = record.between(*SEARCHED_S)
                    print(f"{setting} {each}: {found[each].cells()}", flush=True)
                best = best_bound(found)
                for threshold in sorted({default, best}):
                    title = f"Go picker, {detector}, {setting} {threshold}"
                    what = [word for word, it in (("default", default), ("best", best)) if it == threshold]
                    targets[f"{title} ({' and '.join(what)})"] = (go, _config(detector, threshold))
            records: dict[str, list[Record]] = {title: [] for title in targets}
            for seed in range(1, rounds + 1):
                for title in tuple(targets)[:: 1 if seed % 2 else -1]:
                    records[title].append(await rig.measure(*targets[title], seed, COMPARED_S[1]))
                    print(f"{title}, {seed}: {_cells(records[title][-1:])}", flush=True)
    rows = [[title, *_cells(each)] for title, each in records.items()]
    note = (
        f"Goodput: served requests whose first token came within {_GOOD_S:g} s. Medians of {rounds} rounds."
    )
    return f"{table(('', *Figures.HEAD, 'goodput, requests/s'), rows)}\n\n{note}"


class _Rig:
    def __init__(self, cluster: ApiServer, them: Servers, kind: Kind, folder: Path) -> None:
        self._cluster, self._them, self._kind, self._folder = cluster, them, kind, folder
        self._runs = 0

    async def measure(self, go: str, config: str, seed: int, lasts_s: float) -> Record:
        self._runs += 1
        folder = self._folder / str(self._runs)
        async with behind_gateway(self._cluster, folder, _POOL, go, config=config) as target:
            return await run(target.url, self._them, self._kind, seed=seed, lasts_s=lasts_s)


def _cells(records: list[Record]) -> list[str]:
    from_s, to_s = COMPARED_S
    goodput = [
        sum(
            each.served and each.first_s is not None and each.first_s <= _GOOD_S
            for each in record.answers
            if from_s <= each.done_s - record.began_s < to_s
        )
        for record in records
    ]
    good = statistics.median(goodput) / (to_s - from_s)
    return [*median([each.between(*COMPARED_S) for each in records]).cells(), f"{good:.1f}"]
