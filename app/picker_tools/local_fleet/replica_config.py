"""The configuration that the replicas of a local fleet share: the user's, with this fleet's parts in it."""

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from picker_fleet.config import Settings, parse
from picker_tools.local_fleet.options import TRUSTED_HEADERS


def overlaid(settings: Settings, *, redis_url: str, endpoints: Sequence[str] | None) -> dict[str, Any]:
    """`settings` as a plain tree of what was set, with `redis_url` and `endpoints` (`ip:port`) in it.

    `endpoints` None keeps the discovery of `settings`. The replicas trust what this fleet's Envoy lets
    through. Environment variables are in `settings` already, so the replicas are started without them.

    Raises:
        ConfigError: the result is not valid.
    """
    tree: dict[str, Any] = _plain(settings.model_dump(exclude_unset=True))
    extproc = tree.get("extproc", {})
    trusts = dict.fromkeys((*extproc.get("trusted_headers", ()), *TRUSTED_HEADERS))
    tree["extproc"] = {**extproc, "trusted_headers": list(trusts)}
    tree["redis"] = {**tree.get("redis", {}), "url": redis_url}
    if endpoints is not None:
        tree["discovery"] = {"static": [{"address": address} for address in endpoints]}
    parse(tree)
    return tree


def served_models(settings: Settings) -> tuple[str, ...]:
    """The names that reach a model server under `settings`, base models first; none: any it likes."""
    names = [target.name for model in settings.models for target in (model.target_models or (model,))]
    return tuple(dict.fromkeys((*names, *settings.scheduling.adapters))) if names else ()


def _plain(value: Any) -> Any:
    """`value` in types that YAML has."""
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Enum):
        return value.name.capitalize()
    if isinstance(value, Path):
        return str(value.absolute())  # a replica's own file stands elsewhere
    return value
