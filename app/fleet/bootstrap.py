"""The bootstrap Envoy starts with, built from typed messages for each mode (ENVOY, "Three modes")."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from app.config import Settings
from app.fleet.clusters import picker, pool
from app.fleet.envoy_types import Admin, Bootstrap, BootstrapStaticResources, Node, address
from app.fleet.listener import listener
from app.fleet.modes import Mode

Host = tuple[str, int]


def build(
    settings: Settings,
    *,
    mode: Mode,
    listen: Host,
    admin: Host,
    pickers: Sequence[Host],
    debug_headers: bool = False,
) -> dict[str, Any]:
    """Envoy's bootstrap in the JSON mapping of its protobuf.

    `pickers` are the replicas' gRPC addresses; `debug_headers` adds `x-picker-*` headers to each answer
    that show what was picked and who served. Port 0 in `listen` or `admin` means any free port.
    """
    bootstrap = Bootstrap(
        node=Node(id=f"envoy-{settings.pool}", cluster=settings.pool),  # discovery needs both
        admin=Admin(address=address(*admin)),
        static_resources=BootstrapStaticResources(
            listeners=[listener(mode, settings, listen, debug_headers=debug_headers)],
            clusters=[picker(pickers), pool()],
        ),
    )
    tree: dict[str, Any] = bootstrap.to_dict()
    return tree


def to_yaml(bootstrap: Mapping[str, Any]) -> str:
    """`bootstrap` as YAML, keys in the order of Envoy's own messages."""
    text: str = yaml.safe_dump(dict(bootstrap), sort_keys=False, width=110)
    return text
