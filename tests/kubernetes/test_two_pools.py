"""One fleet serves two InferencePools, each at its own port; an InferencePool names its picker by port."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml
from api_server import NAMESPACE, ApiServer
from echo_server import EchoServers
from seat import ASK, Picker, Route, Seat

from picker_tools.local_fleet.network import LOOPBACK, free_port

HOSTS = {"chat": ("127.0.0.51", "127.0.0.52"), "batch": ("127.0.0.53", "127.0.0.54")}


async def until_ready(picker: Picker, port: int, name: str, hosts: Sequence[str]) -> None:
    """Wait until exactly the endpoints at `hosts` are ready in pool `name`."""
    await picker.until_ready(*(f"{host}:{port}" for host in hosts), pool=f"{NAMESPACE}.{name}")


async def served(gateway: httpx.AsyncClient) -> set[str]:
    """Send 20 requests, and assert that none fails. Returns the hosts that answered."""
    answers = [await gateway.post("/v1/completions", json=ASK) for _ in range(20)]
    assert [answer.text for answer in answers if answer.status_code != 200] == []
    return {answer.headers["x-served-by"].split(":")[0] for answer in answers}


async def test_one_fleet_sends_each_inference_pools_requests_to_its_own_pods(
    empty: ApiServer, bare: Seat, servers: EchoServers, tmp_path: Path
) -> None:
    for name, hosts in HOSTS.items():
        for number, host in enumerate(hosts):
            await servers.listen(host, bare.port)
            empty.put_pod(f"{name}-{number}", host, {"app": name})
        empty.put_pool(name, [bare.port], {"app": name})
    own_ports = [free_port(), free_port()]

    def discovered(pool: str) -> dict[str, Any]:
        return {"discovery": {"kubernetes": {"pool": pool, "namespace": NAMESPACE}}}

    for number, port in enumerate(own_ports):
        # The pool `absent` has no InferencePool, so no endpoints; the replicas become ready nevertheless.
        pools = {"chat": None, "batch": {**discovered("batch"), "listen": f"{LOOPBACK}:{port}"}}
        pools["absent"] = discovered("absent")
        file = tmp_path / f"pools-{number}.yaml"
        file.write_text(
            yaml.safe_dump({"pools": {f"{NAMESPACE}.{name}": pool for name, pool in pools.items()}})
        )
        await bare.start_picker(empty.kubeconfig("admin"), "chat", NAMESPACE, "--config-file", str(file))
    for picker in bare.pickers:
        await bare.ready(picker)
        for name, hosts in {**HOSTS, "absent": ()}.items():
            await until_ready(picker, bare.port, name, hosts)
    chat = await bare.start_gateway([Route([picker.grpc for picker in bare.pickers])])
    batch_gateway = await bare.start_gateway([Route(own_ports)])
    assert await served(chat) == set(HOSTS["chat"])
    assert await served(batch_gateway) == set(HOSTS["batch"])

    # A change of the pods of pool `batch` does not affect pool `chat`.
    empty.set_ready("batch-0", HOSTS["batch"][0], ready=False)
    for picker in bare.pickers:
        await until_ready(picker, bare.port, "batch", HOSTS["batch"][1:])
        await until_ready(picker, bare.port, "chat", HOSTS["chat"])
    assert await served(batch_gateway) == set(HOSTS["batch"][1:])
    assert await served(chat) == set(HOSTS["chat"])
