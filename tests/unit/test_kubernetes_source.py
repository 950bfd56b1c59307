"""Discovery from Kubernetes: readiness of pods, edits of the pool, outages of the API server."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from background import running, until
from kubernetes_server import PODS, POOLS, ApiServer, pod, pool
from source_reports import Lines, watching
from tls_files import authority

from picker_fleet.domain.config import parse
from picker_fleet.domain.errors import ConfigError, StartupError
from picker_fleet.domain.request import Endpoint
from picker_fleet.endpoints.discovery import source_of
from picker_fleet.telemetry.logs import OneASecond
from picker_kubernetes.api import Api, Collection, KubernetesFault, Reflector
from picker_kubernetes.source import KubernetesSource, Pod, PodEndpoints


class Listed:
    """Receives the endpoint lists of a source; the method `becomes` waits until the newest list is as
    expected."""

    def __init__(self) -> None:
        self.newest: tuple[Endpoint, ...] | None = None
        self.lists = 0
        self._changed = asyncio.Event()

    def __call__(self, endpoints: tuple[Endpoint, ...]) -> None:
        self.newest, self.lists = endpoints, self.lists + 1
        self._changed.set()

    async def becomes(self, **wanted: str) -> None:
        """Wait for the endpoints in `ready` and `draining`, two texts of addresses separated by spaces."""
        ready, draining = wanted.get("ready", "").split(), wanted.get("draining", "").split()
        async with asyncio.timeout(20):
            while self.newest is None or (
                [each.address for each in self.newest if not each.draining] != ready
                or [each.address for each in self.newest if each.draining] != draining
            ):
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer() as running:
        yield running


@asynccontextmanager
async def following(server: ApiServer, *pods: str) -> AsyncIterator[Listed]:
    """Follow the API server `server`; with `pods`, the server has a pool at port 8000 and pods at 10.0.0.1,
    …."""
    listed = Listed()
    if pods:
        server.put(POOLS, pool(8000))
    for number, name in enumerate(pods, 1):
        server.put(PODS, pod(name, f"10.0.0.{number}"))
    async with watching(KubernetesSource("llm", None, api=server.api), listed):
        if pods:
            await listed.becomes(ready=" ".join(f"10.0.0.{number}:8000" for number, _ in enumerate(pods, 1)))
        yield listed


async def test_each_pod_has_an_endpoint_on_each_port_with_the_labels_of_the_pod(server: ApiServer) -> None:
    server.put(POOLS, pool(8000, 8001))
    server.put(PODS, pod("a", "10.0.0.1"))
    server.put(PODS, pod("other", "10.0.0.9", app="other"))
    async with following(server) as listed:
        await listed.becomes(ready="10.0.0.1:8000 10.0.0.1:8001")
        assert listed.newest is not None
        own = {"pod": "a", "namespace": "models", "port-rank": "1"}
        labels = {f"picker-fleet/{name}": value for name, value in own.items()}
        assert listed.newest[1].labels == {"app": "llm", **labels}


async def test_an_unready_or_terminating_pod_is_draining_and_a_deleted_pod_is_gone(server: ApiServer) -> None:
    async with following(server, "p1", "p2", "p3") as listed:
        server.put(PODS, pod("p1", "10.0.0.1", ready=False))
        await listed.becomes(ready="10.0.0.2:8000 10.0.0.3:8000", draining="10.0.0.1:8000")
        server.put(PODS, pod("p2", "10.0.0.2", deletionTimestamp="2026-01-01T00:00:00Z"))
        await listed.becomes(ready="10.0.0.3:8000", draining="10.0.0.1:8000 10.0.0.2:8000")
        server.delete(PODS, "p2")
        server.put(PODS, pod("p1", "10.0.0.1"))
        await listed.becomes(ready="10.0.0.1:8000 10.0.0.3:8000")


async def test_a_pools_new_selector_replaces_pods_and_new_ports_replace_addresses(server: ApiServer) -> None:
    server.put(PODS, pod("b", "10.0.0.2", app="new"))
    async with following(server, "a") as listed:
        for changed, ready in (
            (pool(8000, app="new"), "10.0.0.2:8000"), (pool(9000, app="new"), "10.0.0.2:9000"),
            (pool(9000, app="nobody"), ""), (pool(9000), "10.0.0.1:9000"),
            (None, ""), (pool(8000), "10.0.0.1:8000"),
        ):  # fmt: skip
            if changed is None:
                server.delete(POOLS, "llm")
            else:
                server.put(POOLS, changed)
            await listed.becomes(ready=ready)


async def test_an_unreachable_api_server_changes_no_endpoint_and_the_watch_resumes_without_a_list(
    server: ApiServer, log: Lines
) -> None:
    async with following(server, "a") as listed:
        known = listed.lists
        await server.stop()
        assert "keeping the last known objects" in await log.saying("cannot watch")
        server.put(PODS, pod("b", "10.0.0.2"))
        assert listed.lists == known
        await server.start()
        await listed.becomes(ready="10.0.0.1:8000 10.0.0.2:8000")
        assert server.kinds["list pods"] == server.kinds["list inferencepools"] == 1


async def test_an_expired_watch_causes_a_new_list_and_accepts_no_older_list(server: ApiServer) -> None:
    async with following(server, "a") as listed:
        server.delete(PODS, "a")
        server.put(PODS, pod("b", "10.0.0.2"))
        await listed.becomes(ready="10.0.0.2:8000")
        server.delete(PODS, "b")
        server.put(PODS, pod("c", "10.0.0.3"))
        await server.expire()
        await listed.becomes(ready="10.0.0.3:8000")
        again = [params for _, path, params in server.calls if path == PODS and "watch" not in params][1:]
        assert [each["resourceVersionMatch"] for each in again] == ["NotOlderThan"]


async def test_the_next_watch_begins_at_the_version_of_the_last_bookmark(server: ApiServer) -> None:
    async with following(server, "a") as listed:
        for _ in range(5):
            server.put("/elsewhere", pod("x", "10.9.9.9"))
        server.bookmark(PODS)
        server.bookmark(POOLS)
        server.put(PODS, pod("b", "10.0.0.2"))
        await listed.becomes(ready="10.0.0.1:8000 10.0.0.2:8000")
        await server.cut()
        server.put(PODS, pod("c", "10.0.0.3"))
        await listed.becomes(ready="10.0.0.1:8000 10.0.0.2:8000 10.0.0.3:8000")
        watches = [params for _, path, params in server.calls if "watch" in params and path == PODS]
        first, second = (int(each["resourceVersion"]) for each in watches)
        assert second > first + 5
        assert server.kinds["list pods"] == 1


async def test_a_refused_api_call_is_logged_with_its_reason_and_retried(
    server: ApiServer, log: Lines
) -> None:
    server.refuse = (503, "no leader")
    async with following(server) as listed:
        line = await log.saying("cannot watch InferencePool llm")
        assert "503: no leader; no list has succeeded yet" in line
        server.put(POOLS, pool(8000))
        server.put(PODS, pod("a", "10.0.0.1"))
        server.refuse = None
        await listed.becomes(ready="10.0.0.1:8000")


async def test_the_objects_of_an_optional_kind_that_the_server_no_longer_serves_are_forgotten(
    server: ApiServer,
) -> None:
    changed = asyncio.Event()
    server.put(PODS, pod("a", "10.0.0.1"))
    async with server.api() as api, asyncio.timeout(20):
        reflector = Reflector(api, Collection("pods", PODS, optional=True), Pod, changed.set)
        async with running(reflector.run()):
            for names in ({"a"}, set()):
                await changed.wait()
                changed.clear()
                assert set(reflector.items) == names
                server.refuse = (404, "no such kind")
                await server.cut()


async def test_each_refused_collection_has_a_log_line_although_all_are_refused_at_once(
    server: ApiServer, log: Lines
) -> None:
    log.addFilter(OneASecond())
    server.refuse = (403, "no right")
    names = ("pods", "objectives", "rewrites")
    async with server.api() as api, contextlib.AsyncExitStack() as stack:
        for name in names:
            reflector = Reflector(api, Collection(name, PODS), Pod, lambda: None)
            await stack.enter_async_context(running(reflector.run()))
        lines = {await log.saying("cannot watch") for _ in names}
    assert {line.split()[2] for line in lines} == {f"{name}:" for name in names}


@pytest.mark.parametrize(("code", "longest_s"), [(0, 0.5), (503, 0.5), (403, 5.0)])
async def test_the_pause_after_a_fault_doubles_and_restarts_for_a_new_kind_of_fault(
    code: int, longest_s: float
) -> None:
    codes = [code] * 12 + [403 if code != 403 else 0]
    pauses_s: list[float] = []
    asked_enough = asyncio.Event()

    class Away:
        async def get(self, *_: object) -> bytes:
            if len(pauses_s) == len(codes):
                asked_enough.set()
                await asyncio.Event().wait()
            raise KubernetesFault(codes[len(pauses_s)], "away")

    def draw(least: float, most: float) -> float:
        assert least == most / 2
        pauses_s.append(most)
        return 0.0

    reflector = Reflector(cast(Api, Away()), Collection("pods", PODS), Pod, lambda: None, draw=draw)
    async with running(reflector.run()), asyncio.timeout(20):
        await asked_enough.wait()
    doubled = [0.05 * 2**number for number in range(12)]
    assert pauses_s[:12] == pytest.approx([min(each, longest_s) for each in doubled])
    assert pauses_s[12] == pytest.approx(0.05)


async def test_an_unreadable_pod_is_logged_and_other_pods_are_used(server: ApiServer, log: Lines) -> None:
    unreadable = {"metadata": {"name": "b", "labels": {"app": "llm"}}, "status": {"podIP": 7}}
    server.put(PODS, unreadable)
    async with following(server, "a") as listed:
        await log.saying("skipping one of pods of InferencePool llm")
        server.put(PODS, pod("b", "10.0.0.2"))
        await listed.becomes(ready="10.0.0.1:8000 10.0.0.2:8000")
        server.put(PODS, unreadable)
        server.delete(PODS, "b")
        await listed.becomes(ready="10.0.0.1:8000")


async def test_an_object_with_deeply_nested_fields_hides_no_other_object() -> None:
    nested = b'{"a":' * 9000 + b"1" + b"}" * 9000

    def item(name: bytes) -> bytes:
        return b'{"metadata":{"name":"%s","resourceVersion":"1","managedFields":[%s]}}' % (name, nested)

    class Deep:
        async def get(self, *_: object) -> bytes:
            return b'{"metadata":{"resourceVersion":"1"},"items":[%s,%s]}' % (item(b"a"), item(b"b"))

        async def lines(self, *_: object) -> AsyncIterator[bytes]:
            yield b'{"type":"ADDED","object":%s}' % item(b"c")
            await asyncio.Event().wait()

    reflector = Reflector(cast(Api, Deep()), Collection("pods", PODS), Pod, lambda: None)
    async with running(reflector.run()):
        await until(lambda: len(reflector.items) == 3)


@pytest.mark.parametrize(("labels", "line"), [({}, "its selector is empty"), (None, "does not exist")])
async def test_a_missing_pool_or_a_pool_without_a_selector_has_no_endpoints(
    server: ApiServer, log: Lines, labels: dict[str, str] | None, line: str
) -> None:
    if labels is not None:
        empty = pool(8000)
        empty["spec"]["selector"]["matchLabels"] = labels
        server.put(POOLS, empty)
    server.put(PODS, pod("a", "10.0.0.1"))
    async with following(server) as listed:
        await log.saying(line)
        await listed.becomes(ready="")


def _pods(**by_name: dict[str, Any]) -> dict[str, Pod]:
    """Pods by name; `phase` in a pod's metadata becomes its status phase, by default `Running`."""
    for name, item in by_name.items():
        item["metadata"]["name"] = name
        item["status"]["phase"] = item["metadata"].pop("phase", "Running")
    return msgspec.convert(by_name, dict[str, Pod])


def test_a_changed_pod_changes_only_its_own_endpoints() -> None:
    known, ports = PodEndpoints(), [8000, 8001]
    pods = _pods(a=pod("", "10.0.0.1"), b=pod("", "10.0.0.2"))
    first = known.of(pods, ports)
    pods |= _pods(b=pod("", "10.0.0.2", ready=False))
    second = known.of(pods, ports)
    assert [each.draining for each in second] == [False, False, True, True]
    assert second[0] is first[0]
    assert [each.address for each in known.of(pods, [9000])] == ["10.0.0.1:9000", "10.0.0.2:9000"]
    assert known.of({}, ports) == ()


def test_only_running_pods_with_an_address_are_endpoints_and_each_address_only_once() -> None:
    pods = _pods(
        pending=pod("", "", phase="Pending"),
        failed=pod("", "10.0.0.1", phase="Failed"),
        a_unready=pod("", "10.0.0.2", ready=False),
        b_ready=pod("", "10.0.0.2"),
        six=pod("", "fd00::1"),
        broken=pod("", "nonsense"),
    )
    found = PodEndpoints().of(pods, [8000, 8000])
    assert [each.address for each in found if not each.draining] == ["10.0.0.2:8000", "[fd00::1]:8000"]
    assert len(found) == 2
    assert found[0].labels["picker-fleet/pod"] == "b_ready"


@pytest.mark.parametrize("group", ["llm-d.ai", "inference.networking.k8s.io"])
def test_an_annotation_of_a_pod_may_select_its_serving_ports(
    caplog: pytest.LogCaptureFixture, group: str
) -> None:
    some, none = ({f"{group}/active-ports": ports} for ports in (f"8001, x,²,9999,{'7' * 5000}", ""))
    some |= {"inference.networking.k8s.io/active-ports": "8001,9999", "picker-fleet/metrics-port": "9100"}
    pods = _pods(a=pod("", "10.0.0.1", annotations=some), b=pod("", "10.0.0.2", annotations=none))
    (found,) = PodEndpoints().of(pods, [8000, 8001])
    assert (found.address, found.labels["picker-fleet/port-rank"]) == ("10.0.0.1:8001", "1")
    assert found.labels["picker-fleet/metrics-port"] == "9100"
    assert f"pod a: annotation {group}/active-ports names" in caplog.text
    assert caplog.text.rstrip().endswith("not target ports of the pool: 9999")


def test_the_configuration_names_the_inferencepool_to_follow() -> None:
    settings = parse({"discovery": {"kubernetes": {"pool": "llm", "namespace": "models"}}})
    assert isinstance(source_of(settings.discovery), KubernetesSource)
    with pytest.raises(ConfigError, match=r"discovery\.kubernetes\.pool"):
        parse({"discovery": {"kubernetes": {"pool": "../secrets"}}})


async def test_missing_kubernetes_credentials_are_a_startup_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere/config")
    with pytest.raises(StartupError, match=r"no credentials for the Kubernetes API: .*/nowhere/config"):
        await KubernetesSource("llm", None).watch(lambda _: None)


async def test_a_renewed_authority_of_the_api_server_is_read_again(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted, config = tmp_path / "ca.crt", tmp_path / "config"
    monkeypatch.setenv("KUBECONFIG", str(config))

    async def renew(name: str) -> None:
        """Restart the server with the certificate of a new authority, which becomes the trusted one."""
        pair = authority(tmp_path, name)
        await server.stop()
        server.tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        server.tls.load_cert_chain(pair.cert, pair.key)
        await server.start()
        trusted.write_bytes(pair.cert.read_bytes())

    await renew("former")
    fields = {
        "cluster": {"server": f"https://127.0.0.1:{server.port}", "certificate-authority": "ca.crt"},
        "context": {"cluster": "it"},
    }
    tree = {f"{part}s": [{"name": "it", part: each}] for part, each in fields.items()}
    config.write_text(json.dumps({"current-context": "it", **tree}))
    async with Api.of_environment() as api:
        assert b"List" in await api.get(POOLS, {})
        await renew("renewed")
        with pytest.raises(KubernetesFault, match="CERTIFICATE_VERIFY_FAILED"):
            await api.get(POOLS, {})
        assert b"List" in await api.get(POOLS, {})
