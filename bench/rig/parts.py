"""Processes that benches start next to a `picker up` fleet: simulators, and an Envoy without a picker."""

import contextlib
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.rig.report import cpu_ns
from picker_fleet.domain.units import split_host_port
from picker_tools.local_fleet.network import LOOPBACK, free_port, get
from picker_tools.local_fleet.processes import Child, envoy_binary, picker_command

PLENTY = 100_000
_READY_S, _GRACE_S = 30.0, 10.0


def fleet_config(
    endpoints: Sequence[str], *, bound: int = PLENTY, scorers: Sequence[str] = ()
) -> dict[str, Any]:
    """The configuration of a fleet with `endpoints`, each bounded to `bound` requests."""
    bounds = ("lower_bound", "watermark", "upper_bound")
    return {
        "discovery": {"static": [{"address": address} for address in endpoints]},
        "request_queue_controller": {f"{name}_per_backend": bound for name in bounds},
        "fair_request_queue": {"total_capacity": PLENTY, "flow_capacity": PLENTY},
        "scheduling": {"scorers": [{"name": name} for name in scorers]},
    }


@contextlib.asynccontextmanager
async def _running(name: str, command: Sequence[str], url: str) -> AsyncIterator[Child]:
    """Run a process until the block ends, once `url` answers 200. StartupError if it does not start."""
    with tempfile.TemporaryDirectory(prefix="picker-bench-") as folder:
        child = await Child.start(name, command, Path(folder) / "log")

        async def ready() -> bool:
            reply = await get(url)
            return reply is not None and reply.status == 200

        try:
            await child.until(ready, within_s=_READY_S, what=f"an answer of {url}")
            yield child
        finally:
            await child.stop(_GRACE_S)


@contextlib.asynccontextmanager
async def simulators(hosts: Sequence[str], *options: str) -> AsyncIterator[list[str]]:
    """Run a `picker sim` at each loopback address in `hosts`, all on one port; yields their `ip:port`."""
    port = free_port()
    async with contextlib.AsyncExitStack() as stack:
        for host in hosts:
            command = picker_command("sim", "--host", host, "--port", str(port), *options)
            await stack.enter_async_context(_running(host, command, f"http://{host}:{port}/metrics"))
        yield [f"{host}:{port}" for host in hosts]


@dataclass(frozen=True, slots=True)
class PlainEnvoy:
    """An Envoy that balances load without a picker, as a target of a bench."""

    url: str
    pid: int

    def cpu_us(self) -> tuple[float, float, float]:
        """CPU time in µs of replicas and Valkey, which are absent, and of Envoy."""
        return 0.0, 0.0, cpu_ns([self.pid]) / 1000


@contextlib.asynccontextmanager
async def plain_envoy(endpoints: Sequence[str]) -> AsyncIterator[PlainEnvoy]:
    """Run an Envoy that balances load over `endpoints` without a picker."""
    listen, admin = free_port(), free_port()
    kinds = "type.googleapis.com/envoy.extensions.filters"
    router = {"name": "router", "typed_config": {"@type": f"{kinds}.http.router.v3.Router"}}
    route = {"match": {"prefix": "/"}, "route": {"cluster": "pool", "timeout": "60s"}}
    manager = {
        "@type": f"{kinds}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "plain",
        "http_filters": [router],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
    }
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    hosts = [{"endpoint": {"address": _address(*split_host_port(each))}} for each in endpoints]
    assignment = {"cluster_name": "pool", "endpoints": [{"lb_endpoints": hosts}]}
    cluster = {"name": "pool", "lb_policy": "LEAST_REQUEST", "load_assignment": assignment}
    tree = {
        "admin": {"address": _address(LOOPBACK, admin)},
        "static_resources": {
            "listeners": [{"address": _address(LOOPBACK, listen), "filter_chains": [chain]}],
            "clusters": [cluster],
        },
    }
    command = [envoy_binary(), "--config-yaml", yaml.safe_dump(tree), "--disable-hot-restart"]
    command += ["--concurrency", "2", "--log-level", "warning"]
    async with _running("envoy", command, f"http://{LOOPBACK}:{admin}/ready") as child:
        yield PlainEnvoy(f"http://{LOOPBACK}:{listen}", child.pid)


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}
