"""`python -m bench.fairness.skew`: weights 4:1 with skewed ingress; exit 1 if it is off by over 1 %.

Each replica receives the requests of one flow only. Replicas that schedule independently then serve 1:1,
whatever the weights are: another project measured 255:65 with one router and 163:162 with two.
"""

import asyncio
import sys
from pathlib import Path

from bench.fairness import scenarios
from bench.fairness.fleet import Fleet, RunFailed, running
from bench.rig.page import table
from picker_fleet.errors import PickerError
from picker_tools.audit import measures

_PAGE = Path(__file__).parents[1] / "results" / "skew.md"
_REPLICAS = (1, 2, 4, 8)
_SEEDS = (1, 2, 3)
_GRANTS = 3250  # ten times as many as in the published run
_LIMIT = 0.01
_IDEAL = scenarios.SKEW_WEIGHTS["heavy"] / scenarios.SKEW_WEIGHTS["light"]

_TEXT = """\
# Weights 4:1 with skewed ingress

`python -m bench.fairness.skew`; seeds {seeds}. Two flows of weights 4 and 1, both always backlogged, 16 in
flight, replicas as processes of their own on one Valkey. With two replicas or more each replica receives
requests of one flow only; *swapped* exchanges the flows' replicas, in a run of its own. Counts are
dispatches of weight 4 and of weight 1 while both flows waited, read from the decision log. The control gives
each replica a queue of its own and its part of the bounds.

Largest deviation of heavy/light from 4 with one queue: **{worst:.2%}** (limit 1 %).
"""


async def _ratio(fleet: Fleet, replicas: int, seed: int, *, swapped: bool, separate: bool) -> tuple[int, int]:
    """Dispatches of the heavy and the light flow while both were backlogged."""
    scenario = scenarios.skewed(_GRANTS, swapped=swapped)
    entries = await fleet.run(scenario, seed, replicas, separate=separate)
    served = measures.window(entries, scenarios.SKEW_WEIGHTS.keys(), scenarios.source_of).served
    return round(served["heavy"]), round(served["light"])


async def _measured() -> tuple[list[list[str]], float]:
    """The table's rows, and the largest deviation of the one queue."""
    rows, worst = [], 0.0
    async with running(max(_REPLICAS)) as fleet:
        for replicas in _REPLICAS:
            for swapped in (False, True) if replicas > 1 else (False,):
                found = [
                    await _ratio(fleet, replicas, seed, swapped=swapped, separate=False) for seed in _SEEDS
                ]
                worst = max(worst, *(abs(heavy / light / _IDEAL - 1) for heavy, light in found))
                alone = await _ratio(fleet, replicas, _SEEDS[0], swapped=swapped, separate=True)
                ingress = "swapped" if swapped else "skewed" if replicas > 1 else "one replica"
                cells = [f"{heavy}:{light}" for heavy, light in [*found, alone]]
                furthest = max((heavy / light for heavy, light in found), key=lambda each: abs(each - _IDEAL))
                rows.append(
                    [
                        str(replicas),
                        ingress,
                        *cells[:-1],
                        f"{furthest:.3f}",
                        f"{cells[-1]} ({alone[0] / alone[1]:.2f})",
                    ]
                )
                print(*rows[-1], flush=True)
    return rows, worst


def main() -> int:
    try:
        rows, worst = asyncio.run(_measured())
    except (PickerError, RunFailed) as fault:
        print(fault, file=sys.stderr)
        return 1
    head = ["replicas", "ingress", *(f"seed {seed}" for seed in _SEEDS), "ratio furthest from 4"]
    text = _TEXT.format(seeds=", ".join(map(str, _SEEDS)), worst=worst)
    _PAGE.write_text(f"{text}\n{table([*head, 'control: one queue a replica'], rows)}\n", encoding="utf-8")
    print(f"largest deviation {worst:.2%}; written: {_PAGE}")
    return 0 if worst <= _LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
