"""Live configuration changes: keys that may change, overrides that changes cause, and refused changes."""

import contextlib
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import cases

from picker_fleet.domain.config import Settings, parse
from picker_fleet.domain.errors import ConfigError
from picker_fleet.fleet import live_config
from picker_fleet.fleet.live_config import shared_settings

CONFIGURED = parse({
    "models": [{"name": "a", "criticality": "Critical"}],
    "fair_request_queue": {"total_capacity": 500, "starvation_after": "10s"},
    "request_queue_controller": {"watermark_per_backend": 4},
    "admin": {"token": "t"},
})  # fmt: skip
# The three named bands as the Lua scripts receive them.
CRITICAL: dict[str, Any] = {"priority": 10, "preemptible": False, "guaranteed": True}
DEFAULT: dict[str, Any] = {"priority": 0, "preemptible": True, "guaranteed": False}
SHEDDABLE: dict[str, Any] = {"priority": -10, "preemptible": True, "guaranteed": False}
# Every key that may change live, with a new value.
EVERYTHING: dict[str, dict[str, Any]] = {
    "fair_request_queue": {
        "total_capacity": 900, "flow_capacity": 90, "max_flows": 50, "claim_share": 0.5,
        "band_policy": "weighted", "band_weights": {"Critical": 5}, "fairness": "round-robin",
        "ordering": "edf", "overload": "reject-noncritical", "starvation_after": "2500ms",
        "guard_share": 0.25, "queue_without_endpoints": True, "priority_bands": {"Default": {"bytes": 7000}},
    },
    "request_queue_controller": {
        "watermark_per_backend": 10, "percentage_deviation_for_bounds": 0.2, "lower_bound_per_backend": 9,
        "upper_bound_per_backend": 11, "enabled": False, "mode": "static", "min_per_backend": 2,
        "max_per_backend": 64, "pinned": {"10.0.0.1:8000": 7},
    },
    "workloads": {
        "wait_weight": 0.1, "criticality_weight": 0.2, "rate_weight": 0.7, "wait_cap": "30s", "rate_cap": 50,
        "wait_signal": "workload_average",
    },
    "outlier_detection": {
        "enabled": False, "base_ejection_time": "500ms", "max_ejection_time": "5s",
        "max_ejection_percent": 40,
    },
    "scheduling": {
        "scorers": {"prefix-affinity": 3},
        "stages": {
            "threshold": 700,
            "prefill": {"scorers": {"random": 2}},
            "decode": {"scorers": {"kv-cache": 3}},
        },
    },
    "weights": {"gold": 3, "a.b": 0.5},
}  # fmt: skip


def overridden(patch: dict[str, Any], settings: Settings = CONFIGURED) -> dict[str, object]:
    return live_config.overrides(settings, changed(patch))


def changed(*patches: dict[str, Any], **bands: Iterable[str]) -> dict[str, Any]:
    """The changes in force after `patches`; the argument `bands` is as in `live_config.flattened`."""
    changes: dict[str, Any] = {}
    for patch in patches:
        changes = live_config.merged(changes, live_config.flattened(patch, **bands))
    return changes


def fault(patch: Any, settings: Settings = CONFIGURED) -> str:
    with pytest.raises(ConfigError) as caught:
        overridden(patch, settings)
    return str(caught.value)


def test_shared_settings_have_every_name_that_the_scripts_read() -> None:
    assert shared_settings(parse({}), {"gold": 3.0}) == {
        "adaptive": 1, "limit_min": 1, "limit_max": 1_000_000_000, "limit_initial": 8, "pinned": {},
        "unit": "requests", "prefill_caps": {}, "default_prefill_cap": 8,
        "upper_per": 8, "lower_per": 8, "total_capacity": 1000,
        "flow_capacity": 100, "max_flows": 10_000, "largest_claim": 0,
            "lease_ms": 15_000,
        "silence_ms": 5_000, "fallbacks": 2, "log_max": 0, "window_ms": 60_000, "ema_alpha": 0.2,
        "guard_share": 0.1, "starvation_ms": 0, "band_policy": "strict", "band_weights": [70, 20, 10],
        "bands": [CRITICAL, DEFAULT, SHEDDABLE],
        "fairness": "weighted-fair", "ordering": "fcfs", "wait_signal": "request", "wait_weight": 0.4,
        "criticality_weight": 0.4, "rate_weight": 0.2, "wait_cap_ms": 60_000, "rate_cap": 100,
        "overload": "preempt", "weights": {"gold": 3.0}, "paused": 0, "default_answer": 256,
        "answer_alpha": 0.2, "live_weight": 1.0, "max_workloads": 20_000, "queue_enabled": 1,
        "queue_unready": 0, "eject_ms": 1000, "eject_most_ms": 8000, "eject_percent": 50,
    }  # fmt: skip


@pytest.mark.parametrize(("after", "ms"), [("10s", 10_000), ("0.4ms", 1), (None, 0)])
def test_starvation_after_becomes_whole_milliseconds_and_0_only_if_unset(after: str | None, ms: int) -> None:
    settings = parse({"fair_request_queue": {"starvation_after": after}})
    assert shared_settings(settings, {})["starvation_ms"] == ms


def test_every_live_key_changes_exactly_its_own_overrides() -> None:
    flat = live_config.flattened(EVERYTHING)
    named = (".Critical", ".prefix-affinity", ".Default.bytes")
    keys = {next((key.removesuffix(each) for each in named if key.endswith(each)), key) for key in flat}
    keys -= {key for key in keys if key.startswith("weights.")}
    assert keys == live_config.AFFECTS.keys()

    # The overrides equal the settings that a configuration with these changes would publish.
    assert overridden(EVERYTHING) == {
        "total_capacity": 900, "flow_capacity": 90, "max_flows": 50, "largest_claim": 0.5,
        "band_policy": "weighted", "band_weights": [5, 20, 10],
        "fairness": "round-robin", "ordering": "edf", "overload": "reject-noncritical", "starvation_ms": 2500,
        "adaptive": 0, "default_prefill_cap": 10, "limit_min": 2, "limit_max": 64,
        "pinned": {"10.0.0.1:8000": 7},
        "guard_share": 0.25, "upper_per": 11, "lower_per": 9, "wait_weight": 0.1, "criticality_weight": 0.2,
        "rate_weight": 0.7, "wait_cap_ms": 30_000, "rate_cap": 50, "wait_signal": "workload_average",
        "weights": {"gold": 3, "a.b": 0.5}, "live_weight": 0.25, "queue_enabled": 0,
        "eject_ms": 0, "eject_most_ms": 5000, "eject_percent": 40,
        "queue_unready": 1, "bands": [CRITICAL, {**DEFAULT, "bytes": 7000}, SHEDDABLE],
    }  # fmt: skip


@pytest.mark.parametrize("patch", [
    {str(number): 1 for number in range(501)}, {"weights": {str(number): 1 for number in range(501)}},
])  # fmt: skip
def test_a_change_of_more_than_500_keys_is_refused_with_one_fault(patch: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        live_config.flattened(patch)
    assert str(caught.value) == "at most 500 keys can change at once"


def test_nesting_flattened_changes_restores_the_changes() -> None:
    assert live_config.nested(live_config.flattened(EVERYTHING)) == EVERYTHING


def test_the_configured_value_returns_when_a_live_change_is_reverted() -> None:
    changes = live_config.merged({}, {"fair_request_queue.total_capacity": 900, "weights.gold": 3.0})
    old = {**live_config.overrides(CONFIGURED, changes), "paused": 1}

    # One of the two live changes is reverted.
    changes = live_config.merged(changes, {"fair_request_queue.total_capacity": None})
    wanted = live_config.overrides(CONFIGURED, changes)

    # The reverted change's override is removed; the other override and the override `paused` stay.
    assert live_config.replacing(old, wanted) == {"weights": {"gold": 3.0}, "total_capacity": None}
    assert live_config.applied(CONFIGURED, changes).settings == CONFIGURED


def test_changing_the_weight_of_one_band_keeps_the_other_weights() -> None:
    changes = changed({"weights": {"a": 1, "b": 2}}, {"weights": {"b": None, "c": 3}})
    assert live_config.overrides(CONFIGURED, changes) == {"weights": {"a": 1, "c": 3}}

    configured = parse(band_weights({"Critical": 50, "Default": 40, "Sheddable": 10}))
    one, both = ({"critical": 60},), ({"critical": 60}, {"Default": 30})
    for weights, expected in (
        (one, [60, 40, 10]),
        (both, [60, 30, 10]),
        ((*both, {"Critical": None}), [50, 30, 10]),  # weights are reverted one by one, or all at once
    ):
        changes = changed(*map(band_weights, weights))
        assert live_config.overrides(configured, changes) == {"band_weights": expected}
    assert changed(*map(band_weights, (*both, None))) == {}
    changes = changed(*map(band_weights, both))
    assert live_config.nested(changes) == band_weights({"Critical": 60, "Default": 30})


def band_weights(weights: object) -> dict[str, Any]:
    return {"fair_request_queue": {"band_weights": weights}}


def priority_bands(by_name: object) -> dict[str, Any]:
    return {"fair_request_queue": {"priority_bands": by_name}}


def scorers(weights: object) -> dict[str, Any]:
    return {"scheduling": {"scorers": weights}}


def test_limits_and_attributes_of_bands_can_be_changed_one_by_one() -> None:
    given = [{"priority": 7, "capacity": 5}, {"priority": -50, "name": "low.est", "bytes": 100}]
    configured = parse({"fair_request_queue": {"priority_bands": given, "band_weights": {"7": 3}}})
    names = configured.fair_request_queue.band_weights
    patches = (
        priority_bands({"low.est": {"bytes": 2**40, "capacity": 9}, "default": {"preemptible": False}}),
        priority_bands({"low.est": {"capacity": None}, "7": {"guaranteed": True}}),
    )
    changes = changed(*patches, bands=names)
    assert live_config.nested(changes) == priority_bands(
        {"low.est": {"bytes": 2**40}, "Default": {"preemptible": False}, "7": {"guaranteed": True}}
    )
    # The live changes are in force; weights and names of bands are unchanged.
    found = live_config.applied(configured, changes).settings.fair_request_queue.bands
    expected = {band.name: band for band in configured.fair_request_queue.bands}
    expected["low.est"] = replace(expected["low.est"], bytes=2**40)
    expected["Default"] = replace(expected["Default"], preemptible=False)
    expected["7"] = replace(expected["7"], guaranteed=True, preemptible=False)  # inherits from Default
    assert {band.name: band for band in found} == expected
    assert live_config.overrides(configured, changes) == {"bands": [
        CRITICAL, {**DEFAULT, "preemptible": False}, SHEDDABLE,
        {"priority": 7, "preemptible": False, "guaranteed": True, "capacity": 5},
        {"priority": -50, "preemptible": True, "guaranteed": False, "bytes": 2**40},
    ]}  # fmt: skip
    # The changes of one band, or of all bands, can be reverted.
    one = changed(*patches, priority_bands({"7": None}), bands=names)
    assert "fair_request_queue.priority_bands.7.guaranteed" not in one
    assert changed(*patches, priority_bands(None), bands=names) == {}


@cases("patch, says", {
    "a list": ([{"priority": 7, "bytes": 5}], ": must be an object"),
    "a number": ({"7": 5}, ".7: must be an object"),
    "priority": ({"7": {"priority": 8}}, ".7.priority: cannot change live; valid: bytes, capacity,"),
    "a name": ({"7": {"name": "x"}}, ".7.name: cannot change live"),
    "a weight": ({"7": {"weight": 8}}, ".7.weight: cannot change live; valid: bytes"),
    "no band": ({"8": {"bytes": 8}}, ".8: is no configured band; valid: Critical, 7, Default, Sheddable"),
    "no bytes": ({"7": {"bytes": 0}}, ".7.bytes: "),
    "bytes in text": ({"Default": {"bytes": "1Gi"}}, ".Default.bytes: "),
    "no number": ({"Default": {"capacity": True}}, ".Default.capacity: "),
    "no boolean": ({"7": {"guaranteed": "yes"}}, ".7.guaranteed: "),
})  # fmt: skip
def test_the_refusal_of_a_change_of_bands_names_the_fault(patch: object, says: str) -> None:
    configured = parse(priority_bands([{"priority": 7}]))
    with pytest.raises(ConfigError, match=f"priority_bands{re.escape(says)}"):
        live_config.applied(configured, live_config.flattened(priority_bands(patch), ("7",)))


def test_scorers_can_be_changed_one_by_one_and_the_weight_zero_turns_a_scorer_off() -> None:
    named = [{"name": "prefix-affinity", "weight": 2}, {"name": "kv-cache", "weight": 1}]
    configured = parse({"scheduling": {"scorers": named, "fallbacks": 1}})
    off, back = scorers({"kv-cache": 0, "latency": 3}), scorers({"kv-cache": None})
    for patches, weights in (
        ([off], {"prefix-affinity": 2, "latency": 3}),
        ([off, back], {"prefix-affinity": 2, "kv-cache": 1, "latency": 3}),
        ([off, scorers(None)], {"prefix-affinity": 2, "kv-cache": 1}),
        (
            [scorers([{"name": "kv-cache", "weight": 0}, {"name": "random"}])],
            {"prefix-affinity": 2, "random": 1},
        ),
    ):
        scheduling = live_config.applied(configured, changed(*patches)).settings.scheduling
        assert scheduling.scorers == weights
        assert scheduling.fallbacks == 1
    assert live_config.overrides(configured, changed(off)) == {"live_weight": pytest.approx(1 / 6)}
    assert changed(off, scorers(None)) == {}


def test_preferred_labels_count_until_their_scorer_weighs_almost_nothing() -> None:
    configured = parse({"scheduling": {"prefer": {"zone": "a"}}})
    assert live_config.shared_settings(configured, {})["live_weight"] == pytest.approx(2 / 3)
    change = changed(scorers({"topology": 1}))
    assert live_config.overrides(configured, change) == {"live_weight": 0.5}
    with pytest.raises(ConfigError, match=r"topology: must be above 0 while scheduling\.prefer is set"):
        live_config.applied(configured, changed(scorers({"topology": 0})))


CANNOT_CHANGE: dict[str, Any] = {
    "scheduling.fallbacks": 1, "fair_request_queue.queue_ttl": "5s", "fair_request_queue.nonsense": 1,
    "request_queue_controller.unit": "tokens", "workloads.rate_window": "5s",
}  # fmt: skip
BAD_CHANGES: list[tuple[dict[str, Any], str, str]] = [
    *(({key.split(".")[0]: {key.split(".")[1]: value}}, key, "cannot change live")
      for key, value in CANNOT_CHANGE.items()),
    ({"admin": {"token": "x"}}, "admin", "cannot change live"),
    ({"": {}}, "", "cannot change live"),
    (scorers(["random"]), "scheduling.scorers", "map scorers to weights, or list {name, weight}"),
    (scorers([{"name": "random"}, {"name": "random"}]), "scheduling.scorers", "random is named twice"),
    (scorers([{"name": "speed"}]), "scheduling.scorers.speed", "valid: queue-depth, kv"),
    (scorers([{"name": "random", "weight": "3"}]), "scheduling.scorers.random", "must be a number"),
    (scorers({"in-flight": 0}), "scheduling.scorers.in-flight", "above 0, or all"),
    (scorers({"speed": 1}), "scheduling.scorers.speed", "valid: queue-depth, kv"),
    (scorers({"random": -1}), "scheduling.scorers.random", "0 turns it off"),
    (scorers({"random": "3"}), "scheduling.scorers.random", "must be a number"),
    ({"fair_request_queue": {"band_weights": 5}}, "fair_request_queue.band_weights", "must be an object"),
    ({"fair_request_queue": {"ordering": "lifo"}}, "fair_request_queue.ordering", "'fcfs', 'edf'"),
    ({"fair_request_queue": {"total_capacity": "5"}}, "fair_request_queue.total_capacity", "integer"),
    ({"fair_request_queue": {"flow_capacity": 600}}, "fair_request_queue", "exceeds total_capacity 500"),
    ({"fair_request_queue": {"total_capacity": 50}}, "fair_request_queue", "exceeds total_capacity 50"),
    ({"fair_request_queue": {"starvation_after": "31s"}}, "fair_request_queue", "exceeds queue_ttl 30s"),
    ({"request_queue_controller": {"upper_bound_per_backend": 3}}, "request_queue_controller",
     "upper_bound_per_backend 3 is below watermark_per_backend 4"),
    ({"workloads": 5}, "workloads", "must be an object"),
    ({"weights": None}, "weights", "must be an object"),
    *(({"weights": {"gold": bad}}, "weights.gold", "from 0.001 to 1e+06") for bad in (0, 1e7)),
    ({"weights": {"gold": "3"}}, "weights.gold", "must be a number"),
    *(({"weights": {flow: 1}}, f"weights.{flow[:3]}", "no flow's key") for flow in (" ", "x" * 257)),
    ({"weights": {f"f{n}": 1 for n in range(201)}}, "weights", "at most 200 flows"),
]  # fmt: skip


@pytest.mark.parametrize(("patch", "where", "says"), BAD_CHANGES)
def test_the_refusal_of_a_live_change_names_the_key(patch: dict[str, Any], where: str, says: str) -> None:
    message = fault(patch)
    assert message.startswith(where)
    assert message.removeprefix(where)[:1] in (":", "x")  # a long name is cut in the message
    assert says in message


LIMITED = [{"name": "a", "max_inflight_per_endpoint": 2}]


@cases("section, entries, queue, says", {
    "critical models": ("models", [{"name": name, "criticality": "Critical"} for name in "ab"],
                        {"flow_capacity": 600}, "ErrTooManyFlows"),
    "a model's limit": ("models", LIMITED, {"fairness": "none"}, "of models a cannot be kept"),
    "an objective's limit": ("objectives", LIMITED, {"fairness": "none"}, "of objectives a cannot be kept"),
})  # fmt: skip
def test_the_refusal_of_a_change_that_contradicts_the_configuration_names_the_conflict(
    section: str, entries: list[dict[str, Any]], queue: dict[str, Any], says: str
) -> None:
    assert says in fault({"fair_request_queue": queue}, parse({section: entries}))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
live_keys = st.sampled_from(sorted(live_config.AFFECTS)).map(lambda key: tuple(key.split(".")))


@given(st.lists(st.tuples(live_keys, json_values), max_size=4))
def test_a_live_change_gives_overrides_or_a_named_fault(changes: list[tuple[tuple[str, ...], Any]]) -> None:
    patch: dict[str, Any] = {}
    for (*sections, key), value in changes:
        at = patch
        for section in sections:
            at = at.setdefault(section, {})
        at[key] = value
    with contextlib.suppress(ConfigError):
        found = overridden(patch)
        assert json.loads(json.dumps(found, allow_nan=False)) == found
        return
    assert fault(patch)


def test_stages_change_live_by_whole_keys_and_the_changes_can_be_reverted() -> None:
    settings = parse({"scheduling": {"scorers": {"kv-cache": 1}, "stages": {"threshold": 500}}})
    patches = [{"scheduling": {"stages": {"threshold": "auto", "prefill": {"scorers": {"random": 1}}}}}]
    stages = live_config.applied(settings, changed(*patches)).settings.scheduling.stages
    assert (stages.threshold, stages.prefill.scorers) == (None, {"random": 1})
    assert live_config.nested(changed(*patches)) == patches[0]
    patches.append({"scheduling": {"stages": {"threshold": None}}})
    stages = live_config.applied(settings, changed(*patches)).settings.scheduling.stages
    assert (stages.threshold, stages.prefill.scorers) == (500, {"random": 1})
    assert changed(*patches, {"scheduling": {"stages": None}}) == {}
    assert "scheduling.stages.header: cannot change live" in fault(
        {"scheduling": {"stages": {"header": "x-other"}}}
    )
    assert "scheduling.stages.threshold" in fault({"scheduling": {"stages": {"threshold": "soon"}}})
    assert "scheduling.stages: " in fault({"scheduling": {"stages": 5}})
