"""Replicas are replaced one by one under load, as a Deployment does, and no client gets an error."""

import asyncio

from api_server import NAMESPACE, ApiServer
from seat import Seat, publish, until

HOSTS = ("127.0.0.51", "127.0.0.52")
LONG_TOKENS = 400  # an answer of this length takes about 1.2 s
LATE_REQUESTS = 20  # number of requests served between a replica's SIGTERM and the gateway's update


async def test_a_rolling_update_of_the_replicas_fails_no_request(empty: ApiServer, seat: Seat) -> None:
    for number, host in enumerate(HOSTS):
        await seat.start_pod(empty, f"p{number}", host)
    wanted = {f"{host}:{seat.port}" for host in HOSTS}
    await seat.everywhere(lambda found: found.keys() == wanted, "both pods are known")
    serving = list(seat.pickers)
    discovery = seat.folder / "pickers.json"
    publish(discovery, [picker.grpc for picker in serving])
    await seat.start_gateway(discovery=discovery)

    async def running() -> float:
        return sum([await picker.figure("llm_d_epp_request_running") for picker in seat.pickers])

    async with seat.load(clients=8) as short, seat.load(clients=8, tokens=LONG_TOKENS) as long:

        async def progress(requests: int) -> None:
            await asyncio.gather(short.wait_for_served(requests), long.wait_for_served(requests))

        await progress(20)
        for old in tuple(serving):
            new = await seat.start_picker(empty.kubeconfig("admin"), "llm", NAMESPACE)
            await seat.ready(new)
            publish(discovery, [picker.grpc for picker in (*serving, new)])
            await progress(20)
            old.process.terminate()
            serving.remove(old)
            await short.wait_for_served(LATE_REQUESTS)
            serving.append(new)
            publish(discovery, [picker.grpc for picker in serving])
            await old.ended()
            seat.pickers.remove(old)
            await progress(20)
        assert [picker.process.poll() for picker in serving] == [None, None]
        await until(running, lambda count: count > 0, what="metrics that count running requests")
    assert short.unserved == []
    assert long.unserved == []
    await until(running, lambda count: count == 0, what="metrics that count no running request")
