"""Finds installed scorers, filters, orderings and cost estimators: entry points of distributions.

The configuration names an extension; this module finds, imports and checks it. The installed entry points are
read once, and only if the configuration names a scorer or an extension. `picker_fleet.extensions` describes
extensions for their authors; `scheduling/extension_calls.py` calls extensions.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

VERSION: Final = 1  # the interface's version: raise it if present extensions would no longer work

SCORERS: Final = "picker_fleet.scorers"
FILTERS: Final = "picker_fleet.filters"
ORDERINGS: Final = "picker_fleet.orderings"
COST_ESTIMATORS: Final = "picker_fleet.cost_estimators"
KINDS: Final = {
    SCORERS: "scorer",
    FILTERS: "filter",
    ORDERINGS: "ordering",
    COST_ESTIMATORS: "cost estimator",
}
BUILT_IN_FILTERS: Final = frozenset({"subset", "health", "drain", "label", "adapter"})  # always in force
_LONGEST = 40  # maximum characters of an unknown name in a message

P = TypeVar("P", bound=BaseModel)
F = TypeVar("F", covariant=True)


class NoParameters(BaseModel):
    """The model of an extension without parameters."""

    model_config = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Extension(Generic[P, F]):
    """The object that an extension's entry point names. `version`: the interface for which it was written;
    `make` gets the parameters and returns the scorer (or filter, …); `parameters` is the parameters' model.

    `make` is called once at the start of a replica for each pool whose configuration names the extension.
    """

    version: int
    make: Callable[[P], F]
    parameters: type[P]


def find(group: str, name: str, built_in: Collection[str] = ()) -> Extension[Any, Any] | None:
    """The extension `name` of `group`; None if `name` is one of the `built_in` names.

    Raises:
        ValueError: the extension is unknown or unusable, or two have this name; the message says what to do.
    """
    kind = KINDS[group]
    found = _installed().get(group, {})
    entries = found.get(name, ())
    whose = " and ".join(sorted(_distribution(each) for each in entries))
    if entries and (name in built_in or (group == FILTERS and name in BUILT_IN_FILTERS)):
        raise ValueError(
            f"the {kind} {name} of {whose} has the name of a built-in {kind}: rename its entry point, or "
            "uninstall it"
        )
    if name in built_in:
        return None
    if not entries:
        valid = ", ".join((*built_in, *sorted(found))) or "none is installed"
        raise ValueError(f"no {kind} is named {name[:_LONGEST]!r}; valid: {valid}")
    if len(entries) > 1:
        raise ValueError(f"{whose} both have a {kind} {name}: rename one, or uninstall one")
    try:
        extension = entries[0].load()
    except (Exception, SystemExit) as fault:
        raise ValueError(
            f"the {kind} {name} of {whose} cannot be imported: {type(fault).__name__}: {fault}"
        ) from fault
    if not isinstance(extension, Extension):
        raise ValueError(f"the {kind} {name} of {whose} is no picker_fleet.extensions.Extension")
    if extension.version != VERSION:
        raise ValueError(
            f"the {kind} {name} of {whose} was written for version {extension.version} of the extensions' "
            f"interface; this picker has version {VERSION}: install a release of {whose} for that version"
        )
    return extension


def check(group: str, name: str, parameters: Mapping[str, Any]) -> None:
    """Check that the extension `name` of `group` can be used with `parameters`.

    Raises:
        ValueError: the faults that `find` finds, or invalid parameters; the message names extension and keys.
    """
    _parsed(group, name, parameters)


def made(group: str, name: str, parameters: Mapping[str, Any]) -> Any:
    """The scorer, filter, ordering or cost estimator `name`, made with `parameters`.

    Raises:
        ValueError: the faults that `check` finds, or `make` of the extension fails.
    """
    extension, own = _parsed(group, name, parameters)
    try:
        function = extension.make(own)
    except (Exception, SystemExit) as fault:
        raise ValueError(
            f"the {KINDS[group]} {name} did not start: {type(fault).__name__}: {fault}"
        ) from fault
    if not callable(function):
        found = type(function).__name__
        raise ValueError(f"the {KINDS[group]} {name} did not start: make returned {found}, no function")
    return function


def _parsed(group: str, name: str, parameters: Mapping[str, Any]) -> tuple[Extension[Any, Any], BaseModel]:
    extension = find(group, name)
    assert extension is not None, "only a built-in name gives None"
    try:
        return extension, extension.parameters.model_validate(parameters)
    except ValidationError as fault:
        faults = [
            f"{'.'.join(('parameters', *map(str, each['loc'])))}: {each['msg'].removeprefix('Value error, ')}"
            for each in fault.errors()
        ]
        raise ValueError(f"{KINDS[group]} {name}: {'; '.join(faults)}") from None
    except (Exception, SystemExit) as fault:
        raise ValueError(
            f"the {KINDS[group]} {name} cannot check its parameters: {type(fault).__name__}: {fault}"
        ) from fault


@cache
def _installed() -> Mapping[str, Mapping[str, tuple[EntryPoint, ...]]]:
    """The installed entry points by group and name."""
    everything = entry_points()
    by_group = {group: everything.select(group=group) for group in KINDS}
    return {
        group: {name: tuple(found.select(name=name)) for name in found.names}
        for group, found in by_group.items()
    }


def _distribution(entry: EntryPoint) -> str:
    return "an unknown distribution" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
