"""The names and weights of scorers in the configuration; scheduling/scorers.py computes the scores."""

from collections.abc import Mapping
from typing import Any, Final

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

# The scorers that read metrics scraped from model servers.
SCRAPED_SCORERS: Final = frozenset(
    {"queue-depth", "kv-cache", "running-requests", "lora-affinity", SLO_HEADROOM}
)


def scorer_name(value: str) -> str:
    """Return `value` if a scorer has that name.

    Raises:
        ValueError: no scorer has that name; the message lists the valid names.
    """
    if value not in SCORER_NAMES:
        raise ValueError(f"no scorer is named {value[:40]!r}; valid: {', '.join(SCORER_NAMES)}")
    return value


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
