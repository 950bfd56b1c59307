"""Compares limits that the fleet finds for real vLLM servers with the best static bound and with vLLM alone.

A search finds the static bound with the most requests a second. Then each round measures vLLM alone, vLLM
behind an Envoy without a picker, a fleet with the best bound, and a new fleet with nothing configured, from
the 20th second of its load on.
"""

import argparse
import asyncio
import math
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from whole_fleet import exact_bounds

from bench.rig.fleet import picker_up, plain_envoy
from long.findings import Findings
from long.vllm_servers import Server, installed, made_model, servers
from picker_tools.load.generator import Client, Load, Request, flow_header, quantiles

_TOKENS, _PROMPT_BYTES = 48, (100, 200)  # the tokenizer makes a token of each byte
_GRID = (2, 4, 8, 16, 32, 64, 128)
_SEARCHED_S = (5.0, 15.0)  # in the search: seconds until measuring starts, and until the run ends
_MEASURED_S = (20.0, 45.0)  # in a compared run: seconds until measuring starts, and until it ends
_ALIKE = 0.98  # best bound: the least p95 TTFT among bounds with this share of the most requests/s
_DRAIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Figures:
    requests_per_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    unserved: float

    def __str__(self) -> str:
        ttft = f"TTFT p50 {self.ttft_p50_s:.2f} s, p95 {self.ttft_p95_s:.2f} s"
        unserved = f", {self.unserved:g} unserved" if self.unserved else ""
        return f"{self.requests_per_s:.1f} requests/s, {ttft}{unserved}"


async def _measure(urls: Sequence[str], clients: int, span_s: tuple[float, float], seed: int) -> Figures:
    """Figures of `span_s` of a closed loop of `clients`, divided among `urls`."""
    from_s, to_s = span_s
    with ExitStack() as stack:
        loads = [Load(stack.enter_context(Client(url, exact=False))) for url in urls]
        async with asyncio.TaskGroup() as tasks:
            sending = [
                tasks.create_task(load.send_closed(clients // len(urls), _request, seed=seed + number))
                for number, load in enumerate(loads)
            ]
            await asyncio.sleep(to_s)
            for load in loads:
                load.finish()
            await asyncio.wait(sending, timeout=_DRAIN_S)
            for load in loads:
                load.stop()
        answers = [(each, load.began_s) for load in loads for each in load.history]
    ended = [each for each, began_s in answers if from_s <= each.done_s - began_s < to_s]
    sent = [each for each, began_s in answers if from_s <= each.sent_s - began_s < to_s]
    ttft = quantiles(each.first_s for each in sent if each.served and each.first_s is not None)
    rate = sum(each.served for each in ended) / (to_s - from_s)
    unserved = sum(each.unserved for each in ended)
    return Figures(rate, ttft.get("p50", math.nan), ttft.get("p95", math.nan), unserved)


def _request(dice: random.Random, number: int) -> Request:
    start = f"{dice.getrandbits(48):012x} "
    pad_bytes = dice.randint(*_PROMPT_BYTES) - len(start)
    return Request(start, _TOKENS, True, pad_bytes, headers=flow_header(f"flow-{number % 4}"))


def _config(running: Sequence[Server], controller: Mapping[str, Any]) -> dict[str, Any]:
    static = [{"address": server.address} for server in running]
    return {"discovery": {"static": static}, "request_queue_controller": dict(controller)}


async def _search(running: Sequence[Server], options: argparse.Namespace) -> dict[int, Figures]:
    found = {}
    up = ("--replicas", f"{options.replicas}", "--endpoints", "0")
    async with picker_up(_config(running, exact_bounds(_GRID[0])), *up) as fleet:
        for bound in _GRID:
            await fleet.change({"request_queue_controller": exact_bounds(bound)})
            found[bound] = await _measure([fleet.url], options.clients, _SEARCHED_S, 0)
            print(f"bound {bound}: {found[bound]}", flush=True)
            if bound * len(running) >= options.clients:  # bounds from this one up delay no request
                break
    return found


async def _compare(options: argparse.Namespace, folder: Path, findings: Findings) -> None:
    python, model = await asyncio.to_thread(installed), made_model(folder / "model")
    sizes = {"places": options.places, "kv_blocks": options.kv_blocks}
    compared = ("vLLM asked directly", "Envoy alone", "static", "adaptive")
    figures: dict[str, list[Figures]] = {name: [] for name in compared}
    up = ("--replicas", f"{options.replicas}", "--endpoints", "0")
    async with servers(python, model, folder, count=options.servers, **sizes) as running:
        direct = [f"http://{server.address}" for server in running]
        await _measure(direct, options.clients, (1.0, 5.0), 0)  # vLLM compiles at its first requests
        searched = await _search(running, options)
        most = max(each.requests_per_s for each in searched.values())
        alike = [bound for bound, each in searched.items() if each.requests_per_s >= _ALIKE * most]
        best = min(alike, key=lambda bound: searched[bound].ttft_p95_s)
        controllers: dict[str, Mapping[str, Any]] = {"static": exact_bounds(best), "adaptive": {}}
        for seed in range(1, options.rounds + 1):
            for name in compared[:: 1 if seed % 2 else -1]:
                if name == "vLLM asked directly":
                    found = await _measure(direct, options.clients, _MEASURED_S, seed)
                elif name == "Envoy alone":
                    with plain_envoy([server.address for server in running]) as envoy:
                        found = await _measure([envoy.url], options.clients, _MEASURED_S, seed)
                else:
                    async with picker_up(_config(running, controllers[name]), *up) as fleet:
                        found = await _measure([fleet.url], options.clients, _MEASURED_S, seed)
                        limits = [row.get("limit") for row in await fleet.get("endpoints")]
                figures[name].append(found)
                print(
                    f"{name}, round {seed}: {found}{f', limits {limits}' if name == 'adaptive' else ''}",
                    flush=True,
                )
    median = {
        name: Figures(*map(statistics.median, zip(*map(astuple, each), strict=True)))
        for name, each in figures.items()
    }
    what = f"{options.servers} servers of {options.places} places, {options.clients} clients"
    findings.check(f"{what}: the best static bound", True, f"{best}: {median['static']}")
    for other in ("static", "vLLM asked directly", "Envoy alone"):
        ratio = median["adaptive"].requests_per_s / median[other].requests_per_s
        slower = median["adaptive"].ttft_p95_s / median[other].ttft_p95_s
        seen = f"{median['adaptive']}; {other}: {median[other]}; ratios {ratio:.2f}, {slower:.2f}"
        findings.check(f"{what}: found limits equal {other}", ratio >= 0.97 and slower <= 1.05, seen)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--places", type=int, default=32, metavar="N", help="vLLM's --max-num-seqs")
    parser.add_argument("--kv-blocks", type=int, default=128, metavar="N", help="blocks of 128 tokens")
    parser.add_argument("--servers", type=int, default=1, metavar="N")
    parser.add_argument("--clients", type=int, default=48, metavar="N")
    parser.add_argument("--replicas", type=int, default=2, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")


def run(options: argparse.Namespace, findings: Findings) -> None:
    with tempfile.TemporaryDirectory(prefix="picker-vllm-") as name:
        asyncio.run(_compare(options, Path(name), findings))
