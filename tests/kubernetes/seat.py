"""Runs pickers with a chart's flags, a gateway and simulators around a Kubernetes API server, and their load.

The gateway is an Envoy configured as inference gateways do it: ext_proc in `standard`, and requests go to the
endpoint in the header (`ORIGINAL_DST`), without fallbacks. The gateway reports the serving endpoint to the
picker, and passes the subset hint of requests with the header `SUBSET_HEADER`. Simulators listen at different
loopback addresses on one port, as pods do.
"""

import asyncio
import base64
import contextlib
import json
import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from api_server import ApiServer
from fleet_load import total
from google.protobuf.struct_pb2 import ListValue, Value
from redis_servers import Server, redis_server

from picker_tools.load.generator import Load, Request, closed_loop
from picker_tools.local_fleet import network
from picker_tools.local_fleet.network import LOOPBACK, free_port
from picker_tools.local_fleet.processes import envoy_binary, picker_command

READY_S = 60.0
ASK = {"model": "llama", "prompt": "hi"}
APP = {"app": "llm"}  # labels of the pods in pool `llm`
_EXT_PROC = "envoy.filters.http.ext_proc"
_HTTP2 = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_DESTINATION = "x-gateway-destination-endpoint"
_SERVED_HEADER = "x-test-served"
SUBSET_HEADER = "x-test-subset"  # a request header that the gateway turns into a subset hint (`subset`)
Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Route:
    """The gateway sends requests to these pickers in proportion to `weight`."""

    pickers: Sequence[int]  # loopback ports
    weight: int = 1


def subset(*addresses: str) -> dict[str, str]:
    """A request header that the gateway turns into the subset hint for endpoints at `addresses`."""
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
    """Configuration of an Envoy that listens at port `listen` and splits requests over `routes` by weight.

    `discovery`: Envoy reads the pickers of the first route from this file, and does not check their health.
    `fail_open`: without a picker, requests go to these addresses in turn; if empty, Envoy refuses them.
    `http2`: Envoy sends requests to model servers over HTTP/2.
    """
    split = [_split(number, route.weight) for number, route in enumerate(routes)]
    served = {"header": {"key": _SERVED_HEADER, "value": "%UPSTREAM_REMOTE_ADDRESS%"}}
    route = {
        "match": {"prefix": "/"},
        "route": {"weighted_clusters": {"clusters": split}, "timeout": "60s"},
        "response_headers_to_add": [served],
    }
    subset_hint = ("envoy.lb.subset_hint", f"{_DESTINATION}-subset")
    decoded = {"type": "PROTOBUF_VALUE", "encode": "BASE64"}
    filters = [
        _header_to_metadata("request_rules", SUBSET_HEADER, *subset_hint, **decoded),
        _processor(fails_open=bool(fail_open)),
        _header_to_metadata("response_rules", _SERVED_HEADER, "envoy.lb", f"{_DESTINATION}-served"),
    ]
    pickers = [_picker_cluster(number, route.pickers, tls=tls) for number, route in enumerate(routes)]
    if discovery is not None:
        del pickers[0]["load_assignment"], pickers[0]["health_checks"]
        source = {"path_config_source": {"path": str(discovery)}, "resource_api_version": "V3"}
        pickers[0] |= {
            "type": "EDS",
            "eds_cluster_config": {"service_name": "picker-0", "eds_config": source},
        }
    pool = _failing_open(fail_open) if fail_open else _original_destination()
    return {
        "node": {"id": "gateway", "cluster": "gateway"},
        "admin": {"address": _address(admin)},
        "static_resources": {
            "listeners": [_listener("gateway", LOOPBACK, listen, filters, {"routes": [route]})],
            "clusters": [*pickers, {**pool, **(_speaking_http2() if http2 else {})}],
        },
    }


def _typed(name: str, kind: str, **fields: Any) -> Tree:
    """The configuration of an Envoy extension; `kind` is its type's name below `envoy.extensions`."""
    return {"name": name, "typed_config": {"@type": f"type.googleapis.com/envoy.extensions.{kind}", **fields}}


def _processor(*, fails_open: bool) -> Tree:
    """The ext_proc filter; it sends headers, body and trailers of requests and responses to a picker."""
    modes = {"header": "SEND", "body": "FULL_DUPLEX_STREAMED", "trailer": "SEND"}
    sides = ("request", "response")
    return _typed(
        *(_EXT_PROC, "filters.http.ext_proc.v3.ExternalProcessor"),
        failure_mode_allow=fails_open,
        grpc_service={"envoy_grpc": {"cluster_name": "picker-0"}},
        message_timeout="60s",
        processing_mode={f"{side}_{part}_mode": mode for side in sides for part, mode in modes.items()},
        metadata_options={
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    )


def _split(number: int, weight: int) -> Tree:
    """A weighted cluster that sends its requests through the pickers of route `number`."""
    overrides = {"grpc_service": {"envoy_grpc": {"cluster_name": f"picker-{number}"}}}
    asking = _typed("", "filters.http.ext_proc.v3.ExtProcPerRoute", overrides=overrides)
    per_filter = {_EXT_PROC: asking["typed_config"]}
    return {"name": "pool", "weight": weight, "typed_per_filter_config": per_filter}


def _header_to_metadata(rules: str, header: str, namespace: str, key: str, **how: str) -> Tree:
    """A filter that moves a header into dynamic metadata."""
    place = {"metadata_namespace": namespace, "key": key, **how}
    rule = {"header": header, "remove": True, "on_header_present": place}
    return _typed(rules, "filters.http.header_to_metadata.v3.Config", **{rules: [rule]})


def _listener(name: str, host: str, port: int, filters: Sequence[Tree], of_host: Tree, **more: str) -> Tree:
    """An HTTP listener with `filters` and one virtual host; `more`: fields of the connection manager."""
    manager = _typed(
        "envoy.filters.network.http_connection_manager",
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix=name,
        http_filters=[*filters, _typed("envoy.filters.http.router", "filters.http.router.v3.Router")],
        route_config={"virtual_hosts": [{"name": "all", "domains": ["*"], **of_host}]},
        **more,
    )
    return {"name": name, "address": _address(port, host), "filter_chains": [{"filters": [manager]}]}


def _speaking_http2() -> Tree:
    options = {
        "@type": f"type.googleapis.com/{_HTTP2}",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    return {"typed_extension_protocol_options": {_HTTP2: options}}


def _picker_cluster(number: int, pickers: Sequence[int], *, tls: bool) -> Tree:
    check = {"grpc_health_check": {"service_name": "envoy.service.ext_proc.v3.ExternalProcessor"}}
    secure = _typed(
        *("envoy.transport_sockets.tls", "transport_sockets.tls.v3.UpstreamTlsContext"),
        common_tls_context={"alpn_protocols": ["h2"]},
    )
    return {
        **_static(f"picker-{number}", [(LOOPBACK, port) for port in pickers]),
        **_speaking_http2(),
        "health_checks": [
            {"timeout": "1s", "interval": "0.5s", "unhealthy_threshold": 1, "healthy_threshold": 1, **check}
        ],
        **({"transport_socket": secure} if tls else {}),
    }


def _static(name: str, hosts: Sequence[tuple[str, int]]) -> Tree:
    """A static Envoy cluster of `hosts`."""
    assignment = _assignment(name, hosts)
    return {"name": name, "type": "STATIC", "connect_timeout": "2s", "load_assignment": assignment}


def _assignment(name: str, hosts: Sequence[tuple[str, int]]) -> Tree:
    endpoints = [{"endpoint": {"address": _address(port, host)}} for host, port in hosts]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}


def publish(discovery: Path, pickers: Sequence[int]) -> None:
    """Write the pickers' ports to the file `discovery`, which gateways read."""
    kind = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
    new = discovery.with_suffix(".new")
    hosts = [(LOOPBACK, port) for port in pickers]
    new.write_text(json.dumps({"resources": [{"@type": kind, **_assignment("picker-0", hosts)}]}))
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
    """A cluster that routes to the endpoint in the header, or without the header to `hosts` in turn."""

    def policy(name: str, kind: str, **fields: Any) -> Tree:
        kind = f"load_balancing_policies.{name}.v3.{kind}"
        return {"policies": [{"typed_extension_config": _typed(name, kind, **fields)}]}

    by_header = policy(
        *("override_host", "OverrideHost"),
        override_host_sources=[{"header": _DESTINATION}],
        fallback_policy=policy("round_robin", "RoundRobin"),
    )
    return {**_static("pool", hosts), "load_balancing_policy": by_header}


def echo_over_http2(hosts: Sequence[tuple[str, int]]) -> Tree:
    """Configuration of an Envoy that answers every request at `hosts`, over cleartext HTTP/2 only."""
    routes = [{"match": {"prefix": "/"}, "direct_response": {"status": 200}}]
    listeners = []
    for host, port in hosts:
        told = {"header": {"key": "x-served-by", "value": f"{host}:{port}"}}
        of_host = {"routes": routes, "response_headers_to_add": [told]}
        listeners.append(_listener(host, host, port, (), of_host, codec_type="HTTP2"))
    return {"static_resources": {"listeners": listeners}}


def _address(port: int, host: str = LOOPBACK) -> Tree:
    return {"socket_address": {"address": host, "port_value": port}}


async def until(
    look: Callable[[], Awaitable[Any]],
    holds: Callable[[Any], object] = bool,
    *,
    what: str = "",
    log: Path | None = None,
) -> Any:
    """Call `look` until `holds` accepts its result, and return the result. Connection errors are retried.

    Raises AssertionError after READY_S, with the last result and the end of `log`.
    """
    last: Any = None

    async def found() -> list[Any] | None:
        nonlocal last
        try:
            last = await look()
        except httpx.TransportError as fault:
            last = fault
            return None
        return [last] if holds(last) else None

    if not await network.until(found, within_s=READY_S):
        raise AssertionError(f"timed out waiting for {what}; last result: {last!r}\n{_end_of(log)}")
    return last


def _end_of(log: Path | None) -> str:
    return log.read_text(errors="replace")[-3000:] if log else ""


@dataclass(slots=True)
class Picker:
    """A replica started with a chart's flags."""

    process: "subprocess.Popen[bytes]"
    grpc: int
    health: int
    admin: httpx.AsyncClient
    log: Path

    async def endpoints(self, pool: str = "") -> dict[str, str]:
        """The status of each endpoint of `pool` (by default the first pool), by address."""
        page = await self.admin.get(f"{f'/pools/{pool}' if pool else ''}/api/v1/endpoints")
        page.raise_for_status()
        return {each["address"]: each["status"] for each in page.json()}

    async def until_ready(self, *addresses: str, pool: str = "") -> None:
        """Wait until exactly the endpoints at `addresses` are ready in `pool`."""

        async def ready() -> set[str]:
            return {address for address, status in (await self.endpoints(pool)).items() if status == "ready"}

        await until(ready, lambda found: found == set(addresses), what=f"{pool} {addresses}", log=self.log)

    async def figure(self, name: str) -> float:
        """The sum of all series of one metric on this replica's metrics page."""
        return total((await self.admin.get("/metrics")).text, name)

    async def ended(self) -> None:
        """Wait until the replica's process has exited, and assert exit status 0."""
        assert await asyncio.to_thread(self.process.wait, READY_S) == 0, _end_of(self.log)


@dataclass(slots=True)
class Seat:
    """The Redis, pickers, gateways and model servers around one Kubernetes API server."""

    folder: Path
    redis: Server
    port: int  # every model server listens at this port
    tls: bool
    pickers: list[Picker] = field(default_factory=list)
    gateway: httpx.AsyncClient | None = None
    envoy: "subprocess.Popen[bytes] | None" = None  # the gateway's Envoy process
    _started: int = 0
    _processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    _clients: list[httpx.AsyncClient] = field(default_factory=list)
    _models: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def spawn(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{name}.log").open("ab") as log:
            whole = {**os.environ, **(environment or {})}
            process = subprocess.Popen(command, stdout=log, stderr=log, env=whole)
        self._processes.append(process)
        return process

    async def start_model(self, address: str, *options: str, port: int | None = None) -> None:
        """Start a simulator at the loopback address `address`; by default a request takes about 20 ms."""
        quick = ("--ttft", "10", "--itl", "3", "--max-num-seqs", "64")
        at = port or self.port
        self._models[f"{address}:{at}"] = self.spawn(
            f"model-{address}",
            picker_command("sim", "--host", address, "--port", str(at), *(options or quick)),
        )
        await until(lambda: listens(address, at), what=f"the model server at {address}")

    async def start_pod(
        self, cluster: ApiServer, name: str, address: str, labels: Mapping[str, str] = APP
    ) -> None:
        """Start a simulator at `address`, and create a ready pod for it."""
        await self.start_model(address)
        cluster.put_pod(name, address, labels)

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
        """Start a replica; `launch` turns its arguments into a command line."""
        grpc, health, metrics = free_port(), free_port(), free_port()
        number = self._started
        self._started += 1
        command = launch(
            *("serve", "--pool-name", pool, "--pool-namespace", namespace, "--zap-encoder", "json"),
            *("--grpc-port", str(grpc), "--grpc-health-port", str(health), "--metrics-port", str(metrics)),
            *flags,
        )
        environment = {"KUBECONFIG": str(kubeconfig), "PICKER_REDIS__URL": self.redis.url}
        process = self.spawn(f"picker-{number}", command, environment)
        admin = httpx.AsyncClient(base_url=f"http://{LOOPBACK}:{metrics}", trust_env=False, timeout=20)
        self._clients.append(admin)
        picker = Picker(process, grpc, health, admin, self.folder / f"picker-{number}.log")
        self.pickers.append(picker)
        return picker

    async def replace_pickers(self, config: str, kubeconfig: Path, pool: str, namespace: str) -> None:
        """Restart every replica with the configuration `config`, and start a new gateway."""
        file = self.folder / "picker.yaml"
        file.write_text(config)
        former, self.pickers = self.pickers, []
        for picker in former:
            picker.process.terminate()
            picker.process.wait()
            await self.ready(await self.start_picker(kubeconfig, pool, namespace, "--config", str(file)))
        await self.start_gateway()

    async def ready(self, picker: Picker) -> None:
        async def status() -> int:
            assert picker.process.poll() is None, _end_of(picker.log)
            return (await picker.admin.get("/readyz")).status_code

        await until(status, lambda found: found == 200, what="a ready replica", log=picker.log)

    async def start_gateway(self, routes: Sequence[Route] | None = None, **how: Any) -> httpx.AsyncClient:
        """Start an Envoy with `bootstrap`'s options, and wait until it considers all its pickers healthy."""
        listen, admin = free_port(), free_port()
        routes = routes or [Route([picker.grpc for picker in self.pickers])]
        tree = bootstrap(listen, admin, routes, tls=self.tls, **how)
        self.spawn_envoy("envoy", tree)
        wanted = sum(len(route.pickers) for route in routes)

        async def healthy() -> int:
            async with httpx.AsyncClient(trust_env=False) as client:
                lines = (await client.get(f"http://{LOOPBACK}:{admin}/clusters")).text.splitlines()
            return sum(
                line.startswith("picker-") and line.endswith("::health_flags::healthy") for line in lines
            )

        log = self.folder / "envoy.log"
        await until(healthy, lambda count: count == wanted, what=f"{wanted} healthy pickers", log=log)
        self.gateway = httpx.AsyncClient(base_url=f"http://{LOOPBACK}:{listen}", trust_env=False, timeout=70)
        self._clients.append(self.gateway)
        return self.gateway

    def spawn_envoy(self, name: str, tree: Tree) -> None:
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(tree))
        self.envoy = self.spawn(
            name, [envoy_binary(), "-c", str(file), "--disable-hot-restart", "--concurrency", "1"]
        )

    async def ask(
        self, headers: Mapping[str, str] | None = None, tokens: int = 4, prompt: str = ASK["prompt"]
    ) -> httpx.Response:
        assert self.gateway is not None
        body = json.dumps({**ASK, "max_tokens": tokens, "prompt": prompt})
        return await self.gateway.post("/v1/completions", content=body, headers=headers or {})

    async def until_answered(self, status: int) -> None:
        """Wait until a request is answered with `status`."""
        await until(self.ask, lambda answer: answer.status_code == status, what=f"an answer {status}")

    def load(self, clients: int = 8, tokens: int = 4) -> AbstractAsyncContextManager[Load]:
        """While the block runs, `clients` clients send one request after the other."""
        assert self.gateway is not None
        url = str(self.gateway.base_url).rstrip("/")
        return closed_loop(url, clients=clients, make_request=lambda _, __: Request("hi", tokens))

    async def received(self, address: str) -> float:
        """The number of requests that the model server at `address` has completed."""
        async with httpx.AsyncClient(trust_env=False) as client:
            page = (await client.get(f"http://{address}:{self.port}/metrics")).text
        return total(page, "vllm:request_success_total")

    async def everywhere(self, condition: Callable[[dict[str, str]], bool], what: str) -> None:
        """Wait until `condition` accepts every replica's endpoints (address → status)."""

        async def endpoints() -> list[dict[str, str]]:
            return [await picker.endpoints() for picker in self.pickers]

        await until(endpoints, lambda found: all(map(condition, found)), what=what)

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()
        for process in self._processes:
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
    """A `Seat` with a Redis, but no pickers or gateway yet. The end of the block kills all processes."""
    with redis_server(folder / "valkey") as valkey:
        here = Seat(folder, valkey, free_port(), tls=True)
        try:
            yield here
        finally:
            await here.close()
