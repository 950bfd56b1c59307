"""One fleet that serves two InferencePools, each at a port of its own: a gateway can name nothing else."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import httpx
import yaml
from api_server import NAMESPACE, ApiServer
from echo_server import EchoServer
from seat import ASK, READY_S, Picker, Route, Seat

from picker_tools.local_fleet import network
from picker_tools.local_fleet.network import LOOPBACK, free_port

HOSTS = {"chat": ("127.0.0.51", "127.0.0.52"), "batch": ("127.0.0.53", "127.0.0.54")}


async def until_ready(picker: Picker, pool: str, hosts: Sequence[str]) -> None:
    """Wait until the pool's endpoints that take requests are at `hosts`."""

    async def so() -> bool | None:
        page = (await picker.admin.get(f"/pools/{NAMESPACE}.{pool}/api/v1/endpoints")).json()
        return {each["address"].split(":")[0] for each in page if each["status"] == "ready"} == set(
            hosts
        ) or None

    assert await network.until(so, within_s=READY_S), (picker.log.read_text()[-3000:], pool, hosts)


async def served(gateway: httpx.AsyncClient, requests: int = 20) -> Counter[str]:
    """The hosts that answered, by how many requests; none may fail."""
    found: Counter[str] = Counter()
    for _ in range(requests):
        answer = await gateway.post("/v1/completions", json=ASK)
        assert answer.status_code == 200, answer.text
        found[answer.headers["x-served-by"].split(":")[0]] += 1
    return found


async def test_two_inference_pools_have_their_own_pods_behind_one_fleet(
    empty: ApiServer, bare: Seat, servers: EchoServer, tmp_path: Path
) -> None:
    for name, hosts in HOSTS.items():
        for number, host in enumerate(hosts):
            await servers.listen(host, bare.port)
            empty.put_pod(f"{name}-{number}", host, {"app": name})
        empty.put_pool(name, [bare.port], {"app": name})
    own_ports = []
    for number in range(2):
        own_ports.append(free_port())
        batch = {
            "discovery": {"kubernetes": {"pool": "batch", "namespace": NAMESPACE}},
            "listen": f"{LOOPBACK}:{own_ports[-1]}",
        }
        # One whose InferencePool nobody has made has no endpoints, and keeps no replica from being ready.
        absent = {"discovery": {"kubernetes": {"pool": "absent", "namespace": NAMESPACE}}}
        pools = {f"{NAMESPACE}.chat": None, f"{NAMESPACE}.batch": batch, f"{NAMESPACE}.absent": absent}
        file = tmp_path / f"pools-{number}.yaml"
        file.write_text(yaml.safe_dump({"pools": pools}))
        await bare.start_picker(empty.kubeconfig("admin"), "chat", NAMESPACE, "--config-file", str(file))
    for picker in bare.pickers:
        await bare.ready(picker)
        for name, hosts in {**HOSTS, "absent": ()}.items():
            await until_ready(picker, name, hosts)
    chat = await bare.start_gateway([Route([picker.grpc for picker in bare.pickers])])
    batch_gateway = await bare.start_gateway([Route(own_ports)])
    assert (await served(chat)).keys() == set(HOSTS["chat"])
    assert (await served(batch_gateway)).keys() == set(HOSTS["batch"])

    # What happens to the pods of one pool is nothing to the other.
    empty.set_ready("batch-0", HOSTS["batch"][0], ready=False)
    for picker in bare.pickers:
        await until_ready(picker, "batch", HOSTS["batch"][1:])
        await until_ready(picker, "chat", HOSTS["chat"])
    assert (await served(batch_gateway)).keys() == set(HOSTS["batch"][1:])
    assert (await served(chat)).keys() == set(HOSTS["chat"])
