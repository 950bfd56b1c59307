"""InferenceObjectives and InferenceModelRewrites: bands, traffic splits, precedence, cycles and faults."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest
from background import running, until
from tables import cases

from picker_fleet.domain.bands import Band
from picker_fleet.domain.config import parse
from picker_fleet.ingress.intake import Ask, Intake
from picker_fleet.state.accounting_token import Keyring
from picker_kubernetes import objects as followed_objects
from picker_kubernetes.api import Api, KubernetesFault
from picker_kubernetes.objects import (
    InferenceObjects,
    LiveObjects,
    Objective,
    Rewrite,
    cycles,
    live_objects,
    objective_fault,
    rewrite_fault,
)

IDS = itertools.count()

KEYS = Keyring()


def objective(name: str, priority: int) -> Objective:
    return msgspec.convert({"metadata": {"name": name}, "spec": {"priority": priority}}, Objective)


def rewrite(name: str, created: str, *rules: dict[str, Any]) -> Rewrite:
    metadata = {"name": name, "creationTimestamp": created}
    return msgspec.convert({"metadata": metadata, "spec": {"rules": list(rules)}}, Rewrite)


def rule(targets: dict[str, int], *models: str, kind: str = "Exact") -> dict[str, Any]:
    return {
        "matches": [{"model": {"value": model, "type": kind}} for model in models],
        "targets": [{"modelRewrite": name, "weight": weight} for name, weight in targets.items()],
    }


def intake(settings: dict[str, Any] | None = None) -> Intake:
    return Intake(parse(settings or {}), new_id=lambda: "made", keys=KEYS)


def use(gate: Intake, *rewrites: Rewrite, objectives: Sequence[Objective] = ()) -> Intake:
    """Give the rewrites and objectives to the intake `gate`, and return `gate`."""
    found = live_objects(list(objectives), list(rewrites))
    gate.use_live(found.priorities, found.splits, found.anything)
    return gate


def ask(gate: Intake, model: str, **headers: str) -> tuple[str, Band]:
    """Target model and band of a request whose id the gateway has set, by default to `id-0`, `id-1`, …"""
    fields = {name.replace("_", "-"): value.encode() for name, value in headers.items()}
    fields.setdefault("x-request-id", f"id-{next(IDS)}".encode())
    request = gate.request(Ask(model, False, None), fields, subset=None, trusted=True)
    return request.target_model, request.band


@pytest.mark.parametrize(("priority", "name", "like"), [
    (10, "Critical", Band.CRITICAL), (0, "Default", Band.DEFAULT), (-10, "Sheddable", Band.SHEDDABLE),
    (1, "1", Band.DEFAULT), (-1, "-1", Band.SHEDDABLE), (-(2**31), "-2147483648", Band.SHEDDABLE),
    (2**31 - 1, "2147483647", Band.CRITICAL),
])  # fmt: skip
def test_a_new_priority_gets_its_own_band_with_the_attributes_of_the_nearest_band(
    priority: int, name: str, like: Band
) -> None:
    trusted = {"trusted_headers": ["x-gateway-inference-objective"]}
    gate = intake({"extproc": trusted, "objectives": [{"name": "kept"}]})
    for objects, band in (
        ([objective("o", priority)], replace(like, priority=priority, name=name)), ([], Band.DEFAULT),
    ):  # fmt: skip
        use(gate, objectives=objects)
        assert ask(gate, "m", x_gateway_inference_objective="o") == ("m", band)


def test_a_request_id_keeps_its_target_model_in_a_traffic_split() -> None:
    split = rewrite("r", "1", rule({"v1": 90, "v2": 10, "never": 0}, "m"))
    gate = use(intake(), split)
    assert {ask(gate, "m")[0] for _ in range(200)} == {"v1", "v2"}  # test_traffic_split.py checks shares
    # A request id keeps its target model at every replica, and when other objects change.
    ids = [f"again-{number}" for number in range(100)]
    given = [ask(gate, "m", x_request_id=each)[0] for each in ids]
    other = use(intake(), split, rewrite("s", "2", rule({"v9": 1}, "n")))
    assert [ask(other, "m", x_request_id=each)[0] for each in ids] == given
    assert ask(gate, "other")[0] == "other"


def test_the_older_rewrite_rule_wins_and_a_rule_without_matches_applies_to_other_models() -> None:
    old, new = rewrite("z", "1", rule({"old": 1}, "m")), rewrite("a", "2", rule({"new": 1}, "m", "n"))
    rest = rewrite("rest", "3", rule({"rest": 1}))
    gate = use(intake(), new, rest, old)
    assert [ask(gate, model)[0] for model in ("m", "n", "x")] == ["old", "new", "rest"]


@cases("rules, target", {
    "no rule": ([], "configured"),
    "a rule for the model": ([rule({"live": 1}, "m")], "live"),
    "a rule for all models": ([rule({"rest": 1})], "rest"),
    "a rule for the configured target": ([rule({"again": 1}, "configured")], "configured"),
    "all of these rules": ([rule({"live": 1}, "m"), rule({"again": 1}, "live"), rule({"rest": 1})], "live"),
})  # fmt: skip
def test_rewrites_precede_configured_targets_and_no_target_is_rewritten_again(
    rules: list[dict[str, Any]], target: str
) -> None:
    gate = intake({"models": [{"name": "m", "target_models": [{"name": "configured", "weight": 1}]}]})
    assert ask(use(gate, rewrite("r", "1", *rules)), "m")[0] == target


def test_the_fault_names_the_models_in_a_cycle_of_rewrites() -> None:
    first = rewrite("first", "1", rule({"b": 1, "a": 9}, "a"))
    second = rewrite("second", "2", rule({"c": 1}, "b"))
    assert cycles([first, second]) == {}, "a model may keep a share of its own requests"
    third = rewrite("third", "3", rule({"x": 1, "a": 1}, "c"), rule({"y": 1}, "z"))
    found = cycles([first, second, third])
    assert found == dict.fromkeys(("first", "second", "third"), "a to b to c to a")
    fourth = rewrite("fourth", "4", rule({"c": 1}, "d"), rule({"d": 1, "y": 1}, "x"))
    assert cycles([first, second, third, fourth])["fourth"] == "c to x to d to c"


def test_cycles_among_thousands_of_rewrites_are_found_in_bounded_time() -> None:
    chain = [rule({f"m{n + 1}": 1}, f"m{n}") for n in range(5000)]
    assert cycles([rewrite("chain", "1", *chain)]) == {}
    pairs = [(f"m{n}", f"m{n ^ 1}") for n in range(1000)]
    found = cycles(rewrite(one, "1", rule({other: 1}, one)) for one, other in pairs)
    assert 2 <= len(found) < 100
    assert found["m0"] == "m0 to m1 to m0"


@cases("rules, fault", {
    "no rule": ([], "spec.rules is empty"),
    "no target": ([{"targets": []}], "no target has a weight above 0"),
    "no weight": ([rule({"v": 0}, "m")], "no target has a weight above 0"),
    "a target without a name": ([rule({"": 1}, "m")], "is no model's name"),
    "a model without a name": ([rule({"v": 1}, " ")], "is no model's name"),
    "a negative weight": ([rule({"v": -1}, "m")], "weight -1"),
    "an unknown match": ([rule({"v": 1}, "m", kind="Regex")], "model type Regex is not supported"),
    "a valid rule": ([rule({"v": 1}, "m")], ""),
})  # fmt: skip
def test_the_error_names_the_fault_of_an_unusable_rewrite(rules: list[dict[str, Any]], fault: str) -> None:
    found = rewrite_fault(rewrite("r", "1", *rules))
    assert fault in found
    assert bool(found) == bool(fault)


def test_the_priority_of_an_objective_must_be_an_int32() -> None:
    assert objective_fault(objective("o", 2**31)) == "spec.priority is no int32"
    assert objective_fault(objective("o", -(2**31))) == ""


class ObjectsOfTwoPools:
    """An API server with objectives of pool `own`, and 100 objectives of two missing pools. Reads of pools
    and writes of conditions wait for the event `answers`."""

    namespace = "models"

    def __init__(self) -> None:
        self.asked = asyncio.Queue[str]()
        self.answers = asyncio.Event()
        self.written = asyncio.Queue[str]()
        self.failures: list[KubernetesFault] = []

    async def get(self, path: str, params: Mapping[str, str]) -> bytes:
        if path.endswith("/inferencepools"):
            self.asked.put_nowait(params["fieldSelector"])
            await self.answers.wait()
            return b'{"items": []}'

        def item(name: str, priority: int, pool: str, **group: str) -> dict[str, Any]:
            spec = {"priority": priority, "poolRef": {"name": pool, **group}}
            return {"metadata": {"name": name}, "spec": spec}

        items = []
        if path.endswith("/inferenceobjectives"):
            newer, others = "llm-d.ai" in path, {"group": "inference.networking.x-k8s.io"}
            if newer:
                items = [item("own", 7, "own"), *(item(f"o{n}", 7, f"gone-{n % 2}") for n in range(100))]
            items += [
                item("both", 2**31 if newer else 5, "own"),  # exists in both API groups, invalid in the newer
                # These two objectives name pools of another API group, which have another picker.
                item("of-others", 9, "own", **others),
                item("also-of-others", 9, "gone-2", **others),
                item("unnamed", 8, "own", group=""),  # an empty group means the API's default group
            ]
        return msgspec.json.encode({"metadata": {"resourceVersion": "1"}, "items": items})

    async def lines(self, *_: object) -> AsyncGenerator[bytes, None]:
        yield b""
        await asyncio.Event().wait()

    async def apply_status(self, path: str, *_: object, **__: object) -> None:
        await self.answers.wait()
        self.written.put_nowait(path)
        if self.failures:
            raise self.failures.pop()

    async def __aenter__(self) -> "ObjectsOfTwoPools":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("publishes", [False, True], ids=["reading only", "writing conditions"])
async def test_objects_of_this_pool_take_effect_before_other_pools_have_been_read(publishes: bool) -> None:
    server, reported = ObjectsOfTwoPools(), asyncio.Queue[LiveObjects]()
    followed = InferenceObjects(
        "own", None, fleet="test", report=lambda *found: reported.put_nowait(LiveObjects(*found)),
        publishes=lambda: publishes, api=lambda: cast(Api, server),
    )  # fmt: skip
    async with running(followed.run()), asyncio.timeout(10):
        while (await reported.get()).priorities != {"own": 7, "unnamed": 8}:
            pass
        server.answers.set()
        asked = sorted([await server.asked.get() for _ in range(2)])
        for _ in range(2):  # each missing pool is read from the API only once
            followed._changed.set()
            await reported.get()
    assert asked == ["metadata.name=gone-0", "metadata.name=gone-1"]
    assert server.asked.empty()


async def test_a_condition_is_written_again_after_a_failed_call_although_no_object_changes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(followed_objects, "_RETRY_S", 0.01)
    server = ObjectsOfTwoPools()
    server.answers.set()
    server.failures = [KubernetesFault(403, "no right")] * 3
    followed = InferenceObjects(
        "own", None, fleet="test", report=lambda *_: None, publishes=lambda: True,
        api=lambda: cast(Api, server),
    )  # fmt: skip
    async with running(followed.run()), asyncio.timeout(10):
        failed = await server.written.get()
        while await server.written.get() != failed:
            pass
        await until(lambda: not server.failures)
    told = [line for line in caplog.messages if "cannot write" in line]
    assert told == ["cannot write conditions, such as that of inferenceobjectives own: 403: no right"]
