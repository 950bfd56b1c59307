"""Measures and writes bench/results/latency.md; exit 1 if the scorer gains too little."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, quantiles
from typing import Any

import uvloop

from bench.latency.load import Load, Taken
from bench.overhead.surroundings import look
from bench.rig.client import connected
from bench.rig.fleet import running

_RESULTS = Path(__file__).parents[1] / "results"
_REPLICAS = 2
_QUICK = ("--ttft", "200", "--itl", "50")
_SLOW = ("--ttft", "600", "--itl", "150")
_SERVERS = (_QUICK, _QUICK, _QUICK, _SLOW)
_BOUND = 0.7  # of round robin's p95
_SEED = 11


@dataclass(frozen=True, slots=True)
class Case:
    what: str
    scorers: tuple[tuple[str, float], ...]
    variant: str = "product"


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds; `slow` is the part of the requests that the slow endpoint served."""

    what: str
    requests: int
    mean_s: float
    p50_s: float
    p95_s: float
    slow: float


_CASES = (
    Case("control: round robin", (), "round-robin"),
    Case("least in flight (no scorers)", ()),
    Case("latency 1", (("latency", 1),)),
    Case("latency 3", (("latency", 3),)),
)
_CLAIMED = 3  # which of them is held against the bound


def _row(case: Case, taken: Sequence[Taken], slow: str) -> Row:
    seconds = [one.seconds for one in taken]
    cuts = quantiles(seconds, n=100)
    share = sum(one.endpoint == slow for one in taken) / len(taken)
    return Row(case.what, len(taken), mean(seconds), cuts[49], cuts[94], share)


async def _measured(rate_per_s: float, for_s: float) -> list[Row]:
    rows = []
    for case in _CASES:
        config: dict[str, Any] = {
            "scheduling": {"scorers": [{"name": name, "weight": weight} for name, weight in case.scorers]},
            "request_queue_controller": {"watermark_per_backend": 100},
            "extproc": {"drain_grace": "0s"},
        }
        async with (
            running(_REPLICAS, config, variant=case.variant, servers=_SERVERS) as fleet,
            connected(fleet.grpc) as client,
        ):
            taken = await Load(client, rate_per_s=rate_per_s, for_s=for_s, seed=_SEED).run()
            rows.append(_row(case, taken, fleet.endpoints[-1]))
        print(rows[-1], file=sys.stderr)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.latency")
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=45.0, help="of each case (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=_RESULTS)
    options = parser.parse_args()
    here = look([])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows = runner.run(_measured(options.rate, options.seconds))
    control, claimed = rows[0], rows[_CLAIMED]
    ratio = claimed.p95_s / control.p95_s
    met = ratio <= _BOUND
    lines = [
        "# The latency scorer", "",
        f"`python -m bench.latency --rate {options.rate:g} --seconds {options.seconds:g}`"
        f" (`make bench-latency`), {here.date}, {here.cores} cores, load {here.load:.2f} before.",
        f"Requests arrive at random, {options.rate:g} a second, the same in every case, at {_REPLICAS}",
        "replicas in turn. Three simulated endpoints take 0.95 s for an answer, the fourth three times that;",
        "none slows down under this load. Seconds are from arrival to the end of the answer, the picker's",
        "part included, and begin with the first request, when nothing is known of the endpoints.",
        "",
        "| what | requests | mean, s | p50, s | p95, s | p95 to round robin | to the slow endpoint |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {row.what} | {row.requests} | {row.mean_s:.2f} | {row.p50_s:.2f} | {row.p95_s:.2f}"
            f" | {row.p95_s / control.p95_s:.2f} | {row.slow * 100:.0f} % |"
            for row in rows
        ),
        "",
        f"{claimed.what}: {ratio:.2f} of round robin's p95 (bound {_BOUND}:"
        f" {'held' if met else '**broken**'}).",
    ]  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "latency.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines[4:]))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
