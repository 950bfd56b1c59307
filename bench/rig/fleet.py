"""Runs a fleet with `picker up`, or an Envoy without a picker, for benches and long tests."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from crowd import http_client
from edge_envoy import started
from fleet_load import metric, total
from whole_fleet import Fleet, exact_bounds, running

from bench.rig.report import cpu_ns
from picker_fleet.domain.units import split_host_port
from picker_tools.local_fleet.network import LOOPBACK

PLENTY = 100_000
_FOLLOWED_S = 30.0
_THREADS = 2  # number of Envoy's threads, as `picker up` starts Envoy


class RunningFleet(Fleet):
    """A running fleet, with methods that read figures for benches and long tests."""

    @property
    def endpoints(self) -> list[str]:
        """`ip:port` of each simulator."""
        return [str(endpoint["address"]) for endpoint in self.state["endpoints"]]

    @property
    def replicas(self) -> list[psutil.Process]:
        return [psutil.Process(replica["pid"]) for replica in self.state["replicas"]]

    def cpu_us(self) -> tuple[float, float, float]:
        """CPU time in µs of the replicas, Valkey and Envoy since they started."""
        replicas, valkey, envoy = (
            cpu_ns(process.pid for process in processes) / 1000
            for processes in (self.replicas, [self.child("valkey-server")], [self.child("envoy")])
        )
        return replicas, valkey, envoy

    async def counted(self, series: str, **labels: str) -> float:
        """The sum of the metric `series` over all replicas."""
        return await metric(self, series, **labels)

    async def drift(self) -> int:
        """Sum of stock, queue, leases, and differences between in-flight counts of fleet and simulators."""
        state = await self.get("state")
        pages = zip(self.endpoints, await self._simulator_pages(), strict=True)
        differences = sum(abs(state["in_flight"].get(address, 0) - _busy(page)) for address, page in pages)
        return int(differences + state["stock"] + state["queued"] + state["leases"])

    async def at_model_servers(self) -> int:
        """The number of requests that run or wait at the simulators, from their metrics pages."""
        return sum(map(_busy, await self._simulator_pages()))

    async def finished(self) -> int:
        """The number of finished requests, from the simulators' metrics pages."""
        return int(sum(total(page, "vllm:request_success_total") for page in await self._simulator_pages()))

    async def _simulator_pages(self) -> list[str]:
        async with http_client() as client:
            calls = [client.get(f"http://{address}/metrics") for address in self.endpoints]
            return [answer.text for answer in await asyncio.gather(*calls)]

    async def wait_for_rest(self, within_s: float) -> None:
        """Wait until every count is 0 (`drift`). TimeoutError after `within_s`."""
        async with asyncio.timeout(within_s):
            while await self.drift():  # noqa: ASYNC110 - the fleet notifies nobody of it
                await asyncio.sleep(0.2)

    async def change(self, tree: dict[str, Any]) -> None:
        """Change the live configuration, and wait until every replica has applied the change."""
        wanted = (await self.patch(tree))["tuned_version"]
        for replica in range(len(self.replicas)):
            await self.until(
                "config",
                lambda config: config["tuned_version"] == wanted,
                replica=replica,
                within_s=_FOLLOWED_S,
                what=f"version {wanted}",
            )


def _busy(page: str) -> int:
    return int(total(page, "vllm:num_requests_running") + total(page, "vllm:num_requests_waiting"))


@contextlib.asynccontextmanager
async def picker_up(
    config: Mapping[str, Any],
    *options: str,
    environment: Mapping[str, str] | None = None,
    kind: type[RunningFleet] = RunningFleet,
) -> AsyncIterator[Any]:
    """Run `picker up` with `config` and `options` until the block ends; yields the ready fleet. The decision
    log is off unless `config` enables it. `environment`: additional variables; a PYTHONPATH with another
    checkout's folder `app` runs that version.
    """
    quiet = {"decision_log": {"enabled": False}, **config}
    with tempfile.TemporaryDirectory(prefix="picker-bench-") as name:
        how = {"environment": environment, "kind": kind, "spawned": True}
        async with running(Path(name), *options, config=quiet, **how) as fleet:
            yield fleet


def fleet_config(
    endpoints: Sequence[str], *, bound: int = PLENTY, scorers: Sequence[str] = (), **others: Any
) -> dict[str, Any]:
    """A configuration with static `endpoints`, a bound of `bound` requests per endpoint, and `others`."""
    return {
        "discovery": {"static": [{"address": address} for address in endpoints]},
        "request_queue_controller": exact_bounds(bound),
        "fair_request_queue": {"total_capacity": PLENTY, "flow_capacity": PLENTY},
        "scheduling": {"scorers": [{"name": name} for name in scorers]},
        **others,
    }


@dataclass(frozen=True, slots=True)
class PlainEnvoy:
    """An Envoy that balances load without a picker; a bench compares pickers with it."""

    url: str
    pid: int

    def cpu_us(self) -> tuple[float, float, float]:
        """CPU time in µs of replicas and Valkey (0: there are none) and of Envoy."""
        return 0.0, 0.0, cpu_ns([self.pid]) / 1000


@contextlib.contextmanager
def plain_envoy(endpoints: Sequence[str]) -> Iterator[PlainEnvoy]:
    """Run an Envoy that balances load over `endpoints` without a picker."""
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
    tree = {
        "admin": {"address": _address(LOOPBACK, 0)},
        "static_resources": {
            "listeners": [{"address": _address(LOOPBACK, 0), "filter_chains": [chain]}],
            "clusters": [{"name": "pool", "lb_policy": "LEAST_REQUEST", "load_assignment": assignment}],
        },
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        started(yaml.safe_dump(tree), Path(folder), threads=_THREADS) as envoy,
    ):
        yield PlainEnvoy(envoy.url, envoy.pid)


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}
