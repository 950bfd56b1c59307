"""What listeners are told of decisions: each once, whoever listened before."""

from typing import Any

import pytest

from picker_fleet.admin import snapshot
from picker_fleet.admin.snapshot import Snapshots


class Shared:
    """A shared state of which only the decision log says anything."""

    def __init__(self) -> None:
        self.logged = 0

    async def state(self) -> dict[str, Any]:
        return {"now_us": 0}

    async def endpoints(self) -> list[Any]:
        return []

    async def flows(self, *_: Any) -> dict[str, Any]:
        return {"flows": [], "total": 0}

    async def busiest(self, *_: Any) -> dict[str, Any]:
        return {"workloads": [], "total": 0}

    async def replicas(self) -> list[Any]:
        return []

    async def decisions(self, most: int) -> list[dict[str, str]]:
        entry = dict.fromkeys(("event", "request", "flow", "workload", "endpoint", "by", "note"), "")
        zeros = dict.fromkeys(("time_us", "band", "stock", "queued"), "0")
        first = max(self.logged - most, 0)
        return [{**entry, **zeros, "seq": str(seq)} for seq in range(first + 1, self.logged + 1)]


async def told(snapshots: Snapshots) -> tuple[int, int]:
    """How many entries a look tells, and how many it could not."""
    decisions = dict(await snapshots())["decisions"]
    return len(decisions["entries"]), decisions["skipped"]


async def test_given_others_that_listen_when_one_joins_then_it_has_the_last_entries_and_nothing_twice() -> (
    None
):
    shared = Shared()
    snapshots = Snapshots(shared, shared, shared, logging=True)  # type: ignore[arg-type]
    assert snapshots.recent() == []
    shared.logged = 3
    assert await told(snapshots) == (3, 0)
    [(name, recent)] = snapshots.recent()
    assert (name, [each["seq"] for each in recent["entries"]], recent["skipped"]) == (
        "decisions",
        [1, 2, 3],
        0,
    )
    shared.logged = 5
    assert await told(snapshots) == (2, 0)
    shared.logged = 205
    assert await told(snapshots) == (100, 100)


async def test_given_hours_without_a_listener_when_one_comes_then_what_came_meanwhile_is_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = Shared()
    snapshots = Snapshots(shared, shared, shared, logging=True)  # type: ignore[arg-type]
    shared.logged = 10
    assert await told(snapshots) == (10, 0)
    monkeypatch.setattr(snapshot, "_IDLE_S", -1.0)
    shared.logged = 5000
    assert snapshots.recent() == []
    assert await told(snapshots) == (100, 0)
