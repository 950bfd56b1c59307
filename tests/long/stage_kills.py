"""Kills prefill servers, decode servers and replicas while clients send requests that are split.

Four endpoints prefill the prompts above a threshold, four others decode, in each mode. In mode `standard` no
replica is killed, because that cuts the answers whose streams the replica owns (docs/operations.md).
"""

import argparse
import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import httpx
from fleet_load import at_rest, total
from whole_fleet import exact_bounds

from bench.rig.fleet import RunningFleet, picker_up
from bench.rig.report import table
from long.findings import Findings
from picker_fleet.state.keys import Keys
from picker_tools.load.generator import Answer, Request, closed_loop, flow_header
from picker_tools.local_fleet.network import until
from picker_tools.local_fleet.parts import MODES
from picker_tools.simulator.openai_api import BYTES_PER_TOKEN

_PREFILL, _ENDPOINTS, _REPLICAS = 4, 8, 3
_CLIENTS, _FLOWS = 48, 6
_LIMIT = 6  # maximum requests in flight on an endpoint in each stage
_THRESHOLD_TOKENS = 200
_PROMPT_TOKENS = (20, 100, 400, 1500, 6000)
_KILL_EVERY_S = (1.0, 3.0)
_BACK_S, _REST_S = 30.0, 25.0
_UNPICKABLE = 10**9  # added to the load of an endpoint that takes no new requests (docs/redis-schema.md)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--kills", type=int, default=6, help="kills in each stage, and of replicas")
    parser.add_argument("--seed", type=int, default=1)


def run(options: argparse.Namespace, findings: Findings) -> None:
    rows = [asyncio.run(_mode(mode, options, findings)) for mode in options.modes]
    head = ["mode", "requests", "prompts computed by prefill servers", "kills"]
    findings.add(table([*head, "answers cut by kills of their decode server"], rows))


@dataclass(slots=True)
class _Kills:
    """Counts of killed servers by kind, and the addresses of killed decode servers."""

    counts: Counter[str] = field(default_factory=Counter)
    decoding: set[str] = field(default_factory=set)

    def cut(self, answer: Answer) -> bool:
        """Whether `answer` had begun at a decode server that was killed: such an answer is lost."""
        return answer.status == 200 and bool(answer.fault) and answer.endpoint in self.decoding


async def _mode(mode: str, options: argparse.Namespace, findings: Findings) -> list[str]:
    config = {
        "decision_log": {"enabled": True, "max_entries": 3_000_000},
        "request_queue_controller": exact_bounds(_LIMIT),
        "scheduling": {"stages": {"threshold": _THRESHOLD_TOKENS}},
    }
    size = ("--replicas", f"{_REPLICAS}", "--endpoints", f"{_ENDPOINTS}", "--prefill", f"{_PREFILL}")
    async with picker_up(config, *size, "--mode", mode, "--sim-ttft", "40", "--sim-itl", "4") as fleet:
        dice, kills = random.Random(options.seed), _Kills()
        await fleet.until_counted()
        async with closed_loop(fleet.url, clients=_CLIENTS, make_request=_request) as load:
            for _ in range(options.kills):
                await asyncio.sleep(dice.uniform(*_KILL_EVERY_S))
                await _kill_endpoint(fleet, dice.randrange(_PREFILL), kills)
                await asyncio.sleep(dice.uniform(*_KILL_EVERY_S))
                await _kill_endpoint(fleet, dice.randrange(_PREFILL, _ENDPOINTS), kills)
                await asyncio.sleep(dice.uniform(*_KILL_EVERY_S))
                if mode != "standard":
                    kills.counts["replicas"] += 1
                    await _kill(fleet, "replicas", dice.randrange(_REPLICAS))
        lost = [answer for answer in load.unserved if not kills.cut(answer)]
        findings.check(
            f"{mode}: no client gets an error", not lost, ", ".join(sorted({each.outcome for each in lost}))
        )
        split = await _prefilled(fleet)
        findings.check(f"{mode}: prompts are computed by prefill servers", split > 0)
        await at_rest(fleet, within_s=_REST_S)
        left = await until(lambda: _rests(fleet), within_s=_REST_S)
        findings.check(f"{mode}: the counts of both stages are 0 at rest", bool(left), await _counts(fleet))
        try:
            await asyncio.to_thread(fleet.audit)
            violations = ""
        except (AssertionError, BaseExceptionGroup) as fault:
            violations = str(fault)[-500:]
        findings.check(f"{mode}: the audit finds no violation", not violations, violations)
        cut = sum(map(kills.cut, load.history))
        told = ", ".join(f"{count} {what}" for what, count in sorted(kills.counts.items()))
        return [mode, f"{len(load.history)}", f"{split}", told, f"{cut}"]


def _request(dice: random.Random, number: int) -> Request:
    return Request(
        f"request {number} ",
        dice.choice((1, 5, 40)),
        streamed=dice.random() < 0.5,
        pad_bytes=BYTES_PER_TOKEN * dice.choice(_PROMPT_TOKENS),
        headers=flow_header(f"flow-{dice.randrange(_FLOWS)}"),
    )


async def _kill_endpoint(fleet: RunningFleet, index: int, kills: _Kills) -> None:
    """Kill an endpoint with SIGKILL, and wait until `picker up` has started it again."""
    entry = fleet.state["endpoints"][index]
    kills.counts[f"of role {entry['role']}"] += 1
    if entry["role"] == "decode":
        kills.decoding.add(entry["address"])
    await _kill(fleet, "endpoints", index)


async def _kill(fleet: RunningFleet, part: str, index: int) -> None:
    pid = fleet.state[part][index]["pid"]
    (fleet.replica if part == "replicas" else fleet.endpoint)(index).kill()

    async def is_back() -> bool:
        return fleet.state[part][index]["pid"] not in (pid, None)

    if not await until(is_back, within_s=_BACK_S):
        raise RuntimeError(f"{part} {index} was not started again within {_BACK_S:g} s")


async def _prefilled(fleet: RunningFleet) -> int:
    """Number of prompts that the prefill servers have computed since each started."""
    found = 0.0
    async with httpx.AsyncClient(timeout=10.0, trust_env=False) as client:
        for address in fleet.endpoints[:_PREFILL]:
            found += total((await client.get(f"http://{address}/metrics")).text, "vllm:request_success_total")
    return int(found)


async def _stage(fleet: RunningFleet) -> tuple[dict[str, int], int]:
    """The number of reservations of each prefill endpoint, and the number of all reservations' leases."""
    prefix = Keys.of("default").prefix
    async with fleet.redis() as client:
        loads = await client.zrange(f"{prefix}prefill_load", 0, -1, withscores=True)
        return {str(address): int(load) % _UNPICKABLE for address, load in loads}, await client.zcard(
            f"{prefix}prefills"
        )


async def _rests(fleet: RunningFleet) -> bool:
    loads, leases = await _stage(fleet)
    return not any(loads.values()) and not leases


async def _counts(fleet: RunningFleet) -> str:
    loads, leases = await _stage(fleet)
    return f"prefill endpoints {sorted(loads.values())}, leases {leases}"
