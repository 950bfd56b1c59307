"""Does a fleet of several replicas cost prefix cache hits? Writes bench/results/prefix.md (`make
bench-prefix`).

Exit 1 if four replicas hit less than one does.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import uvloop

from bench.prefix.chats import Chats, connected
from bench.prefix.fleet import running
from bench.rig.machine import describe_machine
from bench.rig.page import table

_RESULTS = Path(__file__).parents[1] / "results"
_ENDPOINTS = 4
_BOUND = 0.95  # of what one replica hits
_KV_BLOCKS = 3000
_SERVER = ("--ttft", "60", "--itl", "2", "--kv-blocks", str(_KV_BLOCKS))
_LOAD = {"queue-depth": 2, "kv-cache": 2}
_WITH_PREFIX = {**_LOAD, "prefix-affinity": 3}


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens of prompts that the model servers looked up and that were cached, by their own counters."""

    queried: float
    hit: float

    @property
    def rate(self) -> float:
        return self.hit / self.queried


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    what: str
    replicas: int
    scorers: dict[str, int]
    variant: str = "product"


_CASES = (
    Case("1 replica", 1, _WITH_PREFIX),
    Case("4 replicas", 4, _WITH_PREFIX),
    Case("control: 4 replicas, each knows its own routes only", 4, _WITH_PREFIX, "own-routes"),
    Case("control: 4 replicas, no prefix scorer", 4, _LOAD),
)


async def _run(case: Case, count: int, turns: int, seed: int) -> Run:
    scorers = [{"name": name, "weight": weight} for name, weight in case.scorers.items()]
    config: dict[str, Any] = {
        "scheduling": {"scorers": scorers},
        "request_queue_controller": {"watermark_per_backend": 100},
        "extproc": {"drain_grace": "0s"},
    }
    servers = [_SERVER] * _ENDPOINTS
    async with (
        running(case.replicas, config, variant=case.variant, servers=servers) as fleet,
        connected(fleet.grpc) as client,
    ):
        await Chats(client, count=count, turns=turns, seed=seed).run()
        return Run(
            await fleet.counted("vllm:prefix_cache_queries_total"),
            await fleet.counted("vllm:prefix_cache_hits_total"),
        )


async def _measured(count: int, turns: int, seeds: int) -> dict[Case, list[Run]]:
    found: dict[Case, list[Run]] = {case: [] for case in _CASES}
    for seed in range(seeds):
        for case in _CASES:
            found[case].append(await _run(case, count, turns, seed))
            print(f"seed {seed}, {case.what}: {found[case][-1].rate:.3f}", file=sys.stderr)
    return found


def _rows(found: dict[Case, Sequence[Run]]) -> tuple[list[list[str]], float]:
    """The table's rows; how many replicas compare with one."""
    rates = {case: mean(run.rate for run in runs) for case, runs in found.items()}
    alone, fleet = rates[_CASES[0]], rates[_CASES[1]]
    rows = [
        [
            case.what,
            f"{sum(run.queried for run in runs) / 1000:.0f}",
            " ".join(f"{run.rate:.3f}" for run in runs),
            f"{rates[case]:.3f}",
            f"{rates[case] / alone:.3f}",
        ]
        for case, runs in found.items()
    ]
    return rows, fleet / alone


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.prefix")
    parser.add_argument("--chats", type=int, default=40, help="at once (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=8, help="of each (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each case (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=_RESULTS)
    options = parser.parse_args()
    here = describe_machine("bench.prefix")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(_measured(options.chats, options.turns, options.seeds))
    rows, ratio = _rows({case: tuple(runs) for case, runs in found.items()})
    met = ratio >= _BOUND
    lines = [
        "# Prefix hits of a fleet", "",
        f"`python -m bench.prefix --chats {options.chats} --turns {options.turns} --seeds {options.seeds}`",
        f"(`make bench-prefix`), {here.date}, {here.cores} cores, load {here.load:.2f} before.",
        f"{options.chats} chats at once of {options.turns} turns, five openings among them, over"
        f" {_ENDPOINTS}",
        f"simulated model servers with prefix caches of {_KV_BLOCKS} blocks of 16 tokens; each turn goes",
        "to the next replica. The rate is of the servers' own counters: prompt tokens that were cached by",
        "prompt tokens looked up. Scorers: queue-depth 2, kv-cache 2, prefix-affinity 3, and in-flight 1,",
        "as always.",
        "",
        table(["what", "prompt tokens, 1000", "hit rate by seed", "mean", "to 1 replica"], rows),
        "",
        f"4 replicas hit {ratio:.3f} of what one does (bound {_BOUND}: {'met' if met else '**not met**'}).",
    ]  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "prefix.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines[4:]))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
