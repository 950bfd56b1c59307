"""`python -m bench.targets` compares policy `workload-aware` with `fcfs` by the targets of specification 000.

A live change switches one fleet between the two policies. Each round has two passes of each policy in the
order A B B A or B A A B, so that a drift of the machine's speed cancels out. A target is met if the whole 95
% interval meets it, missed if the mean misses it, and otherwise not shown. Writes bench/results/targets.md.
The exit status is 1 if a target is missed.
"""

import asyncio
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.rig.fleet import RunningFleet, picker_up
from bench.rig.passes import SMALL_BYTES, alike, per_s, warmed
from bench.rig.report import describe_run, interval, options_parser, percentile, table, write_page
from bench.rig.server import Server, arrival, server
from picker_fleet.domain.config import parse
from picker_fleet.fleet.live_config import shared_settings
from picker_fleet.state.keys import Keys
from picker_fleet.state.scripts import Library
from picker_tools.load.generator import Request, send_request

_POLICIES = ("fcfs", "workload-aware")
_WORKLOADS, _SCORES = 1000, 200_000
_CONCURRENT = 1000
_BUSY, _CALM = 48, 4  # numbers of clients: with 48, two thirds of the requests wait; with 4, no request waits
_BUSY_REQUESTS, _CALM_REQUESTS = 1500, 400
_TAIL_S = 0.5  # seconds within which the replicas process a pass's access log
_CONFIG: Mapping[str, Any] = {
    "request_queue_controller": {"watermark_per_backend": 4},
    "fair_request_queue": {"flow_capacity": 2000, "total_capacity": 4000, "queue_ttl": "60s"},
}
_SIZE = ("--replicas", "2", "--endpoints", "4", "--mode", "lean", "--sim-ttft", "1", "--sim-itl", "0")

# A Redis function that computes a request's score many times in a call, as dispatch does, or only loops.
_SCORE = "return constant_score(r) + settings.wait_weight * math.min((now_us - r.arrived) / cap_us(), 1)"
_FUNCTION = """
redis.register_function{function_name='%s', callback=function(keys, args)
  return run(function(args)
    local requests, sum = {}, 0
    for n = 1, tonumber(args[3]) do
      requests[n] = {flow = 'flow', workload = 'workload-' .. n, criticality = 3, arrived = now_us - n * 1000}
    end
    for n = 1, tonumber(args[1]) do
      local r = requests[n %% #requests + 1]
      if args[2] == 'score' then sum = sum + order.whole_score(r) end
    end
    return tostring(sum)
  end, keys, args)
end}
"""


@dataclass(frozen=True, slots=True)
class Row:
    target: str
    measured: str
    met: bool | None  # None: neither met nor missed, because the interval includes the limit


def _scoring_library(library: Library) -> Library:
    marker = "  -- Put the head of a line into `growing` or `static` by its current score."
    if library.source.count(marker) != 1:
        raise RuntimeError("lua/lib/order.lua has changed: the marker of its score function was not found")
    version = f"{library.version}_score"
    source = library.source.replace(library.version, version)
    source = source.replace(marker, f"  function order.whole_score(r) {_SCORE} end\n{marker}")
    return Library(source + _FUNCTION % f"score_{version}", version)


def _score(it: Server) -> list[Row]:
    """Measure the CPU time of one score, and the memory of the workload registry, on a separate Valkey."""
    library = _scoring_library(it.library)
    it.client.function_load(library.source)
    pool = Keys.of("targets").pool

    def call(name: str, *args: object) -> object:
        return it.client.execute_command("FCALL", f"{name}_{library.version}", 1, pool, *args)

    settings = shared_settings(parse({"fair_request_queue": {"ordering": "workload-aware"}}), {})
    call("publish", "r", "c", "e", json.dumps(settings), "10.0.0.1:8000", '{"labels":{},"draining":false}')
    call("heartbeat", "r", "{}", 60_000, "")
    for number in range(1, _WORKLOADS + 1):
        call("admit", "r", arrival(f"id-{number}", "flow", workload=f"workload-{number}", ttl_ms=60_000))
        call("settle", "r", f"id-{number}", "completed", "", "", "", "")
    registry = pool.removesuffix("pool") + "workloads"
    taken_mb = int(it.client.memory_usage(registry, samples=0)) / 1e6
    registered = it.client.hlen(registry)
    if registered != _WORKLOADS:
        raise RuntimeError(f"{registered} workloads are registered, not {_WORKLOADS}")

    def loop_us(what: str) -> float:
        return min(it.cpu_us_of(lambda: call("score", _SCORES, what, _WORKLOADS)) for _ in range(5)) / _SCORES

    score_us = loop_us("score") - loop_us("nothing")
    return [
        Row("a score: < 1 µs", f"{score_us:.2f} µs of Valkey's CPU, rate and wait included", score_us < 1),
        Row("1000 workloads: < 10 MB", f"{taken_mb:.2f} MB of Redis's memory", taken_mb < 10),
    ]


@dataclass(frozen=True, slots=True)
class Pass:
    """Figures of one pass. `cpu_us`: CPU per request of replicas and Valkey. Latencies run from the request
    to the last byte of its answer."""

    per_s: float
    cpu_us: float
    p50_ms: float
    p99_ms: float


async def _pass(fleet: RunningFleet, clients: int, requests: int) -> Pass:
    async with warmed(fleet.url, clients, alike(SMALL_BYTES, tokens=1)) as send:
        await asyncio.sleep(_TAIL_S)
        before = sum(fleet.cpu_us()[:2])
        answers = await send(requests)
        await asyncio.sleep(_TAIL_S)
        cpu_us = (sum(fleet.cpu_us()[:2]) - before) / requests
    p50, p99 = (1000 * percentile([each.took_s for each in answers], share) for share in (0.5, 0.99))
    return Pass(per_s(answers), cpu_us, p50, p99)


async def _set_policy(fleet: RunningFleet, policy: str) -> None:
    await fleet.change({"fair_request_queue": {"ordering": policy}})


async def _concurrent(fleet: RunningFleet) -> Row:
    """Check that a workload's counts are exact after 1000 concurrent requests."""
    await _set_policy(fleet, "workload-aware")
    context = json.dumps({"workload_id": "concurrent", "criticality": 3})
    one = Request("hello", 1, headers=(("x-workload-context", context),))
    records = await asyncio.gather(*(send_request(fleet.url, one) for _ in range(_CONCURRENT)))
    served = sum(record.served for record in records)
    await fleet.wait_for_rest(30)
    found = await fleet.get("workloads/concurrent")
    counted = f"counted {found['total']} in all, {found['active']} active, {found['dispatched']} dispatched"
    return Row(
        f"{_CONCURRENT} concurrent updates of a workload",
        f"{served} served; {counted}",
        (served, found["total"], found["active"]) == (_CONCURRENT, _CONCURRENT, 0),
    )


async def _fleet_rows(rounds: int) -> list[Row]:
    passes: dict[tuple[str, str], list[Pass]] = {
        (kind, p): [] for kind in ("busy", "calm") for p in _POLICIES
    }
    async with picker_up(_CONFIG, *_SIZE) as fleet:
        for number in range(rounds):
            first, second = _POLICIES[:: 1 if number % 2 else -1]
            for policy in (first, second, second, first):
                await _set_policy(fleet, policy)
                for kind, size in (("busy", (_BUSY, _BUSY_REQUESTS)), ("calm", (_CALM, _CALM_REQUESTS))):
                    found = await _pass(fleet, *size)
                    passes[kind, policy].append(found)
                    print(f"{number + 1} of {rounds}: {policy}, {kind}: {found}", flush=True)
        concurrent = await _concurrent(fleet)
    return [*_compared(passes), concurrent]


def _compared(passes: Mapping[tuple[str, str], Sequence[Pass]]) -> list[Row]:
    def rounds(kind: str, policy: str, figure: str) -> list[float]:
        found = [float(getattr(each, figure)) for each in passes[kind, policy]]
        return [statistics.fmean(each) for each in zip(found[::2], found[1::2], strict=True)]

    def ratio(kind: str, figure: str) -> tuple[float, float, float]:
        fcfs, aware = (rounds(kind, policy, figure) for policy in _POLICIES)
        return interval([b / a for a, b in zip(fcfs, aware, strict=True)])

    def shown(ends: tuple[float, float, float]) -> str:
        return f"{ends[0]:.1%} ({ends[1]:.1%} to {ends[2]:.1%})"

    def median(kind: str, policy: str, figure: str) -> float:
        return statistics.median(float(getattr(each, figure)) for each in passes[kind, policy])

    def each(kind: str, figure: str, unit: str) -> str:
        return ", ".join(f"{policy} {median(kind, policy, figure):.0f}{unit}" for policy in _POLICIES)

    def times(kind: str) -> str:
        return "p50 / p99 " + ", ".join(
            f"{policy} {median(kind, policy, 'p50_ms'):.1f} / {median(kind, policy, 'p99_ms'):.1f} ms"
            for policy in _POLICIES
        )

    slower_ms = statistics.median(
        b - a for a, b in zip(*(rounds("calm", policy, "p99_ms") for policy in _POLICIES), strict=True)
    )
    rate = ratio("busy", "per_s")
    measured = f"{shown(rate)}; {each('busy', 'per_s', '/s')}"
    rows = [Row("throughput: > 90 % of fcfs", measured, _verdict(rate[0] > 0.9, rate[1] > 0.9))]
    for kind, when in (("calm", "no queue"), ("busy", "two thirds of requests wait")):
        cpu = ratio(kind, "cpu_us")
        measured = f"{shown(cpu)}; {each(kind, 'cpu_us', ' µs')} a request"
        met = _verdict(cpu[0] < 1.1, cpu[2] < 1.1)
        rows.append(Row(f"CPU of replicas and Valkey, {when}: < +10 %", measured, met))
    latency = f"{slower_ms:+.2f} ms, the median of the rounds; {times('calm')}"
    rows.append(Row("latency, no queue: p99 < +5 ms", latency, slower_ms < 5))
    return [*rows, Row("latency if two thirds of requests wait, for comparison", times("busy"), True)]


def _verdict(mean_meets: bool, interval_meets: bool) -> bool | None:
    return None if mean_meets and not interval_meets else mean_meets


_WORDS = {True: "met", False: "**missed**", None: "not shown"}


def _page(rows: Sequence[Row], rounds: int) -> str:
    cells = [[row.target, _WORDS[row.met], row.measured] for row in rows]
    return f"""\
# The targets of specification 000

{describe_run(" ".join(["python -m bench.targets", *sys.argv[1:]]))}

`workload-aware` and `fcfs` on one fleet (2 replicas, 4 simulated model servers, `lean`), switched live:
{rounds} rounds, each with two passes of both. Ratios are geometric means of the rounds with their 95 %
intervals; a target is met if the whole interval meets it. With {_BUSY} clients two thirds of the requests
wait, with {_CALM} no request waits.

{table(["target", "", "measured"], cells)}

An hour without a leak: [soak.md](soak.md).
"""


def main() -> int:
    parser = options_parser("python -m bench.targets")
    parser.add_argument("--rounds", type=int, default=20, help="of four passes")
    options = parser.parse_args()
    with server() as it:
        rows = _score(it)
    rows += asyncio.run(_fleet_rows(options.rounds))
    write_page(options.out / "targets.md", _page(rows, options.rounds))
    return 1 if any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
