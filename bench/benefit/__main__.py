"""`python -m bench.benefit`: simulates whether the queue helps clients, and writes benefit.md."""

import itertools
import statistics
import sys
from collections.abc import Iterable, Sequence

from bench.benefit import simulation
from bench.benefit.policies import CRITICALITY
from bench.benefit.simulation import CHAT_LOAD, DEADLINE_S, KINDS, KV_SLOTS, POLICIES, SERVERS, Figures
from bench.rig.report import options_parser, percentile, table, write_page

_LOADS = (0.6, 0.9, 1.2, 2.0)
_IN_FLIGHT = (8, 16, 24, 32, 36, 40, 48, 64, 128, 256)
_NEARLY = 0.97  # the simulated bound is the lowest bound that reaches this share of the capacity
_BOUNDS_AT = 1.2

Runs = dict[tuple[str, float], list[Figures]]

_HOW = f"""\
# Does the queue help?

`python -m bench.benefit`; seeds {{seeds}}. The findings are in [docs/benefit.md](../../docs/benefit.md).

A simulation, so its figures do not depend on the machine: {SERVERS} model servers with the simulator's
engine, which batches continuously, and preempts and recomputes when its KV cache is full. Steps take the
times that were measured for vLLM with OPT-13B (`app/picker_tools/simulator/batch.py`). A server has the
{KV_SLOTS} KV slots of one A100-40GB, and requests have ShareGPT's mean lengths, both as in the vLLM paper.
The queue (`LocalQueue`, `FairQueue`) and the scheduler are the product's code. A policy learns of a freed
place 10 ms late; the network and Redis take no time. All policies get the same requests.

Two tenants of equal weight: `chat` asks for {CHAT_LOAD:.0%} of the capacity, `bulk` for the rest of the load.
A tenth of bulk's requests are `urgent` (criticality {CRITICALITY["urgent"]}), the others `nightly`
({CRITICALITY["nightly"]}). A client leaves {DEADLINE_S:g} s after it asked; its request is aborted. The queue
has the defaults (1000 places, with fairness 100 for each flow, TTL 30 s). If each replica has its own queue,
four replicas split bounds and capacities; chat arrives at the first three replicas, bulk at the last three.

Capacity: **{{capacity:.1f}} answers/s**, the highest rate with a fixed number of requests at each server.
Bound: **{{bound}} requests** a server, the lowest bound that reaches {_NEARLY:.0%} of the capacity.
"""

_READ = """\
Times are in seconds: p50 / p95 / p99 of the requests that were answered before the client left. *In time* is
the share of requests answered before the client left; other requests were refused or expired, or the client
left. If clients with long answers leave, answers/s exceed the capacity: compare tokens/s instead. *Fair* is
Jain's index of the tenants' tokens divided by their max-min fair shares. *Recomputed*: share of all computed
tokens that preemption discarded. *Too late*: share of all computed tokens whose clients then left.
"""


def main(arguments: Sequence[str]) -> int:
    parser = options_parser("python -m bench.benefit", __doc__)
    args = parser.parse_args(arguments)
    seeds = (1, 2)
    curve = {each: simulation.saturated(each, 1) for each in _IN_FLIGHT}
    capacity = max(per_s for per_s, _, _ in curve.values())
    bound = min(each for each, (per_s, _, _) in curve.items() if per_s >= _NEARLY * capacity)
    print(f"capacity {capacity:.2f}/s, bound {bound}", flush=True)
    runs: Runs = {}
    for load in _LOADS:
        for policy in POLICIES:
            runs[policy, load] = [simulation.run(policy, load, capacity, bound, seed) for seed in seeds]
            median_s = _wait(runs[policy, load], "chat", 0.5)
            print(f"{load:.0%} {policy}: chat's median TTFT {median_s:.2f} s", flush=True)
    bounds = {
        each: [simulation.run("weighted-fair", _BOUNDS_AT, capacity, each, seed) for seed in seeds]
        for each in _IN_FLIGHT
    }
    page = _HOW.format(seeds=", ".join(map(str, seeds)), capacity=capacity, bound=bound)
    parts = [page, _READ]
    parts += [f"## At {load:.0%} of the capacity\n\n{_at_load(runs, load)}" for load in _LOADS]
    parts.append(f"## The bound\n\n{_of_bounds(curve, bounds)}")
    write_page(args.out / "benefit.md", "\n\n".join(part.strip() for part in parts) + "\n")
    return 0


def _mean(runs: Sequence[Figures], name: str) -> float:
    return statistics.fmean(getattr(run, name) for run in runs)


def _in_time(runs: Sequence[Figures], kind: str) -> str:
    return f"{statistics.fmean(run.in_time(kind) for run in runs):.1%}"


def _wait(runs: Sequence[Figures], kind: str, q: float) -> float:
    return percentile([wait for run in runs for wait in run.waits_s(kind)], q)


def _quantiles(found: Iterable[list[float]]) -> str:
    times = list(itertools.chain(*found))
    return " / ".join(f"{percentile(times, q):.2f}" for q in (0.5, 0.95, 0.99))


_FIGURES = {"per_s": ".2f", "tokens_per_s": ".0f", "jain": ".3f", "recomputed": ".1%", "too_late": ".1%"}


def _at_load(runs: Runs, load: float) -> str:
    head = ["policy", "answers/s", "tokens/s", "fair", "recomputed", "too late"]
    rows = [
        [policy, *(f"{_mean(runs[policy, load], name):{digits}}" for name, digits in _FIGURES.items())]
        for policy in POLICIES
    ]
    times = [
        [
            policy,
            kind,
            _in_time(found, kind),
            _quantiles(run.waits_s(kind) for run in found),
            _quantiles(run.durations_s(kind) for run in found),
        ]
        for policy in POLICIES
        for kind in KINDS
        if (found := runs[policy, load])
    ]
    return f"{table(head, rows)}\n\n{table(['policy', 'class', 'in time', 'TTFT', 'end to end'], times)}"


def _of_bounds(curve: dict[int, tuple[float, float, float]], bounds: dict[int, list[Figures]]) -> str:
    text = f"""\
The first columns show servers without a queue, each always with that many requests. The columns from "with
the queue" on show policy weighted-fair with that bound, at a load of {_BOUNDS_AT:.0%} of the capacity."""
    head = ["requests a server", "answers/s", "recomputed", "mean TTFT at the server"]
    head += ["with the queue: tokens/s", "recomputed", "chat's TTFT", "chat in time", "fair"]
    rows = []
    for each, found in bounds.items():
        per_s, recomputed, first_s = curve[each]
        alone = [f"{each}", f"{per_s:.2f}", f"{recomputed:.1%}", f"{first_s:.2f}"]
        queued = [f"{_mean(found, 'tokens_per_s'):.0f}", f"{_mean(found, 'recomputed'):.1%}"]
        chat = [_quantiles(run.waits_s("chat") for run in found), _in_time(found, "chat")]
        rows.append([*alone, *queued, *chat, f"{_mean(found, 'jain'):.3f}"])
    return f"{text}\n\n{table(head, rows)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
