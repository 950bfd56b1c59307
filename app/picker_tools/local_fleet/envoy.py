"""Runs Envoy as a part of a local fleet."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from picker_fleet.domain.config import Settings, pools_of
from picker_tools.local_fleet.bootstrap import PICKER, PICKER_HTTP, Host, build_bootstrap, cluster_of, to_yaml
from picker_tools.local_fleet.network import LOOPBACK, get
from picker_tools.local_fleet.parts import Mode, trusted_headers
from picker_tools.local_fleet.processes import READY_S, Child, envoy_binary

_CONCURRENCY = 2


class Envoy:
    """An Envoy in front of the replicas `pickers`, for clients on this machine, with any free admin port."""

    name = "envoy"

    def __init__(
        self,
        settings: Settings,
        mode: Mode,
        port: int,
        pickers: Sequence[Host],
        folder: Path,
        *,
        http_pickers: Sequence[Host],
        debug_headers: bool,
    ) -> None:
        self._settings = settings
        self._mode = mode
        self._port = port
        self._admin_port = 0
        self._pickers, self._http_pickers = pickers, http_pickers
        self._file = folder / "envoy.yaml"
        self._admin_file = folder / "envoy-admin-address"
        self._bootstrap = partial(
            build_bootstrap,
            settings,
            mode=mode,
            pickers=pickers,
            http_pickers=http_pickers,
            trusted=trusted_headers(settings),
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
        self._file.write_text(to_yaml(bootstrap), encoding="utf-8")
        self._admin_file.unlink(missing_ok=True)
        return [
            envoy_binary(),
            *("--config-path", str(self._file)),
            *("--admin-address-path", str(self._admin_file)),
            *("--concurrency", str(_CONCURRENCY)),
            "--disable-hot-restart",  # a hot restart would share memory with other fleets
            *("--log-level", "warning"),
        ]

    async def ready(self, child: Child) -> str:
        # Envoy binds its listener now, but serves only once it has replicas (see the method `missing`).
        self._admin_port = await child.until(self._look_admin, within_s=READY_S, what="its admin port")
        self._port = await child.until(self._look_listener, within_s=READY_S, what="its listener")
        return f"{self.url}, mode {self._mode}, admin {self.admin}"

    async def missing(self, endpoints: int | None) -> str | None:
        """The reason why Envoy cannot serve yet: replicas are not healthy, or a pool lacks some of its
        `endpoints` model servers (None: any number suffices). Returns None once Envoy can serve."""
        live = await get(f"{self.admin}/ready")
        if live is None or live.status != 200:
            return "Envoy waits for a replica to send it the endpoints"
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
                return f"Envoy knows {known} of {endpoints} endpoints ({cluster})"
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
