"""What is measured: prompts and answers, modes, numbers of replicas."""

from dataclasses import dataclass, replace
from typing import Literal

from picker_tools.local_fleet.parts import MODES, Mode

Prompt = Literal["small", "large"]
Variant = Literal["none", "constant", "terse", "picker", "queued"]

MODEL = "llama"
MEMORY_REQUESTS = 100_000
PROMPT_BYTES: dict[Prompt, int] = {"small": 300, "large": 400_000}
PROMPT_NAMES: dict[Prompt, str] = {"small": "300 B", "large": "400 KB"}
# Closed loop. Busy: at full speed, for CPU and requests/s. Calm: few connections, for latency.
_BUSY_CONNECTIONS: dict[Prompt, int] = {"small": 16, "large": 8}
CALM_CONNECTIONS = 2
# In `lean` a request is in flight until its access log arrives, up to 50 ms after its answer. The bound makes
# most requests wait and still lets enough through to measure their cost.
QUEUED_WATERMARK = 8  # an endpoint
_QUEUED_CONNECTIONS = 64
# Answers of different length are compared at one rate, because batching depends on requests/s.
PACE_PER_S = 80.0
PACED_REQUESTS = 240
_QUEUED_SHARE = 2  # `queued` gets one in so many of the other variants' requests


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of request; `busy` and `calm` are how many of it are sent in each pass of a round.

    `queued` has no calm pass: its waits are for other requests, not for the picker.
    """

    prompt: Prompt
    tokens: int
    busy: int
    calm: int

    def connections(self, variant: Variant) -> int:
        """The connections of the busy pass."""
        return _QUEUED_CONNECTIONS if variant == "queued" else _BUSY_CONNECTIONS[self.prompt]

    def busy_requests(self, variant: Variant) -> int:
        return self.busy // _QUEUED_SHARE if variant == "queued" else self.busy

    @property
    def name(self) -> str:
        return f"{PROMPT_NAMES[self.prompt]} prompt, {self.tokens} token{'s' if self.tokens > 1 else ''}"


@dataclass(frozen=True, slots=True)
class Setup:
    """Processes that run side by side while `cases` are measured in turn.

    In `lean` short answers have a second baseline, `terse`, with as few messages as the picker.
    `queued` adds a second picker with so low a bound that nearly every request of the first case waits;
    `paced` compares the shortest with the longest answer to a small prompt at one rate.
    """

    mode: Mode
    replicas: int
    cases: tuple[Case, ...]
    queued: bool = False
    paced: bool = False

    @property
    def ends(self) -> tuple[Case, Case]:
        """The cases of the shortest and of the longest answer to a small prompt."""
        small = sorted((case for case in self.cases if case.prompt == "small"), key=lambda case: case.tokens)
        return small[0], small[-1]

    @property
    def name(self) -> str:
        return f"{self.mode}, {self.replicas} replica{'s' if self.replicas > 1 else ''}"

    def variants(self, case: Case) -> tuple[Variant, ...]:
        found: list[Variant] = ["none", "constant", "picker"]
        if self.mode == "lean" and case.tokens == 1:
            found.append("terse")
        if self.queued and case is self.cases[0]:
            found.append("queued")
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole run. `memory_requests` 0 leaves the memory part out."""

    setups: tuple[Setup, ...]
    rounds: int
    memory_requests: int


_SHORT = Case("small", 1, busy=1200, calm=800)
_MEDIUM = Case("small", 100, busy=1000, calm=400)
_LONG = Case("small", 1000, busy=500, calm=150)
_LARGE = Case("large", 1, busy=240, calm=120)


def full(rounds: int) -> Plan:
    """Prompts and answers by modes and replicas."""
    setups = []
    for mode in sorted(MODES):
        lean = mode == "lean"
        cases = (_SHORT, _MEDIUM, _LONG, _LARGE)
        setups.append(Setup(mode, 1, cases, queued=lean, paced=lean))
        setups.append(Setup(mode, 3, cases, queued=lean))
    return Plan(tuple(setups), rounds, memory_requests=MEMORY_REQUESTS)


def quick(rounds: int) -> Plan:
    """About two minutes: shows a change of 10 %, too few rounds for a published figure."""
    short, long, large = (
        replace(case, busy=case.busy // 2, calm=case.calm // 2) for case in (_SHORT, _LONG, _LARGE)
    )
    setups = (
        Setup("lean", 1, (short, long, large), queued=True, paced=True),
        Setup("lean", 3, (short,)),
        Setup("headers", 1, (short,)),
        Setup("standard", 1, (short,)),
    )
    return Plan(setups, rounds, memory_requests=0)
