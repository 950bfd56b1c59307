"""YAML as this project reads it: the safe subset, and no key twice in one mapping."""

from collections.abc import Hashable
from typing import Any

import yaml


class YamlFault(ValueError):
    """A text that is not usable YAML; the message is one line and says where."""


class _Loader(yaml.SafeLoader):
    """SafeLoader keeps the last of two equal keys in silence; half a configuration would vanish unseen."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen and key.value != "<<":
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is there twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> object:
    """The one document in `text`; None if it is empty.

    Raises:
        YamlFault: it cannot be parsed, has a key twice, or nests without reason.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.YAMLError as fault:
        raise YamlFault(f"is not YAML: {' '.join(str(fault).split())[:300]}") from fault
    except RecursionError as fault:
        raise YamlFault("is not YAML: it is nested too deeply") from fault
    except ValueError as fault:  # a timestamp such as 2026-99-99
        raise YamlFault(f"is not YAML: {fault}") from fault
