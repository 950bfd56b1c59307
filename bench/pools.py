"""`python -m bench.pools`: does a flood of one pool harm another pool of the same fleet?

Pool `calm` has a steady load far below its capacity. Its latency is measured in turns: without a flood;
while pool `flooded` of the same fleet is sent several times what it can serve; and, as a control, while the
same flood goes to another fleet on the same machine, with an Envoy and a Valkey of its own: what that adds
is the machine's, not the fleet's. Writes bench/results/pools.md.

Requests are sent by the clock, whatever is answered (an open loop). The load of each pool and its model
server are one process: one clock times both. A turn in which the clock of the calm pool's process was late by
more than `_LATE_S` is repeated, in each condition alike: then somebody else had the core.
"""

import asyncio
import contextlib
import multiprocessing
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from bench.rig.fleet import picker_up
from bench.rig.http import Client, ModelServer, model_server
from bench.rig.machine import describe_machine
from bench.rig.page import options_parser, percentile, table, write_page
from picker_fleet.errors import StartupError

CALM, FLOODED = "calm", "flooded"
CONDITIONS = ("no flood", "flood of the other pool", "flood of another fleet")
_CALM_PER_S, _CALM_SERVED_S = 200, 0.01
_PLACES, _FLOODED_SERVED_S = 4, 0.05  # so the flooded pool serves 80 requests a second
_QUEUE = 100
_SETTLE_S = 1.0  # of a turn, before it is measured
_QUIET_S = 0.3  # between turns, after the flood's last answer
_TICK_S, _LATE_S = 0.005, 0.03
_REPEATS = 3


@dataclass
class Turn:
    """What one turn measured: seconds from the time that a request was due to its answer, statuses, and by
    how much the clock was late at most."""

    latencies_s: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    late_s: float = 0.0


async def load(url: str, pool: str, per_s: float, seconds: float) -> Turn:
    """Send `per_s` requests a second to `pool` for so long, and wait for all answers."""
    idle: list[Client] = []
    turn = Turn()
    began_s = time.perf_counter()  # uvloop's own clock counts milliseconds

    async def tick() -> None:
        while True:
            due_s = time.perf_counter() + _TICK_S
            await asyncio.sleep(_TICK_S)
            turn.late_s = max(turn.late_s, time.perf_counter() - due_s)

    async def one(due_s: float) -> None:
        client = idle.pop() if idle else await Client.connected(url)
        turn.statuses[await client.ask(pool)] += 1
        if due_s >= began_s + _SETTLE_S:
            turn.latencies_s.append(time.perf_counter() - due_s)
        idle.append(client)

    clock = asyncio.create_task(tick())
    async with asyncio.TaskGroup() as tasks:
        for number in range(round(per_s * seconds)):
            due_s = began_s + number / per_s
            if (wait_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            tasks.create_task(one(due_s))
    clock.cancel()
    for client in idle:
        client.close()
    return turn


def serving(served_s: float) -> contextlib.AbstractAsyncContextManager[str]:
    """A model server whose completions take `served_s` each."""
    return model_server(lambda: ModelServer(lambda: served_s))


def flood(pipe: Connection) -> None:
    """The flood's process: tells its model server's address, then floods as often as it is told."""

    async def work() -> None:
        async with serving(_FLOODED_SERVED_S) as address:
            pipe.send(address)
            while (asked := await asyncio.to_thread(pipe.recv)) is not None:
                turn = await load(*asked)
                pipe.send(turn.statuses)

    uvloop.run(work())


@contextlib.contextmanager
def flooder() -> Iterator[Connection]:
    own, its = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=flood, args=(its,), daemon=True)
    process.start()
    try:
        yield own
    finally:
        process.kill()
        process.join()


def config(addresses: dict[str, str]) -> dict[str, Any]:
    """Of a fleet that serves both pools, with a model server each."""
    bounds = ("lower_bound", "watermark", "upper_bound")
    places = {CALM: 64, FLOODED: _PLACES}
    queue = {"total_capacity": _QUEUE, "flow_capacity": _QUEUE, "queue_ttl": "10s"}
    return {
        "pool": CALM,
        "fair_request_queue": queue,
        "pools": {
            name: {
                "discovery": {"static": [{"address": address}]},
                "request_queue_controller": {f"{bound}_per_backend": places[name] for bound in bounds},
            }
            for name, address in addresses.items()
        },
    }


@dataclass
class Found:
    """Of a number of replicas: the turns of the calm pool by condition, and what the flood was answered."""

    turns: dict[str, list[Turn]] = field(default_factory=lambda: {name: [] for name in CONDITIONS})
    flooded: dict[str, Counter[int]] = field(default_factory=lambda: {name: Counter() for name in CONDITIONS})
    repeated: Counter[str] = field(default_factory=Counter)


async def measure(replicas: int, rounds: int, seconds: float, times: float) -> Found:
    per_s = times * _PLACES / _FLOODED_SERVED_S
    found = Found()
    options = ("--replicas", str(replicas), "--endpoints", "0", "--no-restart")
    with flooder() as pipe:
        async with serving(_CALM_SERVED_S) as calm:
            tree = config({CALM: calm, FLOODED: await asyncio.to_thread(pipe.recv)})
            async with picker_up(tree, *options) as both, picker_up(tree, *options) as other:
                flooded_urls = {CONDITIONS[1]: both.url, CONDITIONS[2]: other.url}
                await load(both.url, CALM, _CALM_PER_S, 3.0)
                for number in range(rounds):
                    for name in CONDITIONS if number % 2 == 0 else CONDITIONS[::-1]:
                        print(f"{replicas} replicas, round {number + 1} of {rounds}: {name}", file=sys.stderr)
                        for _ in range(1 + _REPEATS):
                            if flooded := flooded_urls.get(name):
                                pipe.send((flooded, FLOODED, per_s, seconds))
                            turn = await load(both.url, CALM, _CALM_PER_S, seconds)
                            answers = await asyncio.to_thread(pipe.recv) if flooded else Counter()
                            await asyncio.sleep(_QUIET_S)
                            if turn.late_s <= _LATE_S:
                                break
                            found.repeated[name] += 1
                        found.turns[name].append(turn)
                        found.flooded[name] += answers
    return found


def rows(replicas: int, found: Found) -> list[list[str]]:
    """A row a condition: quantiles of all turns in ms, the median of the turns' p99, and its ratio."""
    lines = []
    quiet = [percentile(turn.latencies_s, 0.99) for turn in found.turns[CONDITIONS[0]]]
    for name, turns in found.turns.items():
        every = [each for turn in turns for each in turn.latencies_s]
        p99 = [percentile(turn.latencies_s, 0.99) for turn in turns]
        ratio = statistics.median(own / none for own, none in zip(p99, quiet, strict=True))
        statuses = sum((turn.statuses for turn in turns), Counter[int]())
        quantiles = (f"{percentile(every, share) * 1000:.1f}" for share in (0.5, 0.9, 0.99))
        figures = [f"{statistics.median(p99) * 1000:.1f}", f"{ratio:.2f}", f"{found.repeated[name]}"]
        told = [_told(statuses), _told(found.flooded[name]) or "–"]
        lines.append([str(replicas), name, *quantiles, *figures, *told])
    return lines


def _told(statuses: Counter[int]) -> str:
    return ", ".join(f"{count} × {status}" for status, count in sorted(statuses.items()))


HEAD = (
    "replicas", "condition", "p50, ms", "p90, ms", "p99, ms", "p99 of a turn, ms", "ratio to no flood",
    "turns repeated", "answers", "the flood's answers",
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    parser = options_parser("python -m bench.pools", __doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a turn")
    parser.add_argument("--times", type=float, default=4.0, help="the flood, in what its pool can serve")
    parser.add_argument("--replicas", nargs="+", type=int, default=(1, 3))
    args = parser.parse_args(arguments)
    made = describe_machine("bench.pools", arguments)
    lines = []
    for count in args.replicas:
        try:
            found = uvloop.run(measure(count, args.rounds, args.seconds, args.times))
        except (StartupError, OSError) as fault:
            print(fault, file=sys.stderr)
            return 1
        lines += rows(count, found)
    rate = args.times * _PLACES / _FLOODED_SERVED_S
    page = (
        "# A flood of one pool, and another pool of the same fleet\n\n"
        f"`{made.command}`, {made.date}, {made.cores} cores, {made.processor}, load {made.load:.2f} at the "
        f"start. Pool `{CALM}`: {_CALM_PER_S} requests a second, served in {_CALM_SERVED_S * 1000:g} ms. "
        f"Pool `{FLOODED}`: {rate:g} requests a second, {args.times:g} times what its {_PLACES} places can "
        f"serve, in {_FLOODED_SERVED_S * 1000:g} ms each; its queue has {_QUEUE} places. "
        f"{args.rounds} rounds of {args.seconds:g} s a condition, in turns. Latency of the calm pool's "
        "requests, from when they are due to the answer's last byte. `flood of another fleet`, with "
        "replicas, an Envoy and a Valkey of its own on the same machine, shows what the flood costs by the "
        "machine alone. `ratio`: p99 of a turn by that of the round's turn without a flood, median over "
        f"the rounds. A turn is repeated, {_REPEATS} times at most, if the clock of the calm pool's process "
        f"was late by more than {_LATE_S * 1000:g} ms.\n\n{table(HEAD, lines)}\n"
    )
    write_page(args.out / "pools.md", page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
