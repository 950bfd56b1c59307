"""What a cluster runs around an API server: pickers by the flags of a chart, a gateway, model servers, load.

The gateway is an Envoy as implementations of inference gateways configure it: ext_proc in `standard`, and
the endpoint by the header (`ORIGINAL_DST`), without fallbacks. It tells the picker who served, and which
endpoints may be picked where a request has the header `SUBSET_HEADER`. The model servers are simulators at
addresses of the loopback, all on one port, as pods are.
"""

import asyncio
import base64
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
from google.protobuf.struct_pb2 import ListValue, Value
from redis_servers import redis_server

from picker_tools.local_fleet import network
from picker_tools.local_fleet.network import LOOPBACK, free_port
from picker_tools.local_fleet.processes import envoy_binary, picker_command

READY_S = 60.0
ASK = {"model": "llama", "prompt": "hi"}
_EXT_PROC = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor"
_MANAGER = (
    "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
)
_ROUTER = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
_PROTOCOLS = "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_PER_ROUTE = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
_TO_METADATA = "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config"
_OVERRIDE_HOST = "type.googleapis.com/envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost"
_ROUND_ROBIN = "type.googleapis.com/envoy.extensions.load_balancing_policies.round_robin.v3.RoundRobin"
_TLS = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
_EXT_PROC_FILTER = "envoy.filters.http.ext_proc"
_DESTINATION = "x-gateway-destination-endpoint"
_SERVED_HEADER = "x-test-served"
SUBSET_HEADER = "x-test-subset"  # see `subset`
Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Route:
    """What a gateway does for a pool."""

    pickers: Sequence[int]  # ports of the loopback
    weight: int = 1


def subset(*addresses: str) -> dict[str, str]:
    """The request header of which the gateway makes the hint that only `addresses` may be picked: a list."""
    value = Value(list_value=ListValue(values=[Value(string_value=each) for each in addresses]))
    return {SUBSET_HEADER: base64.b64encode(value.SerializeToString()).decode()}


def bootstrap(
    listen: int,
    admin: int,
    routes: Sequence[Route],
    *,
    tls: bool,
    fail_open: Sequence[tuple[str, int]] = (),
    http2: bool = False,
    discovery: Path | None = None,
) -> Tree:
    """An Envoy on `listen`. Requests are split over `routes` by weight. The pickers of the first one are read
    from the file `discovery` if there is one, and their health is not checked then.

    Where no picker can be asked they are refused, or go to the addresses `fail_open` in turn. Model servers
    are asked by HTTP/2 if `http2`.
    """
    processor = {
        "@type": _EXT_PROC,
        "failure_mode_allow": bool(fail_open),
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker-0"}},
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
    hint = {
        "header": SUBSET_HEADER,
        "remove": True,
        "on_header_present": {
            "metadata_namespace": "envoy.lb.subset_hint",
            "key": "x-gateway-destination-endpoint-subset",
            "type": "PROTOBUF_VALUE",
            "encode": "BASE64",
        },
    }
    served = {
        "header": _SERVED_HEADER,
        "remove": True,
        "on_header_present": {
            "metadata_namespace": "envoy.lb",
            "key": "x-gateway-destination-endpoint-served",
        },
    }
    split = [
        {
            "name": "pool",
            "weight": route.weight,
            "typed_per_filter_config": {
                _EXT_PROC_FILTER: {
                    "@type": _PER_ROUTE,
                    "overrides": {"grpc_service": {"envoy_grpc": {"cluster_name": f"picker-{number}"}}},
                }
            },
        }
        for number, route in enumerate(routes)
    ]
    manager = {
        "@type": _MANAGER,
        "stat_prefix": "gateway",
        "http_filters": [
            {"name": "hint", "typed_config": {"@type": _TO_METADATA, "request_rules": [hint]}},
            {"name": _EXT_PROC_FILTER, "typed_config": processor},
            {"name": "served", "typed_config": {"@type": _TO_METADATA, "response_rules": [served]}},
            {"name": "envoy.filters.http.router", "typed_config": {"@type": _ROUTER}},
        ],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [
                        {
                            "match": {"prefix": "/"},
                            "route": {"weighted_clusters": {"clusters": split}, "timeout": "60s"},
                            "response_headers_to_add": [
                                {"header": {"key": _SERVED_HEADER, "value": "%UPSTREAM_REMOTE_ADDRESS%"}}
                            ],
                        }
                    ],
                }
            ]
        },
    }
    chain = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    listener = {"name": "gateway", "address": _address(listen), "filter_chains": [{"filters": chain}]}
    pickers = [
        _picker_cluster(f"picker-{number}", route.pickers, tls=tls) for number, route in enumerate(routes)
    ]
    if discovery is not None:
        del pickers[0]["load_assignment"], pickers[0]["health_checks"]
        source = {"path_config_source": {"path": str(discovery)}, "resource_api_version": "V3"}
        pickers[0] |= {
            "type": "EDS",
            "eds_cluster_config": {"service_name": "picker-0", "eds_config": source},
        }
    pool = _failing_open(fail_open) if fail_open else _original_destination()
    if http2:
        pool |= _speaking_http2()
    return {
        "node": {"id": "gateway", "cluster": "gateway"},
        "admin": {"address": _address(admin)},
        "static_resources": {"listeners": [listener], "clusters": [*pickers, pool]},
    }


def _speaking_http2() -> Tree:
    options = {"@type": _PROTOCOLS, "explicit_http_config": {"http2_protocol_options": {}}}
    return {
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options
        }
    }


def _picker_cluster(name: str, pickers: Sequence[int], *, tls: bool) -> Tree:
    cluster: Tree = {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        **_speaking_http2(),
        "health_checks": [
            {
                "timeout": "1s",
                "interval": "0.5s",
                "unhealthy_threshold": 1,
                "healthy_threshold": 1,
                "grpc_health_check": {"service_name": "envoy.service.ext_proc.v3.ExternalProcessor"},
            }
        ],
        "load_assignment": _assignment(name, pickers),
    }
    if tls:
        cluster["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {"@type": _TLS, "common_tls_context": {"alpn_protocols": ["h2"]}},
        }
    return cluster


def _assignment(name: str, pickers: Sequence[int]) -> Tree:
    hosts = [{"endpoint": {"address": _address(port)}} for port in pickers]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": hosts}]}


def publish(discovery: Path, pickers: Sequence[int]) -> None:
    """Have gateways that read the file `discovery` take the pickers at these ports."""
    kind = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
    new = discovery.with_suffix(".new")
    new.write_text(json.dumps({"resources": [{"@type": kind, **_assignment("picker-0", pickers)}]}))
    new.rename(discovery)


def _original_destination() -> Tree:
    return {
        "name": "pool",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "connect_timeout": "2s",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": _DESTINATION},
    }


def _failing_open(hosts: Sequence[tuple[str, int]]) -> Tree:
    """The endpoint by the header, any of `hosts` without it."""
    fallback = {"name": "round-robin", "typed_config": {"@type": _ROUND_ROBIN}}
    policy = {
        "@type": _OVERRIDE_HOST,
        "override_host_sources": [{"header": _DESTINATION}],
        "fallback_policy": {"policies": [{"typed_extension_config": fallback}]},
    }
    endpoints = [{"endpoint": {"address": _address(port, host)}} for host, port in hosts]
    return {
        "name": "pool",
        "type": "STATIC",
        "connect_timeout": "2s",
        "load_balancing_policy": {
            "policies": [{"typed_extension_config": {"name": "override-host", "typed_config": policy}}]
        },
        "load_assignment": {"cluster_name": "pool", "endpoints": [{"lb_endpoints": endpoints}]},
    }


def echo_over_http2(hosts: Sequence[tuple[str, int]]) -> Tree:
    """An Envoy that answers any request at `hosts`, by cleartext HTTP/2 only."""
    listeners = []
    for host, port in hosts:
        manager = {
            "@type": _MANAGER,
            "stat_prefix": "echo",
            "codec_type": "HTTP2",
            "http_filters": [{"name": "envoy.filters.http.router", "typed_config": {"@type": _ROUTER}}],
            "route_config": {
                "virtual_hosts": [
                    {
                        "name": "all",
                        "domains": ["*"],
                        "routes": [{"match": {"prefix": "/"}, "direct_response": {"status": 200}}],
                        "response_headers_to_add": [
                            {"header": {"key": "x-served-by", "value": f"{host}:{port}"}}
                        ],
                    }
                ]
            },
        }
        chain = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
        listeners.append(
            {"name": host, "address": _address(port, host), "filter_chains": [{"filters": chain}]}
        )
    return {"static_resources": {"listeners": listeners}}


def _address(port: int, host: str = LOOPBACK) -> Tree:
    return {"socket_address": {"address": host, "port_value": port}}


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

    async def progress(self, requests: int = 50) -> None:
        """Wait until so many more requests were served."""
        aim = self.served.total() + requests

        async def reached() -> bool | None:
            return self.served.total() >= aim or None

        assert await network.until(reached, within_s=READY_S), f"no progress; errors: {self.errors[:3]}"


@dataclass(slots=True)
class Seat:
    """Everything around one API server."""

    folder: Path
    redis_url: str
    port: int  # of all model servers
    tls: bool
    pickers: list[Picker] = field(default_factory=list)
    gateway: httpx.AsyncClient | None = None
    _started: int = 0
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

    async def start_picker(
        self,
        kubeconfig: Path,
        pool: str,
        namespace: str,
        *flags: str,
        launch: Callable[..., list[str]] = picker_command,
    ) -> Picker:
        """A replica; `launch` makes the command of its arguments."""
        grpc, health, metrics = free_port(), free_port(), free_port()
        number = self._started
        self._started += 1
        process = self.spawn(
            f"picker-{number}",
            launch(
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

    async def replace_pickers(self, config: str, kubeconfig: Path, pool: str, namespace: str) -> None:
        """End all replicas; as many others, with this configuration, serve behind a new gateway."""
        file = self.folder / "picker.yaml"
        file.write_text(config)
        former, self.pickers = self.pickers, []
        for picker in former:
            picker.process.terminate()
            picker.process.wait()
            await self.ready(await self.start_picker(kubeconfig, pool, namespace, "--config", str(file)))
        await self.start_gateway()

    async def ready(self, picker: Picker) -> None:
        async def is_ready() -> bool | None:
            assert picker.process.poll() is None, picker.log.read_text()[-3000:]
            with contextlib.suppress(httpx.TransportError):
                return (await picker.admin.get("/readyz")).status_code == 200 or None
            return None

        assert await network.until(is_ready, within_s=READY_S), picker.log.read_text()[-3000:]

    async def start_gateway(
        self,
        routes: Sequence[Route] | None = None,
        *,
        fail_open: Sequence[tuple[str, int]] = (),
        http2: bool = False,
        discovery: Path | None = None,
    ) -> httpx.AsyncClient:
        """As `bootstrap`; by default all pickers serve one pool. Returns once it takes all for healthy."""
        listen, admin = free_port(), free_port()
        routes = routes or [Route([picker.grpc for picker in self.pickers])]
        tree = bootstrap(
            listen,
            admin,
            routes,
            tls=self.tls,
            fail_open=fail_open,
            http2=http2,
            discovery=discovery,
        )
        file = self.folder / "envoy.yaml"
        file.write_text(yaml.safe_dump(tree))
        self.spawn_envoy("envoy", file)

        async def is_ready() -> bool | None:
            with contextlib.suppress(httpx.TransportError):
                async with httpx.AsyncClient(trust_env=False) as client:
                    page = await client.get(f"http://{LOOPBACK}:{admin}/clusters")
                    healthy = [
                        line
                        for line in page.text.splitlines()
                        if line.startswith("picker-") and line.endswith("::health_flags::healthy")
                    ]
                    return len(healthy) == sum(len(route.pickers) for route in routes) or None
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

    def spawn_envoy(self, name: str, file: Path) -> None:
        command = [envoy_binary(), "-c", str(file), "--disable-hot-restart", "--concurrency", "1"]
        self.spawn(name, command)

    async def ask(self, headers: Mapping[str, str] | None = None, tokens: int = 4) -> httpx.Response:
        assert self.gateway is not None
        body = json.dumps({**ASK, "max_tokens": tokens})
        return await self.gateway.post("/v1/completions", content=body, headers=headers or {})

    async def until_answered(self, status: int) -> None:
        """Wait until a request is answered so."""

        async def is_answered() -> bool | None:
            return (await self.ask()).status_code == status or None

        assert await network.until(is_answered, within_s=READY_S), f"no answer is {status}"

    @contextlib.asynccontextmanager
    async def load(self, clients: int = 8, tokens: int = 4) -> AsyncIterator[Load]:
        """Closed loops of `clients` while the context is open."""
        load, stop = Load(), asyncio.Event()

        async def client() -> None:
            while not stop.is_set():
                answer = await self.ask(tokens=tokens)
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


@contextlib.asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Seat]:
    """A seat that has a Redis, and no pickers and gateway yet. All of it ends with the block."""
    with redis_server(folder / "valkey") as valkey:
        here = Seat(folder, valkey.url, free_port(), tls=True)
        try:
            yield here
        finally:
            await here.close()
