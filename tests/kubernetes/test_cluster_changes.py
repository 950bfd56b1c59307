"""Changes of a cluster under load: no client sees an error, and every replica follows."""

from collections import Counter

from api_server import NAMESPACE, PODS, POOLS, ApiServer
from seat import Load, Seat

from picker_tools.local_fleet import network

APP = {"app": "llm"}
HOSTS = ("127.0.0.11", "127.0.0.12", "127.0.0.13")
READY_S = 60.0
OBJECT_GROUPS = ["llm-d.ai", "inference.networking.x-k8s.io"]
OBJECTS = ["inferenceobjectives", "inferencemodelrewrites"]


async def started(cluster: ApiServer, seat: Seat, hosts: tuple[str, ...] = HOSTS) -> None:
    """Model servers as ready pods, known to every replica."""
    for number, host in enumerate(hosts, 1):
        await seat.start_model(host)
        cluster.put_pod(f"p{number}", host, APP)
    await ready(seat, *hosts)


async def ready(seat: Seat, *hosts: str) -> None:
    """Wait until exactly `hosts` take requests, as every replica sees it."""
    wanted = {f"{host}:{seat.port}" for host in hosts}
    await seat.everywhere(
        lambda found: {address for address, status in found.items() if status == "ready"} == wanted,
        f"{sorted(wanted)} are ready",
    )


async def progress(load: Load, requests: int = 50) -> None:
    """Wait until so many more requests were served."""
    aim = load.served.total() + requests

    async def reached() -> bool | None:
        return load.served.total() >= aim or None

    assert await network.until(reached, within_s=READY_S), f"no progress; errors: {load.errors[:3]}"


async def nothing_more(seat: Seat, load: Load, host: str) -> None:
    """A host that drains is given nothing: its count stands still while others serve."""
    await progress(load, 20)  # what was under way has ended
    before = await seat.received(host)
    await progress(load, 50)
    assert await seat.received(host) == before


async def test_pods_come_drain_and_go_without_an_error(empty: ApiServer, seat: Seat) -> None:
    await started(empty, seat)
    async with seat.load() as load:
        await progress(load)
        empty.set_ready("p1", HOSTS[0], ready=False)
        await ready(seat, *HOSTS[1:])
        await nothing_more(seat, load, HOSTS[0])
        empty.set_ready("p1", HOSTS[0], ready=True)
        await ready(seat, *HOSTS)
        before = await seat.received(HOSTS[0])
        await progress(load, 100)
        assert await seat.received(HOSTS[0]) > before

        empty.delete_pod("p2", grace_s=30)
        await ready(seat, HOSTS[0], HOSTS[2])
        await nothing_more(seat, load, HOSTS[1])
        seat.kill_model(HOSTS[1])
        empty.delete_pod("p2", grace_s=0)
        await seat.everywhere(lambda found: f"{HOSTS[1]}:{seat.port}" not in found, "the deleted pod is gone")
        await progress(load)
    assert load.errors == []


async def test_an_edit_of_the_pool_moves_the_load_without_an_error(empty: ApiServer, seat: Seat) -> None:
    await started(empty, seat, HOSTS[:2])
    await seat.start_model(HOSTS[2])
    empty.put_pod("q", HOSTS[2], {"app": "next"})
    async with seat.load() as load:
        await progress(load)
        empty.put_pool("llm", [seat.port], {"app": "next"})
        await ready(seat, HOSTS[2])
        await nothing_more(seat, load, HOSTS[0])
        empty.put_pool("llm", [seat.port], APP)
        await ready(seat, *HOSTS[:2])
        await progress(load)
    assert load.errors == []
    empty.put_pool("llm", [seat.port], {"app": "nobody"})
    await ready(seat)
    assert (await seat.ask()).status_code == 503
    empty.put_pool("llm", [seat.port], APP)
    await ready(seat, *HOSTS[:2])
    assert (await seat.ask()).status_code == 200


async def test_an_api_server_that_is_away_changes_nothing_and_is_followed_again(
    empty: ApiServer, seat: Seat
) -> None:
    await started(empty, seat)
    async with seat.load() as load:
        await progress(load)
        empty.kill_api()
        try:
            await progress(load, 300)
            await ready(seat, *HOSTS)
        finally:
            empty.start_api()
        empty.set_ready("p1", HOSTS[0], ready=False)
        await ready(seat, *HOSTS[1:])
        await progress(load)
    assert load.errors == []


async def test_watches_that_expire_are_listed_again_without_an_error(empty: ApiServer, seat: Seat) -> None:
    await started(empty, seat)
    async with seat.load() as load:
        await progress(load)
        # A new API server knows no version from before its start, and etcd has none either.
        for number in range(20):
            empty.apply(
                {
                    "apiVersion": "v1",
                    "kind": "ConfigMap",
                    "metadata": {"name": f"unrelated-{number}", "namespace": "models"},
                }
            )
        empty.kill_api()
        empty.compact()
        empty.start_api()
        empty.set_ready("p1", HOSTS[0], ready=False)
        await ready(seat, *HOSTS[1:])
        await progress(load)
    assert load.errors == []
    for picker in seat.pickers:
        assert "expired; listing again" in picker.log.read_text()


async def test_a_replica_lists_and_watches_the_pool_and_its_pods_and_asks_nothing_else(
    empty: ApiServer, seat: Seat
) -> None:
    empty.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "picker", "namespace": NAMESPACE}}
    )
    pool = {"apiGroups": ["", "inference.networking.k8s.io"], "resources": ["pods", "inferencepools"]}
    objects = {"apiGroups": OBJECT_GROUPS, "resources": OBJECTS}
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "metadata": {"name": "picker", "namespace": NAMESPACE},
    }
    empty.apply(
        {**role, "kind": "Role", "rules": [{**each, "verbs": ["list", "watch"]} for each in (pool, objects)]}
    )
    empty.apply(
        {
            **role,
            "kind": "RoleBinding",
            "subjects": [{"kind": "ServiceAccount", "name": "picker", "namespace": NAMESPACE}],
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "picker"},
        }
    )
    picker = await seat.start_picker(empty.kubeconfig("account", empty.token_of("picker")), "llm", NAMESPACE)
    await seat.ready(picker)
    await started(empty, seat)
    for number in range(6):
        empty.set_ready("p1", HOSTS[0], ready=bool(number % 2))
    empty.put_pool("llm", [seat.port, 1], APP)
    empty.set_ready("p1", HOSTS[0], ready=False)
    await ready(seat, *HOSTS[1:])

    calls = empty.calls(f"system:serviceaccount:{NAMESPACE}:picker")
    answers = {
        (each["objectRef"].get("apiGroup") == OBJECT_GROUPS[0], each["responseStatus"]["code"])
        for each in calls
    }
    assert answers == {(False, 200), (True, 404)}, "llm-d.ai is not served here"
    begun = Counter(
        (each["verb"], each["requestURI"].partition("?")[0])
        for each in calls
        if each["stage"] == ("ResponseStarted" if each["verb"] == "watch" else "ResponseComplete")
    )
    base = f"/apis/{OBJECT_GROUPS[1]}/v1alpha2/namespaces/{NAMESPACE}"
    paths = (PODS, POOLS, *(f"{base}/{kind}" for kind in OBJECTS))
    served = {what: count for what, count in begun.items() if OBJECT_GROUPS[0] not in what[1]}
    assert served == {(verb, path): 1 for verb in ("list", "watch") for path in paths}
