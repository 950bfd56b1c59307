"""What the event stream tells each second."""

import asyncio
import math
import time
from typing import Any

from picker_fleet.admin.shown import BANDS
from picker_fleet.admin.standing import PAUSE_S
from picker_fleet.admin.view import Lists, StateView
from picker_fleet.state.reads import Reads

ROWS = 50
_MOST_DECISIONS = 100
_IDLE_S = 5.0  # after so long without a look nobody listens, and the next one begins anew


class Snapshots:
    """Called, it reads what there is to tell, as (event, data). `logging`: whether decisions are logged."""

    def __init__(self, view: StateView, lists: Lists, reads: Reads, *, logging: bool) -> None:
        self._view = view
        self._lists = lists
        self._reads = reads
        self._logging = logging
        self._found: list[dict[str, Any]] | None = None  # by the look before, where there was one
        self._asked_s = -math.inf

    async def __call__(self) -> list[tuple[str, Any]]:
        if self._idle():
            self._found = None
        self._asked_s = time.monotonic()
        state = await self._view.state()
        await asyncio.sleep(PAUSE_S)
        flows = await self._lists.flows(ROWS, None, None)
        await asyncio.sleep(PAUSE_S)
        workloads = await self._lists.busiest(ROWS)
        await asyncio.sleep(PAUSE_S)
        snapshot = {
            "at": state["now_us"] / 1e6,
            "state": state,
            "flows": flows["flows"],
            "flows_total": flows["total"],
            "workloads": workloads["workloads"],
            "workloads_total": workloads["total"],
            "endpoints": await self._view.endpoints(),
            "replicas": await self._lists.replicas(),
        }
        told: list[tuple[str, Any]] = [("snapshot", snapshot)]
        await asyncio.sleep(PAUSE_S)
        if self._logging:
            told.append(("decisions", await self._decisions()))
            await asyncio.sleep(PAUSE_S)
        return told

    async def _decisions(self) -> dict[str, Any]:
        """The entries since the last time, newest last; `skipped` is how many more there were."""
        found = [_entry(fields) for fields in await self._reads.decisions(_MOST_DECISIONS)]
        before, self._found = self._found, found
        last, newest = _newest(before or []), _newest(found)
        if before is None or newest < last:  # the first look, or another life of the pool
            return {"entries": found, "skipped": 0}
        fresh = [entry for entry in found if entry["seq"] > last]
        return {"entries": fresh, "skipped": newest - last - len(fresh)}

    def recent(self) -> list[tuple[str, Any]]:
        """What one who joins others has to be told, for the next look to go on from."""
        if self._idle() or not self._found:
            return []
        return [("decisions", {"entries": self._found, "skipped": 0})]

    def _idle(self) -> bool:
        return time.monotonic() - self._asked_s > _IDLE_S


def _newest(entries: list[dict[str, Any]]) -> int:
    return int(entries[-1]["seq"]) if entries else 0


def _entry(fields: dict[str, str]) -> dict[str, Any]:
    return {
        "seq": int(fields["seq"]),
        "at": float(fields["time_us"]) / 1e6,
        "event": fields["event"],
        "request": fields["request"] or None,
        "flow": fields["flow"] or None,
        "band": BANDS[int(fields["band"])] if fields["flow"] else None,
        "workload": fields["workload"] or None,
        "endpoint": fields["endpoint"] or None,
        "stock": float(fields["stock"]),
        "queued": int(float(fields["queued"])),
        "by": fields["by"] or None,
        "note": fields["note"],
    }
