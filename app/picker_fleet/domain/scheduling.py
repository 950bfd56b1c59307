"""The section `scheduling` of the settings: the choice of endpoints, in both stages."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from picker_fleet.domain import extensions
from picker_fleet.domain.allowlist import PREFILLER, prefiller_header
from picker_fleet.domain.label_selector import label_selector
from picker_fleet.domain.scorer_names import (
    PREFILL_SCORERS,
    SCORER_NAMES,
    TOPOLOGY,
    built_in_scorer,
    scorer_name,
    weights_by_name,
    without_parameters,
)
from picker_fleet.domain.sections import OutsideFilter, Section
from picker_fleet.domain.units import AutoCount, Count, Duration, Name, Number, repeated

ScorerName = Annotated[str, AfterValidator(scorer_name)]
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

StageScorer = Annotated[str, AfterValidator(built_in_scorer)]


class Stage(Section):
    """One stage of a request, prefill or decode. `selector` is a Kubernetes label selector; null: the label
    `llm-d.ai/role` decides. `scorers` null: the pool's, for prefill only those about load and prompts."""

    selector: Annotated[str, AfterValidator(label_selector)] | None = None
    scorers: Annotated[dict[StageScorer, ScorerWeight], BeforeValidator(weights_by_name)] | None = None


class Stages(Section):
    """Prefill and decode on different endpoints (docs/picking.md). A request gets a prefill endpoint, named
    in `header`, if more than `threshold` tokens of its prompt are cached on no decode endpoint; `auto`: if
    the predicted times say that it pays."""

    prefill: Stage = Stage()
    decode: Stage = Stage()
    threshold: AutoCount = Field(None, ge=0)
    header: Annotated[str, BeforeValidator(prefiller_header)] = PREFILLER


class Scheduling(Section):
    """The choice of an endpoint. Without scorers, the endpoint with the fewest requests in flight is best."""

    scorers: Annotated[dict[ScorerName, ScorerWeight], BeforeValidator(weights_by_name)] = Field(default={})
    stages: Stages = Stages()
    # Parameters of scorers from outside by name; in a list of scorers each entry may have `parameters`.
    scorer_parameters: dict[str, dict[str, Any]] = Field(default={})
    filters: tuple[OutsideFilter, ...] = ()  # filters from outside, which run after the built-in ones
    extension_budget: Duration = Field(0.001, gt=0, le=0.1)  # most time for one call of an extension
    session_keys: tuple[SessionKey, ...] = ()  # session keys for the scorer session-affinity
    latency: Latency = Latency()
    fallbacks: Count = Field(2, ge=0, le=8)
    adapters: tuple[Name, ...] = ()  # names of LoRA adapters, besides adapters that endpoints report
    endpoint_labels: Mapping[Name, str] = Field(default={})  # labels that each endpoint of the pool needs
    # Labels that endpoints should have, by the scorer `topology`; `same`: the value in this replica's labels.
    prefer: Mapping[Name, Name] = Field(default={})

    @property
    def weights(self) -> dict[str, float]:
        """The scorers' weights for the stage decode, with the scorer `topology` added if labels are
        preferred."""
        own = self.stages.decode.scorers
        return self._with_topology(self.scorers if own is None else own)

    @property
    def prefill_weights(self) -> dict[str, float]:
        """The same for the stage prefill; without own scorers, the pool's that are about prefilling."""
        own = self.stages.prefill.scorers
        shared = {name: weight for name, weight in self.scorers.items() if name in PREFILL_SCORERS}
        return self._with_topology(shared if own is None else own)

    def _with_topology(self, scorers: dict[str, float]) -> dict[str, float]:
        return {TOPOLOGY: _TOPOLOGY_WEIGHT, **scorers} if self.prefer else scorers

    @model_validator(mode="before")
    @classmethod
    def _parameters_apart(cls, tree: Any) -> Any:
        return without_parameters(tree)

    @model_validator(mode="after")
    def _parameters_fit(self) -> Self:
        for name in self.scorer_parameters.keys() & set(SCORER_NAMES):
            raise ValueError(f"scorer {name} is built in and takes no parameters")
        for name in {*self.scorers, *self.scorer_parameters} - set(SCORER_NAMES):
            extensions.check(extensions.SCORERS, name, self.scorer_parameters.get(name, {}))
        if twice := repeated(each.name for each in self.filters):
            raise ValueError(f"filters names {twice[0]} more than once")
        return self

    @model_validator(mode="after")
    def _keys_are_scored(self) -> Self:
        if self.session_keys and "session-affinity" not in self.weights:
            raise ValueError("session_keys needs the scorer session-affinity, by which they count")
        return self
