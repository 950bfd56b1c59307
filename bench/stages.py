"""`python -m bench.stages CASE` compares when to split requests between prefill and decode servers.

Eight simulated model servers, whose steps take the times that were measured for vLLM with OPT-13B
(app/picker_tools/simulator/batch.py), either all serve whole requests, or four prefill and four decode.
The figure is goodput as DistServe (Zhong et al., OSDI 2024) defines it: the highest rate of requests of which
90 % meet both objectives, time to the first token and mean time per further token. Without CASE all cases
run. Each case replaces its section in bench/results/stages.md.
"""

import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import uvloop
from whole_fleet import exact_bounds

from bench.limits.kinds import Sizes
from bench.limits.servers import SLOTS, fleet, servers
from bench.rig.fleet import PLENTY, RunningFleet
from bench.rig.report import describe_run, options_parser, table, with_section, write_page
from picker_tools.load.generator import Answer, Client, Load, Planned, Request, quantile
from picker_tools.local_fleet.parts import ROLE
from picker_tools.simulator.openai_api import BYTES_PER_TOKEN

_ROLES = ("prefill",) * 4 + ("decode",) * 4
_SEQUENCES = 256  # vLLM's default of --max-num-seqs
# An A100-80GB at vLLM's default of 0.9 has 46 GB beside OPT-13B's weights: 3500 blocks of 16 tokens.
_KV_BLOCKS = 3500 * SLOTS // _SEQUENCES
_ATTAINED = 0.9  # share of requests that must meet both objectives
_STEP, _STRIDE, _MOST_STEPS = 1.08, 3, 45  # ratio of two neighbouring rates; first stride of the search
_NEVER = 1_000_000  # a threshold that no prompt exceeds
_REPLICAS = 2
_LEARNT = (
    480  # requests before the search, of which `auto` sends one in eight the slower way until it knows both
)
_REST_S = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    """Requests of `sizes`, and the objectives in s: `ttft_s` to the first token, `pace_s` for each further
    one. A run has `requests`; the search begins at `per_s` requests a second. `thresholds` of tokens."""

    sizes: Sizes
    ttft_s: float
    pace_s: float
    per_s: float
    thresholds: Sequence[int]
    requests: int = 120

    def plan(self, per_s: float, seed: int) -> Iterator[Planned]:
        """Poisson arrivals. Plans of one seed differ only in their pace."""
        dice = random.Random(seed)
        at_s = 0.0
        for number in range(1, self.requests + 1):
            at_s += dice.expovariate(1.0) / per_s
            prompt_tokens, tokens = self.sizes(dice)
            start = f"{dice.getrandbits(48):012x} "  # no two prompts begin alike, so no prompt is cached
            pad_bytes = BYTES_PER_TOKEN * prompt_tokens - len(start)
            yield Planned(at_s, Request(start, tokens, streamed=True, pad_bytes=pad_bytes), number=number)


def _long(dice: random.Random) -> tuple[int, int]:
    return dice.randint(3000, 5000), dice.randint(50, 150)


def _short(dice: random.Random) -> tuple[int, int]:
    return dice.randint(50, 150), dice.randint(50, 150)


def _mixed(dice: random.Random) -> tuple[int, int]:
    return (_long if dice.random() < 0.3 else _short)(dice)


# A long prompt alone takes 0.63 s, and each further token 0.022 s. The strict objectives are 3 and 1.5 times
# that, as those of Splitwise for 90 % of requests (Patel et al., ISCA 2024, table VI). The relaxed ones are
# DistServe's for summarization, those of `short` for a chatbot with OPT-13B (table 1).
_STRICT_S = {"ttft_s": 1.9, "pace_s": 0.033}
_CASES = {
    "long-strict": Case(_long, **_STRICT_S, per_s=3.3, thresholds=(0, _NEVER)),
    "long-relaxed": Case(_long, ttft_s=15.0, pace_s=0.15, per_s=8.0, thresholds=(0, _NEVER), requests=200),
    "short": Case(_short, ttft_s=0.25, pace_s=0.1, per_s=40.0, thresholds=(0, 500, _NEVER), requests=500),
    "mixed-strict": Case(_mixed, **_STRICT_S, per_s=8.0, thresholds=(0, 500, _NEVER), requests=200),
}


@dataclass(frozen=True, slots=True)
class Level:
    """A run at one rate: the share of requests that met both objectives, p90 of their times, the number not
    served, and how busy the machine's CPUs were, in %."""

    per_s: float
    attained: float
    ttft_p90_s: float
    pace_p90_s: float
    unserved: int
    cpu: float

    @property
    def suffices(self) -> bool:
        return self.attained >= _ATTAINED


def _pace_s(answer: Answer) -> float:
    assert answer.first_s is not None
    return (answer.took_s - answer.first_s) / max(1, answer.request.tokens - 1)


async def _level(it: RunningFleet, case: Case, per_s: float, seed: int) -> Level:
    psutil.cpu_percent()  # starts the interval
    with Client(it.url) as client:
        load = Load(client)
        await load.send_open(case.plan(per_s, seed))
    cpu = psutil.cpu_percent()
    await it.wait_for_rest(_REST_S)
    served = [(each.first_s, _pace_s(each)) for each in load.history if each.served and each.first_s]
    met = sum(first_s <= case.ttft_s and pace_s <= case.pace_s for first_s, pace_s in served)
    firsts, paces = (quantile(sorted(each), 0.9) for each in zip(*served, strict=True))
    level = Level(per_s, met / len(load.history), firsts, paces, len(load.unserved), cpu)
    print(level, flush=True)
    return level


async def _search(it: RunningFleet, case: Case, start_per_s: float) -> list[Level]:
    """Levels around goodput, by rate: the last that suffices and the next, `_STEP` above, that does not."""
    levels: dict[int, Level] = {}

    async def suffices(step: int) -> bool:
        if step not in levels:
            levels[step] = await _level(it, case, start_per_s * _STEP**step, seed=1)
        return levels[step].suffices

    up = 1 if await suffices(0) else -1
    near, stride = 0, _STRIDE
    while abs(near) < _MOST_STEPS and await suffices(near + up * stride) == (up > 0):
        near, stride = near + up * stride, 2 * stride
    low, high = sorted((near, near + up * stride))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if await suffices(middle) else (low, middle)
    return [levels[step] for step in sorted(levels) if step <= high]


def _goodput(levels: Sequence[Level]) -> float:
    """The rate at which 90 % meet the objectives, between the last two levels."""
    below, above = levels[-2:]
    part = (below.attained - _ATTAINED) / max(1e-9, below.attained - above.attained)
    return float(below.per_s * (above.per_s / below.per_s) ** part)


async def _compare(case: Case, folder: Path) -> str:
    found: dict[str, float] = {}
    rows, cpu = [], 0.0
    plans: dict[str, tuple[Sequence[str], dict[str, Any]]] = {
        "8 endpoints, whole": ((), {}),
        "8 of both stages, auto": (("prefill-decode",) * 8, {"prefill": {"selector": ROLE}}),
        "4 + 4, auto": (_ROLES, {}),
    }
    names = {0: "4 + 4, always split", _NEVER: "4 + 4, never split"}
    for each in case.thresholds:
        plans[names.get(each, f"4 + 4, above {each} tokens")] = _ROLES, {"threshold": each}
    start_per_s = case.per_s
    for name, (roles, stages) in plans.items():
        own = {"slowdown": 1.0, "kv_blocks": _KV_BLOCKS, "roles": roles}
        more = {"scheduling": {"stages": stages}} if stages else {}
        async with (
            servers(folder, [_SEQUENCES] * 8, **own) as them,
            fleet(them, _REPLICAS, exact_bounds(PLENTY), **more) as it,
        ):
            if stages.get("threshold") is None and roles:
                await _level(it, replace(case, requests=_LEARNT), start_per_s, seed=0)
            levels = await _search(it, case, start_per_s)
        found[name] = start_per_s = _goodput(levels)
        best = levels[-2]
        cpu = max(cpu, *(each.cpu for each in levels))
        first = next(iter(found.values()))
        rows.append([
            name, f"{found[name]:.2f}", f"{found[name] / first:.2f}", f"{best.ttft_p90_s:.2f}",
            f"{1000 * best.pace_p90_s:.0f}", f"{sum(each.unserved for each in levels)}",
        ])  # fmt: skip
        print(rows[-1], flush=True)
    fixed = {name: found[name] for name in list(found)[3:]}
    best_fixed = max(fixed, key=lambda name: fixed[name])
    head = ["", "goodput, requests/s", "to the first row", "TTFT p90, s", "per token p90, ms", "unserved"]
    return "\n\n".join([
        f"{case.requests} requests a run. Objectives: the first token within {case.ttft_s:g} s, "
        f"{1000 * case.pace_s:g} ms for each further one.",
        table(head, rows),
        f"`auto` has {found['4 + 4, auto'] / fixed[best_fixed]:.2f} of the goodput of the best fixed "
        f"threshold ({best_fixed}). The machine's CPUs were at most {cpu:.0f} % busy.",
    ])  # fmt: skip


_TITLE = "# Prefill and decode apart: goodput by when requests are split\n"


def main() -> int:
    parser = options_parser("python -m bench.stages", __doc__)
    parser.add_argument("case", nargs="?", choices=_CASES, metavar="CASE", help=", ".join(_CASES))
    options = parser.parse_args()
    file = options.out / "stages.md"
    for name in [options.case] if options.case else _CASES:
        with tempfile.TemporaryDirectory() as folder:
            text = uvloop.run(_compare(_CASES[name], Path(folder)))
        about = describe_run(f"python -m bench.stages {name}")
        write_page(file, with_section(file, _TITLE, name, f"{about}\n\n{text}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
