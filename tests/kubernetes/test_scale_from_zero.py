"""In a pool without ready pods, requests wait for the first pod, and metrics show them to an autoscaler."""

import asyncio
import time
from collections.abc import Callable

from api_server import NAMESPACE, ApiServer
from seat import APP, Seat, until

HOST = "127.0.0.21"


async def test_requests_wait_until_the_first_pod_is_ready(
    empty: ApiServer, seat: Seat, record_property: Callable[[str, object], None]
) -> None:
    assert (await seat.ask()).status_code == 503, "by default a pool without endpoints refuses requests"
    queueing = "fair_request_queue: {queue_without_endpoints: true, queue_ttl: 60s}"
    await seat.replace_pickers(queueing, empty.kubeconfig("admin"), "llm", NAMESPACE)

    async def demand() -> float:
        return sum([await picker.figure("epp_queue_length") for picker in seat.pickers])

    assert await demand() == 0
    for picker in seat.pickers:
        assert "epp_queue_length" in (await picker.admin.get("/metrics")).text

    waiting = [asyncio.create_task(seat.ask()) for _ in range(40)]
    await until(demand, lambda count: count == len(waiting), what="all requests in the queue")
    reference = [await picker.figure("llm_d_epp_flow_control_queue_size") for picker in seat.pickers]
    assert sum(reference) == len(waiting)
    await seat.start_model(HOST)
    began_s = time.monotonic()
    empty.put_pod("first", HOST, APP)
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    first_s = time.monotonic() - began_s
    record_property("from the first ready pod to the first answer", f"{first_s:.2f} s")
    print(f"from the first ready pod to the first answer: {first_s:.2f} s")  # shown by `pytest -s`
    answers = await asyncio.gather(*waiting)
    assert {answer.status_code for answer in answers} == {200}
    await until(demand, lambda count: count == 0, what="an empty queue")
