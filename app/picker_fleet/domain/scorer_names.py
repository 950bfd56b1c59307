"""The names and weights of scorers in the configuration; scheduling/scorers.py computes the scores."""

from collections.abc import Mapping
from typing import Any, Final

from picker_fleet.domain import extensions

IN_FLIGHT: Final = "in-flight"
SLO_HEADROOM: Final = "slo-headroom"
TOPOLOGY: Final = "topology"
SCORER_NAMES: Final = (
    "queue-depth",
    "kv-cache",
    "running-requests",
    IN_FLIGHT,
    "lora-affinity",
    "latency",
    "prefix-affinity",
    "session-affinity",
    SLO_HEADROOM,
    TOPOLOGY,
    "random",
)

# The scorers that read no metrics scraped from model servers.
UNSCRAPED_SCORERS: Final = frozenset(
    {IN_FLIGHT, "latency", "prefix-affinity", "session-affinity", TOPOLOGY, "random"}
)
# The scorers that say where a prompt is computed soonest; all others are about the answer or its client.
PREFILL_SCORERS: Final = frozenset(
    {"queue-depth", "running-requests", IN_FLIGHT, "lora-affinity", "prefix-affinity", TOPOLOGY, "random"}
)


def scorer_name(value: str) -> str:
    """Return `value` if it names a scorer of this project or from outside.

    Raises:
        ValueError: no scorer has that name, so the message lists the valid names; or the scorer is unusable.
    """
    extensions.find(extensions.SCORERS, value, SCORER_NAMES)
    return value


def built_in_scorer(value: str) -> str:
    """Return `value`, or raise ValueError if it names no scorer of this project."""
    if value not in SCORER_NAMES:
        valid = ", ".join(SCORER_NAMES)
        raise ValueError(f"{value[:40]!r} is no built-in scorer, as a stage of its own needs; valid: {valid}")
    return value


def without_parameters(scheduling: Any) -> Any:
    """The section `scheduling` with the `parameters` of a list of scorers moved to `scorer_parameters`."""
    listed = scheduling.get("scorers") if isinstance(scheduling, Mapping) else None
    scorers, parameters = [], {}
    for entry in listed if isinstance(listed, list | tuple) else ():
        own = dict(entry) if isinstance(entry, Mapping) else entry
        if isinstance(own, dict) and "parameters" in own:
            parameters[str(own.get("name"))] = own.pop("parameters")
        scorers.append(own)
    if not parameters:
        return scheduling
    return {"scorer_parameters": parameters, **scheduling, "scorers": scorers}


def weights_by_name(value: Any) -> dict[Any, Any]:
    """Parse scorers and their weights, unchecked, from either of two forms: `[{name, weight}]`, weight 1 by
    default, or `{name: weight}`.

    Raises:
        ValueError: `value` has neither form, or lists a scorer twice.
    """
    if isinstance(value, Mapping):
        return dict(value)
    weights: dict[Any, Any] = {}
    for entry in value if isinstance(value, list | tuple) else (value,):
        if not isinstance(entry, Mapping) or not {"name"} <= entry.keys() <= {"name", "weight"}:
            raise ValueError("must map scorers to weights, or list {name, weight}")
        name = str(entry["name"])
        if name in weights:
            raise ValueError(f"scorer {name[:40]} is named twice")
        weights[name] = entry.get("weight", 1)
    return weights
