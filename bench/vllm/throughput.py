"""What the queue's bound costs and gives before real vLLM servers: requests/s and time to first token.

The variants take turns, so that the load of others on the machine meets all of them; the page gives ratios
within a round to Envoy alone.
"""

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.overhead.measure import percentile
from bench.overhead.stack import Variant, stack
from bench.rig.machine import describe_machine
from bench.rig.page import table
from bench.vllm.checks import Failed, Fleet, body, fleet_up, text
from bench.vllm.engine import BASE, PLACES, Server

_PROMPT_BYTES, _TOKENS = 150, 40
_REQUESTS = {24: 96, 64: 128}  # by clients
_BOUNDS = (4, 6, 8, 12)
_NO_QUEUE = 1000
_ALONE = "Envoy alone, least request"


@dataclass(frozen=True, slots=True)
class Sample:
    variant: str
    clients: int
    rate: float  # requests/s
    first_ms: list[int]
    load: float  # the machine's load average after it


def variant_name(bound: int) -> str:
    return "no queue" if bound == _NO_QUEUE else f"{bound} a server"


async def measured(pair: Sequence[Server], rounds: int, folder: Path) -> list[Sample]:
    """All variants in turn, `rounds` times, in another order each time."""
    samples: list[Sample] = []
    alone = Variant("alone", "lean", "none")
    async with (
        stack(alone, [server.address for server in pair], folder) as envoy,
        fleet_up(list(pair), "lean", folder / "fleet") as fleet,
    ):
        await fleet.weigh()
        for number in range(rounds):
            bounds = (_NO_QUEUE, *_BOUNDS)
            for bound in (*bounds[number % 5 :], *bounds[: number % 5]):
                await fleet.change({"request_queue_controller": {"watermark_per_backend": bound}})
                for clients in _REQUESTS:
                    samples.append(await _run(fleet, fleet.envoy, variant_name(bound), clients))
            for clients in _REQUESTS:
                samples.append(await _run(fleet, envoy.url, _ALONE, clients))
    return samples


async def _run(fleet: Fleet, url: str, variant: str, clients: int) -> Sample:
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

    began_at = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    rate = _REQUESTS[clients] / (time.perf_counter() - began_at)
    print(
        f"{variant}, {clients} clients: {rate:.1f}/s, load {os.getloadavg()[0]:.1f}",
        file=sys.stderr,
        flush=True,
    )
    return Sample(variant, clients, rate, first_ms, os.getloadavg()[0])


def page(samples: Sequence[Sample], rounds: int) -> str:
    here = describe_machine("bench.vllm")
    loads = [sample.load for sample in samples]
    rows = []
    for clients in _REQUESTS:
        base = [each for each in samples if (each.variant, each.clients) == (_ALONE, clients)]
        for variant in (_ALONE, *(variant_name(bound) for bound in (_NO_QUEUE, *_BOUNDS[::-1]))):
            own = [each for each in samples if (each.variant, each.clients) == (variant, clients)]
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
                    f"{statistics.median(each.rate for each in own):.1f}",
                    f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                    f"{statistics.median(percentile(each.first_ms, 0.5) for each in own):.0f}",
                    *(f"{statistics.median(each):.2f}" for each in firsts),
                ]
            )
    head = (
        f"`python -m bench.vllm --rounds {rounds}`, {here.date}, {here.cores} cores that other\n"
        f"work shares: load {min(loads):.1f} to {max(loads):.1f} meanwhile, the servers' own included. Two\n"
        f"vLLM servers on the CPU, `--max-num-seqs {PLACES}`, prompts of {_PROMPT_BYTES} tokens, answers of\n"
        f"{_TOKENS}; mode `lean`, two replicas, no scorer but requests in flight. A client sends its\n"
        f"next request after an answer. Medians of {rounds} rounds; ratios are to Envoy alone in the same\n"
        "round, with their range."
    )
    columns = ["clients", "variant", "requests/s", "ratio", "TTFT p50, ms", "p50 ratio", "p95 ratio"]
    return f"# The bound of the queue before a real vLLM\n\n{head}\n\n{table(columns, rows)}\n"
