"""Checks a fleet in front of real vLLM servers on the CPU, in each mode (docs/benefit.md).

Installs vLLM once in the user's cache folder (6 GB), and starts servers with random weights and
`--max-num-seqs 4` behind two replicas. Each check returns a short text for the report, or raises Failed.
"""

import argparse
import asyncio
import contextlib
import json
import random
import string
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml
from crowd import http_client
from fleet_load import metric

from bench.rig.fleet import RunningFleet, picker_up
from long.findings import Findings
from long.vllm_servers import ADAPTERS, BASE, MAX_TOKENS, PLACES, Server, installed, made_model, servers
from picker_tools.local_fleet.network import until
from picker_tools.local_fleet.parts import MODES

_COMPLETIONS = "/v1/completions"
_CALL_S, _WAIT_S = 120.0, 30.0
_SERVED = "x-picker-served"
_LONG = 1900  # number of tokens of an answer that outlasts a check
# Tokens of a load's answers. Answers of equal length would end together, and a scrape could then see an idle
# vLLM.
_LOAD_TOKENS = (500, _LONG)
_FEW = 6
_AT_KILL = 30
_PREFIXES, _TURNS, _PREFIX_BYTES = 5, 4, 900


class Failed(Exception):
    """A check failed; the message says what was observed."""


class Fleet(RunningFleet):
    """A fleet of `picker up` in front of vLLM `servers`; `client` sends requests to fleet and servers."""

    servers: list[Server]
    client: httpx.AsyncClient

    async def ask(self, prompt: str, *, model: str = BASE, tokens: int = 4, **more: Any) -> httpx.Response:
        return await self.client.post(self.url + _COMPLETIONS, json=body(prompt, model, tokens, **more))

    async def views_of(self, server: Server) -> list[dict[str, Any]]:
        """The admin API's row about `server`, from each replica."""
        pages = [await self.get("endpoints", replica) for replica in range(len(self.replicas))]
        return [next((row for row in rows if row["address"] == server.address), {}) for rows in pages]

    async def in_flight(self) -> dict[str, int]:
        """The number of requests in flight by endpoint; endpoints without requests are left out."""
        return {place: count for place, count in (await self.get("state"))["in_flight"].items() if count}

    async def weigh(self, **weights: float) -> None:
        """Set the weights of the named scorers, and the weights of all other scorers to 0."""
        await self.change({"scheduling": {"scorers": dict.fromkeys(SCORERS, 0.0) | weights}})

    async def is_idle(self) -> bool:
        return not await self.in_flight()

    async def served_by(self, prompts: list[str], model: str = BASE) -> list[str]:
        """Send each request once the one before is settled. Returns the address of each serving endpoint."""

        found = []
        for prompt in prompts:
            await _until("earlier requests are settled", self.is_idle)
            try:
                answer = await self.ask(prompt, model=model)
            except httpx.TimeoutException:
                raise Failed(
                    f"no answer for {model}; in flight {await self.in_flight()}; {await _known_of(self)}"
                ) from None
            if answer.status_code != 200:
                raise Failed(f"status {answer.status_code}: {answer.text[:200]}")
            found.append(answer.headers[_SERVED])
        return found


SCORERS = ("queue-depth", "kv-cache", "lora-affinity", "prefix-affinity")


def body(prompt: str, model: str, tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **more}


def text(length: int, chance: random.Random = random.Random()) -> str:  # noqa: B008
    return "".join(chance.choices(string.ascii_lowercase, k=length))


@contextlib.asynccontextmanager
async def fleet_up(servers: list[Server], mode: str, folder: Path) -> AsyncIterator[Fleet]:
    """Run a fleet of two replicas in `mode` until the block ends."""
    endpoints = folder / f"endpoints-{mode}.yaml"
    addresses = [{"address": server.address} for server in servers]
    endpoints.write_text(yaml.safe_dump(addresses), encoding="utf-8")
    config = {
        "discovery": {"file": str(endpoints)},
        "scheduling": {"scorers": [{"name": name, "weight": 1} for name in SCORERS]},
        "scraping": {"interval": "300ms"},
        "request_queue_controller": {"watermark_per_backend": 12},
        "fair_request_queue": {"queue_ttl": "60s"},
    }
    options = ("--replicas", "2", "--endpoints", "0", "--mode", mode, "--debug-headers")
    async with picker_up(config, *options, kind=Fleet) as fleet, http_client(timeout=_CALL_S) as fleet.client:
        fleet.servers = servers
        await _until("every endpoint is ready", lambda: _all_ready(fleet))
        yield fleet


async def _all_ready(fleet: Fleet) -> bool:
    rows = [row for server in fleet.servers for row in await fleet.views_of(server)]
    return all(row.get("status") == "ready" and row.get("scraped_s_ago") is not None for row in rows)


async def _until(what: str, holds: Callable[[], Awaitable[bool]]) -> None:
    if not await until(holds, within_s=_WAIT_S, pause_s=0.2):
        raise Failed(f"timed out after {_WAIT_S:.0f} s: {what}")


@contextlib.asynccontextmanager
async def _busy(fleet: Fleet, server: Server, count: int, model: str = BASE) -> AsyncIterator[None]:
    """Until the block ends, keep `count` long requests running on a server, without the fleet."""
    url, chance = f"http://{server.address}{_COMPLETIONS}", random.Random(count)

    async def one() -> None:
        while True:
            tree = body(text(64), model, chance.randint(*_LOAD_TOKENS), stream=True)
            async with fleet.client.stream("POST", url, json=tree) as answer:
                async for _ in answer.aiter_bytes():
                    pass

    tasks = [asyncio.create_task(one()) for _ in range(count)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def queue_is_read(fleet: Fleet) -> str:
    """Replicas scrape vLLM's waiting requests, and the scorer `queue-depth` avoids the busy server."""
    waiting, seen = await _goes_elsewhere(fleet, "queue-depth", "waiting", least=3, load=3 * PLACES)
    return f"{waiting:.0f} waiting at one server: {seen}"


async def kv_cache_is_read(fleet: Fleet) -> str:
    """Replicas scrape vLLM's KV cache usage, and the scorer `kv-cache` avoids the busy server."""
    used, seen = await _goes_elsewhere(fleet, "kv-cache", "kv_utilisation", least=0.1, load=PLACES)
    return f"{100 * used:.0f} % of KV cache in use at one server: {seen}"


async def _goes_elsewhere(
    fleet: Fleet, scorer: str, figure: str, *, least: float, load: int
) -> tuple[float, str]:
    """Put `load` requests on one server; check that replicas see its `figure` reach `least`, and that
    `scorer` alone sends all requests to the other server. Returns the figure, and a text on the choices."""
    busy, other = fleet.servers
    await fleet.weigh(**{scorer: 3.0})

    async def known() -> bool:
        return min(float(row.get(figure) or 0) for row in await fleet.views_of(busy)) >= least

    async with _busy(fleet, busy, load):
        await _until(f"the picker sees {figure} of the loaded vLLM", known)
        seen = float((await fleet.views_of(busy))[0][figure])
        went = await fleet.served_by([text(20) for _ in range(_FEW)])
        if went != [other.address] * _FEW:
            raise Failed(f"{went.count(busy.address)} went to the loaded server; {await _known_of(fleet)}")
    return seen, f"{_FEW} of {_FEW} requests went to the other server; at rest {await _spread(fleet)}"


async def _known_of(fleet: Fleet) -> str:
    """Text for a failed check: what each replica now knows of each endpoint."""
    names = ("waiting", "running", "kv_utilisation", "adapters", "scraped_s_ago", "scrape_fault")
    rows = [row for server in fleet.servers for row in await fleet.views_of(server)]
    return "known now: " + "; ".join(str({name: row.get(name) for name in names}) for row in rows)


async def _spread(fleet: Fleet) -> str:
    """Control: check that the picker chooses both servers while they are idle. Returns the counts as text."""

    async def idle() -> bool:
        rows = [row for server in fleet.servers for row in await fleet.views_of(server)]
        return all(row["waiting"] == 0 and row["kv_utilisation"] == 0 for row in rows)

    await _until("both servers are idle", idle)
    went = await fleet.served_by([text(20) for _ in range(_FEW)])
    counts = sorted(went.count(server.address) for server in fleet.servers)
    if counts[0] == 0:
        raise Failed("at rest only one server is chosen")
    return f"{counts[1]} and {counts[0]}"


async def leaving_aborts(fleet: Fleet) -> str:
    """When a client leaves, vLLM aborts the client's request."""
    before = await _total(fleet, "vllm:generation_tokens_total")
    tree = body(text(20), BASE, _LONG, stream=True)
    async with fleet.client.stream("POST", fleet.url + _COMPLETIONS, json=tree) as answer:
        async for _ in answer.aiter_bytes():
            break

    async def ended() -> bool:
        return await _total(fleet, "vllm:num_requests_running") == 0

    await _until("vLLM has ended the request", ended)
    made = await _total(fleet, "vllm:generation_tokens_total") - before

    await _until("the fleet has released the request", fleet.is_idle)
    if not 0 < made < _LONG / 2:
        raise Failed(f"vLLM made {made:.0f} of {_LONG} tokens")
    return f"vLLM aborted the request after {made:.0f} of {_LONG} tokens; the fleet has none in flight"


async def _total(fleet: Fleet, series: str, **labels: str) -> float:
    return sum([await server.counted(series, **labels) for server in fleet.servers])


async def prefix_hits_rise(fleet: Fleet) -> str:
    """The scorer `prefix-affinity` raises vLLM's prefix-cache hit rate, compared with no scorer."""
    rates = []
    for weights in ({}, {"prefix-affinity": 3.0}):
        await fleet.weigh(**weights)
        before = [await _total(fleet, f"vllm:prefix_cache_{what}_total") for what in ("hits", "queries")]
        said = [text(_PREFIX_BYTES) for _ in range(_PREFIXES)]
        for _ in range(_TURNS):
            for number in range(_PREFIXES):
                answer = await fleet.ask(said[number])
                answer.raise_for_status()
                said[number] += text(150)
        after = [await _total(fleet, f"vllm:prefix_cache_{what}_total") for what in ("hits", "queries")]
        rates.append((after[0] - before[0]) / (after[1] - before[1]))
    if rates[1] < 1.2 * rates[0]:
        raise Failed(f"{rates[1]:.3f} of the prompts' tokens hit, {rates[0]:.3f} without the scorer")
    return f"{100 * rates[1]:.0f} % of prompt tokens hit vLLM's cache, {100 * rates[0]:.0f} % without it"


async def _tokens(fleet: Fleet) -> list[float]:
    """The prompt and completion tokens that the fleet has counted."""
    return [await metric(fleet, f"epp_{what}_tokens_total") for what in ("input", "output")]


async def _charged(fleet: Fleet, *, streamed: bool) -> str:
    before = await _tokens(fleet)
    more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
    answer = await fleet.ask(text(77), tokens=11, **more)
    last = answer.text.split("data: ")[-2] if streamed else answer.text
    usage = [float(json.loads(last)["usage"][f"{what}_tokens"]) for what in ("prompt", "completion")]

    async def charged() -> bool:
        return [b - a for a, b in zip(before, await _tokens(fleet), strict=True)] == usage

    await _until(f"the usage {usage} is charged, streamed={streamed}", charged)
    return f"{usage[0]:.0f} + {usage[1]:.0f}"


async def usage_is_charged(fleet: Fleet) -> str:
    """The fleet's token metrics equal vLLM's `usage`, for plain and for streamed answers."""
    seen = [await _charged(fleet, streamed=streamed) for streamed in (False, True)]
    return f"prompt and answer, plain {seen[0]}, streamed {seen[1]} tokens, as vLLM's usage"


async def errors_pass(fleet: Fleet) -> str:
    """vLLM's error answers reach the client unchanged, and the fleet's metrics count them."""
    seen = []
    for prompt, model, status in ((text(MAX_TOKENS + 50), BASE, 400), (text(20), "unknown", 404)):
        before = await metric(fleet, "epp_responses_total", status=str(status))
        through = await fleet.ask(prompt, model=model)
        url = f"http://{fleet.servers[0].address}{_COMPLETIONS}"
        direct = await fleet.client.post(url, json=body(prompt, model, 4))
        if (through.status_code, through.content) != (direct.status_code, direct.content):
            raise Failed(f"{through.status_code} {through.text[:200]} instead of {direct.text[:200]}")
        if through.status_code != status:
            raise Failed(f"vLLM answered {through.status_code}, {status} was expected")

        async def counted(before: float = before, status: int = status) -> bool:
            return await metric(fleet, "epp_responses_total", status=str(status)) == before + 1

        await _until(f"the {status} is counted", counted)
        seen.append(f"{status}")
    return f"{' and '.join(seen)}, byte for byte, each counted once"


async def a_killed_server_cuts_only_begun_answers(fleet: Fleet) -> str:
    """When a server is killed, every request whose answer has not begun is still answered.

    vLLM sends the header of a streamed answer before the first token, and Envoy cannot retry after a header.
    So answers with a header and no token may be cut; the check counts them.
    """
    began: set[int] = set()
    cut: dict[int, int] = {}  # request number → bytes of the answer's body
    faults: list[str] = []
    served: list[int] = []

    async def one(number: int) -> None:
        content = b""
        try:
            tree = body(text(40), BASE, 60, stream=True)
            async with fleet.client.stream("POST", fleet.url + _COMPLETIONS, json=tree) as answer:
                if answer.status_code != 200:
                    faults.append(f"{answer.status_code} {(await answer.aread())[:120]!r}")
                    return
                began.add(number)
                async for part in answer.aiter_bytes():
                    content += part
        except httpx.TransportError as fault:
            if number not in began:
                faults.append(f"{type(fault).__name__} before the first byte")
        if content.endswith(b"data: [DONE]\n\n"):
            served.append(number)
        elif number in began:
            cut[number] = len(content)

    async def some_began() -> bool:
        return len(began) >= 4

    await fleet.weigh()
    tasks = [asyncio.create_task(one(number)) for number in range(_AT_KILL)]
    await _until("some answers have begun", some_began)
    await fleet.servers[1].kill()
    await asyncio.gather(*tasks)
    afterwards = [await fleet.ask(text(20)) for _ in range(_FEW)]
    faults += [f"after the kill: {each.status_code}" for each in afterwards if each.status_code != 200]
    if faults or len(served) + len(cut) != _AT_KILL:
        raise Failed(f"{len(faults)} errors before the first byte: {faults[:3]}")
    headless = sum(not each for each in cut.values())
    return (
        f"of {_AT_KILL} no error before the first byte; {len(served)} complete answers, {len(cut)} cut,"
        f" {headless} of them after the header and no token; {_FEW} of {_FEW} later requests answered"
    )


async def adapters_are_read(fleet: Fleet) -> str:
    """Replicas scrape vLLM's loaded LoRA adapters, and `lora-affinity` sends requests to their adapter."""
    await fleet.weigh(**{"lora-affinity": 3.0})
    for adapters in (ADAPTERS, ADAPTERS[::-1]):
        pairs = list(zip(fleet.servers, adapters, strict=True))

        async def known(pairs: list[tuple[Server, str]] = pairs) -> bool:
            rows = [(row, adapter) for server, adapter in pairs for row in await fleet.views_of(server)]
            return all(row.get("adapters") == [adapter] for row, adapter in rows)

        async with contextlib.AsyncExitStack() as loads:
            for server, adapter in pairs:
                await loads.enter_async_context(_busy(fleet, server, PLACES - 1, adapter))
            await _until("the picker sees each server's adapter", known)
            for server, adapter in pairs:
                went = await fleet.served_by([text(20) for _ in range(_FEW)], adapter)
                if went != [server.address] * _FEW:
                    count = went.count(server.address)
                    raise Failed(
                        f"{count} of {_FEW} of {adapter} went to its server; {await _known_of(fleet)}"
                    )
    return f"{4 * _FEW} of {4 * _FEW} went to the server with their adapter, also after a swap of adapters"


Checks = Sequence[tuple[str, Callable[[Fleet], Awaitable[str]]]]
BASE_CHECKS: Checks = (
    ("queue", queue_is_read),
    ("KV cache", kv_cache_is_read),
    ("a client leaves", leaving_aborts),
    ("prefix affinity", prefix_hits_rise),
    ("usage", usage_is_charged),
    ("errors", errors_pass),
    ("a killed server cuts only begun answers", a_killed_server_cuts_only_begun_answers),
)
ADAPTER_CHECKS: Checks = (("LoRA", adapters_are_read),)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)


def run(options: argparse.Namespace, findings: Findings) -> None:
    with tempfile.TemporaryDirectory(prefix="picker-vllm-") as name:
        asyncio.run(_all_checks(options.modes, Path(name), findings))


async def _all_checks(modes: Sequence[str], folder: Path, findings: Findings) -> None:
    python, model = await asyncio.to_thread(installed), made_model(folder / "model")
    # The last check kills a server, so each mode gets its own second server.
    async with servers(python, model, folder, count=1 + len(modes)) as (first, *others):
        for mode, other in zip(modes, others, strict=True):
            await _check([first, other], mode, folder, BASE_CHECKS, findings)
    async with servers(python, model, folder, count=2, with_adapters=True) as pair:
        for mode in modes:
            await _check(pair, mode, folder, ADAPTER_CHECKS, findings)


async def _check(
    running: Sequence[Server], mode: str, folder: Path, checks: Checks, findings: Findings
) -> None:
    async with fleet_up(list(running), mode, folder) as fleet:
        for name, check in checks:
            try:
                holds, seen = True, await check(fleet)
            except (Failed, httpx.HTTPError, TimeoutError, KeyError) as fault:
                holds, seen = False, f"{type(fault).__name__}: {fault}"
            findings.check(f"`{mode}`: {name}", holds, seen)
