"""Measures and writes bench/results/herding.md; exit 1 if the fleet herds."""

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from bench.overhead.surroundings import look
from bench.rig.client import connected
from bench.rig.fleet import running
from bench.scraping.pages import serving

_RESULTS = Path(__file__).parents[1] / "results"
_REPLICAS = 4
_ENDPOINTS = 8
_PAGE = b"vllm:num_requests_waiting 0\nvllm:num_requests_running 0\nvllm:kv_cache_usage_perc 0.5\n"
_PICKS = 1000
_MOST_APART = 1
_ASK = b'{"model": "llama", "prompt": "p"}'
_SCORERS = [
    {"name": "queue-depth", "weight": 2},
    {"name": "kv-cache", "weight": 2},
    {"name": "lora-affinity", "weight": 3},
]
_CONFIG = {
    "request_queue_controller": {"watermark_per_backend": 1000},
    "extproc": {"drain_grace": "0s"},
}


@dataclass(frozen=True, slots=True)
class Row:
    """Requests in flight by endpoint once all of a round's picks are made, for each round."""

    what: str
    rounds: tuple[tuple[int, ...], ...]
    bound: int | None = _MOST_APART

    @property
    def apart(self) -> int:
        return max(max(loads) - min(loads) for loads in self.rounds)

    @property
    def met(self) -> bool:
        return self.bound is None or self.apart <= self.bound


async def _round(
    replicas: int, variant: str, config: dict[str, Any], endpoints: Sequence[str]
) -> tuple[int, ...]:
    async with (
        running(replicas, config, variant=variant, endpoints=endpoints) as fleet,
        connected(fleet.grpc) as client,
    ):
        exchanges = [client.exchange(number) for number in range(_PICKS)]
        # All wait for their bodies before the first one is sent.
        await asyncio.gather(*(exchange.begin() for exchange in exchanges))
        picked = Counter(await asyncio.gather(*(exchange.pick(_ASK) for exchange in exchanges)))
        loads = await fleet.in_flight()
        if loads != {address: picked[address] for address in endpoints}:
            raise RuntimeError(f"the fleet counts {loads}, the answers say {dict(picked)}")
        await asyncio.gather(*(exchange.end(endpoints[0]) for exchange in exchanges))
    return tuple(sorted(loads.values()))


async def _measured(rounds: int) -> list[Row]:
    scored = {**_CONFIG, "scheduling": {"scorers": _SCORERS}}
    cases: Sequence[tuple[str, int, str, dict[str, Any], int | None]] = (
        ("least in flight, 4 replicas", _REPLICAS, "product", _CONFIG, _MOST_APART),
        ("three scorers, 4 replicas", _REPLICAS, "product", scored, _MOST_APART),
        ("three scorers, 1 replica", 1, "product", scored, _MOST_APART),
        ("control: three scorers, 4 replicas, no atomic reserve", _REPLICAS, "snapshot-only", scored, None),
    )
    found = []
    for what, replicas, variant, config, bound in cases:
        print(what, file=sys.stderr)
        async with serving(_ENDPOINTS) as pages:
            pages.serve(_PAGE)
            some = [await _round(replicas, variant, config, pages.addresses) for _ in range(rounds)]
        loads = tuple(some)
        found.append(Row(what, loads, bound))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.herding")
    parser.add_argument("--rounds", type=int, default=3, help="of each case (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=_RESULTS)
    options = parser.parse_args()
    here = look([])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows = runner.run(_measured(options.rounds))
    lines = [
        "# Herding", "",
        f"`python -m bench.herding --rounds {options.rounds}` (`make bench-herding`), {here.date},"
        f" {here.cores} cores, load {here.load:.2f} before.",
        f"{_PICKS} picks at once over {_ENDPOINTS} equal endpoints, through the gRPC services of replica",
        "processes on one Valkey: all streams are open and wait for their bodies, which then come together.",
        "In flight is what the fleet counts when all are placed; the answers say the same. The control's",
        "replicas each pick the best by what they know (the fleet's in-flight figures of the last heartbeat,",
        "ties at random), and the script takes that one.",
        "",
        "| what | rounds | in flight by endpoint, worst round | apart | bound | met |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        worst = max(row.rounds, key=lambda loads: max(loads) - min(loads))
        bound = "" if row.bound is None else str(row.bound)
        met = "" if row.bound is None else "yes" if row.met else "**no**"
        loads = " ".join(map(str, worst))
        lines.append(f"| {row.what} | {len(row.rounds)} | {loads} | {row.apart} | {bound} | {met} |")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "herding.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines[4:]))
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
