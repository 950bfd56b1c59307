"""The result of an import, and functions by which importers read the files of other products."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from picker_fleet.domain.errors import ConfigError


@dataclass(slots=True)
class Imported:
    """The result of an import: a Picker Fleet configuration `tree`, and remarks about other keys."""

    tree: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def section(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.tree.setdefault(name, {})
        return found


def mappings(section: Mapping[str, Any], key: str, where: str) -> list[Mapping[str, Any]]:
    """The objects in the list `section[key]`. ConfigError, which names `where`, if it is no such list."""
    return [mapping(each, where) for each in listed(section, key)]


def listed(tree: Mapping[str, Any], key: str) -> list[Any]:
    """The list in `tree[key]`, empty if the key is missing. Raises ConfigError if the value is no list."""
    value = tree.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise ConfigError(f"{key}: must be a list")
    return value


def mapping(value: object, where: str) -> Mapping[str, Any]:
    """Return `value` if it is an object, {} if it is None; else raise ConfigError, which names `where`."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: must be an object")
    return value
