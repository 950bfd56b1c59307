"""A case of the fault suite: its size, its measurements, and the table of all results."""

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from case_fleet import log_of
from history import HistoryCheck, check_history
from whole_fleet import Fleet

from picker_tools.load.generator import Answer, Load

FULL = os.environ.get("FAULT_SUITE") == "full"
# Time to first token of model servers in cases that need a full pool at any rate of requests. Answers of the
# short form take about three times as long, because it runs beside other tests.
TTFT_MS = "20" if FULL else "150"
RESULTS = Path(__file__).parents[3] / "bench" / "results"


class Case:
    """One row of the table: `fault`, and the figures added by `report`."""

    def __init__(self, name: str, mode: str) -> None:
        self.mode = mode  # the mode of Envoy
        self.name = name.replace("[lean]", "").replace("lean-", "").replace("-lean", "")
        self.fault = name
        self.figures: list[str] = []
        self.ended_well = True

    def describe(self, fault: str) -> None:
        self.fault = fault if self.mode == "lean" else f"{fault}, mode `{self.mode}`"

    def report(self, figure: str) -> None:
        self.figures.append(figure)

    def size(self, short: int, full: int) -> int:
        """`short` under `make test`, `full` under `make faults`."""
        return full if FULL else short

    async def check(self, fleet: Fleet, history: Sequence[Answer] = (), **rules: Any) -> HistoryCheck:
        """Run `check_history` on the clients' answers and the fleet's log; assert that it finds no fault."""
        found = check_history(history, await log_of(fleet), **rules)
        self.report(f"G1–G6 over {found.entries} log entries")
        assert found.faults == ()
        return found

    def all_served(self, load: Load) -> None:
        """Assert that every request was served."""
        self.report(f"{len(load.unserved)} errors in {len(load.history)} requests")
        assert load.unserved == []

    def record(self, passed: bool) -> None:
        """Add or replace this case's row in bench/results/faults.json, and write the table."""
        file = RESULTS / "faults.json"
        rows = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        rows[self.name] = {
            "fault": self.fault,
            "form": "full" if FULL else "short",
            "figures": "; ".join(self.figures),
            "passed": passed,
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "load": round(os.getloadavg()[0], 1),
        }
        file.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n", encoding="utf-8")
        (RESULTS / "faults.md").write_text(_table(rows), encoding="utf-8")


_PAGE = """# The fault suite

Written by `make faults`, a row a case, each as it was last run; a row says in which form. Real
processes: Envoy, Valkey, three replicas and simulated model servers on one machine with two cores;
the load is that machine's average at the case's end.

| fault | what was seen | passed | form | run | load |
|---|---|---|---|---|---|
"""


def _table(rows: dict[str, dict[str, object]]) -> str:
    lines = []
    for _, row in sorted(rows.items()):
        passed = "yes" if row["passed"] else "**no**"
        cells = (row["fault"], row["figures"], passed, row["form"], row["date"], row["load"])
        lines.append(f"| {' | '.join(map(str, cells))} |\n")
    return _PAGE + "".join(lines)
