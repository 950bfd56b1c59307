"""A second Envoy in front of a running fleet, with the bootstrap that `picker envoy-config` prints."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
from fleet_load import at_rest, decisions
from redis_servers import wait

from picker_fleet.domain import config
from picker_fleet.domain.units import split_host_port
from picker_tools.local_fleet.bootstrap import build_bootstrap, to_yaml
from picker_tools.local_fleet.network import LOOPBACK
from picker_tools.local_fleet.parts import Mode
from picker_tools.local_fleet.processes import envoy_binary

EXAMPLES = Path(__file__).parents[2] / "deploy" / "examples"
_READY_S = 60.0
Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Edge:
    """A running Envoy: its process, its admin interface's URL, and its listener's port on the loopback."""

    pid: int
    admin: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"


def http_manager(tree: Tree) -> Tree:
    """The HTTP connection manager of a bootstrap's listener, for a test to edit."""
    manager: Tree = tree["staticResources"]["listeners"][0]["filterChains"][0]["filters"][0]["typedConfig"]
    return manager


async def admitted(fleet: Any) -> list[tuple[str, int]]:
    """Flow and priority of each request that `fleet` has admitted, after all requests have ended."""
    await at_rest(fleet)
    return [(entry.flow, entry.priority) for entry in await decisions(fleet) if entry.flow]


@contextmanager
def edge(
    fleet: Any,
    folder: Path,
    *,
    mode: Mode = "lean",
    edit: Callable[[Tree], None] = lambda tree: None,
    settings: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Iterator[Edge]:
    """Run an Envoy in front of the replicas of `fleet`. `options` are arguments of `build_bootstrap`; the
    function `edit` changes the bootstrap. Mode `http` needs a fleet that serves mode `http`.
    """
    tree = bootstrap(fleet, mode, settings, **{"trusted": (), "debug_headers": True, **options})
    edit(tree)
    with started(to_yaml(tree), folder) as running:
        yield running


@contextmanager
def example(
    fleet: Any,
    folder: Path,
    name: str,
    *arguments: str,
    mode: Mode = "lean",
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Edge]:
    """Run an Envoy with the bootstrap of `picker envoy-config`, edited by an example of `EXAMPLES`."""
    plain = to_yaml(bootstrap(fleet, mode, settings))
    with started(run([str(EXAMPLES / name), *arguments], plain), folder / "envoy") as running:
        yield running


def run(command: list[str], text: str = "") -> str:
    """Run a Python program with `text` on stdin; return its stdout. AssertionError if the program fails."""
    done = subprocess.run([sys.executable, *command], input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def bootstrap(
    fleet: Any, mode: Mode, settings: Mapping[str, Any] = MappingProxyType({}), **options: Any
) -> Tree:
    """The bootstrap of an Envoy on free ports, in front of the replicas of `fleet` with these `settings`."""
    replicas = fleet.state["replicas"]
    return build_bootstrap(
        config.parse(settings),
        mode=mode,
        listen=(LOOPBACK, 0),
        admin=(LOOPBACK, 0),
        pickers=[split_host_port(replica["grpc"]) for replica in replicas],
        http_pickers=[split_host_port(replica["http"]) for replica in replicas if mode == "http"],
        **options,
    )


@contextmanager
def started(bootstrap: str, folder: Path, *, threads: int = 1) -> Iterator[Edge]:
    """Run Envoy with this bootstrap; yield when it serves."""
    folder.mkdir(exist_ok=True)
    file, address, log = folder / "envoy.yaml", folder / "admin-address", folder / "envoy.log"
    file.write_text(bootstrap)
    command = [envoy_binary(), "--config-path", str(file), "--admin-address-path", str(address)]
    command += ["--concurrency", str(threads), "--disable-hot-restart", "--log-level", "warning"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def running() -> Edge | None:
        assert process.poll() is None, log.read_text(errors="replace")
        return _running(process.pid, address)

    try:
        yield wait(running, "an Envoy that serves", _READY_S)
    finally:
        process.kill()
        process.wait()


def _running(pid: int, address: Path) -> Edge | None:
    """The Envoy with its admin address in `address`; None until pickers are healthy and endpoints known."""
    if not address.exists() or ":" not in address.read_text():
        return None
    admin = f"http://{address.read_text().strip()}"
    try:
        with httpx.Client(base_url=admin, trust_env=False, verify=False) as client:
            clusters = client.get("/clusters?format=json").json()
            listeners = client.get("/listeners?format=json").json()
        (bound, *_) = listeners["listener_statuses"]
    except (httpx.HTTPError, KeyError, ValueError):
        return None
    hosts = {each["name"]: each.get("host_statuses", []) for each in clusters.get("cluster_statuses", [])}
    pickers = [each["health_status"] for each in hosts.get("picker", [])]
    if not hosts.get("pool") or any("failed_active_health_check" in health for health in pickers):
        return None
    return Edge(pid, admin, int(bound["local_address"]["socket_address"]["port_value"]))
