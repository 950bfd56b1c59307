"""Finds endpoints in Kubernetes: the pods that one InferencePool selects, on each of its target ports.

The InferencePool has the API version inference.networking.k8s.io/v1. Each running pod with an address is an
endpoint, which drains while the pod is unready or terminating. Requests on a pod that is gone still count.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from picker_fleet.background import keep
from picker_fleet.domain.request import KV_EVENTS_PORT, METRICS_PATH, METRICS_PORT, METRICS_SCHEME, Endpoint
from picker_fleet.domain.units import endpoint_address
from picker_fleet.endpoints.discovery import Report
from picker_kubernetes.api import Api, Collection, Metadata, Reflector

_log = logging.getLogger(__name__)

POD_LABEL = "picker-fleet/pod"
NAMESPACE_LABEL = "picker-fleet/namespace"
PORT_RANK_LABEL = "picker-fleet/port-rank"
# Annotations that name the ports on which a pod serves; of several annotations the first one applies.
_ACTIVE_PORTS = ("llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports")
_PORT_NUMBER = re.compile(r"[0-9]{1,5}")
_PORTS = (METRICS_PORT, METRICS_PATH, METRICS_SCHEME, KV_EVENTS_PORT)  # a pod's labels or annotations
_SETTLE_S = 0.25  # seconds between two updates, since many pods change together; the first is immediate


class _Port(msgspec.Struct, frozen=True):
    number: int = 0


class _Selector(msgspec.Struct, frozen=True, rename="camel"):
    match_labels: dict[str, str] | None = None


class _PickerRef(msgspec.Struct, frozen=True, rename="camel"):
    failure_mode: str = "FailClose"


class _PoolSpec(msgspec.Struct, frozen=True, rename="camel"):
    selector: _Selector = _Selector()
    target_ports: list[_Port] = []
    app_protocol: str = "http"
    endpoint_picker_ref: _PickerRef = _PickerRef()


class Pool(msgspec.Struct, frozen=True):
    """The fields of an InferencePool that the picker reads."""

    metadata: Metadata
    spec: _PoolSpec = _PoolSpec()


class _Condition(msgspec.Struct, frozen=True):
    type: str = ""
    status: str = ""


class _PodStatus(msgspec.Struct, frozen=True):
    phase: str = ""
    podIP: str = ""
    conditions: list[_Condition] | None = None


class Pod(msgspec.Struct, frozen=True):
    """The fields of a pod that the picker reads."""

    metadata: Metadata
    status: _PodStatus = _PodStatus()

    @property
    def ready(self) -> bool:
        """Whether the pod takes requests and is not being deleted."""
        conditions = self.status.conditions or ()
        is_ready = any(each.type == "Ready" and each.status == "True" for each in conditions)
        return is_ready and self.metadata.deletion_timestamp is None


class PodEndpoints:
    """Makes endpoints of pods. Recomputes only changed pods, since few of thousands change at a time."""

    def __init__(self) -> None:
        self._ports: tuple[int, ...] = ()
        self._known: dict[str, tuple[Pod, tuple[Endpoint, ...]]] = {}

    def of(self, pods: Mapping[str, Pod], ports: Iterable[int]) -> tuple[Endpoint, ...]:
        """One endpoint for each running pod in `pods` (by name) and each of its active `ports`, in order of
        address.

        If pods share an address (host network), a ready pod takes precedence, then the first pod by name.
        """
        numbers = tuple(dict.fromkeys(ports))
        former = self._known if numbers == self._ports else {}
        self._ports, self._known = numbers, {}
        found: dict[str, tuple[bool, str, Endpoint]] = {}
        for name, pod in pods.items():
            known = former.get(name)
            if known is None or known[0] is not pod:
                known = pod, tuple(_endpoints(pod, numbers))
            self._known[name] = known
            for endpoint in known[1]:
                other = found.get(endpoint.address)
                if other is None or (endpoint.draining, name) < other[:2]:
                    found[endpoint.address] = endpoint.draining, name, endpoint
        return tuple(found[address][2] for address in sorted(found))


def _endpoints(pod: Pod, ports: Sequence[int]) -> Iterator[Endpoint]:
    if pod.status.phase != "Running" or not pod.status.podIP:
        return
    named, active = _active_ports(pod)
    if active is not None and not active <= set(ports):
        _log.warning(
            "pod %s: annotation %s names ports that are not target ports of the pool: %s",
            pod.metadata.name,
            named,
            ", ".join(map(str, sorted(active - set(ports)))),
        )
    for rank, port in enumerate(ports):
        if active is None or port in active:
            endpoint = _endpoint(pod, port, rank)
            if endpoint is not None:
                yield endpoint


def _endpoint(pod: Pod, port: int, rank: int) -> Endpoint | None:
    host = pod.status.podIP
    try:
        address = endpoint_address(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    except ValueError:
        return None  # not expected, since the API server validates addresses and ports
    own = {
        POD_LABEL: pod.metadata.name,
        NAMESPACE_LABEL: pod.metadata.namespace,
        PORT_RANK_LABEL: str(rank),
    }
    annotations = pod.metadata.annotations or {}
    page = {name: annotations[name] for name in _PORTS if name in annotations}
    return Endpoint(
        address=address, labels={**page, **(pod.metadata.labels or {}), **own}, draining=not pod.ready
    )


def _active_ports(pod: Pod) -> tuple[str, frozenset[int] | None]:
    """The annotation that names the ports on which `pod` serves, and these ports; '' and None without it."""
    annotations = pod.metadata.annotations or {}
    for name in _ACTIVE_PORTS:
        if (text := annotations.get(name)) is not None:
            parts = (part.strip() for part in text.split(","))
            return name, frozenset(int(part) for part in parts if _PORT_NUMBER.fullmatch(part))
    return "", None


class KubernetesSource:
    """Watches the InferencePool `pool` and its pods in `namespace` (None: the credentials' namespace)."""

    def __init__(
        self, pool: str, namespace: str | None, *, api: Callable[[], Api] = Api.of_environment
    ) -> None:
        self._name, self._namespace, self._api_of = pool, namespace, api
        self._changed = asyncio.Event()
        self._logged = ""

    async def watch(self, report: Report) -> None:
        """Implements Source.watch. Reports no endpoints until the pool and its pods are known.

        Raises:
            StartupError: there are no credentials for an API server.
        """
        async with self._api_of() as api, asyncio.TaskGroup() as group:
            await self._follow(api, report, group)

    async def _follow(self, api: Api, report: Report, group: asyncio.TaskGroup) -> None:
        namespace = self._namespace or api.namespace
        base = f"/apis/inference.networking.k8s.io/v1/namespaces/{namespace}/inferencepools"
        collection = Collection(f"InferencePool {self._name}", base, name=self._name)
        pools = Reflector(api, collection, Pool, self._changed.set)
        group.create_task(keep("kubernetes-watch", pools.run))
        pods: _Selected | None = None
        following: _Selected | None = None  # the pods of a new selector, which have not been listed yet
        reported: tuple[Endpoint, ...] | None = None
        pod_endpoints = PodEndpoints()
        while True:
            await self._changed.wait()
            self._changed.clear()
            pool = pools.items.get(self._name)
            if not pools.listed:
                continue
            self._log_pool(pool)
            labels = (pool.spec.selector.match_labels or {}) if pool is not None else {}
            if pool is None or not labels:  # an empty selector selects no pods
                for each in (pods, following):
                    if each is not None:
                        each.task.cancel()
                pods = following = None
                found: tuple[Endpoint, ...] = ()
            else:
                newest = following or pods
                if newest is None or newest.labels != labels:
                    if following is not None:
                        following.task.cancel()
                    following = self._select(api, namespace, labels, group)
                if following is not None and following.reflector.listed:
                    if pods is not None:
                        pods.task.cancel()
                    pods, following = following, None
                if pods is None:
                    continue
                ports = [port.number for port in pool.spec.target_ports]
                found = pod_endpoints.of(pods.reflector.items, ports)
            if found != reported:
                draining = sum(endpoint.draining for endpoint in found)
                _log.info(
                    "InferencePool %s: %d endpoints, %d of them draining", self._name, len(found), draining
                )
                reported = found
                report(found)
            await asyncio.sleep(_SETTLE_S)

    def _select(
        self, api: Api, namespace: str, labels: Mapping[str, str], group: asyncio.TaskGroup
    ) -> "_Selected":
        collection = Collection(
            f"pods of InferencePool {self._name}", f"/api/v1/namespaces/{namespace}/pods", labels=labels
        )
        reflector = Reflector(api, collection, Pod, self._changed.set)
        return _Selected(dict(labels), reflector, group.create_task(keep("kubernetes-watch", reflector.run)))

    def _log_pool(self, pool: Pool | None) -> None:
        """Log the InferencePool's settings, once for each change."""
        level = logging.WARNING
        if pool is None:
            text = "does not exist, so there are no endpoints"
        elif not pool.spec.selector.match_labels:
            text = "selects no pods: its selector is empty"
        else:
            spec, level = pool.spec, logging.INFO
            ports = ", ".join(str(port.number) for port in spec.target_ports) or "none"
            kept = f"failureMode {spec.endpoint_picker_ref.failure_mode} (applied by the gateway)"
            text = f"target ports {ports}, appProtocol {spec.app_protocol}, {kept}"
        if text != self._logged:
            self._logged = text
            _log.log(level, "InferencePool %s: %s", self._name, text)


@dataclass(frozen=True, slots=True)
class _Selected:
    """The pods of one selector, and the task that watches these pods."""

    labels: Mapping[str, str]
    reflector: Reflector[Pod]
    task: "asyncio.Task[None]"
