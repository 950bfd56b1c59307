"""Envoy's bootstrap configuration (docs/protocol.md), and Envoy as a part of a local fleet."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from picker_fleet.domain.config import Settings, pools_of
from picker_tools.local_fleet.clusters import (
    PICKER,
    PICKER_HTTP,
    PickerTls,
    cluster_of,
    picker,
    picker_admin,
    picker_http,
    pool,
)
from picker_tools.local_fleet.envoy_types import (
    address,
    bootstrap_v3,
    connections_v3,
    core_v3,
    fixed_heap_v3,
    overload_v3,
    packed,
    protobuf,
    seconds,
)
from picker_tools.local_fleet.listener import admin_listener, listener
from picker_tools.local_fleet.network import LOOPBACK, get
from picker_tools.local_fleet.parts import TRUSTED_HEADERS, Mode
from picker_tools.local_fleet.processes import READY_S, Child, envoy_binary

_HEAP = "envoy.resource_monitors.fixed_heap"
_CONNECTIONS = "envoy.resource_monitors.global_downstream_max_connections"
# Overload actions and the share of the allowed heap at which each starts: return free memory, close idle
# connections, answer new requests 503, refuse new connections.
_ACTIONS = {
    "shrink_heap": 0.8,
    "close_idle_http_connections": 0.85,
    "stop_accepting_requests": 0.95,
    "reject_incoming_connections": 0.98,
}
_RUNTIME = {
    # Begin one request of a connection at a time: a request that its client resets meanwhile never begins.
    "http.max_requests_per_io_cycle": 1,
    # The routes' regular expressions exceed Envoy's default limit of 100 instructions.
    "re2.max_program_size.error_level": 20_000,
}


def overload_manager(*, max_connections: int, max_heap_bytes: int) -> overload_v3.OverloadManager:
    """Limit client connections to `max_connections` and the heap to about `max_heap_bytes`."""
    connections = connections_v3.DownstreamConnectionsConfig(
        max_active_downstream_connections=max_connections
    )
    heap = fixed_heap_v3.FixedHeapConfig(max_heap_size_bytes=max_heap_bytes)
    return overload_v3.OverloadManager(
        refresh_interval=seconds(0.25),
        resource_monitors=[
            overload_v3.ResourceMonitor(name=_HEAP, typed_config=packed(heap)),
            overload_v3.ResourceMonitor(name=_CONNECTIONS, typed_config=packed(connections)),
        ],
        actions=[
            overload_v3.OverloadAction(
                name=f"envoy.overload_actions.{action}",
                triggers=[
                    overload_v3.Trigger(name=_HEAP, threshold=overload_v3.ThresholdTrigger(value=share))
                ],
            )
            for action, share in _ACTIONS.items()
        ],
    )


Host = tuple[str, int]
MAX_CONNECTIONS = 10_000
MAX_HEAP_BYTES = 1024 * 1024 * 1024


def build_bootstrap(
    settings: Settings,
    *,
    mode: Mode,
    listen: Host,
    admin: Host,
    pickers: Sequence[Host],
    pool_listens: Mapping[str, Host] = MappingProxyType({}),
    http_pickers: Sequence[Host] = (),
    admin_listen: Host | None = None,
    admin_pickers: Sequence[Host] = (),
    picker_tls: PickerTls | None = None,
    http_tls: PickerTls | None = None,
    admin_tls: PickerTls | None = None,
    trusted: Iterable[str] = (),
    max_connections: int = MAX_CONNECTIONS,
    max_heap_bytes: int = MAX_HEAP_BYTES,
    client_rate: int | None = None,
    debug_headers: bool = False,
    origins: Sequence[str] = (),
) -> dict[str, Any]:
    """Envoy's bootstrap in the JSON mapping of its protobuf.

    `pool_listens` maps a pool to a further listener whose requests are all for that pool. `pickers` are the
    replicas' gRPC addresses, `http_pickers` their addresses for mode `http`. `admin` is the address of
    Envoy's own admin page; `admin_listen` is a listener for the replicas' admin API at `admin_pickers` (None:
    no listener). `picker_tls`, `http_tls` and `admin_tls` configure TLS to the replicas (None: plain text).
    `trusted` are the steering headers that clients may set.
    `max_connections` and `max_heap_bytes` limit all clients together; `client_rate` limits the requests a
    second from one client address (None: no limit).
    `debug_headers` adds `x-picker-*` headers that show the picked and the serving endpoint to each answer.
    `origins` are the web origins whose pages may read answers (`*`: any).
    Port 0 in `listen` or `admin` means any free port.
    """
    pools, namespace = pools_of(settings), settings.extproc.metadata_namespace
    bootstrap = bootstrap_v3.Bootstrap(
        node=core_v3.Node(id=f"envoy-{settings.pool}", cluster=settings.pool),  # EDS requires both
        # Accept health checks even when client connections are at their limit.
        admin=bootstrap_v3.Admin(address=address(*admin), ignore_global_conn_limit=True),
        overload_manager=overload_manager(max_connections=max_connections, max_heap_bytes=max_heap_bytes),
        layered_runtime=bootstrap_v3.LayeredRuntime(
            layers=[
                bootstrap_v3.RuntimeLayer(name="picker", static_layer=protobuf.Struct.from_dict(_RUNTIME))
            ]
        ),
        static_resources=bootstrap_v3.BootstrapStaticResources(
            listeners=[
                *(
                    listener(
                        *(mode, settings, at),
                        trusted=trusted,
                        debug_headers=debug_headers,
                        client_rate=client_rate,
                        pool=name,
                        origins=origins,
                    )
                    for name, at in ((None, listen), *pool_listens.items())
                ),
                *([] if admin_listen is None else [admin_listener(admin_listen)]),
            ],
            clusters=[
                picker(pickers, picker_tls),
                *([picker_http(http_pickers, http_tls)] if mode == "http" else []),
                *([] if admin_listen is None else [picker_admin(admin_pickers, admin_tls)]),
                *(
                    pool(
                        namespace,
                        cluster_of(name, settings.pool),
                        name if settings.pools else None,
                        retry_percent=each.outlier_detection.retry_budget_percent,
                    )
                    for name, each in pools.items()
                ),
            ],
        ),
    )
    tree: dict[str, Any] = bootstrap.to_dict()
    return tree


def to_yaml(bootstrap: Mapping[str, Any]) -> str:
    """`bootstrap` as YAML, with keys in the order of Envoy's protobuf messages."""
    text: str = yaml.safe_dump(dict(bootstrap), sort_keys=False, width=110)
    return text


_CONCURRENCY = 2


class Envoy:
    """Envoy in front of `pickers`, for clients on this machine only. Its admin port is any free port.

    `edit` changes the bootstrap's YAML before Envoy reads it.
    """

    name = "envoy"

    def __init__(
        self,
        settings: Settings,
        mode: Mode,
        port: int,
        pickers: Sequence[Host],
        folder: Path,
        *,
        http_pickers: Sequence[Host] = (),
        debug_headers: bool = False,
        trusted: Iterable[str] = TRUSTED_HEADERS,
        max_heap_bytes: int = MAX_HEAP_BYTES,
        edit: Callable[[str], str] = str,
    ) -> None:
        self._settings = settings
        self._mode = mode
        self._port = port
        self._admin_port = 0
        self._pickers, self._http_pickers = pickers, http_pickers
        self._file = folder / "envoy.yaml"
        self._admin_file = folder / "envoy-admin-address"
        self._edit = edit
        self._bootstrap = partial(
            build_bootstrap,
            settings,
            mode=mode,
            pickers=pickers,
            http_pickers=http_pickers,
            picker_tls=PickerTls.of_local(settings.extproc.tls),
            http_tls=PickerTls.of_local(settings.http.tls),
            trusted=tuple(trusted),
            max_heap_bytes=max_heap_bytes,
            debug_headers=debug_headers,
        )

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self._port}"

    @property
    def admin(self) -> str:
        return f"http://{LOOPBACK}:{self._admin_port}"

    def command(self) -> list[str]:
        bootstrap = self._bootstrap(listen=(LOOPBACK, self._port), admin=(LOOPBACK, self._admin_port))
        self._file.write_text(self._edit(to_yaml(bootstrap)), encoding="utf-8")
        self._admin_file.unlink(missing_ok=True)
        return [
            envoy_binary(),
            *("--config-path", str(self._file)),
            *("--admin-address-path", str(self._admin_file)),
            *("--concurrency", str(_CONCURRENCY)),
            "--disable-hot-restart",  # hot restart would use memory shared with other fleets
            # `misc` would warn at each start that sse_to_metadata is new.
            *("--log-level", "warning", "--component-log-level", "misc:error"),
        ]

    async def ready(self, child: Child) -> str:
        # Envoy binds the listener now, but serves only once it has replicas: see `missing`.
        self._admin_port = await child.until(self._look_admin, within_s=READY_S, what="its admin port")
        self._port = await child.until(self._look_listener, within_s=READY_S, what="its listener")
        return f"{self.url}, mode {self._mode}, admin {self.admin}"

    async def missing(self, endpoints: int | None) -> str | None:
        """Why Envoy cannot serve yet: replicas are not healthy, or a pool has not `endpoints` model servers
        (None: any number will do). Returns None once Envoy can serve."""
        live = await get(f"{self.admin}/ready")
        if live is None or live.status != 200:
            return "Envoy waits for a replica to tell it the endpoints"
        reply = await get(f"{self.admin}/clusters?format=json")
        clusters = {
            cluster.get("name"): cluster.get("host_statuses", [])
            for cluster in ((reply.json() if reply else None) or {}).get("cluster_statuses", [])
        }
        for cluster in (PICKER, PICKER_HTTP) if self._http_pickers else (PICKER,):
            healthy = [
                host
                for host in clusters.get(cluster, [])
                if not any(key.startswith("failed_") for key in host.get("health_status", {}))
            ]
            if len(healthy) < len(self._pickers):
                return f"Envoy sees {len(healthy)} of {len(self._pickers)} replicas healthy ({cluster})"
        for name in pools_of(self._settings):
            cluster = cluster_of(name, self._settings.pool)
            known = len(clusters.get(cluster, []))
            if endpoints is not None and known != endpoints:
                return f"Envoy was told of {known} of {endpoints} endpoints ({cluster})"
        return None

    async def _look_admin(self) -> int | None:
        if not self._admin_file.exists():
            return None
        port = self._admin_file.read_text().rpartition(":")[2].strip()
        return int(port) if port.isdecimal() else None

    async def _look_listener(self) -> int | None:
        reply = await get(f"{self.admin}/listeners?format=json")
        if reply is None:
            return None
        bound = (reply.json() or {}).get("listener_statuses")
        return int(bound[0]["local_address"]["socket_address"]["port_value"]) if bound else None
