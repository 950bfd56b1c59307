"""InferenceObjectives and InferenceModelRewrites of the API server, followed live for the pool of discovery.

An objective's priority decides the band of the requests that name it: positive is Critical, 0 Default,
negative Sheddable. A rewrite sends requests for a model as other models, split by weights; which one a
request gets follows from its id. Both are taken from two API groups, the newer one before the older. What
cannot be used is logged, and the replica that publishes writes a condition into its status.
"""

import asyncio
import contextlib
import datetime
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from picker_fleet.endpoints.kubernetes_api import Api, Collection, KubernetesFault, Metadata, Reflector
from picker_fleet.request import Band
from picker_fleet.traffic_split import Split
from picker_fleet.units import has_control

_log = logging.getLogger(__name__)

GROUPS: Final = ("llm-d.ai", "inference.networking.x-k8s.io")  # the first that has an object of a name counts
_SETTLE_S = 0.05
_LONGEST_NAME = 256
_MOST_WEIGHT = 1_000_000


class _PoolRef(msgspec.Struct, frozen=True):
    name: str = ""
    kind: str = "InferencePool"
    group: str = "inference.networking.k8s.io"


class _Condition(msgspec.Struct, frozen=True, rename="camel"):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    observed_generation: int = 0


class _Status(msgspec.Struct, frozen=True):
    conditions: list[_Condition] | None = None


class _ObjectiveSpec(msgspec.Struct, frozen=True, rename="camel"):
    pool_ref: _PoolRef = _PoolRef()
    priority: int = 0


class Objective(msgspec.Struct, frozen=True):
    """An InferenceObjective, as far as it is read."""

    metadata: Metadata
    spec: _ObjectiveSpec = _ObjectiveSpec()
    status: _Status = _Status()


class _ModelMatch(msgspec.Struct, frozen=True):
    value: str = ""
    type: str = "Exact"


class _Match(msgspec.Struct, frozen=True):
    model: _ModelMatch = _ModelMatch()


class _Target(msgspec.Struct, frozen=True, rename="camel"):
    model_rewrite: str = ""
    weight: int = 1


class _Rule(msgspec.Struct, frozen=True):
    matches: list[_Match] | None = None
    targets: list[_Target] | None = None


class _RewriteSpec(msgspec.Struct, frozen=True, rename="camel"):
    pool_ref: _PoolRef = _PoolRef()
    rules: list[_Rule] | None = None


class Rewrite(msgspec.Struct, frozen=True):
    """An InferenceModelRewrite, as far as it is read."""

    metadata: Metadata
    spec: _RewriteSpec = _RewriteSpec()
    status: _Status = _Status()


@dataclass(frozen=True, slots=True)
class LiveObjects:
    """What the objects amount to. `anything` is the split of models that no rule names."""

    bands: Mapping[str, Band] = field(default_factory=dict)
    splits: Mapping[str, Split] = field(default_factory=dict)
    anything: Split | None = None


def objective_fault(objective: Objective) -> str:
    """Why an objective of this pool cannot be used; '' if it can."""
    if len(objective.metadata.name.encode()) > _LONGEST_NAME:
        return "its name is too long"
    return "" if -(2**31) <= objective.spec.priority < 2**31 else "spec.priority is no int32"


def rewrite_fault(rewrite: Rewrite) -> str:
    """Why a rewrite of this pool cannot be used; '' if it can."""
    if not rewrite.spec.rules:
        return "spec.rules is empty: nothing is rewritten"
    for number, rule in enumerate(rewrite.spec.rules):
        where = f"spec.rules[{number}]"
        for match in rule.matches or ():
            if match.model.type != "Exact":
                return f"{where}.matches: model type {match.model.type} is unknown; Exact is"
            if not _is_model(match.model.value):
                return f"{where}.matches: {match.model.value[:60]!r} is no model's name"
        targets = rule.targets or ()
        for target in targets:
            if not _is_model(target.model_rewrite):
                return f"{where}.targets: {target.model_rewrite[:60]!r} is no model's name"
            if not 0 <= target.weight <= _MOST_WEIGHT:
                return f"{where}.targets: weight {target.weight} is not from 0 to {_MOST_WEIGHT}"
        if not any(target.weight for target in targets):
            return f"{where}.targets: no target has a weight above 0: nothing to rewrite to"
    return ""


def _is_model(name: str) -> bool:
    return bool(name.strip()) and len(name.encode()) <= _LONGEST_NAME and not has_control(name)


def live_objects(objectives: Iterable[Objective], rewrites: Iterable[Rewrite]) -> LiveObjects:
    """What usable objects amount to. Of two rules for one model the older object's counts, and within one
    object the first; of equally old ones that with the lesser name."""
    bands = {each.metadata.name: _band(each.spec.priority) for each in objectives}
    splits: dict[str, Split] = {}
    anything: Split | None = None
    for rewrite in sorted(rewrites, key=lambda one: (one.metadata.creation_timestamp, one.metadata.name)):
        for rule in rewrite.spec.rules or ():
            split = Split.of((target.model_rewrite, target.weight) for target in rule.targets or ())
            for match in rule.matches or ():
                splits.setdefault(match.model.value, split)
            if not rule.matches and anything is None:
                anything = split
    return LiveObjects(bands, splits, anything)


def _band(priority: int) -> Band:
    return Band.CRITICAL if priority > 0 else Band.DEFAULT if priority == 0 else Band.SHEDDABLE


class InferenceObjects:
    """Follows the objects of the pool `pool`; `report` is called with what they amount to after each change.

    `publishes` says whether this replica writes conditions.
    """

    def __init__(
        self,
        pool: str,
        namespace: str | None,
        *,
        report: Callable[[LiveObjects], object],
        publishes: Callable[[], bool],
        api: Callable[[], Api] = Api.of_environment,
    ) -> None:
        self._pool, self._namespace = pool, namespace
        self._report, self._publishes, self._api_of = report, publishes, api
        self._changed = asyncio.Event()
        self._faults: dict[tuple[str, str], str] = {}

    async def run(self) -> None:
        """Follow until cancelled. Raises StartupError as KubernetesSource does."""
        api = self._api_of()
        namespace = self._namespace or api.namespace
        try:
            async with asyncio.TaskGroup() as group:
                objectives: list[tuple[str, Reflector[Objective]]] = []
                rewrites: list[tuple[str, Reflector[Rewrite]]] = []
                for api_group in GROUPS:
                    base = f"/apis/{api_group}/v1alpha2/namespaces/{namespace}"
                    path = f"{base}/inferenceobjectives"
                    what = Collection(f"InferenceObjectives of {api_group}", path, optional=True)
                    objective = Reflector(api, what, Objective, self._changed.set)
                    objectives.append((path, objective))
                    path = f"{base}/inferencemodelrewrites"
                    what = Collection(f"InferenceModelRewrites of {api_group}", path, optional=True)
                    rewrite = Reflector(api, what, Rewrite, self._changed.set)
                    rewrites.append((path, rewrite))
                    group.create_task(objective.run())
                    group.create_task(rewrite.run())
                while True:
                    await self._changed.wait()
                    await asyncio.sleep(_SETTLE_S)  # many come together
                    self._changed.clear()
                    usable = {
                        name: objective
                        for path, reflector in reversed(objectives)
                        for name, objective in reflector.items.items()
                        if await self._is_usable(api, path, "Ready", objective, objective_fault)
                    }
                    rules = {
                        name: rewrite
                        for path, reflector in reversed(rewrites)
                        for name, rewrite in reflector.items.items()
                        if await self._is_usable(api, path, "Accepted", rewrite, rewrite_fault)
                    }
                    self._report(live_objects(usable.values(), rules.values()))
        finally:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(1):
                    await api.close()

    async def _is_usable(
        self,
        api: Api,
        path: str,
        condition: str,
        item: Objective | Rewrite,
        fault_of: Callable[..., str],
    ) -> bool:
        """Whether `item` counts here. A new fault is logged, and its condition written."""
        reference = item.spec.pool_ref
        if reference.name != self._pool or reference.kind != "InferencePool":
            return False  # of another pool, whose picker judges it
        name = item.metadata.name
        fault = fault_of(item)
        if fault != self._faults.get((path, name), ""):
            self._faults[path, name] = fault
            if fault:
                _log.warning("%s %s is not used: %s", path.rsplit("/", 1)[1], name, fault)
        if self._publishes():
            await self._write(api, f"{path}/{name}", condition, item, fault)
        return not fault

    async def _write(
        self, api: Api, path: str, condition: str, item: Objective | Rewrite, fault: str
    ) -> None:
        wanted = _Condition(
            type=condition,
            status="False" if fault else "True",
            reason="Invalid" if fault else "Accepted",
            message=fault or "in use",
            observed_generation=item.metadata.generation,
        )
        if wanted in (item.status.conditions or ()):
            return
        others = [
            msgspec.to_builtins(each) for each in item.status.conditions or () if each.type != condition
        ]
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        written = {**msgspec.to_builtins(wanted), "lastTransitionTime": now}
        with contextlib.suppress(
            KubernetesFault
        ):  # an API that is away is watched again, and tells what it has
            await api.patch_status(path, {"status": {"conditions": [*others, written]}})
