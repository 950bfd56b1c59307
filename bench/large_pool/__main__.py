"""Compares a replica's cost with 1000 pods in an InferencePool and with 10; writes large-pool.md (with the
option `--only PART`, prints the page instead).

A real API server serves two InferencePools of one namespace. Each pool has a Valkey, two replicas with a
chart's flags, and an Envoy configured like a gateway. One process runs the model servers, each at its own
loopback address. Measured are a replica's CPU at rest, with and without replacing a tenth of the pods each
minute; the CPU per request in both pools, in turns; the replica's calls to the API server; and the prefix
hits of picks that look at some endpoints and of picks that look at all (hits.py).
"""

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from api_server import NAMESPACE, PODS, ApiServer
from api_server import started as started_api
from redis_servers import redis_server
from seat import Seat

from bench.large_pool.child import address, start_servers
from bench.large_pool.hits import Hits, measure_hits
from bench.rig.report import cpu_ns, describe_run, interval, options_parser, table, write_page
from picker_tools.load.generator import Client, Load, Request
from picker_tools.local_fleet.network import free_port
from picker_tools.local_fleet.processes import picker_command

_REPLICAS = 2
_SMALL, _LARGE = 10, 1000  # pods
_ROUNDS = 12
_REPLACED_S = 600.0  # every pod is replaced within this time, a tenth of the pods each minute
_CONNECTIONS = 16
_CONVERSATIONS = 300
_SHARED, _OWN = "You are a helpful assistant. " * 70, 1500  # common prefix of all prompts; further characters
_READY_S = 120.0
_NUMBERS = itertools.count(1)
_MOST_AT_REST, _MOST_OF_A_PICK, _LEAST_HITS = 2.0, 1.2, 0.98


@dataclass(slots=True)
class Pool:
    """One InferencePool with its pods and its fleet."""

    name: str
    size: int
    first: int  # number of the pool's first model server
    seat: Seat
    redis_pid: int
    pods: list[tuple[str, str]] = field(default_factory=list)  # (name, address)
    accounts: list[str] = field(default_factory=list)  # service accounts of the running replicas
    free: list[str] = field(default_factory=list)  # addresses that no pod has
    _next: int = 0

    @property
    def labels(self) -> dict[str, str]:
        return {"app": self.name, "zone": "a", "model": "llama", "engine": "vllm", "team": "search"}

    def new_pod(self, host: str) -> tuple[str, str]:
        self._next += 1
        return f"{self.name}-{self._next}", host


def create_pod(server: ApiServer, pool: Pool, name: str, host: str) -> None:
    """Create a pod with a model server's usual fields; the pod runs, first unready, then ready."""
    environment = [{"name": f"SETTING_{n}", "value": "a value"} for n in range(12)]
    container = {"name": "server", "image": "server:1", "env": environment, "args": ["--port", "8000"]}
    spec = {"nodeName": "node", "containers": [container]}
    server.call("POST", PODS, {"metadata": {"name": name, "labels": pool.labels}, "spec": spec})
    for ready in (False, True):
        server.set_ready(name, host, ready=ready)


async def replace_pods(server: ApiServer, pool: Pool, dice: random.Random, stop: asyncio.Event) -> None:
    """Until `stop` is set, replace one pod after the other by a pod at another address; all pods take
    `_REPLACED_S`."""
    pause_s = _REPLACED_S / pool.size
    while not stop.is_set():
        began_s = time.monotonic()
        leaving = pool.pods.pop(dice.randrange(len(pool.pods)))
        coming = pool.new_pod(pool.free.pop(0))
        await asyncio.to_thread(server.delete_pod, leaving[0], grace_s=30)
        await asyncio.to_thread(create_pod, server, pool, *coming)
        await asyncio.to_thread(server.delete_pod, leaving[0], grace_s=0)
        pool.pods.append(coming)
        pool.free.append(leaving[1])
        await asyncio.sleep(max(0.0, began_s + pause_s - time.monotonic()))


async def opened(
    stack: AsyncExitStack, folder: Path, server: ApiServer, name: str, size: int, first: int
) -> Pool:
    """Create a pool with its pods, start its replicas, and wait until they know all pods."""
    here = folder / name
    here.mkdir()
    valkey = stack.enter_context(redis_server(here / "valkey"))
    seat = Seat(here, valkey, free_port(), tls=True)
    stack.push_async_callback(seat.close)
    pool = Pool(name, size, first, seat, valkey.process.pid)
    await start_servers(seat, first + size + 50)
    server.put_pool(name, [seat.port], {"app": name})
    pool.pods = [pool.new_pod(address(first + n)) for n in range(size)]
    pool.free = [address(first + size + n) for n in range(50)]
    for at in range(0, size, 20):
        pods = pool.pods[at : at + 20]
        await asyncio.gather(*(asyncio.to_thread(create_pod, server, pool, *pod) for pod in pods))
    await start_replicas(pool, server, scraping=True)
    return pool


async def start_replicas(pool: Pool, server: ApiServer, *, scraping: bool) -> None:
    """Replace the running replicas by new ones, and wait until these know every pod."""
    for picker in pool.seat.pickers:
        picker.process.terminate()
        picker.process.wait()
    pool.seat.pickers.clear()
    # Each replica has its own service account, so that the audit log distinguishes the replicas.
    launch = picker_command if scraping else without_scraping
    pool.accounts = [f"{pool.name}-{next(_NUMBERS)}" for _ in range(_REPLICAS)]
    for account in pool.accounts:
        config = server.put_account(account, [_RIGHTS])
        picker = await pool.seat.start_picker(config, pool.name, NAMESPACE, launch=launch)
        await pool.seat.ready(picker)
    ready = pool.size
    await pool.seat.everywhere(lambda found: list(found.values()).count("ready") == ready, "all are ready")


def without_scraping(*arguments: str) -> list[str]:
    """Command line of a replica that does not scrape; `arguments` go to the program `picker`."""
    return [sys.executable, "-m", "bench.large_pool.child", "replica", *arguments]


_RIGHTS = {
    "apiGroups": ["", "inference.networking.k8s.io", "llm-d.ai", "inference.networking.x-k8s.io"],
    "resources": ["pods", "inferencepools", "inferenceobjectives", "inferencemodelrewrites"],
    "verbs": ["list", "watch"],
}  # the chart grants a replica the same rights


@dataclass(frozen=True, slots=True)
class Rest:
    """The CPU of each replica and of Valkey at rest, in per cent of a core."""

    replicas: tuple[float, ...]
    valkey: float


async def rest(pool: Pool, seconds: float) -> Rest:
    pids = [*(picker.process.pid for picker in pool.seat.pickers), pool.redis_pid]
    before, began_s = [cpu_ns([pid]) for pid in pids], time.monotonic()
    await asyncio.sleep(seconds)
    lasted_ns = (time.monotonic() - began_s) * 1e9
    *replicas, valkey = (
        100 * (cpu_ns([pid]) - was) / lasted_ns for pid, was in zip(pids, before, strict=True)
    )
    return Rest(tuple(replicas), valkey)


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU of the replicas and of Valkey in µs per request, minus their CPU at rest."""

    replica_us: float
    valkey_us: float
    seconds: float


class Clients:
    """Sends requests of conversations that share a system prompt, in a closed loop over new connections."""

    def __init__(self, dice: random.Random) -> None:
        self._prompts = [
            f"{_SHARED}Conversation {number}. {''.join(dice.choices('abcdefgh ', k=_OWN))}"
            for number in range(_CONVERSATIONS)
        ]
        self._dice = dice

    async def run(self, pool: Pool, requests: int) -> None:
        assert pool.seat.gateway is not None
        with Client(str(pool.seat.gateway.base_url)) as client:
            load = Load(client)
            async with asyncio.timeout(_READY_S):
                await load.send_closed(_CONNECTIONS, self._make_request, requests=requests)
        assert not load.unserved, str(load.unserved[0])

    def _make_request(self, _: random.Random, number: int) -> Request:
        return Request(self._dice.choice(self._prompts), 1)


async def cost(pool: Pool, clients: Clients, requests: int, idle: Rest) -> Cost:
    replicas = [picker.process.pid for picker in pool.seat.pickers]
    before, valkey, began_s = cpu_ns(replicas), cpu_ns([pool.redis_pid]), time.monotonic()
    await clients.run(pool, requests)
    lasted_s = time.monotonic() - began_s
    used_us = (cpu_ns(replicas) - before) / 1e3 - sum(idle.replicas) * 1e4 * lasted_s
    valkey_us = (cpu_ns([pool.redis_pid]) - valkey) / 1e3 - idle.valkey * 1e4 * lasted_s
    return Cost(used_us / requests, valkey_us / requests, lasted_s)


def calls_seen(server: ApiServer, account: str) -> dict[str, int]:
    """From the audit log: how often a replica listed, and started to watch, each kind of object."""
    found: Counter[str] = Counter()
    for call in server.calls(f"system:serviceaccount:{NAMESPACE}:{account}"):
        begun = "ResponseStarted" if call["verb"] == "watch" else "ResponseComplete"
        if call["stage"] == begun and call["responseStatus"]["code"] == 200:
            found[f"{call['verb']} {call['objectRef']['resource']}"] += 1
    return dict(found)


@dataclass(slots=True)
class Found:
    rest: dict[str, Rest] = field(default_factory=dict)
    costs: list[tuple[Cost, Cost]] = field(default_factory=list)  # a round's costs in both pools
    calls: dict[str, int] = field(default_factory=dict)  # number of API calls by a key such as `list pods`
    hits: tuple[Hits, Hits] | None = None  # hits of picks from sampled endpoints and from all endpoints


async def measure(folder: Path, server: ApiServer, found: Found, options: argparse.Namespace) -> None:
    """Measure the parts that `options` select, and store the results in `found`."""
    dice = random.Random(29)
    async with AsyncExitStack() as stack:
        small = await opened(stack, folder, server, "small", _SMALL, 0)
        large = await opened(stack, folder, server, "large", _LARGE, _SMALL + 50)
        if options.only in (None, "rest"):
            for scraping in (True, False):
                for pool in (small, large):
                    await start_replicas(pool, server, scraping=scraping)
                await asyncio.sleep(5)
                name = "scraping" if scraping else "no scraping"
                found.rest[f"small, {name}"] = await rest(small, options.seconds)
                found.rest[f"large, {name}"] = await rest(large, options.seconds)
                stop = asyncio.Event()
                async with asyncio.TaskGroup() as group:
                    group.create_task(replace_pods(server, large, dice, stop))
                    await asyncio.sleep(3)
                    found.rest[f"large, {name}, replaced"] = await rest(large, options.seconds)
                    stop.set()
                print(found.rest, flush=True)
            # Count a replica's calls to the API server after pods were replaced.
            found.calls = calls_seen(server, large.accounts[0])
        if options.only in (None, "pick"):
            for pool in (small, large):
                await start_replicas(pool, server, scraping=True)
                await pool.seat.start_gateway()
            await asyncio.sleep(5)
            idle = {pool.name: await rest(pool, 10) for pool in (small, large)}
            clients = Clients(dice)
            for pool in (small, large):
                await clients.run(pool, options.requests)
            for number in range(_ROUNDS):
                pair = {}
                for pool in (small, large) if number % 2 else (large, small):
                    pair[pool.name] = await cost(pool, clients, options.requests, idle[pool.name])
                found.costs.append((pair["small"], pair["large"]))
                print(pair, flush=True)


def ratios(costs: Sequence[tuple[Cost, Cost]], of: str) -> tuple[float, float, float]:
    return interval([getattr(large, of) / getattr(small, of) for small, large in costs])


def faults(found: Found) -> list[str]:
    """A text for each limit that the measurement exceeds."""
    missed = []
    for name, at_rest in found.rest.items():
        if "no scraping" in name and max(at_rest.replicas) > _MOST_AT_REST:
            missed.append(f"a replica at rest takes {max(at_rest.replicas):.1f} % ({name})")
    if found.costs and (ratio := ratios(found.costs, "replica_us")[0]) > _MOST_OF_A_PICK:
        missed.append(f"a request costs {ratio:.2f} times as much as in the small pool")
    if found.hits and found.hits[0].share < _LEAST_HITS * found.hits[1].share:
        missed.append("picks that look at some endpoints have too few prefix hits")
    missed += [f"{count} times {call}" for call, count in found.calls.items() if count > 1]
    return missed


def page(found: Found, about: str, options: argparse.Namespace) -> str:
    parts = [
        f"# A pool of {_LARGE} pods\n\n{about}\n\nA real API server, Valkey and Envoy; pools of {_SMALL} and "
        f"{_LARGE} pods with {_REPLICAS} replicas each, started with a chart's flags.\n\n"
        f"Wanted: a replica at rest takes at most {_MOST_AT_REST:g} % of a core without scraping while a "
        "tenth of the pods is replaced each minute; a request costs at most "
        f"{_MOST_OF_A_PICK:g} times what it costs in the small pool; at least {_LEAST_HITS:g} of the "
        "prefix hits of picks that look at all endpoints; each replica lists and watches each kind once. "
        f"Here: {'; '.join(faults(found)) or 'everything holds'}."
    ]
    if found.rest:
        rows = [
            [name, *(f"{value:.2f}" for value in (*at_rest.replicas, at_rest.valkey))]
            for name, at_rest in found.rest.items()
        ]
        calls = ", ".join(f"{count} × {call}" for call, count in sorted(found.calls.items()))
        parts.append(
            f"## At rest\n\nPer cent of a core in {options.seconds:g} s, without a request. `replaced`: a "
            "tenth of the pods in each minute, one after the other. Calls of one replica to the API server "
            f"until then: {calls}.\n\n" + table(["pool", "first replica", "second replica", "Valkey"], rows)
        )
    if found.costs:
        rows = []
        for what, of in (("replicas", "replica_us"), ("Valkey", "valkey_us")):
            mean, low, high = ratios(found.costs, of)
            amounts = [fmean(getattr(one, of) for one in each) for each in zip(*found.costs, strict=True)]
            rows.append([what, *(f"{each:.0f}" for each in amounts), f"{mean:.3f} ({low:.3f} to {high:.3f})"])
        parts.append(
            "## A request\n\nCPU in microseconds, without CPU at rest: means of "
            f"{len(found.costs)} rounds of {options.requests} requests in each pool, in turns; "
            f"{_CONNECTIONS} connections; prompts of {len(_SHARED) + _OWN} characters that begin alike; "
            "`standard`, TLS, the scorers of a chart's flags. Ratio of a round: geometric mean, 95 % "
            "interval.\n\n" + table(["CPU of", f"{_SMALL} pods", f"{_LARGE} pods", "ratio"], rows)
        )
    if found.hits:
        rows = [
            [name, f"{each.share:.3f}", f"{each.load:.2f}", str(each.load_p99)]
            for name, each in zip(("a part", "all"), found.hits, strict=True)
        ]
        parts.append(
            "## Prefix hits\n\nIn one process, without network: chats of several turns after a few system "
            "prompts. `hits`: share of the prompts' blocks that the chosen endpoint had. `load`: its "
            "earlier requests.\n\n" + table(["looked at", "hits", "load, mean", "load, p99"], rows)
        )
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str]) -> int:
    parser = options_parser("make bench-large-pool")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a measurement at rest")
    parser.add_argument("--requests", type=int, default=1500, help="for each pool and round")
    parser.add_argument("--only", choices=("rest", "pick", "hits"))
    options = parser.parse_args(arguments)
    about = describe_run(" ".join(["python -m bench.large_pool", *arguments]))
    found = Found()
    if options.only in (None, "hits"):
        found.hits = measure_hits(_LARGE)
    if options.only != "hits":
        with tempfile.TemporaryDirectory() as folder, started_api(Path(folder) / "cluster") as server:
            asyncio.run(measure(Path(folder), server, found, options))
    if options.only:
        print(page(found, about, options))
    else:
        write_page(options.out / "large-pool.md", page(found, about, options))
    return 1 if faults(found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
