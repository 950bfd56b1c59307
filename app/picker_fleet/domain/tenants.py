"""Tenants as a tree, and their quotas: the section `tenants` of the configuration.

A request's flow is a path, such as `acme/search/key-17`; each prefix of the path is a node. A configured node
gives weight, limits and budget to the node of its path. A last `*` stands for every child without a node of
its own (`acme/*`), and a path of `*` alone for every node of its level (`*/*`). The scripts divide capacity
and charge requests by the tree's nodes (lua/lib/tenants.lua).
"""

import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from picker_fleet.domain.allowlist import is_custom
from picker_fleet.domain.sections import Section
from picker_fleet.domain.units import (
    LEAST_WEIGHT,
    MAX_NAME_BYTES,
    MOST_WEIGHT,
    FilePath,
    Name,
    has_control,
)

MAX_LEVELS: Final = 8
MAX_NODES: Final = 10_000
_ANY = "*"
_MOST = 1e12  # maximum amount of a limit; Lua's doubles add up a million of these amounts exactly

Unit = Literal["requests", "tokens", "prompt_tokens", "answer_tokens"]
_UNITS: Final[tuple[Unit, ...]] = ("requests", "tokens", "prompt_tokens", "answer_tokens")
_PER_MS: Final = {"1s": 1000, "1m": 60_000, "1h": 3_600_000, "1d": 86_400_000}
# Names of limits' periods by their milliseconds; `parallel` has no period. A budget's period is its name.
PERIODS: Final = {"0": "", **{str(ms): name for name, ms in _PER_MS.items()}}

# How many periods of the second kind, at most, a period of the first kind meets in the calendar.
_PERIODS_MET: Final = {
    ("week", "day"): 7,
    ("week", "month"): 2,
    ("month", "day"): 31,
    ("month", "week"): 6,
}

Amount = Annotated[int, Field(strict=True, gt=0, le=_MOST)]
Units = Annotated[float, Field(strict=True, gt=0, le=_MOST)]
UnitPrice = Annotated[float, Field(strict=True, ge=0, le=1e6)]  # cost units a token


class Limit(Section):
    """At most one unit's amount in each `per`, at most `burst` at once (a leaky bucket, ITU-T I.371)."""

    requests: Amount | None = None
    tokens: Amount | None = None  # the sum of prompt and answer tokens
    prompt_tokens: Amount | None = None
    answer_tokens: Amount | None = None
    per: Literal["1s", "1m", "1h", "1d"]
    burst: Amount | None = None  # null: the amount

    @model_validator(mode="after")
    def _one_unit(self) -> Self:
        named = [unit for unit in _UNITS if getattr(self, unit) is not None]
        if len(named) != 1:
            given = " and ".join(named) or "none"
            raise ValueError(f"a limit needs exactly one of {', '.join(_UNITS)}; it has {given}")
        return self

    def __str__(self) -> str:
        return f"{self.amount} {self.unit} per {self.per}"

    @property
    def unit(self) -> Unit:
        return next(unit for unit in _UNITS if getattr(self, unit) is not None)

    @property
    def amount(self) -> int:
        amount: int = getattr(self, self.unit)
        return amount

    @property
    def per_ms(self) -> int:
        return _PER_MS[self.per]

    @property
    def most_at_once(self) -> int:
        return self.amount if self.burst is None else self.burst


class Budget(Section):
    """At most `units` of cost in each calendar period (UTC; a week begins on Monday)."""

    units: Units
    period: Literal["day", "week", "month"]

    def __str__(self) -> str:
        return f"{self.units:.15g} budget units per {self.period}"


def is_never_reached(own: Limit | Budget, above: Limit | Budget) -> bool:
    """Whether requests reach the limit `above`, of a node above, before the limit `own` of a node."""
    match own, above:
        case Limit(), Limit():
            counts_all = above.unit == own.unit or (above.unit == "tokens" and own.unit != "requests")
            is_faster = own.amount * above.per_ms > above.amount * own.per_ms
            return counts_all and is_faster and own.most_at_once > above.most_at_once
        case Budget(), Budget():
            return own.units > above.units * _PERIODS_MET.get((own.period, above.period), 1)
    return False


class Node(Section):
    """The settings of one node, or of each node that a path with `*` stands for.

    `over_limit` says what happens beyond a limit: the request waits (`queue`), goes to the lowest band
    (`demote`), or is refused with 429 (`reject`).
    """

    path: str
    weight: Annotated[float, Field(strict=True, ge=LEAST_WEIGHT, le=MOST_WEIGHT)] = 1.0
    over_limit: Literal["queue", "demote", "reject"] = "queue"
    max_parallel_requests: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] | None = None
    limits: tuple[Limit, ...] = Field((), max_length=16)
    budget: Budget | None = None

    @model_validator(mode="after")
    def _each_limit_once(self) -> Self:
        kinds = [(limit.unit, limit.per) for limit in self.limits]
        for at, (unit, per) in enumerate(kinds):
            if (unit, per) in kinds[:at]:
                raise ValueError(f"{self.path[:60]}: two limits of {unit} per {per}")
        return self

    def limit(self, unit: str, per_ms: int) -> Limit | None:
        return next((each for each in self.limits if (each.unit, each.per_ms) == (unit, per_ms)), None)

    def bounds(self) -> tuple[Limit | Budget, ...]:
        return self.limits if self.budget is None else (*self.limits, self.budget)

    def amounts(self) -> dict[str, float]:
        """The amount of each limit and of the budget, by a name such as `tokens per 1m`."""
        found: dict[str, float] = {f"{each.unit} per {each.per}": each.amount for each in self.limits}
        if self.max_parallel_requests is not None:
            found["max_parallel_requests"] = self.max_parallel_requests
        if self.budget is not None:
            found[f"budget units per {self.budget.period}"] = self.budget.units
        return found

    def shared(self) -> str:
        """The node as JSON of the shared state (docs/redis-schema.md), without path and defaults. A
        configured weight is included even if it is 1, since it replaces the weight of a leaf's requests."""
        told: dict[str, object] = {}
        if "weight" in self.model_fields_set:
            told["weight"] = self.weight
        if self.over_limit != "queue":
            told["over_limit"] = self.over_limit
        if self.max_parallel_requests is not None:
            told["max_parallel"] = self.max_parallel_requests
        if self.limits:
            told["limits"] = [
                {"unit": each.unit, "amount": each.amount, "per_ms": each.per_ms, "burst": each.most_at_once}
                for each in self.limits
            ]
        if self.budget is not None:
            told["budget"] = {"units": self.budget.units, "period": self.budget.period}
        return json.dumps(told, separators=(",", ":"), sort_keys=True)

    @classmethod
    def of_shared(cls, path: str, text: str) -> "Node":
        """The node of `path` from the JSON that `shared` returns. Raises ValueError for malformed JSON."""
        told: dict[str, Any] = json.loads(text)
        pers = {per_ms: per for per, per_ms in _PER_MS.items()}
        if "limits" in told:
            told["limits"] = [
                {each["unit"]: each["amount"], "per": pers.get(each["per_ms"]), "burst": each["burst"]}
                for each in told["limits"]
            ]
        if "max_parallel" in told:
            told["max_parallel_requests"] = told.pop("max_parallel")
        return cls.model_validate({**told, "path": path})


class Price(Section):
    """The price of a model's token, in cost units. `cached` is the price of prompt tokens from a cache."""

    prompt: UnitPrice = 1.0
    cached: UnitPrice | None = None  # null: as `prompt`
    answer: UnitPrice = 1.0

    def shared(self) -> dict[str, float]:
        cached = self.prompt if self.cached is None else self.cached
        return {"prompt": self.prompt, "cached": cached, "answer": self.answer}


def _few_nodes(given: object) -> object:
    """Return `given`, unless it has too many nodes; called before each node is checked, which takes minutes
    for a million."""
    if isinstance(given, list | tuple) and len(given) > MAX_NODES:
        node = given[MAX_NODES]
        path = node.get("path") if isinstance(node, Mapping) else getattr(node, "path", None)
        raise ValueError(f"{len(given)} nodes; at most {MAX_NODES} (the next would be {str(path)[:60]})")
    return given


class Tenants(Section):
    """The tree of tenants. Without this section flows are names, and have no tree and no quotas."""

    separator: Annotated[str, Field(min_length=1, max_length=1)] = "/"
    # Trusted headers whose values, joined by the separator, are the flow. Null: the flow is the fairness id.
    headers: tuple[str, ...] | None = Field(None, min_length=1, max_length=MAX_LEVELS)
    nodes: Annotated[tuple[Node, ...], BeforeValidator(_few_nodes)] = ()
    prices: Mapping[Name, Price] = Field(default={}, max_length=1000)  # model (`*`: others) -> price
    file: FilePath | None = None  # a watched YAML file with the list of nodes

    @field_validator("separator")
    @classmethod
    def _separates(cls, separator: str) -> str:
        if has_control(separator) or separator.isalnum() or separator in " *":
            raise ValueError("must be one character: no letter, digit, blank, * or control character")
        return separator

    @field_validator("headers", mode="before")
    @classmethod
    def _header_names(cls, given: object) -> object:
        if not isinstance(given, list | tuple):
            return given
        names = [each.strip().lower() if isinstance(each, str) else each for each in given]
        for at, name in enumerate(names):
            if not is_custom(name):
                raise ValueError(f"{str(name)[:60]!r} is not a header of your own, such as x-tenant")
            if name in names[:at]:
                raise ValueError(f"{name} is there twice")
        return tuple(names)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.file is not None and self.nodes:
            raise ValueError("give one of nodes, file; both are set")
        return self

    @model_validator(mode="after")
    def _paths_fit(self) -> Self:
        seen: set[str] = set()
        for node in self.nodes:
            if fault := path_fault(node.path, self.separator):
                raise ValueError(f"node {node.path[:60]!r}: {fault}")
            if node.path in seen:
                raise ValueError(f"node {node.path}: is there twice")
            seen.add(node.path)
        tree = Tree(self.nodes, self.separator)
        for node in self.nodes:
            if fault := tree.limit_fault(node):
                raise ValueError(fault)
        return self

    def shared(self) -> dict[str, object]:
        """The setting `tenants` of the shared state."""
        prices = {model: price.shared() for model, price in self.prices.items()}
        return {"separator": self.separator, "prices": prices}


def path_fault(path: str, separator: str) -> str:
    """Why `path` cannot be a node's path; '' if it can."""
    segments = path.split(separator)
    if len(segments) > MAX_LEVELS:
        return f"has {len(segments)} levels; at most {MAX_LEVELS}"
    if len(path.encode(errors="replace")) > MAX_NAME_BYTES:
        return f"is longer than {MAX_NAME_BYTES} bytes"
    if has_control(path):
        return "contains a control character"
    for segment in segments:
        if not segment.strip():
            return "has an empty segment"
        if _ANY in segment and segment != _ANY:
            return f"'*' must be a whole segment (acme{separator}*)"
    if _ANY in segments[:-1] and set(segments) != {_ANY}:
        levels = separator.join((_ANY, _ANY))
        return f"'*' stands only in the last segment (acme{separator}*), or in all of them ({levels})"
    return ""


class Tree:
    """Looks up the settings of nodes: by the exact path, else by `PARENT/*`, else by the `*` of its level."""

    def __init__(self, nodes: Iterable[Node], separator: str = "/") -> None:
        self.separator = separator
        self._nodes = {node.path: node for node in nodes}
        self._levels = tuple(
            self._nodes.get(separator.join([_ANY] * level)) for level in range(1, MAX_LEVELS + 1)
        )

    @property
    def nodes(self) -> Mapping[str, Node]:
        """The nodes with settings by path, including paths with `*`."""
        return self._nodes

    def node(self, path: str) -> Node | None:
        """The settings of the node at `path`; None if it has none: weight 1 and no limits."""
        found = self._nodes.get(path)
        if found is not None:
            return found
        separator = self.separator
        parts = path.split(separator, MAX_LEVELS - 1)
        if len(parts) > 1:
            found = self._nodes.get(separator.join((*parts[:-1], _ANY)))
        return found or self._levels[len(parts) - 1]

    def paths(self, flow: str) -> tuple[str, ...]:
        """The paths of the nodes of `flow`, from the top to the leaf. The eighth node is the whole flow."""
        parts = flow.split(self.separator, MAX_LEVELS - 1)
        return tuple(self.separator.join(parts[:level]) for level in range(1, len(parts) + 1))

    def changed(self, path: str, node: Node | None) -> "Tree":
        """This tree with `node` as the settings of `path`; None removes the settings of `path`."""
        others = [each for each in self._nodes.values() if each.path != path]
        return Tree(others if node is None else (*others, node), self.separator)

    def fault_by(self, node: Node) -> str:
        """The `limit_fault` of `node`, else of a node below `node`; '' without a fault."""
        near = (each for each in self._nodes.values() if each.path.startswith(node.path.partition(_ANY)[0]))
        below = (
            each for each in near if any(self.node(above) is node for above in self.paths(each.path)[:-1])
        )
        return next(filter(None, map(self.limit_fault, (node, *below))), "")

    def limit_fault(self, node: Node) -> str:
        """Which limit of `node` can never be reached, since a node above has a lower one; '' if none."""
        own = node.amounts()
        for above in reversed(self.paths(node.path)[:-1] if own else ()):
            parent = self.node(above)
            others = {} if parent is None else parent.amounts()
            for what, amount in own.items():
                if amount > others.get(what, amount):
                    told = f"its limit of {amount} {what} is above the limit of {above}, {others[what]}"
                    return f"node {node.path}: {told}"
            for limit, other in itertools.product(node.bounds(), () if parent is None else parent.bounds()):
                if is_never_reached(limit, other):
                    told = f"its limit of {limit} is never reached: {above} has a limit of {other}"
                    return f"node {node.path}: {told}"
        return ""
