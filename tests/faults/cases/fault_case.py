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
# Simulated time to first token (ms) in cases whose load must fill the pool. In the short form answers take
# longer, because a fast load that lasts for leases and restarts would slow tests that run at the same time.
TTFT_MS = "20" if FULL else "300"
_UPPER = "upper_bound_per_backend"
RESULTS = Path(__file__).parents[3] / "bench" / "results"


class Case:
    """One row of the table of results: the name `fault`, and the figures that the test adds by `report`."""

    def __init__(self, name: str, mode: str) -> None:
        self.mode = mode  # Envoy's mode, as `lean`
        self.name = name.replace("[lean]", "").replace("lean-", "").replace("-lean", "")
        self.fault = name
        self.figures: list[str] = []
        self.ended_well = True

    def describe(self, fault: str) -> None:
        self.fault = fault if self.mode == "lean" else f"{fault}, mode `{self.mode}`"

    def report(self, figure: str) -> None:
        self.figures.append(figure)

    def size(self, short: int, full: int) -> int:
        """Return `full` under `make faults`, else `short`."""
        return full if FULL else short

    async def check(self, fleet: Fleet, history: Sequence[Answer] = (), **rules: Any) -> HistoryCheck:
        """Assert that `check_history` finds no fault in the clients' answers and the decision log."""
        found = check_history(history, await log_of(fleet), **rules)
        self.report(f"G1–G6 over {found.entries} log entries")
        assert found.faults == (), found.faults
        return found

    def with_limits(self, config: dict[str, Any]) -> dict[str, Any]:
        """The configuration of a case: in mode `http` the fleet finds the endpoints' limits, from one request
        up to the configured bound."""
        if self.mode != "http":
            return config
        given = config["request_queue_controller"]
        limits = {"mode": "adaptive", "initial_per_backend": 1, "max_per_backend": int(given[_UPPER])}
        return {**config, "request_queue_controller": {**limits, **given}}

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

`make faults` writes this page: one row for the last run of each case, in its full or short form.
Each case runs Envoy, Valkey, three replicas and simulated model servers on one machine with two
cores; `load` is the machine's load average at the end of the case.

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
