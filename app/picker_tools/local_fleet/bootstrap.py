"""Makes Envoy's bootstrap configuration of the parts in bootstrap.yaml.

The modes (docs/protocol.md): in mode `standard` Envoy sends the picker requests and answers, in `lean` only
requests. In mode `http` Envoy asks the picker by ext_authz, not by ext_proc.

If the fleet serves several pools (docs/protocol.md), a request's host names its pool, and Envoy passes the
pool to the picker as metadata of the matched route.

An optional listener for operators leads to the admin API and dashboard of any ready replica: a fleet whose
replicas come and go has no other fixed address for the admin API. Envoy does not restrict access to this
listener: the replicas' tokens decide who may do what (docs/admin-api.md).
"""

import copy
import functools
import json
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from picker_fleet.domain.allowlist import (
    ADMINISTRATION,
    ANY_METHOD,
    DESTINATION,
    NOT_LISTED,
    STEERING,
    SUBSET,
    Paths,
    untrusted,
)
from picker_fleet.domain.budgets import POOL_HEADER
from picker_fleet.domain.config import Settings, pools_of
from picker_fleet.domain.errors import UnknownPath
from picker_fleet.domain.sections import Tls
from picker_fleet.ingress import quota_headers
from picker_fleet.ingress.context import PRESSURE as PRESSURE_HEADER
from picker_fleet.ingress.context import refusal
from picker_fleet.ingress.ext_proc.accesslog import (
    CONTENT_TYPE,
    EXT_AUTHZ,
    FAULT_TAG,
    ID_HEADER,
    METADATA_HEADERS,
    PLACED_HEADER,
    RETRY_AFTER,
    TOKEN_HEADER,
    TOKEN_MARK,
    TTFT_FORMAT,
    TTFT_TAG,
)
from picker_fleet.ingress.ext_proc.codec import ID_ATTRIBUTE, LENGTH_HEADER, SUBSET_HINT
from picker_fleet.ingress.headers import METHOD, PATH, wanted_headers
from picker_fleet.ingress.http.check import CARRIED, CLIENT_HEADERS, REFUSAL_HEADERS, TENANT_HEADERS
from picker_fleet.ingress.http.server import HEALTH_PATH, PREFIX
from picker_fleet.scheduling.sessions import SESSION_HEADER
from picker_tools.local_fleet.parts import Mode

Host = tuple[str, int]  # a host (a name or an address) and a port
Tree = dict[str, Any]

POOL = "pool"  # Envoy's cluster of the default pool; also the resource name in the fleet's EDS
PICKER = "picker"
PICKER_HTTP = "picker-http"  # Envoy's cluster of the replicas' ports for the mode `http`
MAX_CONNECTIONS = 10_000
MAX_HEAP_BYTES = 1024 * 1024 * 1024

_GRPC_HEALTH = {"serviceName": "envoy.service.ext_proc.v3.ExternalProcessor"}
# Envoy reads at most this many bytes at once, so no message to the picker has a larger part of a body.
_CHUNK_BYTES = 1024 * 1024
# Envoy buffers request bodies of up to this many bytes for retries (G9).
_BODY_BYTES = 32 * 1024 * 1024
_BODY_S = 60.0  # a client may take this many seconds to send a body, and to read the end of an answer
_SILENT_S = 3600.0  # Envoy ends a request after this many seconds without a byte in either direction
_ANSWER_MARGIN_S = 60.0

_NAMES = {
    "destination_header": DESTINATION,
    "length_header": LENGTH_HEADER,
    "placed_header": PLACED_HEADER,
    "pressure_header": PRESSURE_HEADER,
    "session_header": SESSION_HEADER,
}
_VALUE = re.compile(r"\$\{(\w+)\}")
_JSON_KEY = re.compile(r'"(\w+)":')


@functools.cache
def _parts() -> Tree:
    parts: Tree = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return parts


def _part(name: str, /, **values: Any) -> Tree:
    """The part `name` of bootstrap.yaml, with `values` in place of its texts `${…}`.

    Raises:
        KeyError: the part has a `${value}` that is neither in `values` nor a header's name.
    """
    part: Tree = _filled(_parts()[name], {**_NAMES, **values})
    return part


def _filled(node: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(node, dict):
        pairs = ((key, _filled(value, values)) for key, value in node.items())
        return {key: value for key, value in pairs if value is not None}
    if isinstance(node, list):
        items: list[Any] = []
        for item in node:
            filled = _filled(item, values)
            items += filled if isinstance(filled, list) else [filled]
        return items
    if not isinstance(node, str):
        return node
    whole = _VALUE.fullmatch(node)
    if whole:
        return copy.deepcopy(values[whole[1]])
    return _VALUE.sub(lambda found: str(values[found[1]]), node)


def _seconds(value_s: float) -> str:
    """A duration in the JSON form of protobuf."""
    return f"{value_s:.12g}s"


def _address(host: Host) -> Tree:
    """A TCP address for Envoy; if its port is 0, Envoy takes any free port."""
    return {"socketAddress": {"address": host[0], "portValue": host[1]}}


def _exactly(names: Iterable[str]) -> list[Tree]:
    return [{"exact": name} for name in sorted(names)]


def _added(texts: Mapping[str, str]) -> list[Tree]:
    """Envoy options that set each header of `texts`; Envoy omits a header whose value is empty."""
    return [
        {"header": {"key": key, "value": text}, "appendAction": "OVERWRITE_IF_EXISTS_OR_ADD"}
        for key, text in texts.items()
    ]


def _pairs(texts: Mapping[str, str]) -> list[Tree] | None:
    return [{"key": key, "value": text} for key, text in texts.items()] or None


def cluster_of(name: str, default: str) -> str:
    """The name of the Envoy cluster of pool `name`; `default` is the pool of requests that name no pool."""
    return POOL if name == default else f"{POOL}-{name}"


@dataclass(frozen=True, slots=True)
class PickerTls:
    """The files with which Envoy speaks TLS to the replicas. Without `ca` Envoy accepts any certificate;
    `cert` and `key` are Envoy's own, which replicas may require."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    @classmethod
    def of_local(cls, tls: Tls) -> "PickerTls":
        """The files for an Envoy on the replicas' machine, which presents the replicas' certificate."""
        if tls.client_ca is None or tls.cert is None:
            return cls()
        return cls(cert=str(tls.cert), key=str(tls.key))

    def socket(self, protocol: str) -> Tree:
        """The transport socket of an Envoy cluster that speaks `protocol`."""
        own = {"certificateChain": {"filename": self.cert}, "privateKey": {"filename": self.key}}
        return _part(
            "tls",
            protocol=protocol,
            certificates=[own] if self.cert is not None and self.key is not None else None,
            validation=None if self.ca is None else {"trustedCa": {"filename": self.ca}},
        )


def build_bootstrap(
    settings: Settings,
    *,
    mode: Mode,
    listen: Host,
    admin: Host,
    pickers: Sequence[Host],
    pool_listens: Mapping[str, Host] = MappingProxyType({}),
    http_pickers: Sequence[Host] = (),
    admin_listen: Host | None = None,
    admin_pickers: Sequence[Host] = (),
    tls: PickerTls | None = None,
    trusted: Iterable[str] = (),
    max_connections: int = MAX_CONNECTIONS,
    max_heap_bytes: int = MAX_HEAP_BYTES,
    client_rate: int | None = None,
    debug_headers: bool = False,
    origins: Sequence[str] = (),
) -> Tree:
    """Envoy's bootstrap in the JSON mapping of its protobuf.

    `pool_listens` maps a pool to a further listener whose requests are all for that pool. `pickers` are the
    replicas' gRPC addresses, `http_pickers` the replicas' addresses for the mode `http`. `admin` is the
    address of Envoy's own admin page; `admin_listen` is a listener for the replicas' admin API at
    `admin_pickers` (None: no listener). `tls` has the files for ports that speak TLS by `settings` (None: the
    replicas' own files). `trusted` are the steering headers that clients may set. `max_connections` and
    `max_heap_bytes` limit all clients together; `client_rate` limits the requests a second from one client
    address (None: no limit). `debug_headers` adds `x-picker-*` headers that show the picked and the serving
    endpoint to each answer. `origins` are the web origins whose pages may read answers (`*`: any). Port 0 in
    `listen` or `admin` means any free port.
    """

    def files(serving: Tls | None) -> PickerTls | None:
        return None if serving is None else tls or PickerTls.of_local(serving)

    manager = _Manager(settings, mode, tuple(trusted), debug_headers, client_rate, origins)
    listeners = [manager.listener(None, listen)]
    listeners += [manager.listener(name, at) for name, at in pool_listens.items()]
    clusters = [_replicas(PICKER, pickers, "h2", files(settings.extproc.tls), grpc_health=_GRPC_HEALTH)]
    if mode == "http":
        own, health = files(settings.http.tls), {"path": HEALTH_PATH.decode()}
        clusters.append(_replicas(PICKER_HTTP, http_pickers, "http/1.1", own, http_health=health))
    if admin_listen is not None:
        listeners.append(_listener("admin", admin_listen, None, _part("admin_manager")))
        # Envoy sends nothing to replicas that are not ready or that drain.
        own, health = files(settings.admin.tls), {"path": "/readyz"}
        clusters.append(_replicas("picker-admin", admin_pickers, "http/1.1", own, http_health=health))
    clusters += [_pool(settings, name, each) for name, each in pools_of(settings).items()]
    return _part(
        "bootstrap",
        pool=settings.pool,
        admin=_address(admin),
        max_connections=max_connections,
        max_heap_bytes=max_heap_bytes,
        listeners=listeners,
        clusters=clusters,
        **_parts()["bounded_bodies" if mode == "http" else "passing_bodies"],
    )


class _Dumper(yaml.CSafeDumper):  # CSafeDumper is ten times as fast as SafeDumper
    """Writes a text that has several lines on several lines of YAML."""


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def to_yaml(bootstrap: Mapping[str, Any]) -> str:
    return str(yaml.dump(dict(bootstrap), Dumper=_Dumper, sort_keys=False, width=110))


def _replicas(
    name: str,
    hosts: Sequence[Host],
    protocol: str,
    tls: PickerTls | None,
    *,
    grpc_health: Tree | None = None,
    http_health: Tree | None = None,
) -> Tree:
    """The Envoy cluster `name`: the replicas' ports `hosts`, which speak `protocol` (an ALPN name), and their
    health check."""
    return _part(
        "replicas",
        name=name,
        discovery="STATIC" if all(_is_ip(host) for host, _ in hosts) else "STRICT_DNS",
        hosts=[{"endpoint": {"address": _address(host)}} for host in hosts],
        grpc_health=grpc_health,
        http_health=http_health,
        protocol=_part("http2" if protocol == "h2" else "http1"),
        transport_socket=None if tls is None else tls.socket(protocol),
    )


def _is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _pool(settings: Settings, name: str, pool: Settings) -> Tree:
    """The Envoy cluster of the pool `name`; `settings` are the fleet's settings."""
    option = getattr(socket, "TCP_USER_TIMEOUT", None)  # some systems lack this socket option
    lost = [] if option is None else [_part("lost_data", level=socket.IPPROTO_TCP, name=option)]
    return _part(
        "pool",
        cluster=cluster_of(name, settings.pool),
        namespace=settings.extproc.metadata_namespace,
        pool_metadata=_pairs({POOL_HEADER: name} if settings.pools else {}),
        socket_options=lost,
        # The percentage of active requests that may be retries.
        retry_percent=pool.outlier_detection.retry_budget_percent,
    )


def _listener(name: str, listen: Host, buffer_bytes: int | None, manager: Tree) -> Tree:
    return _part("listener", name=name, address=_address(listen), buffer_bytes=buffer_bytes, manager=manager)


@dataclass(frozen=True, slots=True)
class _Manager:
    """Makes Envoy's listeners for clients. The fields are arguments of `build_bootstrap`."""

    settings: Settings
    mode: Mode
    trusted: Sequence[str]
    debug_headers: bool
    client_rate: int | None
    origins: Sequence[str]

    def listener(self, pool: str | None, listen: Host) -> Tree:
        """The listener at `listen`; its requests are for `pool`, or, if that is None, for the host's pool."""
        settings, mode, pools = self.settings, self.mode, pools_of(self.settings)
        if pool is not None:
            hosts = [self._host(pools[pool], ("*",))]
        else:
            # Match hosts whose first label is the pool's name: `batch`, `batch:8080`, `batch.example.org`.
            hosts = [
                self._host(each, ("*",) if name == settings.pool else (name, f"{name}:*", f"{name}.*"))
                for name, each in pools.items()
            ]
        request_s = self._longest_wait_s + _BODY_S
        flush_interval = _seconds(settings.leases.access_log_interval)
        manager = _part(
            "manager",
            mode=mode,
            pool=settings.pool,
            untrusted=[
                {"remove": name}
                for name in dict.fromkeys(
                    (*untrusted(self.trusted, self._tenant_headers), *self._stage_headers)
                )
            ],
            silent=_seconds(max(_SILENT_S, request_s)),
            request=_seconds(settings.extproc.body_timeout if mode == "http" else request_s),
            flush=_seconds(_BODY_S),
            hosts=hosts,
            answer_headers=_added(self._answer_headers()),
            # In mode `standard` the picker itself replaces these headers of model servers.
            replaced_headers=None
            if mode == "standard"
            else [PLACED_HEADER, *(quota_headers.NAMES if self._has_tenants else ())],
            filters=self._filters(pool),
            # In mode `standard` the picker reads the answer, but cannot tell whether the answer was cut off
            # or its client left: the access log reports answers that were cut off.
            access_log=_fault_log("only_cut") if mode == "standard" else _request_log(None, CONTENT_TYPE),
            access_log_options=None if mode == "standard" else {"accessLogFlushInterval": flush_interval},
            carried=[
                _part("carried", carried=carried, status=status)
                for status, carried in CARRIED.items()
                if mode == "http"
            ],
        )
        return _listener(mode if pool is None else f"{mode}-{pool}", listen, _CHUNK_BYTES, manager)

    @property
    def _longest_wait_s(self) -> float:
        """The longest time, in seconds, that a request may queue in any pool."""
        return max(each.fair_request_queue.queue_ttl for each in pools_of(self.settings).values())

    @property
    def _has_tenants(self) -> bool:
        return any(each.tenants is not None for each in pools_of(self.settings).values())

    @property
    def _tenant_headers(self) -> Sequence[str]:
        """The headers by which any pool's requests name tenants."""
        sections = [each.tenants for each in pools_of(self.settings).values()]
        names = (name for tenants in sections if tenants is not None for name in tenants.headers or ())
        return tuple(dict.fromkeys(names))

    @property
    def _stage_headers(self) -> Sequence[str]:
        """The headers by which any pool names a request's prefill endpoint and encoders."""
        stages = [each.scheduling.stages for each in pools_of(self.settings).values()]
        return tuple(dict.fromkeys(name for each in stages for name in (each.header, each.encode.header)))

    def _answer_headers(self) -> dict[str, str]:
        found = {}
        if self.mode == "lean":
            # Send the client the queue pressure and, if the picker issues one, the session token
            # (picker_fleet/scheduling/sessions.py). In mode `standard` the picker sets these headers.
            found[SESSION_HEADER] = "%DYNAMIC_METADATA(picker:session)%"
            found[PRESSURE_HEADER] = "%DYNAMIC_METADATA(picker:pressure)%"
            if self._has_tenants:
                found |= {name: f"%DYNAMIC_METADATA(picker:{name})%" for name in quota_headers.NAMES}
        if self.debug_headers:  # these headers show the picked and the serving endpoint
            namespace = self.settings.extproc.metadata_namespace
            found["x-picker-header"] = f"%REQ({DESTINATION})%"
            found["x-picker-endpoint"] = f"%DYNAMIC_METADATA({namespace}:{DESTINATION})%"
            found["x-picker-served"] = "%UPSTREAM_REMOTE_ADDRESS%"
            found["x-picker-request-id"] = "%REQ(x-request-id)%"
        return found

    def _filters(self, pool: str | None) -> list[Tree]:
        """Envoy's HTTP filters. Requests pass the filters in this order, answers in reverse order."""
        filters = [_part("cors")] if self.origins else []
        if self.client_rate is not None:
            filters.append(_part("local_ratelimit", rate=self.client_rate, burst=2 * self.client_rate))
        attempts = [_fault_log("only_failed_attempts")]
        if self.mode == "standard":  # the picker itself reads usage, and sees the answer end
            return [*filters, self._asking(pool), _part("router", attempts=attempts, marked_answers=None)]
        # Tenants' prices and the prefix index need the number of cached tokens that an answer reports.
        scorers = [each.scheduling.scorers for each in pools_of(self.settings).values()]
        reads_cached = self._has_tenants or any("prefix-affinity" in each for each in scorers)
        filters.append(_part("usage", script=_usage_script(reads_cached=reads_cached)))
        attempts.append(_request_log(_part("only_multiplexed"), PLACED_HEADER))
        id_and_token = f"%DYNAMIC_METADATA(picker:id)% {TOKEN_MARK}%DYNAMIC_METADATA(picker:token)%"
        if self.mode == "http":
            id_and_token = " ".join(
                f"%DYNAMIC_METADATA({EXT_AUTHZ}:{name})%" for name in (ID_HEADER, TOKEN_HEADER)
            )
        marked = _part("marked_answers", placed=id_and_token)
        if self.mode == "lean":
            filters.append(_part("content_length"))
        return [*filters, self._asking(pool), _part("router", attempts=attempts, marked_answers=marked)]

    def _asking(self, pool: str | None) -> Tree:
        """The filter that asks the picker about requests for `pool`; None: for the pools of their routes."""
        mode, extproc = self.mode, self.settings.extproc
        naming = {}  # the header, or gRPC metadata, that names a request's pool to the picker
        if pool is not None or self.settings.pools:
            naming[POOL_HEADER] = "%METADATA(ROUTE:picker:pool)%" if pool is None else pool
        read = {name for pair in STEERING for name in pair}  # Envoy drops the untrusted among these headers
        read.update(*(wanted_headers(each) for each in pools_of(self.settings).values()))
        balances = extproc.on_failure == "balance" or None
        if mode == "http":
            of_tenants = TENANT_HEADERS if self._has_tenants else ()
            return _part(
                "ext_authz",
                prefix=PREFIX.decode(),
                wait=_seconds(self._longest_wait_s + _ANSWER_MARGIN_S),
                request_headers=_pairs({SUBSET: f"%DYNAMIC_METADATA({SUBSET_HINT}:{SUBSET})%", **naming}),
                upstream_headers=_exactly((DESTINATION, *self._stage_headers)),
                refusal_headers=_exactly((*REFUSAL_HEADERS, *of_tenants)),
                client_headers=_exactly((*CLIENT_HEADERS, *of_tenants)),
                metadata_headers=_exactly(METADATA_HEADERS),
                balances=balances,
                read_headers=_exactly(read - {METHOD, PATH}),
                body_bytes=extproc.max_body_bytes + 1,
            )
        is_standard, namespace = mode == "standard", extproc.metadata_namespace
        ext_proc = _part(
            "ext_proc",
            pool_metadata=_pairs(naming),
            balances=balances,
            namespace=namespace,
            served_namespace=[namespace] if is_standard else [],  # names the serving endpoint
            answer="SEND" if is_standard else "SKIP",
            answer_body="FULL_DUPLEX_STREAMED" if is_standard else None,
            # Each header that is forwarded to the picker costs time. But in mode `standard` gateways forward
            # all headers, so this Envoy does, too.
            forward_rules=None if is_standard else {"allowedHeaders": {"patterns": _exactly(read)}},
            attributes=[ID_ATTRIBUTE] if is_standard else None,
        )
        return _part("without_own_faults", filter=ext_proc) if is_standard else ext_proc

    def _host(self, pool: Settings, domains: Sequence[str]) -> Tree:
        """The virtual host that routes `domains` to `pool`."""
        cluster = cluster_of(pool.pool, self.settings.pool)
        # Envoy drops content-length when the picker returns a body: restore it from LENGTH_HEADER.
        length = _added({"content-length": f"%REQ({LENGTH_HEADER})%"}) if self.mode == "lean" else None
        any_origin = {"safeRegex": {"regex": ".*"}}
        origins = [any_origin if origin == "*" else {"exact": origin} for origin in self.origins]
        return _part(
            "host",
            cluster=cluster,
            domains=list(domains),
            routes=self._routes(cluster, pool.pool),
            request_headers=length,
            body_bytes=max(_BODY_BYTES, self.settings.extproc.max_body_bytes),
            tries=pool.scheduling.fallbacks,
            cors_policy=_part("cors_policy", origins=origins) if origins else None,
        )

    def _routes(self, cluster: str, pool: str) -> list[Tree]:
        """The routes for the paths of model servers; any other path gets 404, unless configured to pass."""
        extproc = self.settings.extproc
        metadata = {"filterMetadata": {"picker": {"pool": pool}}} if self.settings.pools else None
        plain: Tree = {
            "cluster": cluster,
            "metadata": metadata,
            "rewrite": None,
            "upgrades": None,
            "per_filter": None,
        }
        routes = []
        for (methods, is_session), paths in Paths(extproc.paths).routes.items():
            of_route = dict(plain)
            if is_session:
                of_route["upgrades"] = [{"upgradeType": "websocket"}]
                of_route["per_filter"] = _part("headers_alone") if self.mode == "lean" else None
            match: Tree = {"safeRegex": {"regex": f"(?:{paths})"}}
            if methods != ANY_METHOD:
                any_of = {"safeRegex": {"regex": methods.replace(",", "|")}}
                match["headers"] = [{"name": ":method", "stringMatch": any_of}]
            routes.append(_part("route", match=match, **of_route))
            with_slash = match | {"safeRegex": {"regex": f"(?:{paths})/"}}
            of_route["rewrite"] = _part("without_final_slash")
            routes.append(_part("route", match=with_slash, **of_route))
        if extproc.unknown_paths == "pass":
            # The picker refuses administrative paths in any spelling. Envoy, which cannot decode paths, must
            # refuse unusual spellings, as no picker may answer (`extproc.on_failure`).
            any_spelling = {"safeRegex": {"regex": f"(?i)/(?:{ADMINISTRATION})/*|.*[%;\\\\].*"}}
            routes.append(_not_found(any_spelling))
            routes.append(_part("route", match={"prefix": "/"}, **plain))
        else:
            of_anthropic = {"safeRegex": {"regex": ".*/v1/messages(?:/.*)?"}}
            routes += [_not_found(of_anthropic, b"/v1/messages"), _not_found({"prefix": "/"})]
        return routes


def _not_found(match: Tree, path: bytes = b"/") -> Tree:
    """The route that answers 404 in the error format of the API that `path` belongs to."""
    refused = refusal(UnknownPath(NOT_LISTED), 503, 0.0, path)
    return _part("not_found", match=match, body=refused.body.decode())


def _request_log(only: Tree | None, logged_header: str) -> Tree:
    tags = [{"tag": TTFT_TAG, "value": TTFT_FORMAT}]
    return _part("access_log", only=only, logged_header=logged_header, tags=tags)


def _fault_log(only: str) -> Tree:
    tags = [{"tag": FAULT_TAG, "literal": {"value": "1"}}]
    return _part("access_log", only=_part(only), logged_header=RETRY_AFTER, tags=tags)


def _usage_script(*, reads_cached: bool) -> str:
    """The Lua script by which Envoy reads usage; `reads_cached`: also the number of cached prompt tokens."""
    script = Path(__file__).with_name("usage.lua").read_text(encoding="utf-8")
    keys = _part("usage_keys", cached={"cached_tokens": "cached_tokens"} if reads_cached else None)
    for table, tree in keys.items():
        script = f"{table} = {json.dumps(tree)}\n{script}"
    return _JSON_KEY.sub(r"\1 =", script)
