"""Watches a pool's InferenceObjectives and InferenceModelRewrites in the Kubernetes API server.

A request that names an objective gets the objective's priority, any int32 (bands.py). A rewrite replaces a
request's model by other models, split by weights (traffic_split.py). Objectives and rewrites exist in two
API groups; an object in the newer group takes precedence. Each replica logs objects that it cannot use; the
fleet's leader also writes a condition into each object's status, unless another fleet wrote it first.
"""

import asyncio
import datetime
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final, NamedTuple

import msgspec
from xxhash import xxh64_hexdigest

from picker_fleet.background import keep
from picker_fleet.domain.units import has_control
from picker_fleet.ingress.traffic_split import Split
from picker_kubernetes.api import (
    CONFLICT,
    Api,
    Collection,
    KubernetesFault,
    Metadata,
    Reflector,
)

_log = logging.getLogger(__name__)

GROUPS: Final = ("llm-d.ai", "inference.networking.x-k8s.io")  # objects in the first group take precedence
_SETTLE_S = 0.05  # seconds to wait after a change, since changes arrive in bursts
_LONGEST_NAME = 256  # maximum bytes of an objective's name
_MOST_WEIGHT = 1_000_000
POOL_GROUP: Final = "inference.networking.k8s.io"
# The reason in an object's condition if its pool does not exist; a fleet that serves the pool replaces it.
_NO_POOL = "PoolNotFound"
_RETRY_S = 30.0  # seconds until a failed call for a condition is repeated
_TAKE_OVER_S = 30.0  # seconds for a condition's owner to update it for an object's new version
_WRITE_S = 1.0  # seconds for writing conditions while changes wait; one slow API call takes up to 10 s
_MOST_CYCLES = 8  # maximum cycles to find; finding one among a thousand rewrites takes about 2 ms


class _PoolRef(msgspec.Struct, frozen=True):
    name: str = ""
    kind: str = "InferencePool"
    group: str = POOL_GROUP

    @property
    def is_known(self) -> bool:
        """Whether the referenced pool is in the API group `POOL_GROUP`; an empty group means the same."""
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
    """The fields of an InferenceObjective that the picker reads."""

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
    """The fields of an InferenceModelRewrite that the picker reads."""

    metadata: Metadata
    spec: _RewriteSpec = _RewriteSpec()
    status: _Status = _Status()


class _Names(msgspec.Struct):
    """A list that the API returns; the picker uses only the number of its items."""

    items: list[msgspec.Raw] | None = None


@dataclass(frozen=True, slots=True)
class LiveObjects:
    """The priorities and splits that objects define. `anything` is the split for models without a rule."""

    priorities: Mapping[str, int] = field(default_factory=dict)  # objective's name -> priority
    splits: Mapping[str, Split] = field(default_factory=dict)  # model -> split
    anything: Split | None = None


def objective_fault(objective: Objective) -> str:
    """The reason why an objective of this pool cannot be used; '' if it is usable."""
    if len(objective.metadata.name.encode()) > _LONGEST_NAME:
        return "its name is too long"
    return "" if -(2**31) <= objective.spec.priority < 2**31 else "spec.priority is no int32"


def rewrite_fault(rewrite: Rewrite) -> str:
    """The reason why a rewrite of this pool cannot be used; '' if it is usable."""
    if not rewrite.spec.rules:
        return "spec.rules is empty: nothing is rewritten"
    for number, rule in enumerate(rewrite.spec.rules):
        where = f"spec.rules[{number}]"
        for match in rule.matches or ():
            if match.model.type != "Exact":
                return f"{where}.matches: model type {match.model.type} is not supported; use Exact"
            if not _is_model(match.model.value):
                return f"{where}.matches: {match.model.value[:60]!r} is no model's name"
        targets = rule.targets or ()
        for target in targets:
            if not _is_model(target.model_rewrite):
                return f"{where}.targets: {target.model_rewrite[:60]!r} is no model's name"
            if not 0 <= target.weight <= _MOST_WEIGHT:
                return f"{where}.targets: weight {target.weight} is not from 0 to {_MOST_WEIGHT}"
        if not any(target.weight for target in targets):
            return f"{where}.targets: no target has a weight above 0"
    return ""


def cycles(rewrites: Iterable[Rewrite]) -> dict[str, str]:
    """Find rewrites whose targets lead back to a matched model by way of other rules. Maps each rewrite's
    name to the models in its cycle. The fleet still applies rewrites in a cycle: it rewrites a request's
    model only once. Finds at most `_MOST_CYCLES` cycles."""
    rewrites = list(rewrites)
    targets = {
        model: [name for name in dict.fromkeys(split.names) if name != model]  # a rule may name its own model
        for model, split in live_objects((), rewrites).splits.items()
    }
    found: dict[str, str] = {}
    for _ in range(_MOST_CYCLES):
        try:
            TopologicalSorter(targets).prepare()
        except CycleError as fault:
            cycle: list[str] = fault.args[1][::-1]  # after each model comes one of its rewrite targets
        else:
            break
        targets[cycle[0]].remove(cycle[1])  # break this cycle, so that the next one can be found
        models = frozenset(cycle)
        for rewrite in rewrites:
            matches = (match.model.value for rule in rewrite.spec.rules or () for match in rule.matches or ())
            if not models.isdisjoint(matches):
                found.setdefault(rewrite.metadata.name, " to ".join(cycle)[:_LONGEST_NAME])
    return found


def _is_model(name: str) -> bool:
    return bool(name.strip()) and len(name.encode()) <= _LONGEST_NAME and not has_control(name)


def live_objects(objectives: Iterable[Objective], rewrites: Iterable[Rewrite]) -> LiveObjects:
    """Compute priorities and splits from usable objects. If two rules match one model, the older object's
    rule applies; of equally old objects, the one whose name sorts first; in one object, the first rule."""
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


class _Kind(NamedTuple):
    """A kind of object: objectives or rewrites. `condition` is the type of their status condition."""

    name: str
    type: type[Objective] | type[Rewrite]
    condition: str
    fault_of: Callable[[Any], str]


_KINDS: Final = (
    _Kind("InferenceObjective", Objective, "Ready", objective_fault),
    _Kind("InferenceModelRewrite", Rewrite, "Accepted", rewrite_fault),
)


class _Sent(NamedTuple):
    """A condition sent for an object created at `created`. `refused`: another manager owns the condition."""

    created: str
    condition: _Condition
    at_s: float
    refused: bool


@dataclass(slots=True)
class _Followed:
    """An object in the collection at `path`. `fault` says why the object cannot be used; `remark` is the last
    logged message about it. `judged` has the object's generation and the other pool that it named when this
    pool was last looked up."""

    path: str
    kind: _Kind
    item: Objective | Rewrite
    fault: str = ""
    remark: str = ""
    judged: tuple[int, str] | None = None
    sent: _Sent | None = None  # the condition last sent for the object

    @property
    def name(self) -> str:
        return self.item.metadata.name

    def log(self, what: str, remark: str) -> None:
        # `OneASecond` limits the lines of each template, so the template contains the object's name.
        _log.warning(f"{self.kind.name.lower()}s {self.name} %s: %s", what, remark)


class InferenceObjects:
    """Watches the objectives and rewrites of `pool`, and calls `report` with the fields of LiveObjects after
    each change.

    `publishes` returns whether this replica writes conditions. The text `fleet` is the same in all replicas
    of a fleet and, together with their namespace, unique to the fleet.
    """

    def __init__(
        self,
        pool: str,
        namespace: str | None,
        *,
        fleet: str,
        report: Callable[[Mapping[str, int], Mapping[str, Split], Split | None], object],
        publishes: Callable[[], bool],
        api: Callable[[], Api] = Api.of_environment,
    ) -> None:
        self._pool, self._namespace = pool, namespace
        self._report, self._publishes, self._api_of = report, publishes, api
        self._changed = asyncio.Event()
        self._retry: asyncio.TimerHandle | None = None
        self._unwritten: int | None = None  # the code of the last call for a condition, if it failed
        self._known: dict[tuple[str, str], _Followed] = {}  # (collection's path, object's name) -> object
        self._pools_path = ""
        self._fleet, self._manager = fleet, ""

    async def run(self) -> None:
        """Watch until cancelled. Raises StartupError if there are no credentials for an API server."""
        async with self._api_of() as api, asyncio.TaskGroup() as tasks:
            namespace = self._namespace or api.namespace
            self._pools_path = f"/apis/{POOL_GROUP}/v1/namespaces/{namespace}/inferencepools"
            self._manager = f"picker-fleet-{xxh64_hexdigest(f'{api.namespace} {self._fleet}'.encode())}"
            reflectors: list[tuple[str, _Kind, Reflector[Any]]] = []
            for group, kind in itertools.product(GROUPS, _KINDS):
                path = f"/apis/{group}/v1alpha2/namespaces/{namespace}/{kind.name.lower()}s"
                what = Collection(f"{kind.name}s of {group}", path, optional=True)
                reflector: Reflector[Any] = Reflector(api, what, kind.type, self._changed.set)
                reflectors.append((path, kind, reflector))
                tasks.create_task(keep("kubernetes-watch", reflector.run))
            while True:
                await self._changed.wait()
                await asyncio.sleep(_SETTLE_S)  # wait for further changes, which arrive in bursts
                self._changed.clear()
                self._take(reflectors)
                await self._write_conditions(api)

    def _take(self, reflectors: Sequence[tuple[str, _Kind, Reflector[Any]]]) -> None:
        """Report the priorities and traffic splits that objects define, and log objects' new faults."""
        known: dict[tuple[str, str], _Followed] = {}
        for path, kind, reflector in reflectors:
            for name, item in reflector.items.items():
                each = known[path, name] = self._known.get((path, name)) or _Followed(path, kind, item)
                each.item = item
        self._known = known
        own = self._own()
        for each in own:
            each.fault = self._fault_of(each)
        usable = [each.item for each in own if not each.fault]
        rewrites = [item for item in usable if isinstance(item, Rewrite)]
        in_cycles = cycles(rewrites)
        for each in own:
            cycle = in_cycles.get(each.name, "") if each.kind.type is Rewrite else ""
            remark = each.fault or (
                cycle and f"rules form a cycle ({cycle}); targets are not rewritten again"
            )
            if remark and remark != each.remark:
                each.log("is not used" if each.fault else "is used", remark)
            each.remark = remark
        found = live_objects((item for item in usable if isinstance(item, Objective)), rewrites)
        self._report(found.priorities, found.splits, found.anything)

    def _fault_of(self, each: _Followed) -> str:
        kind = each.item.spec.pool_ref.kind
        if kind != "InferencePool":
            return f"spec.poolRef.kind is {kind[:60]!r}, not InferencePool"
        return each.kind.fault_of(each.item)

    def _own(self) -> list[_Followed]:
        """This pool's objects; of two objects of the same name and kind, the one in the first API group."""
        found: dict[tuple[str, str], _Followed] = {}
        for each in self._known.values():
            found.setdefault((each.kind.name, each.name), each)
        references = ((each, each.item.spec.pool_ref) for each in found.values())
        return [each for each, pool in references if pool.is_known and pool.name == self._pool]

    async def _write_conditions(self, api: Api) -> None:
        """Write the conditions of this pool's objects, then of objects whose pool does not exist. Stop after
        `_WRITE_S` seconds if objects have changed meanwhile."""
        clock = asyncio.get_running_loop().time
        until_s = clock() + _WRITE_S
        for each in self._own() if self._publishes() else ():
            reason = "Invalid" if each.fault else "Cycle" if each.remark else "Accepted"
            await self._write(api, each, not each.fault, reason, each.remark or "in use")
            if self._changed.is_set() and clock() > until_s:
                return
        await self._judge_of_others(api)

    def _retry_later(self) -> None:
        """Write conditions again after `_RETRY_S` seconds, even if no object changes."""
        loop = asyncio.get_running_loop()
        if self._retry is None or self._retry.when() <= loop.time():
            self._retry = loop.call_later(_RETRY_S, self._changed.set)

    async def _judge_of_others(self, api: Api) -> None:
        """Write a condition to objects whose pool does not exist; the picker of an existing pool writes its
        own. Check each version of an object once: if its pool is created later, its picker takes over."""
        exists: dict[str, bool | None] = {}  # pool -> whether it exists; None if the API did not answer
        for each in self._known.values():
            reference, generation = each.item.spec.pool_ref, each.item.metadata.generation
            pool = reference.name
            if not reference.is_known:
                continue  # the pool belongs to an API group that this picker does not know
            if pool == self._pool or each.judged == (generation, pool):
                continue
            if pool not in exists:
                try:
                    body = await api.get(self._pools_path, {"fieldSelector": f"metadata.name={pool}"})
                    exists[pool] = bool(msgspec.json.decode(body, type=_Names).items)
                except (KubernetesFault, msgspec.MsgspecError):
                    exists[pool] = None
            if exists[pool] is None:
                self._retry_later()
                continue
            each.judged = generation, pool
            if exists[pool]:
                continue
            fault = f"spec.poolRef names InferencePool {pool[:60]!r}, which does not exist"
            each.log("is not used", fault)
            if self._publishes():
                await self._write(api, each, False, _NO_POOL, fault)

    async def _write(self, api: Api, each: _Followed, is_used: bool, reason: str, message: str) -> None:
        """Write the object's condition, unless another fleet owns the condition.

        Two fleets that disagree must not replace each other's condition for ever. So each fleet writes a
        condition once; then it leaves the condition to its owner, the field manager of the first fleet. If
        the owner ignores a new version of the object for `_TAKE_OVER_S` seconds, this fleet takes over.
        """
        metadata, status = each.item.metadata, "True" if is_used else "False"
        wanted = _Condition(each.kind.condition, status, reason, message, metadata.generation)
        conditions = each.item.status.conditions or ()
        present = next((one for one in conditions if one.type == wanted.type), _Condition())
        if msgspec.structs.replace(present, last_transition_time="") == wanted:
            return
        force = present.reason == _NO_POOL
        sent, loop = each.sent, asyncio.get_running_loop()
        if sent is not None and (sent.created, sent.condition) == (metadata.creation_timestamp, wanted):
            is_late = present.observed_generation < metadata.generation
            if not (sent.refused and is_late and loop.time() >= sent.at_s + _TAKE_OVER_S):
                return
            force = True
        since = present.last_transition_time if present.status == wanted.status else ""
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        tree = {
            "apiVersion": "/".join(each.path.split("/")[2:4]),
            "kind": each.kind.name,
            "metadata": {"name": metadata.name},
            "status": {"conditions": [msgspec.structs.replace(wanted, last_transition_time=since or now)]},
        }
        refused = False
        try:
            await api.apply_status(f"{each.path}/{metadata.name}", tree, manager=self._manager, force=force)
        except KubernetesFault as fault:
            what = f"{each.kind.name.lower()}s {metadata.name}"
            if fault.code != CONFLICT:
                if fault.code != self._unwritten:
                    _log.warning("cannot write conditions, such as that of %s: %s", what, fault)
                self._unwritten = fault.code
                self._retry_later()
                return
            _log.info("another field manager owns the condition of %s, which stays: %s", what, fault)
            loop.call_later(_TAKE_OVER_S, self._changed.set)
            refused = True
        self._unwritten = None
        each.sent = _Sent(metadata.creation_timestamp, wanted, loop.time(), refused)
