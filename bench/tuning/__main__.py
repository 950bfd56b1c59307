"""Try each knob, write bench/results/tuning.md: `python -m bench.tuning`."""

import asyncio
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from bench.tuning.fleet import ENDPOINTS, REPLICAS, SERVICE_MS, running
from bench.tuning.knobs import TRIALS

_PAGE = Path(__file__).parents[1] / "results" / "tuning.md"


async def _rows() -> list[str]:
    rows = []
    async with running() as fleet:
        for trial in TRIALS:
            for value, change in trial.values.items():
                seen = await fleet.run(change, trial.groups, paused=trial.paused)
                rows.append(f"| `{trial.knob}` | {trial.asked} | {value} | {trial.told(seen)} |")
                print(rows[-1], flush=True)
    return rows


def main() -> int:
    load = os.getloadavg()[0]
    rows = asyncio.run(_rows())
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    lines = [
        "# What single settings do",
        "",
        f"`python -m bench.tuning`, {now}; {REPLICAS} replicas, {ENDPOINTS} simulated model servers "
        f"({SERVICE_MS} ms an answer), real Envoy, one fleet for all runs. Load average {load:.1f} before; "
        "nothing here depends on how fast the machine is. Each run is one `PATCH /api/v1/config`, taken back "
        "after it; the rest is default. Requests arrive while dispatch is paused (but for "
        "`percentage_deviation_for_bounds`), group by group, and are served after `resume`; order and stock "
        "are read off the decision log, refusals off the answers.",
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
