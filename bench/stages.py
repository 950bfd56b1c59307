"""`python -m bench.stages CASE` compares when to split requests between prefill and decode servers.

Eight simulated model servers, whose steps take the times that were measured for vLLM with OPT-13B
(app/picker_tools/simulator/batch.py), either all serve whole requests, or four prefill and four decode.
The figure is goodput as DistServe (Zhong et al., OSDI 2024) defines it: the highest rate of requests of which
90 % meet both objectives, time to the first token and mean time per further token. All figures are in
unslowed time: servers, arrivals and objectives are slowed alike. Each case replaces its section in
bench/results/stages.md.
"""

import itertools
import math
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import uvloop
from whole_fleet import exact_bounds

from bench.limits.kinds import Sizes
from bench.limits.servers import SLOTS, SLOWDOWN, Servers, fleet, servers
from bench.rig.fleet import PLENTY, RunningFleet
from bench.rig.report import describe_run, options_parser, table, with_section, write_page
from picker_tools.load.generator import Answer, Client, Load, Planned, Request, quantile
from picker_tools.simulator.openai_api import BYTES_PER_TOKEN

_ROLES = ("prefill",) * 4 + ("decode",) * 4
_SEQUENCES = 256  # vLLM's default of --max-num-seqs
# An A100-80GB at vLLM's default of 0.9 has 46 GB beside OPT-13B's weights: 3500 blocks of 16 tokens.
_KV_BLOCKS = 3500 * SLOTS // _SEQUENCES
_ATTAINED = 0.9  # share of requests that must meet both objectives
_STEP = 1.1  # ratio of two neighbouring rates of the search
_NEVER = 1_000_000  # a threshold that no prompt exceeds
_REPLICAS = 2


@dataclass(frozen=True, slots=True)
class Case:
    """Requests of `sizes`, and the objectives in s: `ttft_s` to the first token, `pace_s` for each further
    one. The search begins at `per_s` requests a second; a run has `requests`."""

    sizes: Sizes
    ttft_s: float
    pace_s: float
    per_s: float
    requests: int = 120

    def plan(self, per_s: float, seed: int) -> Iterator[Planned]:
        """Poisson arrivals. Plans of one seed differ only in their pace."""
        dice = random.Random(seed)
        at_s = 0.0
        for number in range(1, self.requests + 1):
            at_s += dice.expovariate(1.0) / per_s * SLOWDOWN
            prompt_tokens, tokens = self.sizes(dice)
            start = f"{dice.getrandbits(48):012x} "  # no two prompts begin alike, so no prompt is cached
            pad_bytes = BYTES_PER_TOKEN * prompt_tokens - len(start)
            yield Planned(at_s, Request(start, tokens, streamed=True, pad_bytes=pad_bytes), number=number)

    def met(self, answer: Answer) -> bool:
        """Whether `answer` meets both objectives."""
        if not answer.served or answer.first_s is None:
            return False
        pace_s = (answer.took_s - answer.first_s) / max(1, answer.request.tokens - 1)
        return answer.first_s <= self.ttft_s * SLOWDOWN and pace_s <= self.pace_s * SLOWDOWN


def _long(dice: random.Random) -> tuple[int, int]:
    return dice.randint(3000, 5000), dice.randint(50, 150)


def _short(dice: random.Random) -> tuple[int, int]:
    return dice.randint(50, 150), dice.randint(50, 150)


def _mixed(dice: random.Random) -> tuple[int, int]:
    return (_long if dice.random() < 0.3 else _short)(dice)


# A whole request alone has its first token after 0.6 s (long) or 0.04 s (short), then one each 0.022 s. The
# objectives of `long-relaxed` and `short` are DistServe's for summarization and for a chatbot with OPT-13B.
_CASES = {
    "long-strict": Case(_long, ttft_s=2.5, pace_s=0.04, per_s=3.0),
    "long-relaxed": Case(_long, ttft_s=15.0, pace_s=0.15, per_s=5.0),
    "short": Case(_short, ttft_s=0.25, pace_s=0.1, per_s=40.0, requests=400),
    "mixed-strict": Case(_mixed, ttft_s=2.5, pace_s=0.04, per_s=6.0, requests=160),
}


@dataclass(frozen=True, slots=True)
class Level:
    """A run at one rate: the share of requests that met both objectives, p90 of their times, and what part of
    the machine's CPUs was used."""

    per_s: float
    attained: float
    ttft_p90_s: float
    pace_p90_s: float
    unserved: int
    cpu: float


async def _level(it: RunningFleet, case: Case, per_s: float, seed: int) -> Level:
    psutil.cpu_percent()
    with Client(it.url) as client:
        load = Load(client)
        await load.send_open(case.plan(per_s, seed))
    await it.wait_for_rest(60.0)
    served = [each for each in load.history if each.served]
    first = sorted(each.first_s / SLOWDOWN for each in served if each.first_s is not None)
    pace = sorted(
        (each.took_s - each.first_s) / SLOWDOWN / max(1, each.request.tokens - 1)
        for each in served
        if each.first_s is not None
    )
    attained = sum(map(case.met, load.history)) / len(load.history)
    level = Level(
        per_s, attained, quantile(first, 0.9), quantile(pace, 0.9), len(load.unserved), psutil.cpu_percent()
    )
    print(level, flush=True)
    return level


async def _goodput(
    it: RunningFleet, case: Case, start_per_s: float, seed: int
) -> tuple[float, Sequence[Level]]:
    """Goodput between the highest rate that attains the objectives and the next rate of the grid."""
    levels: dict[int, Level] = {}

    async def attains(step: int) -> bool:
        if step not in levels:
            levels[step] = await _level(it, case, start_per_s * _STEP**step, seed)
        return levels[step].attained >= _ATTAINED

    # Bracket with growing strides, then halve.
    low, stride = 0, 4
    if await attains(0):
        while await attains(low + stride):
            low += stride
        high = low + stride
    else:
        high = 0
        low = -stride
        while not await attains(low):
            high, low = low, low - stride
            if low <= -10 * stride:
                return 0.0, list(levels.values())
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if await attains(middle) else (low, middle)
    below, above = levels[low], levels[high]
    part = (below.attained - _ATTAINED) / max(1e-9, below.attained - above.attained)
    return below.per_s * (above.per_s / below.per_s) ** min(1.0, part), list(levels.values())


async def _compare(case: Case, folder: Path, thresholds: Sequence[str | int], seeds: int) -> str:
    rows = []
    found: dict[str, float] = {}
    cpu: list[float] = []
    for name, threshold in itertools.chain(
        [("8 endpoints serve whole requests", None)],
        ((_named(each), each) for each in thresholds),
    ):
        async with AsyncExitStack() as stack:
            roles = () if threshold is None else _ROLES
            them: Servers = await stack.enter_async_context(
                servers(folder, [_SEQUENCES] * 8, kv_blocks=_KV_BLOCKS, roles=roles)
            )
            more = {} if threshold is None else {"scheduling": {"stages": {"threshold": threshold}}}
            it = await stack.enter_async_context(fleet(them, _REPLICAS, exact_bounds(PLENTY), **more))
            # Connections, and what `auto` has to learn.
            await _level(it, case, case.per_s / 2, seed=0)
            rates = []
            for seed in range(1, seeds + 1):
                rate, levels = await _goodput(it, case, case.per_s, seed)
                rates.append(rate)
                cpu += [each.cpu for each in levels]
            found[name] = math.exp(math.fsum(math.log(max(each, 1e-9)) for each in rates) / len(rates))
            best = max(
                (each for each in levels if each.attained >= _ATTAINED),
                key=lambda each: each.per_s,
                default=None,
            )
            rows.append([
                name, f"{found[name]:.2f}", f"{found[name] / found[next(iter(found))]:.2f}",
                *((f"{best.ttft_p90_s:.2f}", f"{best.pace_p90_s * 1000:.0f}") if best else ("", "")),
                f"{sum(each.unserved for each in levels)}",
            ])  # fmt: skip
            print(rows[-1], flush=True)
    head = [
        "",
        "goodput, requests/s",
        "ratio to the first row",
        "TTFT p90, s",
        "time per token p90, ms",
        "unserved",
    ]
    fixed = {name: rate for name, rate in found.items() if name not in (_named("auto"), next(iter(found)))}
    best_name = max(fixed, key=lambda name: fixed[name])
    verdict = (
        f"`auto` against the best threshold ({best_name}): {found[_named('auto')] / fixed[best_name]:.2f}."
    )
    objectives = (
        f"Objectives: first token within {case.ttft_s:g} s, {case.pace_s * 1000:g} ms for each further token."
    )
    return "\n\n".join([
        objectives, table(head, rows), verdict,
        f"The machine's CPUs were busy for at most {max(cpu):.0f} % of a run.",
    ])  # fmt: skip


def _named(threshold: str | int) -> str:
    if threshold == "auto":
        return "4 + 4, auto"
    return {0: "4 + 4, always split", _NEVER: "4 + 4, never split"}.get(
        int(threshold), f"4 + 4, threshold {threshold}"
    )


_TITLE = "# Prefill and decode apart: goodput by when requests are split\n"


def main() -> int:
    parser = options_parser("python -m bench.stages", __doc__)
    parser.add_argument("case", nargs="?", choices=_CASES, metavar="CASE", help=", ".join(_CASES))
    parser.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="searches, with other arrivals each"
    )
    options = parser.parse_args()
    file = options.out / "stages.md"
    for name in [options.case] if options.case else _CASES:
        with tempfile.TemporaryDirectory() as folder:
            thresholds = ("auto", 0, 500, 2000, _NEVER)
            text = uvloop.run(_compare(_CASES[name], Path(folder), thresholds, options.seeds))
        command = f"python -m bench.stages {name} --seeds {options.seeds}"
        write_page(file, with_section(file, _TITLE, name, f"{describe_run(command)}\n\n{text}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
