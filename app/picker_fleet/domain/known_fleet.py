"""A replica's view of its fleet. Membership (fleet/heartbeat.py) updates the view; the gate, the chooser and
the scraper read the view.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from picker_fleet.domain.config import EffectiveConfig, Settings
from picker_fleet.domain.request import UNLEARNED, PromptLine
from picker_fleet.domain.scheduling import use_of
from picker_fleet.domain.tenants import Tree


class KnownFleet:
    """The fleet as of the last heartbeat; before the first heartbeat, only the configuration.

    `config` includes the live changes. `live` has the ids of the live replicas, including this one;
    `in_flight` maps endpoints to their numbers of requests in flight, `prefills` to the numbers of prompts
    that they prefill for others; `busy` is True while any request is in flight. `prompt_lines` maps models to
    the lines that give a prompt's cost. `tenants` has the nodes of tenants that the fleet shares, None
    without tenants. Membership replaces the objects in the fields, and never changes an object.
    """

    def __init__(self, settings: Settings) -> None:
        self.config = EffectiveConfig(settings, {})
        self.live: Sequence[str] = ()
        self.in_flight: Mapping[str, int] = {}
        self.prefills: Mapping[str, int] = {}
        self.busy = False
        self.prompt_lines: Mapping[str, PromptLine] = MappingProxyType({})
        tenants = settings.tenants
        self.tenants = None if tenants is None else Tree(tenants.nodes, tenants.separator)

    def prompt_line(self, model: str) -> PromptLine:
        """The linear function by which `model`'s prompts are costed."""
        return self.prompt_lines.get(model, UNLEARNED)

    @property
    def picks_by_metrics(self) -> bool:
        """Whether a scorer reads metrics pages of model servers; installed scorers and filters may."""
        scheduling = self.config.settings.scheduling
        names = (*scheduling.weights, *scheduling.prefill_weights)
        return bool(scheduling.filters) or any(use_of(name).pages for name in names)

    @property
    def limits_by_metrics(self) -> bool:
        """Whether metrics pages decide the endpoints' limits now: in mode `adaptive`, while requests run."""
        controller = self.config.settings.request_queue_controller
        return self.busy and controller.is_adaptive
