"""EDS over real gRPC: the endpoints that Envoy receives, pushed changes, and acknowledgements."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from background import until
from clocks import Clock
from envoy.config.core.v3 import health_check_pb2
from envoy.config.endpoint.v3 import endpoint_pb2
from envoy.service.discovery.v3 import discovery_pb2
from extproc_client import serving_on

from picker_fleet.domain.request import Endpoint
from picker_fleet.endpoints import snapshot as snapshots
from picker_fleet.endpoints.snapshot import MAX_REMOVED, REMOVED_S, Snapshot, SnapshotCell
from picker_fleet.ingress.ext_proc import eds

pytestmark = pytest.mark.usefixtures("transport")

Request = discovery_pb2.DiscoveryRequest
Response = discovery_pb2.DiscoveryResponse


@asynccontextmanager
async def serving(cell: SnapshotCell) -> AsyncIterator[grpc.aio.Channel]:
    async with serving_on(eds.handlers(cell)) as address, grpc.aio.insecure_channel(address) as channel:
        yield channel


async def subscribe(channel: grpc.aio.Channel, *names: str) -> Any:
    """Open a stream as Envoy does, and ask for the clusters `names`."""
    call = channel.stream_stream(
        f"/{eds.SERVICE}/StreamEndpoints",
        request_serializer=Request.SerializeToString,
        response_deserializer=Response.FromString,
    )(timeout=20)
    await call.write(asking(*names))
    return call


@asynccontextmanager
async def subscribed(cell: SnapshotCell, *names: str) -> AsyncIterator[Any]:
    async with serving(cell) as channel:
        yield await subscribe(channel, *names)


def asking(*names: str, after: Response | None = None, error: str = "") -> Request:
    seen = {"response_nonce": after.nonce, "version_info": after.version_info} if after is not None else {}
    fault = {"error_detail": {"message": error}} if error else {}
    return Request(type_url=eds.TYPE_URL, resource_names=names, **seen, **fault)


def read(response: Response) -> dict[str, dict[str, int]]:
    """The endpoints in a response, as {cluster: {ip:port: health status}}."""
    clusters: dict[str, dict[str, int]] = {}
    for resource in response.resources:
        message = endpoint_pb2.ClusterLoadAssignment()
        assert resource.Unpack(message)
        clusters[message.cluster_name] = {
            f"{host.endpoint.address.socket_address.address}:"
            f"{host.endpoint.address.socket_address.port_value}": host.health_status
            for locality in message.endpoints
            for host in locality.lb_endpoints
        }
    return clusters


def snapshot(version: str, *addresses: str, draining: str = "") -> Snapshot:
    return Snapshot(version, tuple(Endpoint(one, draining=one == draining) for one in addresses))


def filled(*addresses: str, clock: Clock | None = None) -> SnapshotCell:
    """A snapshot cell with version v1 of the endpoints `addresses`. The default clock stands still."""
    cell = SnapshotCell(clock or Clock())
    cell.publish(snapshot("v1", *addresses))
    return cell


async def test_envoy_receives_the_endpoints_of_the_pool_and_nothing_before_their_first_snapshot() -> None:
    cell = SnapshotCell()
    async with subscribed(cell, "pool") as call:
        await call.write(asking("pool", "other"))
        cell.publish(snapshot("v1", "10.0.0.1:8000", "[fd00::1]:8001"))
        response = await call.read()
    assert (response.version_info, response.type_url) == ("v1", eds.TYPE_URL)
    healthy = health_check_pb2.HEALTHY
    assert read(response)["pool"] == {"10.0.0.1:8000": healthy, "fd00::1:8001": healthy}


async def test_an_unknown_cluster_gets_an_empty_endpoint_assignment() -> None:
    async with subscribed(filled("10.0.0.1:8000"), "elsewhere") as call:
        assert read(await call.read()) == {"elsewhere": {}}


async def test_a_version_of_the_endpoints_that_envoy_rejected_is_not_sent_again() -> None:
    cell = filled("10.0.0.1:8000")
    async with subscribed(cell, "pool") as call:
        first = await call.read()
        await call.write(asking("pool", after=first, error="no such thing"))
        await call.write(asking("pool", after=first, error="no such thing"))
        await call.write(asking("pool", "more", after=first))  # gets the answer after both rejections
        second = await call.read()
        cell.publish(snapshot("v2", "10.0.0.1:8000", "10.0.0.2:8000"))
        third = await call.read()
    assert (second.version_info, int(second.nonce)) == ("v1", int(first.nonce) + 1)
    assert set(read(second)) == {"pool", "more"}
    assert third.version_info == "v2"


async def test_an_acknowledgement_of_an_older_version_of_the_endpoints_changes_nothing() -> None:
    cell = filled("10.0.0.1:8000")
    async with subscribed(cell, "pool") as call:
        first = await call.read()
        cell.publish(snapshot("v2", "10.0.0.2:8000"))
        second = await call.read()
        await call.write(asking("stale", after=first))
        await call.write(asking("pool", "fresh", after=second))
        third = await call.read()
    assert set(read(third)) == {"pool", "fresh"}


async def test_every_envoy_receives_a_change_of_the_pool() -> None:
    cell = filled("10.0.0.1:8000")
    async with serving(cell) as channel:
        one, other = await subscribe(channel, "pool"), await subscribe(channel, "pool")
        first = await one.read()
        assert read(first) == read(await other.read())
        cell.publish(snapshot("v2", "10.0.0.1:8000", "10.0.0.2:8000", draining="10.0.0.1:8000"))
        second = await one.read()
        assert second.nonce != first.nonce
        drained, healthy = health_check_pb2.DRAINING, health_check_pb2.HEALTHY
        expected = {"pool": {"10.0.0.1:8000": drained, "10.0.0.2:8000": healthy}}
        assert [read(second), read(await other.read())] == [expected] * 2


def test_each_version_of_the_endpoints_is_announced_once_when_all_envoys_know_it() -> None:
    announced: list[str | None] = []
    cell = SnapshotCell(on_acknowledged=lambda: announced.append(cell.acknowledged))
    for version in ("v1", "v2+2"):
        cell.publish(snapshot(version, "10.0.0.1:8000"))
        cell.acknowledge("one", "")
        cell.acknowledge("other", version)
        for _ in range(10):  # a peer that acknowledges a version, then none, again and again
            cell.acknowledge("one", version)
            cell.acknowledge("one", "")
            cell.acknowledge("one", None)
    assert announced == ["v1", "v2"]


async def test_the_newest_version_of_the_endpoints_that_every_envoy_acknowledged_is_known() -> None:
    cell = filled("10.0.0.1:8000")
    assert cell.acknowledged is None
    async with serving(cell) as channel:
        one, other = await subscribe(channel, "pool"), await subscribe(channel, "pool")
        await subscribe(channel, "elsewhere")
        for call in (one, other):
            first = await call.read()
            assert cell.acknowledged == ""
            await call.write(asking("pool", after=first))
        await until(lambda: cell.acknowledged == "v1")
        cell.publish(snapshot("v2+3", "10.0.0.2:8000"))
        await one.write(asking("pool", after=await one.read()))
        await until(lambda: cell.acknowledged == "")
        await other.write(asking("pool", after=await other.read(), error="no such thing"))
        other.cancel()
        await until(lambda: cell.acknowledged == "v2")
        one.cancel()
        await until(lambda: cell.acknowledged is None)


async def test_a_removed_endpoint_stays_listed_as_draining_for_a_short_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshots, "REMOVED_S", 0.05)
    clock = Clock()
    cell = filled("10.0.0.1:8000", clock=clock)
    async with subscribed(cell, "pool") as call:
        await call.read()
        cell.publish(snapshot("v2"))
        second = await call.read()
        assert read(second)["pool"] == {"10.0.0.1:8000": health_check_pb2.DRAINING}
        await call.write(asking("pool", after=second))
        await until(lambda: cell.acknowledged == "v2")
        clock.now_s = 0.05
        third = await call.read()
        assert read(third)["pool"] == {}
        assert third.version_info == "v2"
        assert second.version_info != "v2"
        await call.write(asking("pool", "more", after=third))
        await call.read()
        assert cell.acknowledged == "v2"


def listed(cell: SnapshotCell) -> dict[str, bool]:
    """The endpoints as sent to Envoy: {address: whether the endpoint takes requests}."""
    return {each.address: each.ready for each in cell.listed().endpoints}


def test_each_removed_endpoint_stays_listed_for_its_own_time_or_until_it_returns() -> None:
    clock = Clock()
    cell = filled("a:1", "b:1", "c:1", clock=clock)
    versions = [cell.listed().version]

    def step(at: float, version: str, *addresses: str) -> dict[str, bool]:
        clock.now_s = at * REMOVED_S
        cell.publish(snapshot(version, *addresses))
        versions.append(cell.listed().version)
        return listed(cell)

    assert step(0, "v2", "b:1", "c:1") == {"a:1": False, "b:1": True, "c:1": True}
    assert step(0.5, "v3", "c:1") == {"a:1": False, "b:1": False, "c:1": True}
    assert step(0.9, "v4", "b:1", "c:1") == {"a:1": False, "b:1": True, "c:1": True}
    assert step(1, "v4") == {"b:1": True, "c:1": True}
    assert step(1.1, "v5", "c:1") == {"b:1": False, "c:1": True}
    assert step(2.1, "v5") == {"c:1": True}
    assert len(set(versions)) == len(versions)


def test_the_number_of_removed_endpoints_that_stay_listed_is_bounded() -> None:
    addresses = [f"e{number}:1" for number in range(MAX_REMOVED + 1)]
    cell = filled(*addresses)
    cell.publish(snapshot("v2"))
    assert listed(cell) == dict.fromkeys(addresses[1:], False)


def test_a_replica_without_a_snapshot_of_the_endpoints_lists_no_endpoint() -> None:
    cell = filled("a:1")
    cell.publish(Snapshot("", ()))
    assert cell.listed() == Snapshot("", ())


async def test_the_refusal_of_a_request_for_another_resource_type_names_the_type() -> None:
    async with subscribed(filled(), "pool") as call:
        await call.read()
        await call.write(Request(type_url="type.googleapis.com/envoy.config.cluster.v3.Cluster"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert eds.TYPE_URL in str(caught.value.details())


async def test_a_request_that_names_too_many_clusters_is_refused() -> None:
    async with subscribed(filled(), *("pool" for _ in range(17))) as call:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "at most 16 clusters" in str(caught.value.details())


async def test_endpoints_are_described_once_however_often_and_by_whom_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    described: list[str] = []
    describe = eds._describe
    monkeypatch.setattr(
        eds, "_describe", lambda message, each: described.append(each.address) or describe(message, each)
    )
    cell = filled("10.0.0.1:8000", "10.0.0.2:8000")
    async with serving(cell) as channel:
        for call in [await subscribe(channel, *("pool",) * 16) for _ in range(3)]:
            for others in ([], ["other"], []):
                response = await call.read()
                assert list(read(response)) == ["pool", *others]
                assert len(response.resources) == 1 + len(others)
                await call.write(asking("pool", *([] if others else ["other"]), after=response))
    assert described == ["10.0.0.1:8000", "10.0.0.2:8000"]


async def test_a_stream_gets_status_ok_after_the_client_ends_the_stream() -> None:
    async with subscribed(filled(), "pool") as call:
        await call.read()
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
