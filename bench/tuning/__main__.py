"""Try each knob, write bench/results/tuning.md: `python -m bench.tuning`.

With names of knobs only these are tried, and nothing is written.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from bench.tuning.fleet import ENDPOINTS, REPLICAS, SERVICE_MS, SLOW_MS, running
from bench.tuning.knobs import TRIALS, Trial
from bench.tuning.live import LIVE
from bench.tuning.started import FLEETS, STARTED

_PAGE = Path(__file__).parents[1] / "results" / "tuning.md"


_TRIALS = (*TRIALS, *LIVE, *STARTED)


async def _rows(trials: Sequence[Trial]) -> list[str]:
    """One a trial and value, in their order, though the runs are ordered by fleet."""
    rows: dict[tuple[str, str], str] = {(trial.knob, value): "" for trial in trials for value in trial.values}
    wanted = {trial.fleets.get(value, "") for trial in trials for value in trial.values}
    for name, (settings, service_ms) in FLEETS.items():
        if name not in wanted:
            continue
        async with running(settings, service_ms) as fleet:
            for trial in trials:
                for value, change in trial.values.items():
                    if trial.fleets.get(value, "") != name:
                        continue
                    seen = await fleet.run(change, trial.groups, paused=trial.paused, hold_s=trial.hold_s)
                    row = f"| `{trial.knob}` | {trial.asked} | {value} | {trial.told(seen)} |"
                    rows[trial.knob, value] = row
                    print(row, flush=True)
    return list(rows.values())


def main() -> int:
    load = os.getloadavg()[0]
    named = sys.argv[1:]
    rows = asyncio.run(_rows([trial for trial in _TRIALS if not named or trial.knob in named]))
    if named:
        return 0
    after = os.getloadavg()[0]
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    lines = [
        "# What single settings do",
        "",
        f"`python -m bench.tuning`, {now}; {REPLICAS} replicas, {ENDPOINTS} simulated model servers "
        f"({SERVICE_MS} ms an answer; {SLOW_MS} ms where requests arrive at once), real Envoy. Load average "
        f"{load:.1f} before, {after:.1f} after; nothing here depends on how fast the machine is. Each run is "
        "one `PATCH /api/v1/config`, taken back after it; the rest is default, but for a "
        "`queue_ttl` of 600 s. What cannot be changed live "
        "(`unit`, `queue_ttl`, `overload_status`) has its second value in another fleet. Requests arrive "
        "while dispatch is paused (but for `percentage_deviation_for_bounds` and the two bounds), group by "
        "group, and are served after `resume`; order and stock are read off the decision log, refusals off "
        "the answers.",
        "",
        "| setting | asked | value | what happened |",
        "| --- | --- | --- | --- |",
        *rows,
        "",
    ]
    _PAGE.write_text("\n".join(lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
