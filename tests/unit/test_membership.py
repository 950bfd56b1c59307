"""Membership of a replica, which follows live changes, shows them, and restores lost changes in Redis."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from admission_bench import QUEUED, FickleStore, admission_over
from background import running, until
from clocks import Clock
from local_requests import ask
from members import member_of
from metrics_page import samples
from scripted_store import POOL, ScriptedStore

from picker_fleet.domain.config import EffectiveConfig, Settings, parse
from picker_fleet.domain.request import Endpoint
from picker_fleet.endpoints.snapshot import SnapshotCell
from picker_fleet.fleet.info import EnvoyLimits
from picker_fleet.state.replies import HeartbeatReply
from picker_fleet.state.store import Store
from picker_fleet.telemetry.metrics import Metrics

CONFIGURED = parse({"request_queue_controller": {"watermark_per_backend": 4}})
DEEPER = {"fair_request_queue.total_capacity": 2000}
WIDER = {"request_queue_controller.watermark_per_backend": 10}


class Member:
    """The membership of one replica, which sends heartbeats to `store`."""

    def __init__(self, store: ScriptedStore, settings: Settings) -> None:
        shared, self.metrics = cast(Store, store), Metrics()
        cell = SnapshotCell()
        self.gate = admission_over(shared, self.metrics, cell)
        self.membership = member_of(shared, self.gate.queue, settings, cell, self.metrics)

    async def follows(self, condition: Any) -> None:
        """Send heartbeats until `condition` holds."""

        def beaten() -> bool:
            self.membership.heartbeat_now()
            return bool(condition())

        await until(beaten)


@asynccontextmanager
async def member(store: ScriptedStore, settings: Settings = CONFIGURED) -> AsyncIterator[Member]:
    one = Member(store, settings)
    one.membership.discovered([Endpoint("10.0.0.1:8000")])
    async with running(one.membership.run()):
        await until(lambda: one.membership.pulse is not None and one.membership.pulse.epoch != "0")
        yield one


@pytest.mark.parametrize(
    ("others", "publishes"),
    [
        ({"a": {}}, False),  # the leader publishes
        ({"a": {"no_list": True}}, True),
        ({"a": {"no_list": True}, "b": {"no_list": True}}, True),
        ({"a": {"no_list": True}, "b": {}}, False),  # replica `b`, with a list, publishes
    ],
)
async def test_a_replica_publishes_endpoints_for_a_leader_to_which_discovery_has_told_no_list(
    others: dict[str, dict[str, object]], publishes: bool
) -> None:
    store = Follower()
    store.epoch, store.pool = "1", replace(POOL, about={**others, store.replica: {}})
    async with member(store) as one:
        await one.follows(lambda: len(store.heartbeats) > 5)
        assert bool(store.published) == publishes


class Follower(ScriptedStore):
    """A store to which another replica is the leader."""

    async def heartbeat(self, *about: Any) -> HeartbeatReply:
        return replace(await super().heartbeat(*about), leader=False)


async def test_a_live_change_that_makes_the_limits_static_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    store = ScriptedStore()
    async with member(store, parse({})) as one:
        await store.set_live_config({"adaptive": 0}, WIDER)
        await one.follows(lambda: one.membership.live_config.version)
    assert "a live change made the limits static, since it names watermark_per_backend" in caplog.text


@pytest.mark.parametrize("epoch", ["0", "another life"])
async def test_live_changes_and_a_pause_survive_the_loss_of_the_shared_state(epoch: str) -> None:
    store = ScriptedStore()
    async with member(store) as one:
        await store.set_live_config({"total_capacity": 2000, "paused": 1}, DEEPER)
        await one.follows(lambda: one.membership.live_config.version == "1")
        # Redis loses all data; in one case a replica that does not know the live change publishes first.
        store.lose()
        store.epoch = epoch
        # The replica restores the live changes in Redis.
        await one.follows(lambda: store.overrides)
        assert store.overrides == {"total_capacity": 2000, "paused": 1}
        assert store.changes == DEEPER


async def test_replica_info_is_sent_again_only_when_it_has_changed_or_may_be_lost() -> None:
    store = ScriptedStore()
    async with member(store) as one:
        await one.follows(lambda: len(store.heartbeats) > 5)
        first, *others = store.heartbeats
        assert json.loads(first)["host"] == "test"
        assert set(others) == {""}
        # Redis has lost the record of this replica, or has a new epoch.
        for part, forgotten in (("was_known", False), ("epoch", "another")):
            setattr(store, part, forgotten)
            before = len(store.heartbeats)
            await one.follows(lambda before=before: first in store.heartbeats[before:])
            assert store.heartbeats[before:].index(first) <= 1  # the info is in one of two heartbeats


async def test_heartbeats_go_on_while_waiting_requests_are_registered_again() -> None:
    store = FickleStore()
    store.admitting = [QUEUED]
    async with member(store, parse({"leases": {"heartbeat": "10ms"}})) as one:
        waiting = asyncio.create_task(one.gate.admit(ask("r"), stream_owned=False))
        await until(lambda: one.gate.queue.waiting)
        # Redis may have lost the request, and does not answer when the replica registers the request again.
        store.silent, store.was_known = True, False
        await until(lambda: len(store.ages_s) == 2)
        before = len(store.heartbeats)
        await until(lambda: len(store.heartbeats) > before + 3)
        assert len(store.ages_s) == 2
        waiting.cancel()


@pytest.mark.parametrize("slow", ["nodes_of", "tenants_version"])
async def test_heartbeats_go_on_while_tenants_nodes_are_published_or_followed(slow: str) -> None:
    async def never_answer(*_: object) -> None:
        await asyncio.Event().wait()

    store = ScriptedStore()
    for name, answer in (("nodes_of", {}), ("set_tenants", "1"), ("tenants_version", "1")):
        setattr(store, name, AsyncMock(return_value=answer))
    getattr(store, slow).side_effect = never_answer
    settings = parse({"tenants": {"nodes": []}, "leases": {"heartbeat": "10ms"}})
    async with member(store, settings):
        called = getattr(store, slow)
        await until(lambda: called.called)
        before = len(store.heartbeats)
        await until(lambda: len(store.heartbeats) > before + 3)
        assert called.call_count == 1


def with_change(changes: dict[str, Any], overrides: dict[str, Any]) -> ScriptedStore:
    """A store with a published pool and the live changes `changes`."""
    store = ScriptedStore()
    store.epoch, store.version, store.changes, store.overrides = "life", "1", changes, overrides
    return store


async def test_overrides_of_live_changes_are_computed_again_for_a_new_configuration() -> None:
    # The overrides of bounds were computed from the watermark 4; a replica with the watermark 10 publishes.
    deviation = {"request_queue_controller.percentage_deviation_for_bounds": 0.5}
    bounds = {"adaptive": 0, "largest_claim": 0.25}
    store = with_change(deviation, {"lower_per": 2.0, "upper_per": 6.0, **bounds})
    async with member(store, parse({"request_queue_controller": {"watermark_per_backend": 10}})):
        await until(
            lambda: (
                store.overrides == {"lower_per": 5.0, "upper_per": 15.0, "default_prefill_cap": 10, **bounds}
            )
        )


async def test_live_changes_that_contradict_the_configuration_are_ignored() -> None:
    store = with_change({"fair_request_queue.total_capacity": 10}, {"total_capacity": 10})
    async with member(store) as one:
        await one.follows(lambda: one.membership.live_config.version == "1")
        assert one.membership.effective == EffectiveConfig(CONFIGURED, {})
        assert store.overrides == {"total_capacity": 10}


async def test_the_gate_and_the_metrics_follow_the_state_of_the_pool() -> None:
    store = ScriptedStore()
    store.pool = replace(POOL, retry_after_s=7, paused=True, active_flows=3)
    async with member(store) as one:
        await one.follows(lambda: samples(one.metrics)["epp_active_flows",] == 3)
        await until(lambda: one.gate.queue.retry_after_s == 7)
        assert samples(one.metrics)["epp_paused",] == 1
        assert (await one.membership.state()).watermark == 4 * POOL.ready_backends


async def test_the_wait_in_a_queue_is_predicted_once_requests_have_waited_for_three_sweeps() -> None:
    store = ScriptedStore()
    store.pool = replace(POOL, retry_after_s=7, queued=40, drain_rate=1e-7)  # a burst after half a minute
    async with member(
        store, parse({"request_queue_controller": {"expiry_cleanup_interval": "300ms"}})
    ) as one:
        await one.follows(lambda: one.gate.queue.retry_after_s == 7)
        assert one.gate.queue.expected_wait_s == 0.0
        store.pool = replace(store.pool, drain_rate=80.0)
        await one.follows(lambda: one.gate.queue.expected_wait_s == 0.5)


async def test_only_endpoints_that_decode_have_a_limit_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    store, decoder = ScriptedStore(), Endpoint("10.0.0.1:8000")
    prefiller = Endpoint("10.0.0.2:8000", prefills=True, decodes=False)
    monkeypatch.setattr(store, "endpoints", AsyncMock(return_value=(decoder, prefiller)))
    store.pool = replace(POOL, limits={decoder.address: 8, prefiller.address: 8})
    async with member(store) as one:
        await until(lambda: ("epp_endpoint_limit", f"endpoint={decoder.address}") in samples(one.metrics))
        assert ("epp_endpoint_limit", f"endpoint={prefiller.address}") not in samples(one.metrics)


async def test_readers_of_the_admin_api_do_not_keep_a_replica_from_following_the_pool() -> None:
    store = ScriptedStore()
    async with member(store, parse({"leases": {"heartbeat": "200ms"}})) as one:

        async def read_all_the_time() -> None:
            while True:
                await one.membership.state()
                one.membership.heartbeat_now(full=False)
                await asyncio.sleep(0.01)

        async with running(read_all_the_time()):
            for seconds in (7, 8):
                store.pool = replace(POOL, retry_after_s=seconds)
                await until(lambda: one.gate.queue.retry_after_s == store.pool.retry_after_s)


async def test_one_warning_names_an_envoy_that_stays_at_its_default_stream_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    limits = EnvoyLimits(clock)

    def look(*streams: int) -> int:
        """The number of warnings so far, after each replica has reported these open streams of one Envoy."""
        limits.look([{"streams": {"10.0.0.1": count, "10.0.0.2": 700}} for count in streams] + [{}])
        return len(caplog.records)

    assert look(512, 510) == 0
    clock.now_s += 9
    assert look(512, 510) == 0
    assert look(512, 400) == 0  # fewer streams interrupt the count of seconds
    clock.now_s += 9
    assert look(1024, 0) == 0
    clock.now_s += 10
    assert look(500, 494) == 1
    assert "the Envoy at 10.0.0.1 has 994 streams" in caplog.text
    clock.now_s += 100
    assert look(500, 524) == 1
    limits.look([{"streams": "x"}, {"streams": {"10.0.0.3": "many"}}])
