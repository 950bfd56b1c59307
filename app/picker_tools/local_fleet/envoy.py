"""Envoy of the local fleet: the real binary, started with the generated bootstrap."""

from collections.abc import Sequence
from pathlib import Path

from picker_fleet.config import Settings
from picker_tools.local_fleet.bootstrap import Host, build, to_yaml
from picker_tools.local_fleet.child import Child
from picker_tools.local_fleet.clusters import PICKER, POOL
from picker_tools.local_fleet.modes import Mode
from picker_tools.local_fleet.options import TRUSTED_HEADERS
from picker_tools.local_fleet.part import READY_S, envoy_binary
from picker_tools.local_fleet.ports import LOOPBACK
from picker_tools.local_fleet.probe import get

_CONCURRENCY = 2


class Envoy:
    """Envoy in front of `pickers`, for clients of this machine alone. Its admin port is any free one."""

    name = "envoy"

    def __init__(
        self,
        settings: Settings,
        mode: Mode,
        port: int,
        pickers: Sequence[Host],
        folder: Path,
        *,
        debug_headers: bool,
    ) -> None:
        self._settings = settings
        self._mode = mode
        self._port = port
        self._admin_port = 0
        self._pickers = pickers
        self._file = folder / "envoy.yaml"
        self._admin_file = folder / "envoy-admin-address"
        self._debug_headers = debug_headers

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self._port}"

    @property
    def admin(self) -> str:
        return f"http://{LOOPBACK}:{self._admin_port}"

    def command(self) -> list[str]:
        bootstrap = build(
            self._settings,
            mode=self._mode,
            listen=(LOOPBACK, self._port),
            admin=(LOOPBACK, self._admin_port),
            pickers=self._pickers,
            trusted=TRUSTED_HEADERS,
            debug_headers=self._debug_headers,
        )
        self._file.write_text(to_yaml(bootstrap), encoding="utf-8")
        self._admin_file.unlink(missing_ok=True)
        return [
            envoy_binary(),
            *("--config-path", str(self._file)),
            *("--admin-address-path", str(self._admin_file)),
            *("--concurrency", str(_CONCURRENCY)),
            "--disable-hot-restart",  # no shared memory, so that fleets run side by side
            # `misc` would warn at each start that sse_to_metadata is new.
            *("--log-level", "warning", "--component-log-level", "misc:error"),
        ]

    async def ready(self, child: Child) -> str:
        # Its listener is bound, which is not serving yet: that needs the replicas, see `missing`.
        self._admin_port = await child.until(self._look_admin, within_s=READY_S, what="its admin port")
        self._port = await child.until(self._look_listener, within_s=READY_S, what="its listener")
        return f"{self.url}, mode {self._mode}, admin {self.admin}"

    async def missing(self, endpoints: int | None) -> str | None:
        """What it still lacks to serve: healthy replicas, or `endpoints` model servers (None: any number)."""
        live = await get(f"{self.admin}/ready")
        if live is None or live.status != 200:
            return "Envoy waits for a replica to tell it the endpoints"
        reply = await get(f"{self.admin}/clusters?format=json")
        clusters = {
            cluster.get("name"): cluster.get("host_statuses", [])
            for cluster in ((reply.json() if reply else None) or {}).get("cluster_statuses", [])
        }
        healthy = [
            host
            for host in clusters.get(PICKER, [])
            if not any(key.startswith("failed_") for key in host.get("health_status", {}))
        ]
        if len(healthy) < len(self._pickers):
            return f"Envoy sees {len(healthy)} of {len(self._pickers)} replicas healthy"
        known = len(clusters.get(POOL, []))
        if endpoints is not None and known != endpoints:
            return f"Envoy was told of {known} of {endpoints} endpoints"
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
        for listener in (reply.json() or {}).get("listener_statuses", []):
            port = listener["local_address"]["socket_address"]["port_value"]
            return int(port)
        return None
