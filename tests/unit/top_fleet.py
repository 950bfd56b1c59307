"""A fleet's status as `picker top` has it, and its frames as lines. For test_top."""

import io
from typing import Any

from rich.console import Console

from picker_tools.top.frame import StockSample, ViewState, frame
from picker_tools.top.status import FleetStatus, QueuePage

HOSTILE = "\x1b[2J\x1b]0;owned\x07[red]gold\u202e"
NO_SNAPSHOT = FleetStatus(None, 0.0, "")
QUEUE, LOG = 4, 5


def snapshot(flows: int = 3, **state: Any) -> dict[str, Any]:
    """A snapshot with `flows` flows; the last one has a hostile name."""
    names = [*(f"flow-{number}" for number in range(flows - 1)), HOSTILE]
    flow = {
        "band": "Default", "queued": 4, "oldest_s": 4.04, "weight": 1, "parked": False, "in_flight": None,
        "served_cost_per_s": 1.5, "share": 0.5, "fair_share": 0.25,
    }  # fmt: skip
    pool = {
        "pool": "default", "replica": "r-1", "degraded": False, "paused": False, "unit": "requests",
        "stock": 8, "bounds": {"lower": 7.2, "watermark": 8, "upper": 8.8}, "queued": 12, "overdue": 2,
        "drain_rate": 21.25, "guard_dispatches_total": 4,
        "bands": [{"band": "Default", "queued": 12, "oldest_s": 4.04}],
    }  # fmt: skip
    endpoints = [
        {"address": "10.0.0.1:8000", "status": "ready", "in_flight": 2},
        {"address": "10.0.0.2:8000", "status": "drained", "in_flight": 0},
    ]
    return {
        "at": 1_700_000_000.0, "state": {**pool, **state}, "endpoints": endpoints,
        "flows": [{"flow": name, **flow} for name in names], "flows_total": 1000,
        "workloads": [], "workloads_total": 0,
        "replicas": [{"id": "r-1", "live": True, "degraded": False, "this": True}],
    }  # fmt: skip


def page(count: int = 30, total: int = 100_000, next_cursor: str | None = "next") -> QueuePage:
    """A page of the queue; its last request has a hostile flow and id."""
    request = {
        "band": "Default", "age_s": 3.04, "deadline_in_s": 26.96, "cost": 1.0, "workload": "chat",
        "score": {"total": 0.254}, "owner": "r-77a0",
    }  # fmt: skip
    requests = [
        {
            "id": f"4f1d9c00-0000-4000-8000-{number:012}", "flow": f"flow-{number}", "position": number + 1,
            "overdue": number == 0, **request,
        }
        for number in range(count)
    ]  # fmt: skip
    if requests:
        requests[-1] |= {"id": HOSTILE, "flow": HOSTILE}
    return QueuePage("", tuple(requests), total, next_cursor)


def entry(number: int) -> dict[str, Any]:
    """An entry of the decision log."""
    return {
        "seq": number, "at": 1_700_000_000.25 + number, "event": "expired" if number % 2 else "placed",
        "request": f"request-{number}", "flow": f"flow-{number}", "band": "Default",
        "endpoint": "10.0.0.1:8000", "stock": 8.0, "queued": number, "by": "turn", "note": "0.25",
    }  # fmt: skip


def history(count: int = 300, start: float = 1_700_000_000.0) -> tuple[StockSample, ...]:
    """A stock that rises from 0 to 8 and stays, and a queue of 3."""
    return tuple(StockSample(start + at, min(8.0, at / 10), 3.0, 7.2, 8.0, 8.8) for at in range(count))


def status(**other: Any) -> FleetStatus:
    """A status with every part known."""
    known = {"decisions": tuple(map(entry, reversed(range(40)))), "history": history(), "page": page()}
    return FleetStatus(**{"snapshot": snapshot(flows=50), "age_s": 0.2, "error": "", **known, **other})


def lines(status: FleetStatus, view_state: ViewState, width: int = 80, height: int = 24) -> list[str]:
    """The frame as a terminal of that size shows it."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    with console.capture() as caught:
        console.print(frame(status, view_state, url="http://r", width=width, height=height), end="")
    return caught.get().splitlines()
