"""The fleet's controls over a store that keeps changes as the scripts do."""

from typing import cast

import pytest
from scripted_store import ScriptedStore

from picker_fleet.admin.changes import FleetControls
from picker_fleet.admin.models import Dispatch
from picker_fleet.config import Settings, parse
from picker_fleet.errors import ConfigError, StateUnavailable
from picker_fleet.replica.heartbeat import Membership
from picker_fleet.state.store import Store

CONFIGURED = parse(
    {
        "redis": {"url": "rediss://user:hunter2@redis.example:6380/3?password=hunter2"},
        "admin": {"token": "hunter2"},
        "discovery": {"file": "endpoints.yaml"},
        "models": [{"name": "llama", "criticality": "Critical"}],
    }
)


class Poked:
    """Stands for a membership: counts how often it is asked to beat at once."""

    def __init__(self) -> None:
        self.pokes = 0

    def heartbeat_now(self) -> None:
        self.pokes += 1


def fleet(settings: Settings = CONFIGURED) -> tuple[ScriptedStore, Poked, FleetControls]:
    store, membership = ScriptedStore(), Poked()
    store.epoch = "life"
    return store, membership, FleetControls(cast(Store, store), cast(Membership, membership), settings)


async def test_given_a_change_when_made_then_it_is_in_force_and_followed_at_once() -> None:
    # Given a fleet, when a capacity and a weight change
    store, membership, controls = fleet()
    shown = await controls.change({"fair_request_queue": {"total_capacity": 2000}, "weights": {"gold": 3}})

    # Then the scripts read them, and the configuration shows them
    assert store.overrides == {"total_capacity": 2000, "weights": {"gold": 3}}
    assert shown.config["fair_request_queue"]["total_capacity"] == 2000
    assert shown.config["fair_request_queue"]["flow_capacity"] == 100
    assert shown.weights == {"gold": 3}
    assert shown.changes == {"fair_request_queue": {"total_capacity": 2000}, "weights": {"gold": 3}}
    assert (shown.tuned_version, shown.paused) == ("1", False)
    assert membership.pokes == 1

    # And when they are taken back, then nothing overrides the configuration
    shown = await controls.change({"fair_request_queue": {"total_capacity": None}, "weights": {"gold": None}})
    assert (store.overrides, store.note) == ({}, {})
    assert shown.config["fair_request_queue"]["total_capacity"] == 1000


async def test_given_a_configuration_when_shown_then_it_is_plain_and_keeps_its_secrets() -> None:
    _, _, controls = fleet()
    shown = await controls.config()
    assert "hunter2" not in str(shown)
    assert shown.config["redis"]["url"] == "rediss://redis.example:6380/3"
    assert shown.config["admin"]["token"] == "(set)"
    assert shown.config["discovery"]["file"] == "endpoints.yaml"
    assert shown.config["models"][0]["criticality"] == "Critical"
    assert "fair_request_queue.ordering" in shown.live


async def test_given_two_changes_that_do_not_fit_together_when_the_second_comes_then_it_is_refused() -> None:
    store, _, controls = fleet()
    await controls.change({"fair_request_queue": {"total_capacity": 200}})
    with pytest.raises(ConfigError, match="flow_capacity 300 exceeds total_capacity 200"):
        await controls.change({"fair_request_queue": {"flow_capacity": 300}})
    assert store.note == {"fair_request_queue.total_capacity": 200}
    assert store.tunings == 1


async def test_given_a_change_of_another_replica_in_between_when_changed_then_both_are_in_force() -> None:
    # Given another replica that changes a weight and the deviation while this one changes others
    store, _, controls = fleet()
    deviation = "request_queue_controller.percentage_deviation_for_bounds"
    store.meanwhile = (
        {"weights": {"b": 2}, "lower_per": 1.0, "upper_per": 3.0},
        {"weights.b": 2, deviation: 0.5},
    )
    shown = await controls.change(
        {"weights": {"a": 1}, "request_queue_controller": {"watermark_per_backend": 10}}
    )

    # Then the overrides are what both notes together mean
    assert shown.weights == {"a": 1, "b": 2}
    assert store.overrides == {"weights": {"a": 1, "b": 2}, "lower_per": 5.0, "upper_per": 15.0}
    assert store.note[deviation] == 0.5


async def test_given_a_pause_when_configured_meanwhile_then_it_lasts_until_resumed() -> None:
    store, membership, controls = fleet()
    assert await controls.pause(True) == Dispatch(paused=True, tuned_version="1")
    await controls.change({"workloads": {"rate_cap": 5}})
    shown = await controls.change({"workloads": {"rate_cap": None}})
    assert shown.paused
    assert store.overrides == {"paused": 1}
    assert await controls.pause(False) == Dispatch(paused=False, tuned_version="4")
    assert store.overrides == {}
    assert membership.pokes == 4


async def test_given_a_pool_that_nobody_has_published_when_changed_then_it_cannot_be_yet() -> None:
    store, _, controls = fleet()
    store.epoch = "0"
    with pytest.raises(StateUnavailable, match="not known yet"):
        await controls.change({"workloads": {"rate_cap": 5}})
    with pytest.raises(StateUnavailable, match="not known yet"):
        await controls.pause(True)


async def test_given_changes_that_do_not_fit_this_configuration_when_shown_then_they_are_shown_apart() -> (
    None
):
    store, _, controls = fleet()
    store.version, store.note = "3", {"fair_request_queue.total_capacity": 10}
    shown = await controls.config()
    assert shown.config["fair_request_queue"]["total_capacity"] == 1000
    assert shown.changes == {"fair_request_queue": {"total_capacity": 10}}
    # And when they are taken back, then all fits again
    await controls.change({"fair_request_queue": {"total_capacity": None}})
    assert store.note == {}


async def test_given_a_request_when_evicted_then_the_answer_is_the_stores() -> None:
    store, _, controls = fleet()
    store.evicting = "running"
    assert await controls.evict("r") == "running"
