"""The section `scheduling` of the settings: the choice of endpoints, in both stages, and the scorers' names.

The module scheduling/scorers.py computes the scores.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from picker_fleet.domain import extensions
from picker_fleet.domain.allowlist import ENCODERS, PREFILLER, stage_header
from picker_fleet.domain.label_selector import label_selector
from picker_fleet.domain.sections import OutsideFilter, Port, Section
from picker_fleet.domain.units import AutoCount, Count, Duration, Name, Number, repeated


class ScorerUse(NamedTuple):
    """A scorer's inputs, and whether it serves the stage prefill.

    `pages`: metrics scraped from model servers. `request`: the request, so that scores for one request cannot
    be cached for others. `prefill`: the scorer says where a prompt, not an answer, is computed soonest.
    """

    pages: bool = False
    request: bool = False
    prefill: bool = False


IN_FLIGHT: Final = "in-flight"
SLO_HEADROOM: Final = "slo-headroom"
TOPOLOGY: Final = "topology"
# The scorers of this project; extensions are further scorers (domain/extensions.py).
BUILT_IN: Final[Mapping[str, ScorerUse]] = {
    "queue-depth": ScorerUse(pages=True, prefill=True),
    "kv-cache": ScorerUse(pages=True),
    "running-requests": ScorerUse(pages=True, prefill=True),
    IN_FLIGHT: ScorerUse(prefill=True),
    "lora-affinity": ScorerUse(pages=True, request=True, prefill=True),
    "latency": ScorerUse(request=True),
    "prefix-affinity": ScorerUse(request=True, prefill=True),
    "session-affinity": ScorerUse(request=True),
    SLO_HEADROOM: ScorerUse(pages=True, request=True),
    TOPOLOGY: ScorerUse(request=True, prefill=True),
    "random": ScorerUse(request=True, prefill=True),
}


def use_of(scorer: str) -> ScorerUse:
    """The scorer's inputs; an installed scorer may read everything."""
    return BUILT_IN.get(scorer, ScorerUse(pages=True, request=True))


def _scorer_name(value: str) -> str:
    """Return `value` if it names a built-in or an installed scorer.

    Raises:
        ValueError: no scorer has the name `value` (the message lists the valid names), or it is unusable.
    """
    extensions.find(extensions.SCORERS, value, BUILT_IN)
    return value


def weights_by_name(value: Any) -> dict[Any, Any]:
    """Parse scorers and their weights, unchecked, from one of two forms, `[{name, weight}]`, weight 1 by
    default, or `{name: weight}`.

    Raises:
        ValueError: the list `value` has neither form, or has a scorer twice.
    """
    if isinstance(value, Mapping):
        return dict(value)
    weights: dict[Any, Any] = {}
    for entry in value if isinstance(value, list | tuple) else (value,):
        if not isinstance(entry, Mapping) or not {"name"} <= entry.keys() <= {"name", "weight"}:
            theirs = isinstance(entry, Mapping) and "parameters" in entry
            where = "; its parameters belong in scheduling.scorer_parameters" if theirs else ""
            raise ValueError(f"must map scorers to weights, or list {{name, weight}}{where}")
        name = str(entry["name"])
        if name in weights:
            raise ValueError(f"scorer {name[:40]} is named twice")
        weights[name] = entry.get("weight", 1)
    return weights


ScorerName = Annotated[str, AfterValidator(_scorer_name)]
ScorerWeight = Annotated[Number, Field(gt=0, le=1e6)]


class Latency(Section):
    """Weights of the scorer `latency` (spec 004): cost = alpha·mean_s + beta·load + gamma·std_s, where `load`
    is the number of requests in flight."""

    alpha: Number = Field(1.0, ge=0, le=1e6)
    beta: Number = Field(0.5, ge=0, le=1e6)
    gamma: Number = Field(0.5, ge=0, le=1e6)

    @model_validator(mode="after")
    def _anything_counts(self) -> Self:
        if self.alpha == self.beta == self.gamma == 0:
            raise ValueError("one of alpha, beta and gamma must be above 0, or all endpoints cost the same")
        return self


# Headers and body members that can identify a client's session.
SessionKey = Literal["session-id", "x-session-affinity", "prompt_cache_key", "user", "metadata.user_id"]


# The scorer `in-flight` has weight 1: so a preferred endpoint may have more requests in flight than another,
# by half of the highest load.
_TOPOLOGY_WEIGHT = 0.5


Selector = Annotated[str, AfterValidator(label_selector)]
StageHeader = Annotated[str, BeforeValidator(stage_header)]


class Stage(Section):
    """One stage of a request, prefill or decode. `selector` is a Kubernetes label selector; null: the label
    `llm-d.ai/role` decides. `scorers` null: the pool's scorers; for prefill only scorers that serve it."""

    selector: Selector | None = None
    scorers: Annotated[dict[ScorerName, ScorerWeight], BeforeValidator(weights_by_name)] | None = None


class Encode(Section):
    """The stage that encodes images, audio and video for others; `header` names a request's encoders."""

    selector: Selector | None = None
    header: StageHeader = ENCODERS


class Stages(Section):
    """Prefill and decode on different endpoints (docs/picking.md). A request gets a prefill endpoint, named
    in `header`, if more than `threshold` tokens of its prompt are cached on no decode endpoint; `auto`: if
    the split is predicted to save time."""

    prefill: Stage = Stage()
    decode: Stage = Stage()
    encode: Encode = Encode()
    threshold: AutoCount = Field(None, ge=0)
    header: StageHeader = PREFILLER

    @model_validator(mode="after")
    def _headers_differ(self) -> Self:
        if self.header == self.encode.header:
            raise ValueError(f"header and encode.header are both {self.header}; use two names")
        return self


class Scheduling(Section):
    """The choice of an endpoint. Without scorers, the endpoint with the fewest requests in flight is best."""

    scorers: Annotated[dict[ScorerName, ScorerWeight], BeforeValidator(weights_by_name)] = Field(default={})
    stages: Stages = Stages()
    # Parameters of installed scorers by name; in the list `scorers` each entry may have `parameters`.
    scorer_parameters: dict[str, dict[str, Any]] = Field(default={})
    filters: tuple[OutsideFilter, ...] = ()  # installed filters, which run after the built-in filters
    extension_budget: Duration = Field(0.001, gt=0, le=0.1)  # maximum time for one call of an extension
    session_keys: tuple[SessionKey, ...] = ()  # session keys for the scorer session-affinity
    # Port of the engines' KV events, the replay port is the next (docs/picking.md); null: they are not read.
    kv_events_port: Annotated[Port, Field(le=65_534)] | None = None
    latency: Latency = Latency()
    fallbacks: Count = Field(2, ge=0, le=8)
    adapters: tuple[Name, ...] = ()  # names of LoRA adapters, besides adapters that endpoints report
    endpoint_labels: Mapping[Name, str] = Field(default={})  # labels that each endpoint of the pool needs
    # Labels that endpoints should have, by the scorer `topology`; `same`: the value in this replica's labels.
    prefer: Mapping[Name, Name] = Field(default={})

    @property
    def outside(self) -> set[str]:
        """The installed scorers of the pool and of its stages."""
        return {*self.scorers, *self.weights, *self.prefill_weights} - BUILT_IN.keys()

    @property
    def weights(self) -> dict[str, float]:
        """The scorers' weights for the stage decode, with scorer `topology` added if labels are preferred."""
        own = self.stages.decode.scorers
        return self._with_topology(self.scorers if own is None else own)

    @property
    def prefill_weights(self) -> dict[str, float]:
        """The weights for the stage prefill; by default the weights of the pool's scorers that fit it."""
        own = self.stages.prefill.scorers
        shared = {name: weight for name, weight in self.scorers.items() if use_of(name).prefill}
        return self._with_topology(shared if own is None else own)

    def _with_topology(self, scorers: dict[str, float]) -> dict[str, float]:
        return {TOPOLOGY: _TOPOLOGY_WEIGHT, **scorers} if self.prefer else scorers

    @model_validator(mode="before")
    @classmethod
    def _parameters_apart(cls, tree: Any) -> Any:
        """Move the `parameters` of a list of scorers to `scorer_parameters`, whose own entries win."""
        listed = tree.get("scorers") if isinstance(tree, Mapping) else None
        scorers, parameters = [], {}
        for entry in listed if isinstance(listed, list | tuple) else ():
            use = dict(entry) if isinstance(entry, Mapping) else entry
            if isinstance(use, dict) and "parameters" in use:
                parameters[str(use.get("name"))] = use.pop("parameters")
            scorers.append(use)
        own = (tree.get("scorer_parameters") or {}) if parameters else None
        if not isinstance(own, Mapping):
            return tree
        return {**tree, "scorers": scorers, "scorer_parameters": {**parameters, **own}}

    @model_validator(mode="after")
    def _parameters_fit(self) -> Self:
        for name in self.scorer_parameters.keys() & BUILT_IN.keys():
            raise ValueError(f"scorer {name} is built in and takes no parameters")
        for name in self.outside | self.scorer_parameters.keys():
            extensions.check(extensions.SCORERS, name, self.scorer_parameters.get(name, {}))
        if twice := repeated(each.name for each in self.filters):
            raise ValueError(f"filters names {twice[0]} more than once")
        return self

    @model_validator(mode="after")
    def _keys_are_scored(self) -> Self:
        if self.session_keys and "session-affinity" not in self.weights:
            raise ValueError("session_keys needs the scorer session-affinity, by which they count")
        return self
