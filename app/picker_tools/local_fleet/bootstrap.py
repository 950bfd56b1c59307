"""The bootstrap Envoy starts with, built from typed messages for each mode (docs/protocol.md)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from picker_fleet.config import Settings
from picker_tools.local_fleet.clusters import picker, pool
from picker_tools.local_fleet.envoy_types import Admin, Bootstrap, BootstrapStaticResources, Node, address
from picker_tools.local_fleet.limits import overload_manager
from picker_tools.local_fleet.listener import listener
from picker_tools.local_fleet.modes import Mode

Host = tuple[str, int]
MAX_CONNECTIONS = 10_000
MAX_HEAP_BYTES = 1024 * 1024 * 1024


def build(
    settings: Settings,
    *,
    mode: Mode,
    listen: Host,
    admin: Host,
    pickers: Sequence[Host],
    trusted: Iterable[str] = (),
    max_connections: int = MAX_CONNECTIONS,
    max_heap_bytes: int = MAX_HEAP_BYTES,
    debug_headers: bool = False,
) -> dict[str, Any]:
    """Envoy's bootstrap in the JSON mapping of its protobuf.

    `pickers` are the replicas' gRPC addresses; `trusted` the steering headers that clients may set;
    `max_connections` and `max_heap_bytes` bound what all clients together may cost Envoy;
    `debug_headers` adds `x-picker-*` headers to each answer that show what was picked and who served.
    Port 0 in `listen` or `admin` means any free port.
    """
    bootstrap = Bootstrap(
        node=Node(id=f"envoy-{settings.pool}", cluster=settings.pool),  # discovery needs both
        # Whoever looks whether it is well still gets through when its clients do not.
        admin=Admin(address=address(*admin), ignore_global_conn_limit=True),
        overload_manager=overload_manager(max_connections=max_connections, max_heap_bytes=max_heap_bytes),
        static_resources=BootstrapStaticResources(
            listeners=[listener(mode, settings, listen, trusted=trusted, debug_headers=debug_headers)],
            clusters=[picker(pickers), pool(settings.extproc.metadata_namespace)],
        ),
    )
    tree: dict[str, Any] = bootstrap.to_dict()
    return tree


def to_yaml(bootstrap: Mapping[str, Any]) -> str:
    """`bootstrap` as YAML, keys in the order of Envoy's own messages."""
    text: str = yaml.safe_dump(dict(bootstrap), sort_keys=False, width=110)
    return text
