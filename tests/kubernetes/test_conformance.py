"""Tests what the Gateway API Inference Extension's conformance suite requires of an endpoint picker.

docs/conformance.md lists them. As in the suite, the servers answer every path and have no metrics page.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import httpx
import pytest
import yaml
from api_server import NAMESPACE, ApiServer
from echo_server import EchoServers
from seat import READY_S, Route, Seat, echo_over_http2, listens, publish, subset, until

from picker_tools.local_fleet.network import free_port

CHOICE = "test-epp-endpoint-selection"
TOLD = "x-conformance-test-served-endpoint"
ASK = b'{"model": "conformance-fake-model", "prompt": "What are the advantages of food?"}'
HOSTS = ("127.0.0.41", "127.0.0.42", "127.0.0.43")
OTHER_HOSTS = ("127.0.0.44", "127.0.0.45", "127.0.0.46")
APP, OTHER_APP = {"app": "primary"}, {"app": "secondary"}
REQUESTS, AT_ONCE = 100, 10
# The conformance suite starts its picker with these flags, configuration and rights to list and watch.
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


@dataclass(frozen=True, slots=True)
class Site:
    """A Kubernetes API server, pickers and gateways around it, and echo servers in place of model servers."""

    cluster: ApiServer
    seat: Seat
    servers: EchoServers

    @property
    def port(self) -> int:
        return self.seat.port

    async def listen(self, hosts: Sequence[str], ports: Sequence[int]) -> None:
        for host in hosts:
            for port in ports:
                await self.servers.listen(host, port)

    def put_pool(
        self, hosts: Sequence[str], ports: Sequence[int], name: str, labels: Mapping[str, str]
    ) -> None:
        """Create a pool with pods at `hosts`."""
        for number, host in enumerate(hosts):
            self.cluster.put_pod(f"{name}-{number}", host, labels)
        self.cluster.put_pool(name, ports, labels)

    async def pickers(
        self,
        hosts: Sequence[str] = HOSTS,
        ports: Sequence[int] = (),
        name: str = "primary",
        labels: Mapping[str, str] = APP,
        replicas: int = 2,
    ) -> list[int]:
        """Create a pool with pods at `hosts`, and start its pickers. Returns the pickers' ports."""
        ports = ports or [self.port]
        self.put_pool(hosts, ports, name, labels)
        config = self.cluster.kubeconfig("admin")
        started = [
            await self.seat.start_picker(config, name, NAMESPACE, "--conformance") for _ in range(replicas)
        ]
        for picker in started:
            await self.seat.ready(picker)
            await picker.until_ready(*addresses(hosts, ports))
        return [picker.grpc for picker in started]

    async def gateway(
        self, hosts: Sequence[str] = HOSTS, ports: Sequence[int] = (), **how: Any
    ) -> httpx.AsyncClient:
        """Start echo servers at `hosts`, a pool of them with its pickers, and a gateway."""
        await self.listen(hosts, ports or [self.port])
        await self.pickers(hosts, ports, **how)
        return await self.seat.start_gateway()


@pytest.fixture
def site(empty: ApiServer, bare: Seat, servers: EchoServers) -> Site:
    return Site(empty, bare, servers)


async def ask(gateway: httpx.AsyncClient, headers: Mapping[str, str] | None = None) -> httpx.Response:
    return await gateway.post("/primary-gateway-test", content=ASK, headers=headers or {})


async def served(
    gateway: httpx.AsyncClient, headers: Mapping[str, str], requests: int = REQUESTS
) -> Counter[str]:
    """Send `requests` requests, and assert that none fails. Returns the number of answers by server."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one() -> str:
        async with places:
            answer = await ask(gateway, headers)
        assert answer.status_code == 200, answer.text
        assert answer.headers[TOLD] == answer.headers["x-served-by"]
        return answer.headers[TOLD]

    return Counter(await asyncio.gather(*(one() for _ in range(requests))))


async def test_requests_reach_only_the_pods_that_their_header_selects(site: Site) -> None:
    gateway = await site.gateway()
    for chosen in ([HOSTS[2]], [HOSTS[0], HOSTS[1]], list(HOSTS)):
        found = await served(gateway, {CHOICE: ",".join(chosen)})
        assert found.keys() == set(addresses(chosen, [site.port]))
    # Header names are case-insensitive. If the header selects an unknown address, the request is refused.
    assert (await served(gateway, {CHOICE.upper(): HOSTS[1]}, 5)).keys() == {f"{HOSTS[1]}:{site.port}"}
    assert (await ask(gateway, {CHOICE: "127.0.0.99"})).status_code == 503


async def test_a_picker_serves_with_the_flags_and_rights_that_the_suite_gives(site: Site) -> None:
    await site.listen(HOSTS, [site.port])
    site.put_pool(HOSTS, [site.port], "primary", APP)
    file = site.seat.folder / "conformance-plugins.yaml"
    file.write_text(yaml.safe_dump(SUITE_PLUGINS))
    flags = (*(flag.format(file=file) for flag in SUITE_FLAGS), "--conformance")
    # The suite's picker may neither write statuses nor read the API group llm-d.ai.
    verbs = ["get", "list", "watch"]
    rules = [
        {"apiGroups": [group], "resources": what, "verbs": verbs} for group, what in SUITE_RIGHTS.items()
    ]
    account = site.cluster.put_account("suite", rules)
    picker = await site.seat.start_picker(account, "primary", NAMESPACE, *flags)
    await site.seat.ready(picker)
    wanted = set(addresses(HOSTS, [site.port]))
    await site.seat.everywhere(lambda found: found.keys() == wanted, "the pods are known")
    for service in (b"inference-extension", b"liveness", b"readiness"):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{picker.health}") as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            assert await check(b"\x0a" + bytes([len(service)]) + service, timeout=READY_S) == SERVING
    gateway = await site.seat.start_gateway()
    assert (await served(gateway, {CHOICE: HOSTS[1]}, 20)).keys() == {f"{HOSTS[1]}:{site.port}"}
    assert (await served(gateway, {}, 60)).keys() == wanted


async def test_a_request_without_a_body_is_placed_and_carries_the_endpoint_header(site: Site) -> None:
    gateway = await site.gateway(HOSTS[:2], replicas=1)
    answer = await gateway.get("/primary-gateway-test", headers={CHOICE: HOSTS[1]})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-served-by"] == answer.headers[TOLD] == f"{HOSTS[1]}:{site.port}"
    seen = answer.json()["headers"]
    assert seen["x-gateway-destination-endpoint"] == f"{HOSTS[1]}:{site.port}"


async def test_each_target_port_of_a_pod_is_a_separate_endpoint(site: Site) -> None:
    ports = [free_port() for _ in range(3)]
    gateway = await site.gateway(HOSTS, ports)
    first, second, third = ([f"{host}:{port}" for port in ports] for host in HOSTS)
    for chosen, wanted in (
        ([HOSTS[1]], second),
        ([HOSTS[0], third[1]], [*first, third[1]]),
        ([HOSTS[0], second[0], second[2], HOSTS[2]], [*first, second[0], second[2], *third]),
    ):
        assert (await served(gateway, {CHOICE: ",".join(chosen)})).keys() <= set(wanted)


async def test_a_pool_may_have_eight_target_ports(site: Site) -> None:
    ports = [free_port() for _ in range(8)]
    gateway = await site.gateway(HOSTS[:2], ports, replicas=1)
    assert (await served(gateway, {}, 400)).keys() == set(addresses(HOSTS[:2], ports))
    for address in addresses(HOSTS[:2], ports):
        assert (await served(gateway, {CHOICE: address}, 1)).keys() == {address}


async def test_a_request_goes_only_to_endpoints_in_its_subset_hint(site: Site) -> None:
    first, second, third = addresses(HOSTS, [site.port])
    gateway = await site.gateway()
    assert (await served(gateway, subset(first))).keys() == {first}
    assert (await served(gateway, subset(second, third, "127.0.0.99:1"))).keys() == {second, third}
    for nothing in (subset(), subset("127.0.0.99:1"), subset(HOSTS[0]), {**subset(first), CHOICE: HOSTS[1]}):
        assert (await ask(gateway, nothing)).status_code == 503
    assert (await gateway.get("/any", headers=subset(third))).headers["x-served-by"] == third
    assert (await gateway.get("/any", headers=subset())).status_code == 503
    # The picker refuses a request whose subset hint names only an endpoint that is not ready.
    site.cluster.set_ready("primary-0", HOSTS[0], ready=False)
    await site.seat.everywhere(lambda found: found[first] != "ready", "the unready endpoint leaves")
    assert (await ask(gateway, subset(first))).status_code == 503
    assert (await served(gateway, subset(first, second), 20)).keys() == {second}


async def test_requests_split_by_weight_over_two_pools_stay_in_their_pool(site: Site) -> None:
    await site.listen((*HOSTS, *OTHER_HOSTS), [site.port])
    one = await site.pickers()
    two = await site.pickers(OTHER_HOSTS, name="secondary", labels=OTHER_APP, replicas=1)
    gateway = await site.seat.start_gateway([Route(one, 70), Route(two, 30)])
    found = await served(gateway, {CHOICE: ",".join((*HOSTS, *OTHER_HOSTS))}, 200)
    shares = [sum(found[each] for each in addresses(hosts, [site.port])) for hosts in (HOSTS, OTHER_HOSTS)]
    assert sum(shares) == 200
    assert 120 <= shares[0] <= 160, "the first pool gets 70 % of 200 requests, within the suite's tolerance"
    # A picker chooses only endpoints of its own pool.
    alone = await site.seat.start_gateway([Route(two)])
    assert (await served(alone, {}, 30)).keys() <= set(addresses(OTHER_HOSTS, [site.port]))
    assert (await ask(alone, {CHOICE: HOSTS[0]})).status_code == 503


async def test_only_a_gateway_that_fails_open_serves_without_pickers(site: Site) -> None:
    await site.listen(HOSTS, [site.port])
    pickers = await site.pickers()
    discovery = site.seat.folder / "pickers.json"
    publish(discovery, pickers)
    hosts = [(host, site.port) for host in HOSTS]
    opening = await site.seat.start_gateway(fail_open=hosts, discovery=discovery)
    closing = await site.seat.start_gateway(discovery=discovery)
    chosen, first = {CHOICE: HOSTS[0]}, f"{HOSTS[0]}:{site.port}"
    for gateway in (opening, closing):
        assert (await served(gateway, chosen, 5)).keys() == {first}

    async def answers() -> list[tuple[int, str | None]]:
        """For each gateway: the answer's status, and the serving endpoint that the picker reports."""
        both = [await ask(gateway, chosen) for gateway in (opening, closing)]
        return [(answer.status_code, answer.headers.get(TOLD)) for answer in both]

    publish(discovery, [])  # the gateway now knows no picker
    await until(answers, lambda both: both[0] == (200, None) and both[1][0] == 500, what="lost pickers")
    alone = [await ask(opening, chosen) for _ in range(30)]
    assert {answer.status_code for answer in alone} == {200}
    assert {answer.headers["x-served-by"] for answer in alone} == set(addresses(HOSTS, [site.port]))
    publish(discovery, pickers)
    await until(answers, lambda both: [told for _, told in both] == [first] * 2, what="pickers in use")
    for gateway in (opening, closing):
        assert (await served(gateway, chosen, 20)).keys() == {first}


async def test_model_servers_that_speak_only_cleartext_http2_get_requests(site: Site) -> None:
    site.seat.spawn_envoy("echo", echo_over_http2([(host, site.port) for host in HOSTS[:2]]))
    for host in HOSTS[:2]:
        await until(partial(listens, host, site.port), what=f"the server at {host}")
    await site.pickers(HOSTS[:2], replicas=1)
    gateway = await site.seat.start_gateway(http2=True)
    for address in addresses(HOSTS[:2], [site.port]):
        assert (await served(gateway, {CHOICE: address}, 10)).keys() == {address}
    assert (await served(gateway, {}, 40)).keys() == set(addresses(HOSTS[:2], [site.port]))


async def test_requests_to_a_pool_without_pods_are_refused_until_a_pod_is_ready(site: Site) -> None:
    await site.listen(HOSTS[:1], [site.port])
    gateway = await site.gateway((), replicas=1)
    assert (await ask(gateway)).status_code == 503
    assert (await gateway.get("/any")).status_code == 503
    site.cluster.put_pod("late", HOSTS[0], APP)
    await until(partial(ask, gateway), lambda answer: answer.status_code == 200, what="a served request")
