"""The kinds of load. Sizes are in tokens. Rates are for one server with `SLOTS` slots (`servers.py`).

All requests are of one flow, for which the fleet's queue is first come, first served, as an engine's is.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from picker_tools.load.generator import Load, Planned, Request
from picker_tools.simulator.openai_api import BYTES_PER_TOKEN

_CLIENTS = 24  # clients of a closed loop: one and a half times a server's slots
_LONG_SHARE = 0.2  # fraction of long prompts in mixed requests
_BURST_S, _CALM_S = 3.0, 4.5  # short enough that a burst does not exceed a flow's capacity in the queue

Sizes = Callable[[random.Random], tuple[int, int]]


def _short(dice: random.Random) -> tuple[int, int]:
    return dice.randint(50, 150), dice.randint(20, 60)


def _long(dice: random.Random) -> tuple[int, int]:
    return dice.randint(800, 1600), dice.randint(8, 24)


def _mixed(dice: random.Random) -> tuple[int, int]:
    return (_long if dice.random() < _LONG_SHARE else _short)(dice)


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests with prompts and answers of `sizes`. `per_s`: rate of Poisson arrivals at a given second, at
    most `most_per_s`; None: a closed loop."""

    sizes: Sizes
    per_s: Callable[[float], float] | None = None
    most_per_s: float = 0.0

    async def send(self, load: Load, servers: float, seed: int) -> None:
        """Send the load for `servers` servers until `load.finish` is called."""
        if self.per_s is None:
            await load.send_closed(round(_CLIENTS * servers), self._request, seed=seed)
        else:
            await load.send_open(self._plan(servers, random.Random(seed)))

    def _plan(self, servers: float, dice: random.Random) -> Iterator[Planned]:
        assert self.per_s is not None
        at_s, number = 0.0, 0
        while True:
            at_s += dice.expovariate(self.most_per_s * servers)
            # Lewis and Shedler, "Simulation of Nonhomogeneous Poisson Processes by Thinning", 1979.
            if dice.random() * self.most_per_s < self.per_s(at_s):
                number += 1
                yield Planned(at_s, self._request(dice, number), number=number)

    def _request(self, dice: random.Random, _: int) -> Request:
        prompt_tokens, tokens = self.sizes(dice)
        start = f"{dice.getrandbits(48):012x} "  # prompts begin differently, so none is cached
        return Request(
            start,
            tokens,
            streamed=True,
            pad_bytes=BYTES_PER_TOKEN * prompt_tokens - len(start),
        )


# The rates are 0.85 (mixed) and 0.9 (bursts, on average) of the best static throughput.
KINDS = {
    "short-chats": Kind(_short),
    "long-prompts": Kind(_long),
    "mixed": Kind(_mixed, lambda _: 4.3, 4.3),
    "bursts": Kind(_short, lambda at_s: 12.6 if at_s % (_BURST_S + _CALM_S) < _BURST_S else 2.1, 12.6),
}
