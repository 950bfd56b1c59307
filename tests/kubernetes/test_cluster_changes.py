"""While a Kubernetes cluster changes under load, no client gets an error, and every replica follows."""

from collections import Counter
from collections.abc import Callable

from api_server import NAMESPACE, PODS, POOLS, ApiServer
from changes import HOSTS, change_everything, started
from seat import APP, Seat

POOL_GROUP = "inference.networking.k8s.io"
OBJECT_GROUPS = ["llm-d.ai", "inference.networking.x-k8s.io"]
OBJECTS = ["inferenceobjectives", "inferencemodelrewrites"]
AWAY_S = 30.0  # time for which the API server is down


async def test_no_client_gets_an_error_while_pods_pools_and_api_server_change(
    empty: ApiServer, seat: Seat, record_property: Callable[[str, object], None]
) -> None:
    await started(empty, seat)
    await seat.everywhere(lambda found: list(found.values()).count("ready") == 3, "three pods are ready")
    found = await change_everything(empty, seat, AWAY_S)
    for what, seconds in found.seconds.items():
        record_property(what, f"{seconds:.2f} s")
        print(f"{what}: {seconds:.2f} s")  # shown by `pytest -s`
    assert found.errors == []
    await seat.everywhere(lambda endpoints: not endpoints, "no endpoint is left")
    for picker in seat.pickers:
        assert "expired; listing again" in picker.log.read_text()
        assert (await picker.admin.get("/readyz")).status_code == 200
    # With the first selector again, its pods serve.
    empty.put_pool("llm", [seat.port], APP)
    await seat.until_answered(200)


async def test_a_replica_only_lists_and_watches_its_pool_pods_and_objects(
    empty: ApiServer, seat: Seat
) -> None:
    verbs = ["list", "watch"]
    rules = [
        {"apiGroups": ["", POOL_GROUP], "resources": ["pods", "inferencepools"], "verbs": verbs},
        {"apiGroups": OBJECT_GROUPS, "resources": OBJECTS, "verbs": verbs},
    ]
    picker = await seat.start_picker(empty.put_account("picker", rules), "llm", NAMESPACE)
    await seat.ready(picker)
    await started(empty, seat)
    first, *others = HOSTS
    for number in range(6):
        empty.set_ready("p1", first, ready=bool(number % 2))
    empty.put_pool("llm", [seat.port, 1], APP)
    empty.set_ready("p1", first, ready=False)
    for each in seat.pickers:
        await each.until_ready(*(f"{host}:{seat.port}" for host in others))

    calls = empty.calls(f"system:serviceaccount:{NAMESPACE}:picker")
    answers = {
        (each["objectRef"].get("apiGroup") == OBJECT_GROUPS[0], each["responseStatus"]["code"])
        for each in calls
    }
    assert answers == {(False, 200), (True, 404)}, "the API server does not serve the group llm-d.ai"
    begun = Counter(
        (each["verb"], each["requestURI"].partition("?")[0])
        for each in calls
        if each["stage"] == ("ResponseStarted" if each["verb"] == "watch" else "ResponseComplete")
    )
    base = f"/apis/{OBJECT_GROUPS[1]}/v1alpha2/namespaces/{NAMESPACE}"
    paths = (PODS, POOLS, *(f"{base}/{kind}" for kind in OBJECTS))
    served = {what: count for what, count in begun.items() if OBJECT_GROUPS[0] not in what[1]}
    assert served == {(verb, path): 1 for verb in ("list", "watch") for path in paths}
