"""Simulated model servers, the fleet in front of them, and the record of a run."""

import asyncio
import contextlib
import itertools
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, ClassVar

import httpx
import yaml
from crowd import http_client
from fleet_load import total
from model_servers import process_at

from bench.limits.kinds import Kind
from bench.rig.fleet import RunningFleet, picker_up
from picker_tools.load.generator import Answer, Client, Load, quantiles
from picker_tools.local_fleet.network import LOOPBACK, free_port
from picker_tools.local_fleet.parts import ROLE
from picker_tools.local_fleet.processes import picker_command

SLOTS = 16  # sequences that a server runs at once
SLOWDOWN = 2.0  # steps of 40 ms and more, so that servers, fleet and load fit on two cores
_KV_BLOCKS = 600  # a server's KV blocks: 16 short chats fit, but only 7 long prompts
SEARCHED_S = (6.0, 18.0)  # in a search: the seconds at which a run's figures begin and the run ends
COMPARED_S = (20.0, 50.0)  # in a comparison: the seconds at which a run's figures begin and the run ends
_ALIKE = 0.98  # best bound: the least p95 TTFT among bounds with this share of the highest throughput
_READY_S, _DRAIN_S, _SAMPLE_S = 30.0, 10.0, 0.5


class Servers:
    """Model servers of given sizes (sequences at once). The fleet discovers the first `shown` servers, with
    their `roles` (default: none)."""

    def __init__(
        self,
        file: Path,
        sizes: Sequence[int],
        *,
        slowdown: float = SLOWDOWN,
        kv_blocks: int = _KV_BLOCKS,
        roles: Sequence[str] = (),
    ) -> None:
        self.file = file
        self.roles = roles or [""] * len(sizes)
        self._kv_blocks, self._slowdown = kv_blocks, slowdown
        self.sizes = {f"{LOOPBACK}:{free_port()}": size for size in sizes}
        self.addresses = list(self.sizes)
        self.shown = 0
        self._running: dict[str, contextlib.AsyncExitStack] = {}

    async def start(self, address: str) -> None:
        size = self.sizes[address]
        sizes = ("--max-num-seqs", f"{size}", "--kv-blocks", f"{size * self._kv_blocks // SLOTS}")
        port = address.rpartition(":")[2]
        command = picker_command("sim", "--port", port, "--slowdown", f"{self._slowdown}", *sizes)
        self._running[address] = stack = contextlib.AsyncExitStack()
        child = await stack.enter_async_context(process_at(f"http://{address}/health", command))
        stack.callback(child.kill)

    async def kill(self, address: str) -> None:
        """Kill a server, if it runs, while it serves requests."""
        await self._running.pop(address, contextlib.AsyncExitStack()).aclose()

    async def show(self, count: int) -> None:
        """Write the first `count` addresses into the file that the fleet reads."""
        self.shown = count
        written = self.file.with_suffix(".new")
        listed = [
            {"address": address, **({"labels": {ROLE: role}} if role else {})}
            for address, role in zip(self.addresses[:count], self.roles, strict=False)
        ]
        written.write_text(yaml.safe_dump(listed), encoding="utf-8")
        written.replace(self.file)

    async def slow(self, address: str, factor: float) -> None:
        """Make each step of one server `factor` times as long as at its start."""
        async with http_client() as client:
            changed = await client.post(f"http://{address}/sim", json={"slowdown": self._slowdown * factor})
            changed.raise_for_status()


@contextlib.asynccontextmanager
async def servers(folder: Path, sizes: Sequence[int], **more: Any) -> AsyncIterator[Servers]:
    """Run servers until the block ends; the fleet gets all. `more` are further arguments of `Servers`."""
    them = Servers(folder / "endpoints.yaml", sizes, **more)
    try:
        for address in them.addresses:
            await them.start(address)
        await them.show(len(sizes))
        yield them
    finally:
        for address in them.addresses:
            await them.kill(address)


@contextlib.asynccontextmanager
async def fleet(
    them: Servers, replicas: int, controller: Mapping[str, Any], *, mode: str = "lean", **more: Any
) -> AsyncIterator[RunningFleet]:
    """Run a fleet whose only settings are discovery, `controller` and `more`, until the block ends."""
    config = {"discovery": {"file": str(them.file)}, "request_queue_controller": dict(controller), **more}
    options = ("--replicas", f"{replicas}", "--endpoints", "0", "--mode", mode)
    async with picker_up(config, *options) as it:
        decoding = sum(role != "prefill" for role in them.roles[: them.shown])
        await it.until_state(ready_backends=decoding, within_s=_READY_S)
        yield it


@dataclass(frozen=True, slots=True)
class Figures:
    """Servers count `tokens_per_s` as they generate tokens; clients measure the other figures."""

    requests_per_s: float
    tokens_per_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    unserved: float

    HEAD: ClassVar = ("requests/s", "tokens/s", "TTFT p50, s", "p95, s", "unserved")

    def cells(self) -> list[str]:
        """The cells of a table's row; HEAD has their headings."""
        return [
            f"{self.requests_per_s:.1f}", f"{self.tokens_per_s:.0f}", f"{self.ttft_p50_s:.2f}",
            f"{self.ttft_p95_s:.2f}", f"{self.unserved:.0f}",
        ]  # fmt: skip


def best_bound(found: Mapping[int, Figures]) -> int:
    """The bound with the lowest p95 TTFT among all bounds whose throughput is near the highest."""
    most = max(figures.tokens_per_s for figures in found.values())
    alike = [bound for bound, figures in found.items() if figures.tokens_per_s >= _ALIKE * most]
    return min(alike, key=lambda bound: found[bound].ttft_p95_s)


def median(figures: Sequence[Figures]) -> Figures:
    return Figures(*map(statistics.median, zip(*map(astuple, figures), strict=True)))


@dataclass(frozen=True, slots=True)
class Record:
    """A run: the answers, and the sum of generated tokens at times since the load began, in seconds."""

    began_s: float
    answers: Sequence[Answer]
    tokens: Sequence[tuple[float, float]]
    limits: Sequence[tuple[float, Sequence[int]]]

    def between(self, from_s: float, to_s: float) -> Figures:
        """Figures of a part of the run. Times to first token are from requests sent in that part."""
        ended = [each for each in self.answers if from_s <= each.done_s - self.began_s < to_s]
        sent = [each for each in self.answers if from_s <= each.sent_s - self.began_s < to_s]
        ttft = quantiles(each.first_s for each in sent if each.served and each.first_s is not None)
        samples = [sample for sample in self.tokens if from_s <= sample[0] <= to_s]
        (first_s, first), (last_s, last) = samples[0], samples[-1]
        return Figures(
            sum(each.served for each in ended) / (to_s - from_s),
            (last - first) / (last_s - first_s),
            ttft.get("p50", float("nan")),
            ttft.get("p95", float("nan")),
            sum(each.unserved for each in ended),
        )

    def limits_at(self, at_s: float) -> Sequence[int]:
        """The limits in force at `at_s`, in the order of the servers; empty under static bounds."""
        found = [limits for when_s, limits in self.limits if when_s <= at_s]
        return found[-1] if found else []


Event = tuple[float, Callable[[], Awaitable[None]]]


async def run(
    it: RunningFleet | str,
    them: Servers,
    kind: Kind,
    *,
    seed: int,
    lasts_s: float,
    events: Sequence[Event] = (),
) -> Record:
    """Send load for all servers for `lasts_s`, with `events` at times since the load began; then let requests
    end. `it` is a fleet, or the URL of a gateway, whose limits are not recorded."""
    record_tokens: list[tuple[float, float]] = []
    record_limits: list[tuple[float, Sequence[int]]] = []
    places = sum(them.sizes.values()) / SLOTS

    async def happen(at_s: float, event: Callable[[], Awaitable[None]]) -> None:
        await asyncio.sleep(at_s)
        await event()

    with Client(it if isinstance(it, str) else it.url) as client:
        load = Load(client)
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(kind.send(load, places, seed))
            sampling = [tasks.create_task(_sample_tokens(load, them, record_tokens))]
            if not isinstance(it, str):
                sampling.append(tasks.create_task(_sample_limits(load, it, them, record_limits)))
            for event in events:
                tasks.create_task(happen(*event))
            await asyncio.sleep(lasts_s)
            load.finish()
            await asyncio.wait({sending}, timeout=_DRAIN_S)
            load.stop()
            await sending
            for each in sampling:
                each.cancel()
    if not isinstance(it, str):
        await it.wait_for_rest(_READY_S)
    return Record(load.began_s, load.history, record_tokens, record_limits)


async def _sample_tokens(load: Load, them: Servers, samples: list[tuple[float, float]]) -> None:
    last = dict.fromkeys(them.addresses, 0.0)
    generated = 0.0
    async with http_client(timeout=2.0) as client:

        async def count(address: str) -> float:
            try:
                page = (await client.get(f"http://{address}/metrics")).text
            except httpx.HTTPError:
                return last[address]  # the server restarts
            return total(page, "vllm:generation_tokens_total")

        for number in itertools.count():
            at_s = load.now_s
            for address, now in zip(last, await asyncio.gather(*map(count, last)), strict=True):
                generated += now - last[address] if now >= last[address] else now
                last[address] = now
            samples.append((at_s, generated))
            await asyncio.sleep((number + 1) * _SAMPLE_S - load.now_s)


async def _sample_limits(
    load: Load, it: RunningFleet, them: Servers, samples: list[tuple[float, Sequence[int]]]
) -> None:
    while True:
        limits = {str(row["address"]): row.get("limit") for row in await it.get("endpoints")}
        found = [limit for address in them.addresses if (limit := limits.get(address)) is not None]
        samples.append((load.now_s, found))
        await asyncio.sleep(2 * _SAMPLE_S)
