"""InferenceObjectives and InferenceModelRewrites of the API server, followed live for the pool of discovery.

Requests that name an objective have its priority, any int32 (bands.py). A rewrite sends requests for a model
as other models, split by weights (traffic_split.py). Both are taken from two API groups, the newer one before
the older. What cannot be used is logged, and the replica that publishes writes a condition into its status,
which it leaves to another fleet that has written it first.
"""

import asyncio
import contextlib
import datetime
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec
from xxhash import xxh64_hexdigest

from picker_fleet.endpoints.kubernetes_api import (
    CONFLICT,
    Api,
    Collection,
    Kind,
    KubernetesFault,
    Metadata,
    Reflector,
)
from picker_fleet.traffic_split import Split
from picker_fleet.units import has_control

_log = logging.getLogger(__name__)

GROUPS: Final = ("llm-d.ai", "inference.networking.x-k8s.io")  # the first that has an object of a name counts
_SETTLE_S = 0.05
_LONGEST_NAME = 256
_MOST_WEIGHT = 1_000_000
POOL_GROUP: Final = "inference.networking.k8s.io"
# A condition of an object whose pool is not there: whoever serves the pool once it is there replaces it.
_NO_POOL = "PoolNotFound"
_TAKE_OVER_S = 30.0  # how long the owner of a condition has to judge a new version of its object
_MOST_STEPS = 50_000  # of a search for cycles: some 20 ms


class _PoolRef(msgspec.Struct, frozen=True):
    name: str = ""
    kind: str = "InferencePool"
    group: str = POOL_GROUP

    @property
    def is_known(self) -> bool:
        """Whether it names a pool of the group that is followed. The API takes an empty group, too."""
        return self.group in ("", POOL_GROUP)


class _Condition(msgspec.Struct, frozen=True, rename="camel"):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    observed_generation: int = 0
    last_transition_time: str = ""


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


class _Names(msgspec.Struct):
    """A list, as far as it says whether there is anything."""

    items: list[msgspec.Raw] | None = None


@dataclass(frozen=True, slots=True)
class LiveObjects:
    """What the objects amount to. `anything` is the split of models that no rule names."""

    priorities: Mapping[str, int] = field(default_factory=dict)  # by objective
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


def cycles(rewrites: Iterable[Rewrite]) -> dict[str, str]:
    """Rewrites with a model whose targets lead back to it over other rules, by name, and the models on the
    way. They are in use all the same: a target is not rewritten again. Of thousands that lead to each other
    the first are named: no more than `_MOST_STEPS` are looked at."""
    rewrites = list(rewrites)
    targets = _without_ends(
        {
            model: [name for name in split.names if name != model]  # a share that stays as it is is no cycle
            for model, split in live_objects((), rewrites).splits.items()
        }
    )
    found: dict[str, str] = {}
    steps = 0
    for rewrite in rewrites:
        for match in (match for rule in rewrite.spec.rules or () for match in rule.matches or ()):
            if match.model.value not in targets or rewrite.metadata.name in found or steps > _MOST_STEPS:
                continue
            way, taken = _way_back(match.model.value, targets)
            steps += taken
            if way:
                found[rewrite.metadata.name] = " to ".join(way)[:_LONGEST_NAME]
    return found


def _without_ends(targets: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """`targets` without the models that lead to none of these, of which there may be long chains."""
    kept = {model: [name for name in names if name in targets] for model, names in targets.items()}
    left = {model: len(names) for model, names in kept.items()}
    sources: dict[str, list[str]] = {}
    for model, names in kept.items():
        for name in names:
            sources.setdefault(name, []).append(model)
    ends = [model for model, count in left.items() if not count]
    while ends:
        end = ends.pop()
        del kept[end]
        for source in sources.get(end, ()):
            left[source] -= 1
            if not left[source]:
                ends.append(source)
    return kept


def _way_back(model: str, targets: Mapping[str, Sequence[str]]) -> tuple[list[str], int]:
    """The models from `model` over its targets to itself, none if they do not lead there; and how many were
    looked at."""
    came_from, open_ends = {model: ""}, [model]
    while open_ends:
        here = open_ends.pop()
        for target in targets.get(here, ()):
            if target == model:
                way = [model]
                while here:
                    way.append(here)
                    here = came_from[here]
                return way[::-1], len(came_from)
            if target not in came_from:
                came_from[target] = here
                open_ends.append(target)
    return [], len(came_from)


def _is_model(name: str) -> bool:
    return bool(name.strip()) and len(name.encode()) <= _LONGEST_NAME and not has_control(name)


def live_objects(objectives: Iterable[Objective], rewrites: Iterable[Rewrite]) -> LiveObjects:
    """What usable objects amount to. Of two rules for one model the older object's counts, and within one
    object the first; of equally old ones that with the lesser name."""
    priorities = {each.metadata.name: each.spec.priority for each in objectives}
    splits: dict[str, Split] = {}
    anything: Split | None = None
    for rewrite in sorted(rewrites, key=lambda one: (one.metadata.creation_timestamp, one.metadata.name)):
        for rule in rewrite.spec.rules or ():
            split = Split.of((target.model_rewrite, target.weight) for target in rule.targets or ())
            for match in rule.matches or ():
                splits.setdefault(match.model.value, split)
            if not rule.matches and anything is None:
                anything = split
    return LiveObjects(priorities, splits, anything)


def _of_first_group(followed: Sequence[tuple[str, Reflector[Kind]]]) -> dict[str, tuple[str, Kind]]:
    """Each object by name, with its path, of the first group that has one of that name."""
    found: dict[str, tuple[str, Kind]] = {}
    for path, reflector in followed:
        for name, item in reflector.items.items():
            found.setdefault(name, (path, item))
    return found


class _Sent(NamedTuple):
    """A condition that was sent for the object of this age; `refused`: another field manager owns it."""

    created: str
    condition: _Condition
    at_s: float
    refused: bool


class InferenceObjects:
    """Follows the objects of the pool `pool`; `report` is called with what they amount to after each change.

    `publishes` says whether this replica writes conditions. `fleet` is the same text in all replicas of the
    fleet and, with their namespace, in no other.
    """

    def __init__(
        self,
        pool: str,
        namespace: str | None,
        *,
        fleet: str,
        report: Callable[[LiveObjects], object],
        publishes: Callable[[], bool],
        api: Callable[[], Api] = Api.of_environment,
    ) -> None:
        self._pool, self._namespace = pool, namespace
        self._report, self._publishes, self._api_of = report, publishes, api
        self._changed = asyncio.Event()
        self._remarks: dict[tuple[str, str], str] = {}
        self._judged: dict[tuple[str, str], tuple[int, str]] = {}  # objects of other pools: generation, pool
        self._pools_path = ""
        self._fleet, self._manager = fleet, ""
        self._sent: dict[tuple[str, str], _Sent] = {}  # the last of each object

    async def run(self) -> None:
        """Follow until cancelled. Raises StartupError as KubernetesSource does."""
        api = self._api_of()
        namespace = self._namespace or api.namespace
        self._pools_path = f"/apis/{POOL_GROUP}/v1/namespaces/{namespace}/inferencepools"
        self._manager = f"picker-fleet-{xxh64_hexdigest(f'{api.namespace} {self._fleet}'.encode())}"
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
                        for name, (path, objective) in _of_first_group(objectives).items()
                        if await self._is_usable(api, path, "Ready", objective, objective_fault)
                    }
                    named = _of_first_group(rewrites)
                    in_cycles = cycles(
                        rewrite
                        for _, rewrite in named.values()
                        if self._is_own(rewrite) and not rewrite_fault(rewrite)
                    )
                    rules = {
                        name: rewrite
                        for name, (path, rewrite) in named.items()
                        if await self._is_usable(
                            api, path, "Accepted", rewrite, rewrite_fault, in_cycles.get(name, "")
                        )
                    }
                    self._report(live_objects(usable.values(), rules.values()))
                    present = {
                        (path, name): (condition, item)
                        for condition, followed in (("Ready", objectives), ("Accepted", rewrites))
                        for path, reflector in followed
                        for name, item in reflector.items.items()
                    }
                    self._forget_gone(present.keys())
                    await self._judge_of_others(api, present)
        finally:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(1):
                    await api.close()

    def _forget_gone(self, present: Set[tuple[str, str]]) -> None:
        for gone in self._remarks.keys() - present:
            del self._remarks[gone]
        for gone in self._judged.keys() - present:
            del self._judged[gone]
        for gone in self._sent.keys() - present:
            del self._sent[gone]

    def _is_own(self, item: Objective | Rewrite) -> bool:
        reference = item.spec.pool_ref
        return reference.is_known and reference.name == self._pool

    async def _is_usable(
        self,
        api: Api,
        path: str,
        condition: str,
        item: Objective | Rewrite,
        fault_of: Callable[..., str],
        cycle: str = "",
    ) -> bool:
        """Whether `item` counts here. A new fault is logged, and its condition written."""
        reference, name = item.spec.pool_ref, item.metadata.name
        if not self._is_own(item):
            return False
        fault = (
            fault_of(item)
            if reference.kind == "InferencePool"
            else (f"spec.poolRef.kind is {reference.kind[:60]!r}; InferencePool is known")
        )
        remark = fault or (cycle and f"{cycle} is a cycle: a target is not rewritten again")
        if remark != self._remarks.get((path, name), ""):
            self._remarks[path, name] = remark
            if remark:
                what = "is not used" if fault else "is used"
                _log.warning("%s %s %s: %s", path.rsplit("/", 1)[1], name, what, remark)
        if self._publishes():
            reason = "Invalid" if fault else "Cycle" if cycle else "Accepted"
            wanted = _Condition(
                type=condition,
                status="False" if fault else "True",
                reason=reason,
                message=remark or "in use",
                observed_generation=item.metadata.generation,
            )
            await self._write(api, path, item, wanted)
        return not fault

    async def _judge_of_others(
        self, api: Api, present: Mapping[tuple[str, str], tuple[str, Objective | Rewrite]]
    ) -> None:
        """Report faults of objects of other pools if their pool does not exist; else its own picker does it.
        Each version is looked at once: the pool may be created later, with a picker of its own."""
        exists: dict[str, bool | None] = {}  # each pool is asked for once; None: no answer
        for (path, name), (condition, item) in present.items():
            pool, generation = item.spec.pool_ref.name, item.metadata.generation
            if not item.spec.pool_ref.is_known:
                continue  # a pool of another kind of picker
            if pool == self._pool or self._judged.get((path, name)) == (generation, pool):
                continue
            if pool not in exists:
                try:
                    body = await api.get(self._pools_path, {"fieldSelector": f"metadata.name={pool}"})
                    exists[pool] = bool(msgspec.json.decode(body, type=_Names).items)
                except (KubernetesFault, msgspec.MsgspecError):
                    exists[pool] = None
            if exists[pool] is None:
                continue  # judged with the next change
            self._judged[path, name] = generation, pool
            if exists[pool]:
                continue
            fault = f"spec.poolRef names InferencePool {pool[:60]!r}, which is not there"
            _log.warning("%s %s is not used: %s", path.rsplit("/", 1)[1], name, fault)
            if self._publishes():
                wanted = _Condition(condition, "False", _NO_POOL, fault, generation)
                await self._write(api, path, item, wanted)

    async def _write(self, api: Api, path: str, item: Objective | Rewrite, wanted: _Condition) -> None:
        """Have the object's condition be `wanted`, unless it is another fleet's.

        Two writers that disagree must not replace each other's condition for ever. So each writes a judgement
        once, and who comes second leaves the condition to its owner, the field manager of the first one. An
        owner that has not judged a new version of the object for a while has gone: its condition is taken.
        """
        metadata = item.metadata
        present = next(
            (each for each in item.status.conditions or () if each.type == wanted.type), _Condition()
        )
        if msgspec.structs.replace(present, last_transition_time="") == wanted:
            return
        force = present.reason == _NO_POOL
        sent, loop = self._sent.get((path, metadata.name)), asyncio.get_running_loop()
        if sent is not None and (sent.created, sent.condition) == (metadata.creation_timestamp, wanted):
            is_late = present.observed_generation < metadata.generation
            if not (sent.refused and is_late and loop.time() >= sent.at_s + _TAKE_OVER_S):
                return
            force = True
        since = present.last_transition_time if present.status == wanted.status else ""
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        tree = {
            "apiVersion": "/".join(path.split("/")[2:4]),
            "kind": f"Inference{'Objective' if isinstance(item, Objective) else 'ModelRewrite'}",
            "metadata": {"name": metadata.name},
            "status": {"conditions": [msgspec.structs.replace(wanted, last_transition_time=since or now)]},
        }
        refused = False
        try:
            await api.apply_status(f"{path}/{metadata.name}", tree, manager=self._manager, force=force)
        except KubernetesFault as fault:
            if fault.code != CONFLICT:
                return  # an API that is away is watched again, and tells what it has
            what = path.rsplit("/", 1)[1]
            _log.info("the condition of %s %s is left to another writer: %s", what, metadata.name, fault)
            loop.call_later(_TAKE_OVER_S, self._changed.set)
            refused = True
        self._sent[path, metadata.name] = _Sent(metadata.creation_timestamp, wanted, loop.time(), refused)
