"""What the extension's conformance suite asks of an endpoint picker: see docs/conformance.md.

The servers are of the kind that the suite has: they answer any path and have no metrics page.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc
import httpx
import yaml
from api_server import NAMESPACE, ApiServer
from echo_server import EchoServer
from seat import READY_S, Route, Seat, echo_over_http2, listens, publish, subset

from picker_tools.local_fleet import network
from picker_tools.local_fleet.network import free_port

CHOICE = "test-epp-endpoint-selection"
TOLD = "x-conformance-test-served-endpoint"
ASK = b'{"model": "conformance-fake-model", "prompt": "What are the advantages of food?"}'
HOSTS = ("127.0.0.41", "127.0.0.42", "127.0.0.43")
OTHER_HOSTS = ("127.0.0.44", "127.0.0.45", "127.0.0.46")
APP, OTHER_APP = {"app": "primary"}, {"app": "secondary"}
REQUESTS, AT_ONCE = 100, 10
# How the suite runs its picker: flags besides pool and ports, configuration, rights to list and watch.
SUITE_FLAGS = ("--v", "4", "--config-file", "{file}")
SUITE_PLUGINS = {
    "apiVersion": "inference.networking.x-k8s.io/v1alpha1",
    "kind": "EndpointPickerConfig",
    "plugins": [{"type": "header-based-testing-filter"}, {"type": "destination-endpoint-served-verifier"}],
    "schedulingProfiles": [
        {"name": "conformance-profile", "plugins": [{"pluginRef": "header-based-testing-filter"}]}
    ],
}
SUITE_RIGHTS = {
    "": ["pods"],
    "inference.networking.k8s.io": ["inferencepools"],
    "inference.networking.x-k8s.io": ["inferenceobjectives", "inferencemodelrewrites", "inferencepools"],
}
SERVING = b"\x08\x01"


def addresses(hosts: Sequence[str], ports: Sequence[int]) -> list[str]:
    return [f"{host}:{port}" for host in hosts for port in ports]


async def listen(servers: EchoServer, hosts: Sequence[str], ports: Sequence[int]) -> None:
    for host in hosts:
        for port in ports:
            await servers.listen(host, port)


async def pool(
    cluster: ApiServer,
    seat: Seat,
    hosts: Sequence[str],
    ports: Sequence[int],
    *,
    name: str = "primary",
    labels: Mapping[str, str] = APP,
    replicas: int = 2,
) -> list[int]:
    """Pods at `hosts` in a pool that `replicas` pickers know; the pickers' ports."""
    for number, host in enumerate(hosts):
        cluster.put_pod(f"{name}-{number}", host, labels)
    cluster.put_pool(name, ports, labels)
    started = [
        await seat.start_picker(cluster.kubeconfig("admin"), name, NAMESPACE, "--conformance")
        for _ in range(replicas)
    ]
    wanted = set(addresses(hosts, ports))
    for picker in started:
        await seat.ready(picker)

        async def known() -> bool | None:
            found = await picker.endpoints()  # noqa: B023 (awaited within this turn)
            return {address for address, status in found.items() if status == "ready"} == wanted or None

        assert await network.until(known, within_s=READY_S), await picker.endpoints()
    return [picker.grpc for picker in started]


async def ask(
    gateway: httpx.AsyncClient, headers: Mapping[str, str] | None = None, path: str = "/primary-gateway-test"
) -> httpx.Response:
    return await gateway.post(path, content=ASK, headers=headers or {})


async def served(
    gateway: httpx.AsyncClient, headers: Mapping[str, str], requests: int = REQUESTS
) -> Counter[str]:
    """Who answered `requests` requests, none of which may fail."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one() -> str:
        async with places:
            answer = await ask(gateway, headers)
        assert answer.status_code == 200, answer.text
        by = str(answer.headers["x-served-by"])
        assert answer.headers[TOLD] == by
        return by

    return Counter(await asyncio.gather(*(one() for _ in range(requests))))


async def test_all_requests_reach_only_the_pods_that_the_header_selects(
    empty: ApiServer, bare: Seat, servers: EchoServer
) -> None:
    await listen(servers, HOSTS, [bare.port])
    await pool(empty, bare, HOSTS, [bare.port])
    gateway = await bare.start_gateway()
    for chosen in ([HOSTS[2]], [HOSTS[0], HOSTS[1]], list(HOSTS)):
        found = await served(gateway, {CHOICE: ",".join(chosen)})
        assert found.keys() == set(addresses(chosen, [bare.port]))
    # Names of headers have no case, and an unknown address is not replaced by another.
    assert (await served(gateway, {CHOICE.upper(): HOSTS[1]}, 5)).keys() == {f"{HOSTS[1]}:{bare.port}"}
    assert (await ask(gateway, {CHOICE: "127.0.0.99"})).status_code == 503


def account_of_the_suite(cluster: ApiServer) -> Path:
    """Credentials with the rights that the suite gives its picker: none for statuses and llm-d.ai."""
    named = {"name": "suite", "namespace": NAMESPACE}
    role = "rbac.authorization.k8s.io"
    verbs = ["get", "list", "watch"]
    rules = [
        {"apiGroups": [group], "resources": what, "verbs": verbs} for group, what in SUITE_RIGHTS.items()
    ]
    binding = {
        "subjects": [{"kind": "ServiceAccount", **named}],
        "roleRef": {"apiGroup": role, "kind": "Role", "name": "suite"},
    }
    cluster.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": named})
    cluster.apply({"apiVersion": f"{role}/v1", "kind": "Role", "metadata": named, "rules": rules})
    cluster.apply({"apiVersion": f"{role}/v1", "kind": "RoleBinding", "metadata": named, **binding})
    return cluster.kubeconfig("suite", cluster.token_of("suite"))


async def test_flags_configuration_and_rights_of_the_suite_are_enough(
    empty: ApiServer, bare: Seat, servers: EchoServer
) -> None:
    await listen(servers, HOSTS, [bare.port])
    for number, host in enumerate(HOSTS):
        empty.put_pod(f"primary-{number}", host, APP)
    empty.put_pool("primary", [bare.port], APP)
    file = bare.folder / "conformance-plugins.yaml"
    file.write_text(yaml.safe_dump(SUITE_PLUGINS))
    flags = (*(flag.format(file=file) for flag in SUITE_FLAGS), "--conformance")
    picker = await bare.start_picker(account_of_the_suite(empty), "primary", NAMESPACE, *flags)
    await bare.ready(picker)
    wanted = set(addresses(HOSTS, [bare.port]))
    await bare.everywhere(lambda found: found.keys() == wanted, "the pods are known")
    for service in (b"inference-extension", b"liveness", b"readiness"):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{picker.health}") as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            assert await check(b"\x0a" + bytes([len(service)]) + service, timeout=READY_S) == SERVING
    gateway = await bare.start_gateway()
    assert (await served(gateway, {CHOICE: HOSTS[1]}, 20)).keys() == {f"{HOSTS[1]}:{bare.port}"}
    assert (await served(gateway, {}, 60)).keys() == wanted


async def test_a_request_without_a_body_is_placed_and_the_model_server_sees_where(
    empty: ApiServer, bare: Seat, servers: EchoServer
) -> None:
    await listen(servers, HOSTS[:2], [bare.port])
    await pool(empty, bare, HOSTS[:2], [bare.port], replicas=1)
    gateway = await bare.start_gateway()
    answer = await gateway.get("/primary-gateway-test", headers={CHOICE: HOSTS[1]})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-served-by"] == answer.headers[TOLD] == f"{HOSTS[1]}:{bare.port}"
    seen = answer.json()["headers"]
    assert seen["x-gateway-destination-endpoint"] == f"{HOSTS[1]}:{bare.port}"


async def test_each_target_port_of_a_pod_is_an_endpoint_of_its_own(
    empty: ApiServer, bare: Seat, servers: EchoServer
) -> None:
    ports = [free_port() for _ in range(3)]
    await listen(servers, HOSTS, ports)
    await pool(empty, bare, HOSTS, ports)
    gateway = await bare.start_gateway()
    for chosen, wanted in (
        (HOSTS[1], addresses(HOSTS[1:2], ports)),
        (f"{HOSTS[0]},{HOSTS[2]}:{ports[1]}", [*addresses(HOSTS[:1], ports), f"{HOSTS[2]}:{ports[1]}"]),
        (
            f"{HOSTS[0]},{HOSTS[1]}:{ports[0]},{HOSTS[1]}:{ports[2]},{HOSTS[2]}",
            set(addresses(HOSTS, ports)) - {f"{HOSTS[1]}:{ports[1]}"},
        ),
    ):
        assert (await served(gateway, {CHOICE: chosen})).keys() <= set(wanted)


async def test_a_pool_may_have_eight_target_ports(empty: ApiServer, bare: Seat, servers: EchoServer) -> None:
    ports = [free_port() for _ in range(8)]
    await listen(servers, HOSTS[:2], ports)
    await pool(empty, bare, HOSTS[:2], ports, replicas=1)
    gateway = await bare.start_gateway()
    found = await served(gateway, {}, 400)
    assert found.keys() == set(addresses(HOSTS[:2], ports))
    for address in addresses(HOSTS[:2], ports):
        assert (await served(gateway, {CHOICE: address}, 1)).keys() == {address}


async def test_the_gateways_subset_hint_is_obeyed_strictly(
    empty: ApiServer, bare: Seat, servers: EchoServer
) -> None:
    first, second, third = addresses(HOSTS, [bare.port])
    await listen(servers, HOSTS, [bare.port])
    await pool(empty, bare, HOSTS, [bare.port])
    gateway = await bare.start_gateway()
    assert (await served(gateway, subset(first))).keys() == {first}
    assert (await served(gateway, subset(second, third, "127.0.0.99:1"))).keys() == {second, third}
    for nothing in (subset(), subset("127.0.0.99:1"), subset(HOSTS[0])):
        assert (await ask(gateway, nothing)).status_code == 503
    assert (await ask(gateway, {**subset(first), CHOICE: HOSTS[1]})).status_code == 503
    assert (await gateway.get("/any", headers=subset(third))).headers["x-served-by"] == third
    assert (await gateway.get("/any", headers=subset())).status_code == 503
    # What is not ready is not eligible, even if the hint has nothing else.
    empty.set_ready("primary-0", HOSTS[0], ready=False)
    await bare.everywhere(lambda found: found[first] != "ready", "the first one drains")
    assert (await ask(gateway, subset(first))).status_code == 503
    assert (await served(gateway, subset(first, second), 20)).keys() == {second}


async def test_requests_are_split_over_two_pools_and_stay_within_them(
    empty: ApiServer, bare: Seat, servers: EchoServer
) -> None:
    await listen(servers, (*HOSTS, *OTHER_HOSTS), [bare.port])
    one = await pool(empty, bare, HOSTS, [bare.port])
    two = await pool(empty, bare, OTHER_HOSTS, [bare.port], name="secondary", labels=OTHER_APP, replicas=1)
    gateway = await bare.start_gateway([Route(one, 70), Route(two, 30)])
    found = await served(gateway, {CHOICE: ",".join((*HOSTS, *OTHER_HOSTS))}, 200)
    shares = [
        sum(found[address] for address in addresses(hosts, [bare.port])) for hosts in (HOSTS, OTHER_HOSTS)
    ]
    assert sum(shares) == 200
    assert 120 <= shares[0] <= 160, "70 % of 200, within the suite's tolerance"
    # Each pool's picker knows its own endpoints only.
    alone = await bare.start_gateway([Route(two)])
    assert (await served(alone, {}, 30)).keys() <= set(addresses(OTHER_HOSTS, [bare.port]))
    assert (await ask(alone, {CHOICE: HOSTS[0]})).status_code == 503


async def test_a_gateway_that_fails_open_serves_on_without_pickers_and_follows_them_again(
    empty: ApiServer, bare: Seat, servers: EchoServer
) -> None:
    hosts = [(host, bare.port) for host in HOSTS]
    await listen(servers, HOSTS, [bare.port])
    pickers = await pool(empty, bare, HOSTS, [bare.port])
    discovery = bare.folder / "pickers.json"
    publish(discovery, pickers)
    opening = await bare.start_gateway(fail_open=hosts, discovery=discovery)
    closing = await bare.start_gateway(discovery=discovery)
    chosen = {CHOICE: HOSTS[0]}
    first = f"{HOSTS[0]}:{bare.port}"
    for gateway in (opening, closing):
        assert (await served(gateway, chosen, 5)).keys() == {first}
    publish(discovery, [])  # the pickers' Service has no endpoints

    async def without_pickers() -> bool | None:
        opened, closed = await ask(opening, chosen), await ask(closing, chosen)
        return (
            opened.status_code == 200 and TOLD not in opened.headers and closed.status_code == 500
        ) or None

    assert await network.until(without_pickers, within_s=READY_S)
    answers = [await ask(opening, chosen) for _ in range(30)]
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.headers["x-served-by"] for answer in answers} == set(addresses(HOSTS, [bare.port]))
    publish(discovery, pickers)

    async def with_pickers() -> bool | None:
        found = [await ask(gateway, chosen) for gateway in (opening, closing)]
        return all(answer.headers.get(TOLD) == first for answer in found) or None

    assert await network.until(with_pickers, within_s=READY_S)
    for gateway in (opening, closing):
        assert (await served(gateway, chosen, 20)).keys() == {first}


async def test_a_pool_of_servers_that_speak_only_cleartext_http2_is_served(
    empty: ApiServer, bare: Seat
) -> None:
    file = bare.folder / "echo.yaml"
    file.write_text(yaml.safe_dump(echo_over_http2([(host, bare.port) for host in HOSTS[:2]])))
    bare.spawn_envoy("echo", file)
    for host in HOSTS[:2]:

        async def answers() -> bool | None:
            return await listens(host, bare.port) or None  # noqa: B023 (awaited within this turn)

        assert await network.until(answers, within_s=READY_S)
    await pool(empty, bare, HOSTS[:2], [bare.port], replicas=1)
    gateway = await bare.start_gateway(http2=True)
    for address in addresses(HOSTS[:2], [bare.port]):
        assert (await served(gateway, {CHOICE: address}, 10)).keys() == {address}
    assert (await served(gateway, {}, 40)).keys() == set(addresses(HOSTS[:2], [bare.port]))


async def test_a_pool_that_selects_no_pod_is_refused_until_one_comes(
    empty: ApiServer, bare: Seat, servers: EchoServer
) -> None:
    await listen(servers, HOSTS[:1], [bare.port])
    await pool(empty, bare, (), [bare.port], replicas=1)
    gateway = await bare.start_gateway()
    assert (await ask(gateway)).status_code == 503
    assert (await gateway.get("/any")).status_code == 503
    empty.put_pod("late", HOSTS[0], APP)

    async def is_served() -> bool | None:
        return (await ask(gateway)).status_code == 200 or None

    assert await network.until(is_served, within_s=READY_S)
