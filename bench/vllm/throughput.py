"""What the queue's bound costs and gives before real vLLM servers: full batches, requests/s, first tokens.

The variants take turns, so that the load of others on the machine meets all of them; the page gives ratios
within a round to Envoy alone.
"""

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.overhead.stack import Variant, stack
from bench.rig.machine import describe_machine
from bench.rig.page import interval, percentile, table
from bench.vllm.checks import Failed, Fleet, body, fleet_up, text
from bench.vllm.engine import BASE, PLACES, Server

_PROMPT_BYTES, _TOKENS = 150, 40
_REQUESTS = {24: 96, 64: 128}  # by clients
_NO_QUEUE = 1000
_ALONE = "Envoy alone, least request"
# The scorers and weights that the Go picker has without a configuration; it has no queue then.
_GO_SCORERS = {"queue-depth": 2.0, "kv-cache": 2.0, "prefix-affinity": 3.0}


@dataclass(frozen=True, slots=True)
class Choice:
    """How the fleet is set: its bound a server, and the weights of its scorers beside requests in flight."""

    name: str
    bound: int
    scorers: Mapping[str, float] = field(default_factory=dict)


_CHOICES = (
    Choice("no queue", _NO_QUEUE),
    Choice("no queue, scorers of the Go picker", _NO_QUEUE, _GO_SCORERS),
    *(Choice(f"{bound} a server", bound) for bound in (12, 8, 6, 4)),
)


@dataclass(frozen=True, slots=True)
class Sample:
    variant: str
    clients: int
    rate: float  # requests/s
    first_ms: list[int]
    batch: float  # requests that a vLLM server generates a token for in a step
    load: float  # the machine's load average after it


async def measured(pair: Sequence[Server], rounds: int, folder: Path) -> list[Sample]:
    """All variants in turn, `rounds` times, in another order each time."""
    samples: list[Sample] = []
    alone = Variant("alone", "lean", "none")
    async with (
        stack(alone, [server.address for server in pair], folder) as envoy,
        fleet_up(list(pair), "lean", folder) as fleet,
    ):
        for number in range(rounds):
            turn: list[Choice | None] = [None, *_CHOICES]  # None: Envoy alone
            first = number * 2 % len(turn)
            for choice in (*turn[first:], *turn[:first]):
                if choice is not None:
                    await fleet.change({"request_queue_controller": {"watermark_per_backend": choice.bound}})
                    await fleet.weigh(**choice.scorers)
                name, url = (choice.name, fleet.url) if choice is not None else (_ALONE, envoy.url)
                for clients in _REQUESTS:
                    samples.append(await _run(fleet, pair, url, name, clients))
    return samples


async def _run(fleet: Fleet, pair: Sequence[Server], url: str, variant: str, clients: int) -> Sample:
    left = _REQUESTS[clients]
    first_ms: list[int] = []

    async def client() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            tree = body(text(_PROMPT_BYTES), BASE, _TOKENS, stream=True)
            since = time.perf_counter()
            async with fleet.client.stream("POST", f"{url}/v1/completions", json=tree) as answer:
                if answer.status_code != 200:
                    raise Failed(f"{variant}: status {answer.status_code}")
                began = False
                async for _ in answer.aiter_raw():
                    if not began:
                        first_ms.append(round(1000 * (time.perf_counter() - since)))
                        began = True

    before, began_at = await _generated(pair), time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    rate = _REQUESTS[clients] / (time.perf_counter() - began_at)
    tokens, steps = (then - now for now, then in zip(before, await _generated(pair), strict=True))
    batch, load = tokens / steps, os.getloadavg()[0]
    said = f"{variant}, {clients} clients: {rate:.1f}/s, batches of {batch:.2f}, load {load:.1f}"
    print(said, file=sys.stderr, flush=True)
    return Sample(variant, clients, rate, first_ms, batch, load)


async def _generated(pair: Sequence[Server]) -> tuple[float, float]:
    """Tokens that both servers have generated, and steps in which they did."""
    names = ("vllm:generation_tokens_total", "vllm:iteration_tokens_total_count")
    tokens, steps = [sum([await server.counted(name) for server in pair]) for name in names]
    return tokens, steps


def _of(samples: Sequence[Sample], variant: str, clients: int) -> list[Sample]:
    return [each for each in samples if (each.variant, each.clients) == (variant, clients)]


def page(samples: Sequence[Sample], rounds: int) -> str:
    here = describe_machine("bench.vllm", sys.argv[1:])
    loads = [sample.load for sample in samples]
    rows = []
    for clients in _REQUESTS:
        base = _of(samples, _ALONE, clients)
        for variant in (_ALONE, *(choice.name for choice in _CHOICES)):
            own = _of(samples, variant, clients)
            ratios = [each.rate / other.rate for each, other in zip(own, base, strict=True)]
            firsts = [
                [
                    percentile(each.first_ms, part) / percentile(other.first_ms, part)
                    for each, other in zip(own, base, strict=True)
                ]
                for part in (0.5, 0.95)
            ]
            rows.append(
                [
                    str(clients),
                    variant,
                    f"{statistics.median(each.batch for each in own):.2f}",
                    f"{statistics.median(each.rate for each in own):.1f}",
                    f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                    f"{statistics.median(percentile(each.first_ms, 0.5) for each in own):.0f}",
                    *(f"{statistics.median(each):.2f}" for each in firsts),
                ]
            )
    head = (
        f"`{here.command}`, {here.date}, {here.cores} cores that other\n"
        f"work shares: load {min(loads):.1f} to {max(loads):.1f} meanwhile, the servers' own included. Two\n"
        f"vLLM servers on the CPU, `--max-num-seqs {PLACES}`, prompts of {_PROMPT_BYTES} tokens, answers of\n"
        f"{_TOKENS}; mode `lean`, two replicas, requests in flight as the only scorer, or beside those\n"
        f"of the Go picker ({', '.join(f'{name} {weight:g}' for name, weight in _GO_SCORERS.items())}).\n"
        f"A client sends its next request after an answer. Medians of {rounds} rounds; ratios are to Envoy\n"
        f"alone in the same round, with their range. Batch: requests that a server generates a token for in\n"
        f"a step, at most {PLACES}: fewer where places are empty, also because vLLM's own front end is slow."
    )
    columns = ["clients", "variant", "batch", "requests/s", "ratio", "TTFT p50, ms", "p50 ratio", "p95 ratio"]
    text = f"# The bound of the queue before a real vLLM\n\n{head}\n\n{table(columns, rows)}\n"
    return text if rounds == 1 else f"{text}\n{_pooled(samples)}"


def _pooled(samples: Sequence[Sample]) -> str:
    """Requests/s by Envoy alone of all rounds and clients together."""
    rows = []
    for choice in _CHOICES:
        pairs = [
            (own.rate / alone.rate, own.batch)
            for clients in _REQUESTS
            for own, alone in zip(
                *(_of(samples, variant, clients) for variant in (choice.name, _ALONE)), strict=True
            )
        ]
        mean, low, high = interval([ratio for ratio, _ in pairs])
        batch = statistics.mean(batch for _, batch in pairs)
        rows.append([choice.name, f"{mean:.2f}", f"{low:.2f} to {high:.2f}", f"{batch:.2f}"])
    columns = ["variant", "requests/s by Envoy alone", "95 % interval", "mean batch"]
    return (
        f"Both numbers of clients together, geometric mean of {len(pairs)} pairs:\n\n{table(columns, rows)}\n"
    )
