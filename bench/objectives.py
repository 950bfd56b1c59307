"""`python -m bench.objectives CASE` compares goodput under latency objectives with least-loaded picking.

The simulation of bench/stages.py with eight whole servers. Least-loaded picking takes the endpoint with the
fewest requests. The 60th percentiles of its times to the first token and per further token, for short and for
long prompts, become the objectives. Then the requests are sheddable and carry the objectives: the scorer
`slo-headroom` chooses, and requests that no endpoint can serve in time are refused. The figure is the number
of requests that met their objectives, relative to least-loaded picking at the same rate. Without CASE all
cases run. Each case replaces its section in bench/results/objectives.md.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial

from bench.rig.report import percentile, run_cases, table
from bench.stages import CASES as STAGES
from bench.stages import Case, Pool, Served
from picker_fleet.domain.request import LatencyObjective

_SERVERS, _REQUESTS, _SEEDS = 8, 600, (1, 2)
_LONG_TOKENS = 1000  # a longer prompt has the objectives of long prompts
CASES = {"long": (STAGES["long-strict"], 8.0), "mixed": (STAGES["mixed-strict"], 22.0)}  # requests a second

Objective = Callable[[int], LatencyObjective]


def _runs(case: Case, per_s: float, objective: Objective | None) -> tuple[list[Served], int]:
    """The served requests of all seeds and the number of refused requests, after the model has learned."""
    served: list[Served] = []
    refused = 0
    for seed in _SEEDS:
        pool = Pool(0, _SERVERS, None, seed, objective=objective)
        pool.serve(case.arrivals(_REQUESTS, per_s, 1000 + seed))
        served += pool.serve(case.arrivals(_REQUESTS, per_s, seed))
        refused += pool.refused
    return served, refused


def _objectives(served: Sequence[Served]) -> dict[bool, LatencyObjective]:
    """For short and for long prompts: 60th percentiles of times to first token and per further token."""
    found = {}
    for is_long in (False, True):
        some = [each for each in served if (each.prompt_tokens > _LONG_TOKENS) is is_long]
        if some:
            ttft_s, pace_s = [each.ttft_s for each in some], [each.pace_s for each in some]
            found[is_long] = LatencyObjective(percentile(ttft_s, 0.6), percentile(pace_s, 0.6))
    return found


def _met(served: Sequence[Served], objective: Objective) -> int:
    times = ((each, objective(each.prompt_tokens)) for each in served)
    return sum(each.ttft_s <= most.ttft_s and each.pace_s <= most.tpot_s for each, most in times)


def _compare(name: str) -> str:
    case, per_s = CASES[name]
    least_loaded, _ = _runs(case, per_s, None)
    found = _objectives(least_loaded)

    def both(prompt_tokens: int) -> LatencyObjective:
        return found[prompt_tokens > _LONG_TOKENS]

    def first_token(prompt_tokens: int) -> LatencyObjective:
        return LatencyObjective(ttft_s=both(prompt_tokens).ttft_s)

    def pace(prompt_tokens: int) -> LatencyObjective:
        return LatencyObjective(tpot_s=both(prompt_tokens).tpot_s)

    rows = []
    titles = {"first token": first_token, "per further token": pace, "both": both}
    for title, objective in titles.items():
        served, refused = _runs(case, per_s, objective)
        base, met = _met(least_loaded, objective), _met(served, objective)
        rows.append([title, f"{base}", f"{met}", f"{met / base:.2f}", f"{refused / len(least_loaded):.0%}"])
        print(name, rows[-1], flush=True)
    head = ["objective", "met, least-loaded", "met, by objective", "ratio", "refused"]
    listed = "; ".join(
        f"{'long' if is_long else 'short'} prompts {most.ttft_s:.2f} s and {1000 * most.tpot_s:.0f} ms"
        for is_long, most in found.items()
    )
    return f"{len(least_loaded)} requests at {per_s:g}/s. Objectives: {listed}.\n\n{table(head, rows)}"


_TITLE = "# Requests that met their latency objectives, beside least-loaded picking\n"


if __name__ == "__main__":
    cases = {name: partial(_compare, name) for name in CASES}
    sys.exit(run_cases("bench.objectives", __doc__, _TITLE, cases))
