"""What one simulated model server is like."""

from dataclasses import dataclass, field

from picker_fleet.errors import ConfigError
from picker_tools.simulator.engine import Limits


@dataclass(frozen=True, slots=True)
class Profile:
    """One server: its model and adapters, its speed, its size, its faults.

    `ttft_ms` runs from admission to the first token, less the part of the prompt that is cached (with
    `prefix_caching`); `itl_ms` from one token to the next.
    `failure_rate` is the share of valid requests answered 500 before their first byte; which ones, and
    the generated words, follow from `seed`. `always_usage` tells usage in streams that did not ask.
    """

    model: str = "llama"
    loras: tuple[str, ...] = ()
    ttft_ms: float = 20.0
    itl_ms: float = 5.0
    limits: Limits = field(default_factory=Limits)
    failure_rate: float = 0.0
    seed: int = 0
    always_usage: bool = True
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        names = (self.model, *self.loras)
        if not all(names) or len(set(names)) < len(names):
            raise ConfigError(f"model and loras must be distinct names; given: {', '.join(names)}")

    @property
    def models(self) -> tuple[str, ...]:
        """Every name that may be asked for, the base model first."""
        return (self.model, *self.loras)
