"""Replicas apply objectives and model rewrites without restart, and report faults in the objects' status."""

import asyncio
from typing import Any

import pytest
from api_server import NAMESPACE, POOLS, ApiServer
from seat import APP, Seat, until

from picker_kubernetes import objects as inference_objects
from picker_kubernetes.objects import InferenceObjects
from picker_tools.local_fleet import network

GROUP = "inference.networking.x-k8s.io"
HOST = "127.0.0.31"


def put(cluster: ApiServer, kind: str, name: str, spec: dict[str, Any], pool: str = "llm") -> None:
    cluster.put(f"{GROUP}/v1alpha2", kind, name, spec={"poolRef": {"name": pool}, **spec})


def put_objective(cluster: ApiServer, name: str, priority: int, pool: str = "llm") -> None:
    put(cluster, "InferenceObjective", name, {"priority": priority}, pool)


def put_rewrite(cluster: ApiServer, name: str, model: str, *targets: dict[str, Any]) -> None:
    """Create a model rewrite that splits requests for `model` over the models of `targets` by weight."""
    rules = [{"matches": [{"model": {"value": model}}], "targets": list(targets)}]
    put(cluster, "InferenceModelRewrite", name, {"rules": rules})


def to(model: str, **weight: int) -> dict[str, Any]:
    return {"modelRewrite": model, **weight}


async def condition(cluster: ApiServer, kind: str, name: str, status: str) -> str:
    """Wait until an object has a condition with `status`; return its message. `kind`: as in the API path."""
    path = f"/apis/{GROUP}/v1alpha2/namespaces/{NAMESPACE}/{kind}/{name}"

    async def written() -> str | None:
        conditions = cluster.call("GET", path).get("status", {}).get("conditions", [])
        return next((each["message"] for each in conditions if each["status"] == status), None)

    return str(await until(written, what=f"{status} for {name}"))


async def test_an_inference_objective_sets_the_band_of_its_requests(empty: ApiServer, seat: Seat) -> None:
    put_objective(empty, "urgent", 7)
    put_objective(empty, "batch", -1)
    assert await condition(empty, "inferenceobjectives", "urgent", "True") == "in use"
    assert await condition(empty, "inferenceobjectives", "batch", "True") == "in use"
    queueing = "fair_request_queue: {queue_without_endpoints: true, queue_ttl: 60s}"
    await seat.replace_pickers(queueing, empty.kubeconfig("admin"), "llm", NAMESPACE)
    objective = "x-gateway-inference-objective"
    asked = ("urgent", "urgent", "batch", "unknown")
    asks = [asyncio.create_task(seat.ask({objective: name})) for name in asked]

    async def waiting() -> dict[str, int]:
        state = (await seat.pickers[0].admin.get("/api/v1/state")).json()
        return {band["band"]: band["queued"] for band in state["bands"] if band["queued"]}

    await until(waiting, lambda found: found == {"7": 2, "Default": 1, "-1": 1}, what="each in its band")
    # A changed priority applies to later requests.
    put_objective(empty, "urgent", 20)

    async def one_more() -> dict[str, int]:
        asks.append(asyncio.create_task(seat.ask({objective: "urgent"})))
        return await until(waiting, lambda found: sum(found.values()) == len(asks), what="one more")

    found = await until(one_more, lambda found: "20" in found, what="the other priority")
    assert (found["20"], found["Default"], found["-1"]) == (1, 1, 1)
    await seat.start_pod(empty, "only", HOST)
    assert {answer.status_code for answer in await asyncio.gather(*asks)} == {200}


async def test_a_model_rewrite_splits_requests_by_weight_and_keeps_each_body_with_its_variant(
    empty: ApiServer, seat: Seat
) -> None:
    await seat.start_pod(empty, "only", HOST)
    put_rewrite(empty, "canary", "llama", to("v1", weight=7), to("v2", weight=3))
    assert await condition(empty, "inferencemodelrewrites", "canary", "True") == "in use"

    await seat.until_answered(404)  # the simulator has neither v1 nor v2

    async def variant(prompt: str) -> str:
        answer = await seat.ask(prompt=prompt)
        return next(name for name in ("v1", "v2") if name in answer.text)

    sent = [await variant(f"prompt {each}") for each in range(100)]
    # Model v2 gets 30 requests on average, with a standard deviation of 4.6.
    assert abs(sent.count("v2") - 30) <= 20
    assert [await variant(f"prompt {each}") for each in range(10)] == sent[:10]

    put_rewrite(empty, "canary", "llama", to("llama"))
    await seat.until_answered(200)


async def test_faulty_objects_are_reported_in_log_and_condition_while_requests_are_served(
    empty: ApiServer, seat: Seat
) -> None:
    await seat.start_pod(empty, "only", HOST)
    put(empty, "InferenceModelRewrite", "nothing", {"rules": []})
    put(empty, "InferenceModelRewrite", "blank", {"rules": [{"targets": [to(" ")]}]})
    put_objective(empty, "huge", 2**40)
    assert "nothing is rewritten" in await condition(empty, "inferencemodelrewrites", "nothing", "False")
    assert "is no model's name" in await condition(empty, "inferencemodelrewrites", "blank", "False")
    assert "no int32" in await condition(empty, "inferenceobjectives", "huge", "False")
    put_objective(empty, "stray", 1, pool="no-such-pool")
    assert "no-such-pool" in await condition(empty, "inferenceobjectives", "stray", "False")
    put_rewrite(empty, "there", "there", to("back"))
    put_rewrite(empty, "back", "back", to("there"))
    await until(
        lambda: condition(empty, "inferencemodelrewrites", "there", "True"),
        lambda message: "cycle (" in message and "there to back" in message,
        what="the cycle",
    )
    for picker in seat.pickers:
        log = picker.log.read_text()
        for rewrite in ("nothing is not used", "blank is not used", "there is used"):
            assert f"inferencemodelrewrites {rewrite}" in log
        for objective in ("huge", "stray"):
            assert f"inferenceobjectives {objective} is not used" in log
        assert "HTTP Request" not in log  # log lines of the HTTP client

    await seat.until_answered(200)


async def test_a_target_port_without_a_server_is_logged_and_other_ports_serve(
    empty: ApiServer, seat: Seat
) -> None:
    await seat.start_pod(empty, "only", HOST)
    unused = network.free_port()
    empty.put_pool("llm", [unused, seat.port], APP)
    await seat.everywhere(
        lambda found: found == {f"{HOST}:{seat.port}": "ready", f"{HOST}:{unused}": "down"},
        "the unused port is down",
    )
    assert any(f"scraping {HOST}:{unused} fails" in picker.log.read_text() for picker in seat.pickers)
    assert [(await seat.ask()).status_code for _ in range(20)] == [200] * 20


async def test_the_api_server_rejects_an_empty_selector_and_the_pool_still_serves(
    empty: ApiServer, seat: Seat
) -> None:
    await seat.start_pod(empty, "only", HOST)
    await seat.everywhere(lambda found: len(found) == 1, "the pod is known")
    pool = empty.call("GET", f"{POOLS}/llm")
    pool["spec"]["selector"]["matchLabels"] = {}
    answer = empty.api.put(f"{POOLS}/llm", json=pool)
    assert answer.status_code == 422
    assert "should have at least 1 properties" in answer.json()["message"]
    assert (await seat.ask()).status_code == 200


class Publisher(InferenceObjects):
    """The replica that writes a fleet's conditions, and reports `fault` for each object of its pool. `looked`
    counts how often the replica has checked all objects."""

    def __init__(self, fleet: str, fault: str = "", pool: str = "llm") -> None:
        super().__init__(pool, NAMESPACE, fleet=fleet, report=lambda *found: None, publishes=lambda: True)
        self._fault, self.looked = fault, 0

    def _fault_of(self, _: object) -> str:
        return self._fault

    async def _judge_of_others(self, *about: Any) -> None:
        await super()._judge_of_others(*about)
        self.looked += 1

    async def look_again(self) -> None:
        """Check all objects once more, as after a change."""
        before = self.looked

        async def looked() -> int:
            return self.looked

        self._changed.set()
        await until(looked, lambda count: count > before, what="another look")


async def test_two_fleets_of_one_pool_do_not_overwrite_each_others_conditions(
    empty: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(empty.kubeconfig("admin")))
    path = f"/apis/{GROUP}/v1alpha2/namespaces/{NAMESPACE}/inferenceobjectives/o"
    empty.put_pool("llm", [8000], APP)
    put_objective(empty, "o", 1)
    first, second = Publisher("one"), Publisher("another", fault="disliked")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(first.run())
        assert await condition(empty, "inferenceobjectives", "o", "True") == "in use"
        further = tasks.create_task(second.run())
        # When both fleets check the object again, neither writes a condition.
        version = empty.call("GET", path)["metadata"]["resourceVersion"]
        for _ in range(5):
            await second.look_again()
            await first.look_again()
        assert empty.call("GET", path)["metadata"]["resourceVersion"] == version
        # The fleet that wrote the condition updates it for a new version of the object.
        put_objective(empty, "o", 2)

        async def judged() -> tuple[int, str]:
            (one,) = empty.call("GET", path)["status"]["conditions"]
            return one["observedGeneration"], one["message"]

        await until(judged, lambda found: found == (2, "in use"), what="a condition of the first fleet")
        # Once the first fleet has stopped, the second fleet writes the condition.
        running.cancel()
        await asyncio.wait([running])
        monkeypatch.setattr(inference_objects, "_TAKE_OVER_S", 0.3)
        put_objective(empty, "o", 3)
        assert await condition(empty, "inferenceobjectives", "o", "False") == "disliked"
        further.cancel()


async def test_the_condition_of_an_object_without_a_pool_is_replaced_once_the_pool_exists(
    empty: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(empty.kubeconfig("admin")))
    put_objective(empty, "o", 1)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(Publisher("one", pool="other").run())]
        assert "which does not exist" in await condition(empty, "inferenceobjectives", "o", "False")
        empty.put_pool("llm", [8000], APP)
        running.append(tasks.create_task(Publisher("another").run()))
        assert await condition(empty, "inferenceobjectives", "o", "True") == "in use"
        for each in running:
            each.cancel()
