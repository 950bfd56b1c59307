"""What listeners are told of decisions: each once, whoever listened before."""

from typing import Any

import pytest
from admin_client import STATE

from picker_fleet.admin import events, models
from picker_fleet.admin.events import SnapshotReader


class Shared:
    """A shared state of which only the decision log says anything."""

    def __init__(self) -> None:
        self.logged = 0

    async def state(self) -> models.State:
        return models.State.model_validate(STATE)

    async def endpoints(self) -> list[models.Endpoint]:
        return []

    async def flows(self, *_: Any) -> models.Flows:
        return models.Flows(flows=[], total=0, cursor=None)

    async def busiest(self, *_: Any) -> models.Workloads:
        return models.Workloads(workloads=[], total=0, cursor=None)

    async def replicas(self) -> models.Replicas:
        return models.Replicas(replicas=[])

    async def decisions(self, most: int) -> list[dict[str, str]]:
        entry = dict.fromkeys(("event", "request", "flow", "workload", "endpoint", "by", "note"), "")
        zeros = dict.fromkeys(("time_us", "band", "stock", "queued"), "0")
        first = max(self.logged - most, 0)
        return [{**entry, **zeros, "seq": str(seq)} for seq in range(first + 1, self.logged + 1)]


async def told(snapshots: SnapshotReader) -> tuple[int, int]:
    """How many entries a look tells, and how many it could not."""
    decisions = dict(await snapshots.read())["decisions"]
    assert isinstance(decisions, models.Decisions)
    return len(decisions.entries), decisions.skipped


async def test_given_others_that_listen_when_one_joins_then_it_has_the_last_entries_and_nothing_twice() -> (
    None
):
    shared = Shared()
    snapshots = SnapshotReader(shared, shared, shared, decision_log=True)  # type: ignore[arg-type]
    assert snapshots.recent() == []
    shared.logged = 3
    assert await told(snapshots) == (3, 0)
    [(name, recent)] = snapshots.recent()
    assert isinstance(recent, models.Decisions)
    assert (name, [each.seq for each in recent.entries], recent.skipped) == (
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
    snapshots = SnapshotReader(shared, shared, shared, decision_log=True)  # type: ignore[arg-type]
    shared.logged = 10
    assert await told(snapshots) == (10, 0)
    monkeypatch.setattr(events, "_IDLE_S", -1.0)
    shared.logged = 5000
    assert snapshots.recent() == []
    assert await told(snapshots) == (100, 0)
