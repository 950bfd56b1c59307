"""Live changes of the configuration: the keys that may change, and the resulting settings. Pure.

The shared state stores live changes in two forms. The *changes* use the operator's keys: {`section.key`:
value}, {`weights.FLOW`: weight}, and one key for each entry of a mapping:
{`fair_request_queue.band_weights.BAND`: …}, {`fair_request_queue.priority_bands.BAND.ATTRIBUTE`: …},
{`scheduling.scorers.NAME`: weight}. The scorers of a stage change as a whole. The *overrides* are settings
that the scripts read in place of published settings. Overrides are always computed from all changes together,
so that a conflict between two keys is found whichever key changes last. `admin/changes.py` makes changes;
`fleet/heartbeat.py` applies them.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from picker_fleet.domain.bands import Band, Criticality
from picker_fleet.domain.config import EffectiveConfig, Settings, parse
from picker_fleet.domain.errors import ConfigError
from picker_fleet.domain.request import finite_number
from picker_fleet.domain.scheduling import BUILT_IN, IN_FLIGHT, TOPOLOGY, weights_by_name
from picker_fleet.domain.sections import MOST_LIMIT
from picker_fleet.domain.units import LEAST_WEIGHT, MOST_WEIGHT, has_control
from picker_fleet.scheduling.scheduler import live_weight, with_in_flight

# Each key that may change live -> the shared settings computed from that key.
_BOUNDS = ("adaptive", "largest_claim", "upper_per", "lower_per", "default_prefill_cap")
AFFECTS: Mapping[str, tuple[str, ...]] = {
    "fair_request_queue.total_capacity": ("total_capacity",),
    "fair_request_queue.flow_capacity": ("flow_capacity",),
    "fair_request_queue.max_flows": ("max_flows",),
    "fair_request_queue.claim_share": ("largest_claim",),
    "fair_request_queue.band_policy": ("band_policy",),
    "fair_request_queue.band_weights": ("band_weights",),
    "fair_request_queue.priority_bands": ("bands",),
    "fair_request_queue.fairness": ("fairness",),
    "fair_request_queue.ordering": ("ordering",),
    "fair_request_queue.overload": ("overload",),
    "fair_request_queue.starvation_after": ("starvation_ms",),
    "fair_request_queue.guard_share": ("guard_share",),
    "fair_request_queue.queue_without_endpoints": ("queue_unready",),
    "request_queue_controller.enabled": ("queue_enabled",),
    "request_queue_controller.mode": _BOUNDS,
    "request_queue_controller.min_per_backend": ("limit_min",),
    "request_queue_controller.max_per_backend": ("limit_max",),
    "request_queue_controller.pinned": ("pinned",),
    "request_queue_controller.watermark_per_backend": _BOUNDS,
    "request_queue_controller.percentage_deviation_for_bounds": _BOUNDS,
    "request_queue_controller.lower_bound_per_backend": _BOUNDS,
    "request_queue_controller.upper_bound_per_backend": _BOUNDS,
    "workloads.wait_weight": ("wait_weight",),
    "workloads.criticality_weight": ("criticality_weight",),
    "workloads.rate_weight": ("rate_weight",),
    "workloads.wait_cap": ("wait_cap_ms",),
    "workloads.rate_cap": ("rate_cap",),
    "workloads.wait_signal": ("wait_signal",),
    "scheduling.scorers": ("live_weight",),
    "scheduling.stages.threshold": (),
    "scheduling.stages.prefill.scorers": (),
    "scheduling.stages.decode.scorers": ("live_weight",),
    "outlier_detection.enabled": ("eject_ms",),
    "outlier_detection.base_ejection_time": ("eject_ms",),
    "outlier_detection.max_ejection_time": ("eject_most_ms",),
    "outlier_detection.max_ejection_percent": ("eject_percent",),
}
LIVE = (*AFFECTS, "weights.FLOW")
_WEIGHTS = "weights"
_BAND_WEIGHTS = "fair_request_queue.band_weights"
_BANDS = "fair_request_queue.priority_bands"
_SCORERS = "scheduling.scorers"
_BY_NAME = (_BAND_WEIGHTS, _BANDS, _SCORERS, _WEIGHTS)  # mappings that change by single entries
# The path of each live key; `*` stands for any name.
_LEAVES = [
    tuple(key.split("."))
    for key in (
        *(key for key in AFFECTS if key not in _BY_NAME),
        *(f"{whole}.*" for whole in (_BAND_WEIGHTS, _SCORERS, _WEIGHTS)),
        *(f"{_BANDS}.*.{attribute}" for attribute in ("bytes", "capacity", "guaranteed", "preemptible")),
    )
]
_MOST_SCORER_WEIGHT = 1e6
_MOST_WEIGHTS = 200  # maximum flows with live weights: scripts read all weights after each change
_MOST_CHANGES = 500  # maximum keys of a change: with thousands, its faults alone take a megabyte
_LONGEST_FLOW_BYTES = 256
_OWN_OVERRIDES = frozenset({"paused"})  # overrides that no configuration key can set
_Path = tuple[str, ...]


def flattened(
    patch: Mapping[str, Any],
    bands: Iterable[str] = tuple(Criticality),
    scorers: Iterable[str] = BUILT_IN,
) -> dict[str, Any]:
    """Convert a partial settings tree to live changes; the value None undoes a change, or all changes of a
    mapping. `bands` and `scorers` are the names of bands and scorers that may occur.

    Raises:
        ConfigError: keys cannot change live; the message has a line for each fault.
    """
    names = {_BAND_WEIGHTS: bands, _BANDS: bands, _SCORERS: scorers}
    changes: dict[str, Any] = {}
    faults: list[str] = []

    def add(path: _Path, value: Any) -> None:
        """Add the changes in `value`, the part of `patch` at `path`."""
        if len(changes) + len(faults) >= _MOST_CHANGES:
            raise ConfigError(f"at most {_MOST_CHANGES} keys can change at once")
        key, leaves = ".".join(path), _leaves_below(path)
        shown = ".".join(name[:60] for name in path)
        if key == _SCORERS and value is not None:
            try:
                value = weights_by_name(value)
            except ValueError as fault:
                faults.append(f"{shown}: {fault}")
                return
        if not leaves:
            valid = dict.fromkeys(leaf[len(path) - 1] for leaf in _leaves_below(path[:-1]))
            faults.append(f"{shown}: cannot change live; valid: {', '.join(valid)}")
        elif len(leaves[0]) == len(path):
            changes[key] = value
        elif isinstance(value, Mapping):
            for name, each in value.items():
                add((*path, _named(name) if names.get(key) is bands else name), each)
        elif value is None and len(path) > 1:
            below = {leaf[len(path)] for leaf in leaves}
            for name in names[key] if "*" in below else below:
                add((*path, name), None)
        else:
            faults.append(f"{shown}: must be an object")

    for section, keys in patch.items():
        add((section,), keys)
    if faults:
        raise ConfigError("\n".join(faults))
    return changes


def _leaves_below(path: _Path) -> list[_Path]:
    """The paths of live keys that are `path` or begin with it."""
    return [
        leaf
        for leaf in _LEAVES
        if len(leaf) >= len(path) and all(part in ("*", name) for part, name in zip(leaf, path, strict=False))
    ]


def merged(current: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**current, **changes}.items() if value is not None}


def applied(settings: Settings, changes: Mapping[str, Any]) -> EffectiveConfig:
    """The settings `settings` with the live changes `changes` applied.

    Raises:
        ConfigError: the result is invalid; the lines of the message name the keys.
    """
    patch = nested(changes)
    weights, scheduling = patch.get(_WEIGHTS, {}), patch.get("scheduling", {})
    faults = [*_weight_faults(weights), *_scorer_faults(scheduling.get("scorers", {}), settings)]
    if faults:
        raise ConfigError("\n".join(faults))
    tree = settings.model_dump(exclude_unset=True)
    # Entries of mappings change one by one: begin with all entries, defaults included.
    queue, changed = settings.fair_request_queue, patch.get("fair_request_queue", {})
    if "scorers" in scheduling:
        tree.setdefault("scheduling", {})["scorers"] = dict(settings.scheduling.scorers)
    if "band_weights" in changed:
        tree.setdefault("fair_request_queue", {})["band_weights"] = dict(queue.band_weights)
    if by_name := changed.get("priority_bands", {}):
        tree.setdefault("fair_request_queue", {})["priority_bands"] = _bands_by_name(settings, by_name)
    _put(tree, {key: value for key, value in changes.items() if _whole(key) != _WEIGHTS})
    if "scorers" in scheduling:
        scorers = tree["scheduling"]["scorers"]
        tree["scheduling"]["scorers"] = {name: weight for name, weight in scorers.items() if weight > 0}
    if by_name:
        bands = tree["fair_request_queue"]["priority_bands"]
        tree["fair_request_queue"]["priority_bands"] = list(bands.values())
    try:
        live = parse(tree)
    except ConfigError as fault:
        text = str(fault)
        for place, name in enumerate(bands if by_name else ()):  # name bands in place of their list indices
            text = text.replace(f"{_BANDS}.{place}.", f"{_BANDS}.{name}.")
        raise ConfigError(text) from None
    if new := sorted(live.scheduling.outside - settings.scheduling.outside):
        raise ConfigError(
            f"scheduling.stages: a replica starts without the scorer {new[0]}: name it in the configuration"
        )
    return EffectiveConfig(live, weights)


def overrides(settings: Settings, changes: Mapping[str, Any]) -> dict[str, object]:
    """The overrides: shared settings that the scripts read in place of published settings.

    Raises:
        ConfigError: raised for the same faults as in `applied`.
    """
    effective = applied(settings, changes)
    shared = shared_settings(effective.settings, effective.weights)
    names = {name for key in changes for name in AFFECTS.get(_whole(key), ())}
    if effective.weights:
        names.add(_WEIGHTS)
    return {name: shared[name] for name in sorted(names & shared.keys())}


def replacing(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The update (None: remove the key) that turns the overrides `old` into `new` but keeps `paused`."""
    gone = old.keys() - new.keys() - _OWN_OVERRIDES
    return {**new, **dict.fromkeys(sorted(gone))}


def nested(changes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Convert `changes` to the equivalent partial settings tree."""
    tree: dict[str, dict[str, Any]] = {}
    _put(tree, changes)
    return tree


def _put(tree: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Set the keys of `changes` in the settings tree `tree`."""
    for key, value in changes.items():
        *above, last = _path_of(key)
        at = tree
        for part in above:
            at = at.setdefault(part, {})
        at[last] = value


def _path_of(key: str) -> _Path:
    """The parts of the dotted key of a live change; a name in the key may have dots and stays whole."""
    whole = _whole(key)
    if whole == key:
        return tuple(key.split("."))
    name = key.removeprefix(f"{whole}.")
    return (*whole.split("."), *(name.rsplit(".", 1) if whole == _BANDS else (name,)))


def _whole(key: str) -> str:
    """The configuration key for `key`: the mapping's key if `key` names an entry of a mapping, else `key`."""
    return next((whole for whole in _BY_NAME if key.startswith(whole + ".")), key)


def _bands_by_name(settings: Settings, changed: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The configured `priority_bands` by name, and an entry for each band of `changed` that has none.

    Raises:
        ConfigError: a name belongs to no configured band.
    """
    queue = settings.fair_request_queue
    found = {band.label: band.model_dump(exclude_unset=True) for band in queue.priority_bands}
    priorities = {band.name: band.priority for band in queue.bands}
    for name in changed:
        if name not in priorities:
            known = ", ".join(priorities)
            raise ConfigError(f"{_BANDS}.{name[:60]}: is no configured band; valid: {known}")
        found.setdefault(name, {"priority": priorities[name], "name": name})
    return found


def _named(band: object) -> str:
    """The band's name as the configuration spells it; any other text stays unchanged."""
    try:
        return Criticality.parse(band)
    except ValueError:
        return str(band)


def _weight_faults(weights: Mapping[str, Any]) -> Iterable[str]:
    if len(weights) > _MOST_WEIGHTS:
        yield f"weights: at most {_MOST_WEIGHTS} flows can have one of their own (got {len(weights)})"
    for flow, weight in weights.items():
        number = finite_number(weight)
        if not flow.strip() or has_control(flow) or len(flow.encode(errors="replace")) > _LONGEST_FLOW_BYTES:
            yield f"weights.{flow[:60]}: is no flow's key"
        elif number is None or not LEAST_WEIGHT <= number <= MOST_WEIGHT:
            yield f"weights.{flow[:60]}: must be a number from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}"


def scorers_of(settings: Settings) -> Iterable[str]:
    """The scorers whose weights may change: an extension starts only with the replica."""
    return (*BUILT_IN, *sorted(settings.scheduling.outside))


def _scorer_faults(scorers: Mapping[str, Any], settings: Settings) -> Iterable[str]:
    for name, weight in scorers.items():
        key, number = f"{_SCORERS}.{name[:60]}", finite_number(weight)
        if name not in scorers_of(settings):
            yield f"{key}: the configuration has no such scorer; valid: {', '.join(scorers_of(settings))}"
        if number is None or not 0 <= number <= _MOST_SCORER_WEIGHT:
            yield f"{key}: must be a number, at most {_MOST_SCORER_WEIGHT:g}; 0 turns it off"
        elif name == IN_FLIGHT and number == 0:
            yield f"{key}: must be above 0, or all replicas pick the same endpoint at once"
        elif name == TOPOLOGY and number == 0 and settings.scheduling.prefer:
            yield f"{key}: must be above 0 while scheduling.prefer is set; 0.001 nearly turns it off"


# Smoothing factor of the moving average of a flow's answer lengths: it spans a few dozen answers.
_ANSWER_ALPHA = 0.2


def shared_settings(settings: Settings, weights: Mapping[str, float]) -> dict[str, object]:
    """The shared settings, with the names of docs/redis-schema.md; durations in ms.

    The setting `weights` maps flows to weights, which replace the weights that the flows' requests claim.
    """
    queue = settings.fair_request_queue
    by_name = {band.name: band for band in queue.bands}
    controller, workloads = settings.request_queue_controller, settings.workloads
    leases, log, outliers = settings.leases, settings.decision_log, settings.outlier_detection
    tenants = {} if settings.tenants is None else {"tenants": settings.tenants.shared()}
    overdue_s = queue.starvation_after
    # Prefills count as requests. In mode `adaptive` the scripts replace configured limits by found limits.
    prefill_caps: dict[str, object] = {}
    if controller.unit == "requests":
        most = controller.initial_limit if controller.is_adaptive else round(controller.watermark_per_backend)
        prefill_caps = {"prefill_caps": {}, "default_prefill_cap": max(most, 1)}
    return {
        "adaptive": int(controller.is_adaptive),
        "limit_min": controller.min_per_backend,
        "limit_max": controller.max_per_backend or MOST_LIMIT,
        "limit_initial": controller.initial_limit,
        **prefill_caps,
        "unit": controller.unit,
        "pinned": dict(controller.pinned),
        "upper_per": controller.upper_per_backend,
        "lower_per": controller.lower_per_backend,
        "total_capacity": queue.total_capacity,
        "flow_capacity": queue.flow_capacity,
        "max_flows": queue.max_flows,
        "largest_claim": settings.claim_share,
        "lease_ms": leases.inflight * 1000,
        "silence_ms": leases.replica_silence * 1000,
        "fallbacks": settings.scheduling.fallbacks,
        "log_max": log.max_entries if log.enabled else 0,
        "max_workloads": workloads.max_workloads,
        "window_ms": workloads.rate_window * 1000,
        "ema_alpha": workloads.ema_alpha,
        "guard_share": queue.guard_share,
        "starvation_ms": 0 if overdue_s is None else max(1, round(overdue_s * 1000)),
        "band_policy": queue.band_policy,
        # List the bands in the order Critical, Default, Sheddable, then all others.
        "band_weights": list(queue.band_weights.values()),
        "bands": [_shared_band(by_name[name]) for name in queue.band_weights],
        "fairness": queue.fairness,
        "ordering": queue.ordering,
        "wait_signal": workloads.wait_signal,
        "wait_weight": workloads.wait_weight,
        "criticality_weight": workloads.criticality_weight,
        "rate_weight": workloads.rate_weight,
        "wait_cap_ms": workloads.wait_cap * 1000,
        "rate_cap": workloads.rate_cap,
        "overload": queue.overload,
        "weights": dict(weights),
        "paused": 0,
        "queue_enabled": int(controller.enabled),
        "queue_unready": int(queue.queue_without_endpoints),
        "live_weight": live_weight(with_in_flight(settings.scheduling.weights)),
        "eject_ms": outliers.base_ejection_time * 1000 if outliers.enabled else 0,
        "eject_most_ms": outliers.max_ejection_time * 1000,
        "eject_percent": outliers.max_ejection_percent,
        "default_answer": queue.default_answer_tokens,
        "answer_alpha": _ANSWER_ALPHA,
        **tenants,
    }


def _shared_band(band: Band) -> dict[str, object]:
    attributes = {"preemptible": band.preemptible, "guaranteed": band.guaranteed}
    limits = {"capacity": band.capacity, "bytes": band.bytes}
    given = {name: limit for name, limit in limits.items() if limit is not None}
    return {"priority": band.priority, **attributes, **given}
