"""What a cluster runs around an API server: pickers by the flags of a chart, a gateway, model servers, load.

The gateway is an Envoy as implementations of inference gateways configure it: ext_proc in `standard`, and
the endpoint by the header (`ORIGINAL_DST`), without fallbacks. The model servers are simulators at addresses
of the loopback, all on one port, as pods are.
"""

import asyncio
import contextlib
import json
import os
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from picker_tools.local_fleet import network
from picker_tools.local_fleet.network import LOOPBACK, free_port
from picker_tools.local_fleet.processes import envoy_binary, picker_command

READY_S = 60.0
ASK = {"model": "llama", "prompt": "hi", "max_tokens": 4}
_EXT_PROC = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor"
_MANAGER = (
    "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
)
_ROUTER = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
_PROTOCOLS = "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_TLS = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
Tree = dict[str, Any]


def bootstrap(listen: int, admin: int, pickers: Sequence[int], *, tls: bool, failure_mode: str) -> Tree:
    """An Envoy on `listen` that asks the pickers at the ports `pickers` of the loopback."""
    cluster: Tree = {
        "name": "picker",
        "type": "STATIC",
        "connect_timeout": "1s",
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": _PROTOCOLS,
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        },
        "health_checks": [
            {
                "timeout": "1s",
                "interval": "0.5s",
                "unhealthy_threshold": 1,
                "healthy_threshold": 1,
                "grpc_health_check": {"service_name": "envoy.service.ext_proc.v3.ExternalProcessor"},
            }
        ],
        "load_assignment": {
            "cluster_name": "picker",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(port)}} for port in pickers]}],
        },
    }
    if tls:
        cluster["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {"@type": _TLS, "common_tls_context": {"alpn_protocols": ["h2"]}},
        }
    processor = {
        "@type": _EXT_PROC,
        "failure_mode_allow": failure_mode == "FailOpen",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "message_timeout": "60s",
        "processing_mode": {
            "request_header_mode": "SEND",
            "response_header_mode": "SEND",
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "response_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_trailer_mode": "SEND",
        },
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }
    manager = {
        "@type": _MANAGER,
        "stat_prefix": "gateway",
        "http_filters": [
            {"name": "envoy.filters.http.ext_proc", "typed_config": processor},
            {"name": "envoy.filters.http.router", "typed_config": {"@type": _ROUTER}},
        ],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "pool", "timeout": "60s"}}],
                }
            ]
        },
    }
    pool = {
        "name": "pool",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "connect_timeout": "2s",
        "original_dst_lb_config": {
            "use_http_header": True,
            "http_header_name": "x-gateway-destination-endpoint",
        },
    }
    return {
        "admin": {"address": _address(admin)},
        "static_resources": {
            "listeners": [
                {
                    "name": "gateway",
                    "address": _address(listen),
                    "filter_chains": [
                        {
                            "filters": [
                                {
                                    "name": "envoy.filters.network.http_connection_manager",
                                    "typed_config": manager,
                                }
                            ]
                        }
                    ],
                }
            ],
            "clusters": [cluster, pool],
        },
    }


def _address(port: int) -> Tree:
    return {"socket_address": {"address": LOOPBACK, "port_value": port}}


@dataclass(slots=True)
class Picker:
    """A replica by the flags of a chart; no file of its own."""

    process: "subprocess.Popen[bytes]"
    grpc: int
    health: int
    admin: httpx.AsyncClient
    log: Path

    async def endpoints(self) -> dict[str, str]:
        """The state of each endpoint by its address."""
        page = await self.admin.get("/api/v1/endpoints")
        page.raise_for_status()
        return {each["address"]: each["status"] for each in page.json()}

    async def figure(self, name: str) -> float:
        """The sum of a metric of this replica."""
        text = (await self.admin.get("/metrics")).text
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return sum(float(value) for series, value in lines if series.partition("{")[0] == name)


@dataclass(slots=True)
class Load:
    """Requests in closed loops; `served` counts them by who served, `errors` has every other answer."""

    served: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Seat:
    """Everything around one API server."""

    folder: Path
    redis_url: str
    port: int  # of all model servers
    tls: bool
    pickers: list[Picker] = field(default_factory=list)
    gateway: httpx.AsyncClient | None = None
    _processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    _clients: list[httpx.AsyncClient] = field(default_factory=list)
    _models: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def spawn(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **(environment or {})}
            )
        self._processes.append(process)
        return process

    async def start_model(self, address: str, *options: str, port: int | None = None) -> None:
        """A simulator at `address` of the loopback; its requests take about 20 ms."""
        quick = ("--ttft", "10", "--itl", "3", "--max-num-seqs", "64")
        at = port or self.port
        self._models[f"{address}:{at}"] = self.spawn(
            f"model-{address}",
            picker_command("sim", "--host", address, "--port", str(at), *(options or quick)),
        )

        async def answers() -> bool | None:
            return await listens(address, at) or None

        assert await network.until(answers, within_s=READY_S)

    def kill_model(self, address: str) -> None:
        process = self._models.pop(f"{address}:{self.port}")
        process.kill()
        process.wait()

    async def start_picker(self, kubeconfig: Path, pool: str, namespace: str, *flags: str) -> Picker:
        grpc, health, metrics = free_port(), free_port(), free_port()
        number = len(self.pickers)
        process = self.spawn(
            f"picker-{number}",
            picker_command(
                *("serve", "--pool-name", pool, "--pool-namespace", namespace, "--zap-encoder", "json"),
                *(
                    "--grpc-port",
                    str(grpc),
                    "--grpc-health-port",
                    str(health),
                    "--metrics-port",
                    str(metrics),
                ),
                *flags,
            ),
            {"KUBECONFIG": str(kubeconfig), "PICKER_REDIS__URL": self.redis_url},
        )
        admin = httpx.AsyncClient(base_url=f"http://{LOOPBACK}:{metrics}", trust_env=False, timeout=20)
        self._clients.append(admin)
        picker = Picker(process, grpc, health, admin, self.folder / f"picker-{number}.log")
        self.pickers.append(picker)
        return picker

    async def ready(self, picker: Picker) -> None:
        async def is_ready() -> bool | None:
            assert picker.process.poll() is None, picker.log.read_text()[-3000:]
            with contextlib.suppress(httpx.TransportError):
                return (await picker.admin.get("/readyz")).status_code == 200 or None
            return None

        assert await network.until(is_ready, within_s=READY_S), picker.log.read_text()[-3000:]

    async def start_gateway(self, failure_mode: str = "FailClose") -> httpx.AsyncClient:
        listen, admin = free_port(), free_port()
        tree = bootstrap(
            listen, admin, [picker.grpc for picker in self.pickers], tls=self.tls, failure_mode=failure_mode
        )
        file = self.folder / "envoy.yaml"
        file.write_text(yaml.safe_dump(tree))
        self.spawn("envoy", [envoy_binary(), "-c", str(file), "--disable-hot-restart", "--concurrency", "1"])

        async def is_ready() -> bool | None:
            with contextlib.suppress(httpx.TransportError):
                async with httpx.AsyncClient(trust_env=False) as client:
                    page = await client.get(f"http://{LOOPBACK}:{admin}/clusters")
                    return page.text.count("health_flags::healthy") >= len(self.pickers) or None
            return None

        assert await network.until(is_ready, within_s=READY_S), (self.folder / "envoy.log").read_text()[
            -3000:
        ]
        limits = httpx.Limits(max_connections=64)
        self.gateway = httpx.AsyncClient(
            base_url=f"http://{LOOPBACK}:{listen}", trust_env=False, timeout=70, limits=limits
        )
        self._clients.append(self.gateway)
        return self.gateway

    async def ask(self, headers: Mapping[str, str] | None = None) -> httpx.Response:
        assert self.gateway is not None
        return await self.gateway.post("/v1/completions", content=json.dumps(ASK), headers=headers or {})

    @contextlib.asynccontextmanager
    async def load(self, clients: int = 8) -> AsyncIterator[Load]:
        """Closed loops of `clients` while the context is open."""
        load, stop = Load(), asyncio.Event()

        async def client() -> None:
            while not stop.is_set():
                answer = await self.ask()
                if answer.status_code == 200:
                    load.served[answer.headers.get("x-served-by", "any")] += 1
                else:
                    load.errors.append(f"{answer.status_code} {answer.text[:200]}")

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())
            try:
                yield load
            finally:
                stop.set()

    async def received(self, address: str) -> float:
        """The requests that a model server has ended."""
        async with httpx.AsyncClient(trust_env=False) as client:
            text = (await client.get(f"http://{address}:{self.port}/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith("vllm:request_success_total")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    async def everywhere(self, condition: Callable[[dict[str, str]], bool], what: str) -> None:
        """Wait until the endpoints of every replica are as `condition` wants them."""
        last: list[dict[str, str]] = []

        async def holds() -> bool | None:
            last[:] = [await picker.endpoints() for picker in self.pickers]
            return all(condition(each) for each in last) or None

        assert await network.until(holds, within_s=READY_S), f"{what}; last seen: {last}"

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()


async def listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection(host, port)
        writer.close()
        return True
    return False
