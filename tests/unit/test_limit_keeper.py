"""The limits in Redis and the leader's limits stay equal."""

from dataclasses import replace
from typing import Any, cast
from unittest.mock import Mock

import msgspec
import pytest
from scripted_store import POOL, ScriptedStore

from picker_fleet.domain.config import EffectiveConfig, parse
from picker_fleet.domain.errors import WritesRefused
from picker_fleet.domain.known_fleet import KnownFleet
from picker_fleet.domain.request import Endpoint
from picker_fleet.endpoints.readings import EndpointMetrics, MetricsCache
from picker_fleet.endpoints.snapshot import Snapshot
from picker_fleet.fleet.limits import LimitKeeper
from picker_fleet.state.pool_state import PREFILL, FoundLimit

A = "10.0.0.1:8000"


class Leader:
    """A leader whose queue fills the limit in force, at an engine that runs all its requests."""

    def __init__(
        self,
        store: ScriptedStore,
        *,
        decodes: bool = True,
        prefills: bool = False,
        config: dict[str, Any] | None = None,
        queued: int = 9,
    ) -> None:
        self.store, self.now_s = store, 0.0
        self.queued = queued
        self.pinned: int | None = None
        self.decodes, self.prefills = decodes, prefills
        self.waiting = 0  # requests of other clients that wait in the engine
        self.lag_s = 0.0  # how long the leader takes between two calls of its clock
        self._readings = MetricsCache(10.0, self._clock)
        self._fleet = KnownFleet(parse(config or {}))
        self._keeper = LimitKeeper(cast(Any, store), self._fleet, self._readings, Mock(), self._clock, Mock())

    def _clock(self) -> float:
        self.now_s += self.lag_s
        return self.now_s

    @property
    def limit(self) -> int:
        """The decode endpoint's limit in force, or the prefill limit of an endpoint that only prefills."""
        found = self.store.found.get(A if self.decodes else PREFILL + A)
        return 0 if found is None else found.limit

    def pin(self, limit: int | None) -> None:
        """Pin the limit in force; with None, the found limit is in force again."""
        pinned = {} if limit is None else {A: limit}
        self._fleet.config = EffectiveConfig(parse({"request_queue_controller": {"pinned": pinned}}), {})
        self.pinned = limit

    async def look(self, after_s: float = 1.0, *, leads: bool = True, has_new_page: bool = True) -> int:
        """Let the leader look at the engine `after_s` later; return the limit that is in force afterwards."""
        self.now_s += after_s
        if has_new_page:
            scraped_ms = round(self.now_s * 1000) - 100
            page = EndpointMetrics(scraped_ms, waiting=self.waiting, running=self.limit)
            self._readings.update({A: page})
        prefill_limit = self.store.found[PREFILL + A].limit if self.prefills else 0
        pool = replace(
            POOL,
            now_us=int(self.now_s * 1e6),
            queued=self.queued,
            in_flight={A: self.limit},
            limits={A: self.pinned or self.limit},
            prefill_in_flight={A: prefill_limit},
        )
        snapshot = Snapshot("1", (Endpoint(A, prefills=self.prefills, decodes=self.decodes),))
        await self._keeper.look(pool, snapshot, leads=leads)
        return self.limit


def storing(limit: int, name: str = A) -> ScriptedStore:
    store = ScriptedStore()
    store.found = {name: FoundLimit(limit, "test", 0)}
    return store


async def test_the_limit_of_the_stage_prefill_is_found_by_the_same_rules() -> None:
    leader = Leader(storing(8, PREFILL + A), decodes=False, prefills=True)
    assert [await leader.look(), await leader.look()] == [16, 32]
    assert leader.store.found.keys() == {PREFILL + A}, "the decode stage has no such endpoint"
    leader.waiting = 20
    await leader.look()
    assert await leader.look() < 40, "the engine queues prompts"


async def test_an_endpoint_of_both_stages_has_a_limit_in_each() -> None:
    store = storing(8)
    store.found |= storing(3, PREFILL + A).found
    leader = Leader(store, prefills=True)
    assert await leader.look() == 16
    assert {name: each.limit for name, each in store.found.items()} == {A: 16, PREFILL + A: 6}


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({}, 8),
        ({"request_queue_controller": {"enabled": False}}, 16),
        ({"fair_request_queue": {"overload": "reject-noncritical"}}, 16),
    ],
    ids=["requests may wait", "no queue", "requests are refused"],
)
async def test_a_reached_limit_grows_without_waiting_requests_if_requests_never_wait(
    config: dict[str, Any], limit: int
) -> None:
    assert await Leader(storing(8), config=config, queued=0).look() == limit


async def test_limits_in_tokens_do_not_change_without_a_queue() -> None:
    store = ScriptedStore()
    store.found = {A: FoundLimit(4096, "test", 0, unit="tokens")}
    leader = Leader(store, config={"request_queue_controller": {"unit": "tokens", "enabled": False}})
    leader.waiting = 4096
    assert [await leader.look() for _ in range(3)] == [4096] * 3


async def test_the_leader_stores_that_an_engine_is_full_even_if_its_limit_cannot_fall() -> None:
    leader = Leader(storing(1))
    leader.waiting = 3
    for _ in range(3):
        assert await leader.look() == 1
    assert not leader.store.found[A].grows_fast
    assert leader.store.found[A].pause_s > 0


async def test_a_limit_that_redis_refused_to_store_is_stored_later(monkeypatch: pytest.MonkeyPatch) -> None:
    leader = Leader(storing(8))
    assert await leader.look() == 16
    with monkeypatch.context() as patched:
        patched.setattr(leader.store, "set_limits", Mock(side_effect=WritesRefused("disk full")))
        with pytest.raises(WritesRefused):
            await leader.look()
    assert leader.limit == 16
    assert await leader.look() == 32


async def test_stored_limits_in_the_former_unit_are_not_used() -> None:
    store = storing(9000)
    store.found = {A: msgspec.structs.replace(store.found[A], unit="tokens")}
    assert await Leader(store).look() == 8


@pytest.mark.parametrize(
    ("away_s", "connections", "stored"), [(10.0, 0, 64), (1.0, 1, 4)], ids=["another leader", "older primary"]
)
async def test_a_leader_continues_from_limits_in_redis(away_s: float, connections: int, stored: int) -> None:
    leader = Leader(storing(8))
    assert await leader.look() == 16
    leader.store.found = storing(stored).found
    leader.store.connection_epoch += connections
    assert await leader.look(away_s) == 2 * stored


async def test_a_leader_goes_on_from_limits_that_another_replica_stored_during_a_rebuild() -> None:
    leader = Leader(storing(8))
    assert await leader.look() == 16
    leader.store.found = storing(
        4
    ).found  # Redis took the other replica for the leader, until this one reported
    assert await leader.look() == 8


async def test_a_replica_that_leads_after_redis_lost_the_limits_starts_from_the_limits_it_saw() -> None:
    replica = Leader(storing(32))
    await replica.look(leads=False)
    replica.store.found = {}
    assert await replica.look() == 32
    assert await replica.look() == 64


async def test_a_replica_that_leads_after_redis_lost_the_limits_does_not_start_from_pinned_limits() -> None:
    replica = Leader(storing(32))
    await replica.look(leads=False)
    replica.pin(1)
    await replica.look(leads=False)
    replica.pin(None)
    replica.store.found = {}
    assert await replica.look() == 32
    late = Leader(storing(1))
    late.pin(1)
    await late.look(leads=False)
    late.store.found = {}
    assert await late.look() == 8, "only the pinned limit was seen"


async def test_a_metrics_page_counts_once_even_if_the_time_of_its_scrape_seems_to_move() -> None:
    leader = Leader(storing(8))
    leader.waiting = 20
    leader.lag_s = 0.005
    await leader.look()
    leader.lag_s = 0.001
    for _ in range(5):
        assert await leader.look(has_new_page=False) == 8
    assert await leader.look() < 8, "two pages show a queue in the engine"
