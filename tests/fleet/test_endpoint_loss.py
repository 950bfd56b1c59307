"""A model server hangs or is drained: the next best endpoints serve its clients (G9).

test_one_queue.py tests a server that dies.
"""

import asyncio
from typing import Any

import grpc
import pytest
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from extproc_client import body, headers
from fleet_load import at_rest, complete, served_by
from whole_fleet import suspended

from picker_fleet.domain.allowlist import DESTINATION
from picker_fleet.domain.units import split_host_port
from picker_fleet.ingress.ext_proc.accesslog import SERVICE
from picker_fleet.ingress.ext_proc.server import PROCESS


@pytest.fixture(scope="module")
def here(shared_fleet: Any) -> Any:
    """A fleet of four endpoints; every test leaves the fleet unchanged."""
    return shared_fleet("--sim-ttft", "5", "--sim-itl", "5")


async def test_an_endpoint_that_hangs_is_down_until_it_answers_again(here: Any) -> None:
    stopped = here.state["endpoints"][0]["address"]

    async def seen() -> set[str]:
        return {await here.endpoint_status(stopped, replica) for replica in range(3)}

    with suspended(here.endpoint(0)):
        # No request is sent: scraping alone marks the endpoint as down, for every replica.
        await here.eventually(seen, lambda each: each == {"down"}, within_s=60, what="status down")
        assert stopped not in await served_by(here.url, 12)
    await here.eventually(seen, lambda each: each == {"ready"}, within_s=60, what="status ready")
    await here.eventually(
        lambda: served_by(here.url, 8),
        lambda by: stopped in by,
        within_s=60,
        what="a request served by the resumed endpoint",
    )
    await at_rest(here)


async def test_a_drained_endpoint_finishes_its_requests_and_gets_no_new_ones(here: Any) -> None:
    drained, *others = (each["address"] for each in here.state["endpoints"])

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(complete(here.url, f"runs {i}", 1000, streamed=True)) for i in range(4)]
        await here.until_state(stock=4)
        assert (await here.post(f"endpoints/{drained}/drain"))["drained"] is True
        assert await here.endpoint_status(drained, 1) == "drained"
        assert await served_by(here.url, 12) == set(others)
    assert [task.result() for task in running if not task.result().served] == []
    await here.post(f"endpoints/{drained}/undrain", 2)
    assert await here.endpoint_status(drained) == "ready"
    unknown = await here.admin("/api/v1/endpoints/10.9.9.9:1/drain", method="POST")
    detail = "POST /api/v1/endpoints/10.9.9.9:1/drain: no endpoint 10.9.9.9:1"
    assert (unknown.status_code, unknown.json()["detail"]) == (404, detail)
    await at_rest(here)


def refused(request: dict[str, Any], token: str = "") -> bytes:
    """A message of Envoy's access log: no connection to the endpoint of `request`, a row of /inflight. With a
    `token` the entry is about the request's end, else about an attempt."""
    message = als_pb2.StreamAccessLogsMessage()
    entry = message.http_logs.log_entry.add(request={"request_id": request["id"]})
    common = entry.common_properties
    common.access_log_type = accesslog_pb2.DownstreamEnd if token else accesslog_pb2.UpstreamEnd
    if token:
        common.metadata.filter_metadata["picker"].update({"id": request["id"], "token": token})
    common.response_flags.upstream_connection_failure = True
    address = common.upstream_remote_address.socket_address
    address.address, address.port_value = split_host_port(request["endpoint"])
    return message.SerializeToString()


async def test_a_forged_report_of_a_failed_connection_does_not_mark_the_endpoint_down(here: Any) -> None:
    async with asyncio.TaskGroup() as tasks:
        for number in range(8):
            tasks.create_task(complete(here.url, f"runs {number}", 200, streamed=True))
        await here.until_state(stock=8)
        running = (await here.get("inflight"))["requests"]
        async with grpc.aio.insecure_channel(here.state["replicas"][0]["grpc"]) as channel:
            # A caller gets tokens for requests of its own.
            call = channel.stream_stream(
                PROCESS, ProcessingRequest.SerializeToString, ProcessingResponse.FromString
            )()
            for message in (headers("lean", {"x-request-id": "a-strangers"}), body(b'{"model": "llama"}')):
                await call.write(message)
            picked = (await call.read()).dynamic_metadata
            own = {"id": picked["picker"]["id"], "endpoint": picked["envoy.lb"][DESTINATION].split(",")[0]}
            entries = [*map(refused, running), refused(own, picked["picker"]["token"])]
            await channel.stream_unary(f"/{SERVICE}/StreamAccessLogs")(iter(entries))
    assert {each["status"] for each in await here.get("endpoints")} == {"ready"}
    assert "cannot connect to endpoint" not in here.output
    await at_rest(here)
