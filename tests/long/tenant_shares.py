"""Simulates ten minutes of tenants on three levels: shares, quotas and kills of replicas.

Eight whole replicas run in this process on a clock that jumps to the next event (tests/fleet/time_lapse.py).
An organisation's requests enter at two replicas only. Every minute one replica is killed, and clients retry
its requests at the next replica. Estimates of tokens are wrong by a random factor of up to 2. The audit
checks each decision. Shares are the tokens used after the first minute, divided by weights.
"""

import argparse
import asyncio
import contextlib
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from page_server import answered, serving
from proxy import Proxy, proxy
from redis_servers import redis_server
from time_lapse import NO_LOAD, noted_pools, time_lapse

from bench.rig.report import table
from long.findings import Findings
from picker_fleet import serve
from picker_fleet.domain.bands import NAMED
from picker_fleet.domain.config import parse
from picker_fleet.domain.errors import RequestError
from picker_fleet.domain.request import Completion, InferenceRequest, Outcome, Workload
from picker_fleet.pool import Pool
from picker_fleet.state import connection
from picker_fleet.state.keys import Keys
from picker_tools.audit.auditor import Auditor

_REPLICAS, _ENDPOINTS, _POOL = 8, 4, "default"
_IN_FLIGHT_TOKENS = 3000
_SERVICE_S, _AGAIN_S, _MINUTE_S = 0.25, 5.0, 60.0
_TEAMS, _CROWD = 4, 1000
_KEYS: Mapping[str, int] = {"north": 10, "south": 10, "limited": 5}  # number of keys of each team
_CALLERS = 4  # a leaf's requests at once: enough to keep the leaf backlogged
_CROWD_CALLERS = 60
_REJECTING = "limited/team-3"
_LIMITS: Mapping[str, int] = {"south/team-1": 22_500, "limited": 90_000, "limited/team-1": 18_000}  # per min
_NODES: Sequence[Mapping[str, Any]] = (
    *(
        {"path": path, "limits": [{"tokens": tokens, "per": "1m", "burst": 4000}]}
        for path, tokens in _LIMITS.items()
    ),
    {"path": "north", "weight": 2},
    {"path": "north/team-1", "weight": 3},
    {"path": "limited/team-2", "max_parallel_requests": 1},
    {"path": _REJECTING, "over_limit": "reject", "limits": [{"requests": 30, "per": "1m"}]},
)  # fmt: skip
_WEIGHTS = {node["path"]: node["weight"] for node in _NODES if "weight" in node}
# Sibling nodes without limits of their own: they share the parent node's service by weight.
_SIBLINGS: Mapping[str, Sequence[Sequence[str]]] = {
    "organisations": [["north", "south", "crowd"]],
    "teams": [
        [f"{name}/team-{team}" for team in range(first, _TEAMS + 1)]
        for name, first in (("north", 1), ("south", 2))
    ],
    "keys": [
        [f"{name}/team-{team}/key-{key}" for key in range(keys)]
        for name, keys in _KEYS.items()
        for team in range(1, _TEAMS + 1)
        if f"{name}/team-{team}" != _REJECTING
    ],
}
_CONFIG: Mapping[str, Any] = {
    "request_queue_controller": {
        "unit": "tokens",
        **{
            f"{bound}_per_backend": _IN_FLIGHT_TOKENS / _ENDPOINTS
            for bound in ("lower_bound", "watermark", "upper_bound")
        },
    },
    "fair_request_queue": {"queue_ttl": "240s", "total_capacity": 2000},
    "tenants": {"nodes": _NODES},
    "decision_log": {"enabled": True, "max_entries": 100_000},
    "extproc": {"drain_grace": "0s", "listen": "127.0.0.1:0"},
    "admin": {"listen": "127.0.0.1:0"},
    "http": {"listen": None},
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=int, default=9, help="minutes after the first one (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)


def run(options: argparse.Namespace, findings: Findings) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patched,
        redis_server(Path(folder)) as valkey,
        time_lapse(valkey.url, patched) as lapse,
        valkey.client() as client,
    ):
        patched.setattr(connection.KernelDelay, "read", lambda self: 0.0)  # hides the machine's delays
        log = _Log(client)

        async def life() -> None:
            async with _fleet(valkey.port) as fleet, asyncio.TaskGroup() as tasks:
                clients = [
                    tasks.create_task(client) for client in _clients(fleet, log, random.Random(options.seed))
                ]
                for minute in range(1 + options.minutes):
                    await log.follow(_MINUTE_S)
                    if minute == 0:
                        log.restart()
                    await fleet.replace(minute % _REPLICAS)
                for each in clients:
                    each.cancel()

        lapse.run_until_complete(life())
    _check(log, options.minutes * _MINUTE_S, findings)


def _check(log: "_Log", seconds: float, findings: Findings) -> None:
    report = log.auditor.report()
    seen = [f"{each.what} {each.evidence[-1]}" for found in report.findings for each in found.violations]
    findings.check(
        "the audit finds no violation", not seen, "; ".join(seen[:3]) or f"{report.entries} entries"
    )
    for path, tokens in _LIMITS.items():
        part = log.tokens[path] / (tokens * seconds / _MINUTE_S)
        findings.check(f"{path} gets its limit within 1 %", abs(part - 1) <= 0.01, f"{part:.4f}")
    for level, groups in _SIBLINGS.items():
        widest = max(_widest(log, siblings) for siblings in groups)
        findings.check(f"shares of {level} are within 2 %", widest <= 0.02, f"{widest:.4f}")
    gain = log.tokens["crowd"] / (log.tokens["north"] / 2 + log.tokens["south"]) * 2
    findings.check(f"{_CROWD} keys of one tenant gain at most 1 %", gain <= 1.01, f"{gain:.4f}")
    events = [[event, str(count)] for event, count in sorted(log.events.items())]
    findings.add(table(["event", "entries"], events))


def _widest(log: "_Log", siblings: Sequence[str]) -> float:
    """The largest relative difference between a sibling's service by weight and the siblings' mean."""
    by_weight = [log.tokens[path] / _WEIGHTS.get(path, 1) for path in siblings]
    mean = sum(by_weight) / len(by_weight)
    return max(abs(each / mean - 1) for each in by_weight)


class _Log:
    """Audits the decision log while it grows. `tokens`: the usage of each node since `restart`."""

    def __init__(self, client: Any) -> None:
        self.auditor = Auditor()
        self.tokens: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self._client, self._read = client, "-"

    async def follow(self, seconds: float) -> None:
        for _ in range(round(seconds)):
            await asyncio.sleep(1.0)
            for number, raw in self._client.xrange(Keys.of(_POOL).log, min=self._read):
                self._read = f"({number.decode()}"
                self._take({name.decode(): value.decode() for name, value in raw.items()})

    def restart(self) -> None:
        self.tokens.clear()

    def _take(self, raw: Mapping[str, str]) -> None:
        self.events[self.auditor.take(raw).event] += 1

    def ended(self, flow: str, tokens: int) -> None:
        names = flow.split("/")
        for depth in range(1, len(names) + 1):
            self.tokens["/".join(names[:depth])] += tokens


class _Replica:
    """A replica that `kill` stops as SIGKILL would: nothing that it still does reaches Redis."""

    def __init__(self, pool: Pool, serving: "asyncio.Task[None]", between: Proxy) -> None:
        self.pool = pool
        self.dead = asyncio.Event()
        self._serving, self._between = serving, between

    async def admit(self, request: InferenceRequest) -> str:
        """Returns the accounting token.

        Raises:
            ConnectionError: the replica has died.
            RequestError: the request is refused.
        """
        asking = asyncio.create_task(self.pool.admission.admit(request, stream_owned=False))
        dying = asyncio.create_task(self.dead.wait())
        try:
            await asyncio.wait((asking, dying), return_when=asyncio.FIRST_COMPLETED)
            if self.dead.is_set():
                raise ConnectionError
            return (await asking).accounting_token
        finally:
            asking.cancel()
            dying.cancel()

    async def kill(self) -> None:
        self.dead.set()
        self._between.refusing = self._between.vanished = True
        self._between.cut()
        self._serving.cancel()
        await asyncio.wait((self._serving,))


class _Fleet:
    def __init__(self, port: int, stack: contextlib.AsyncExitStack, tree: Mapping[str, Any]) -> None:
        self.replicas: list[_Replica] = []
        self._port, self._stack, self._tree = port, stack, tree
        self._started = 0

    async def start(self) -> _Replica:
        between = await self._stack.enter_async_context(proxy(self._port))
        bound: asyncio.Future[serve.Bound] = asyncio.get_running_loop().create_future()
        self._started += 1
        settings = parse({**self._tree, "redis": {"url": between.url}})
        pools: list[Pool] = []
        with noted_pools(pools.append):
            work = serve.serve(settings, f"replica-{self._started}", bound.set_result)
            serving = asyncio.create_task(work)
            await bound
        return _Replica(pools[0], serving, between)

    async def replace(self, number: int) -> None:
        await self.replicas[number].kill()
        self.replicas[number] = await self.start()


@contextlib.asynccontextmanager
async def _fleet(port: int) -> AsyncIterator[_Fleet]:
    async with contextlib.AsyncExitStack() as stack:
        pages = [await stack.enter_async_context(serving()) for _ in range(_ENDPOINTS)]
        for page in pages:
            page.answer = answered(
                NO_LOAD.replace(b'running{model_name="m"} 0', b'running{model_name="m"} 999')
            )
        static = {"discovery": {"static": [{"address": page.address} for page in pages]}}
        fleet = _Fleet(port, stack, {**_CONFIG, **static})
        fleet.replicas = [await fleet.start() for _ in range(_REPLICAS)]
        for replica in fleet.replicas:
            await replica.pool.membership.known()
        try:
            yield fleet
        finally:
            for replica in fleet.replicas:
                await replica.kill()


def _clients(fleet: _Fleet, log: _Log, dice: random.Random) -> Iterator[Any]:
    for number, (name, keys) in enumerate(_KEYS.items()):
        for team in range(1, _TEAMS + 1):
            for key in range(keys):
                for _ in range(_CALLERS):
                    yield _call(fleet, log, [f"{name}/team-{team}/key-{key}"], 2 * number + key % 2, dice)
    for caller in range(_CROWD_CALLERS):
        flows = [f"crowd/key-{key}" for key in range(caller, _CROWD, _CROWD_CALLERS)]
        yield _call(fleet, log, flows, _REPLICAS - 1, dice)


async def _call(fleet: _Fleet, log: _Log, flows: Sequence[str], replica: int, dice: random.Random) -> None:
    """Send requests one after the other, of each flow in turn."""
    while True:
        for flow in flows:
            prompt, answer = dice.randint(50, 100), dice.randint(100, 300)
            estimate = round(answer * 2 ** dice.uniform(-1, 1))
            request = InferenceRequest(
                f"{flow} {dice.random()}", "llama", "llama", False, flow, NAMED[1], 1.0,
                Workload("", 3), prompt + estimate, 240.0, None, prompt_tokens=prompt, answer_tokens=estimate,
            )  # fmt: skip
            at, token = replica, ""
            while not token:
                try:
                    token = await fleet.replicas[at % _REPLICAS].admit(request)
                except ConnectionError:
                    at += 1
                except RequestError:
                    await asyncio.sleep(_AGAIN_S)
                    break
            if token:
                await asyncio.sleep(_SERVICE_S)
                end = Completion(
                    request.id, Outcome.COMPLETED, 200, None, prompt, answer, _SERVICE_S, _SERVICE_S,
                    accounting_token=token,
                )  # fmt: skip
                log.ended(flow, prompt + answer)
                while fleet.replicas[at % _REPLICAS].dead.is_set():
                    at += 1
                fleet.replicas[at % _REPLICAS].pool.admission.settle(end)
