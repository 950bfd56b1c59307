"""`python -m bench.refill` measures how long a freed place at a model server stays empty while requests wait.

A place is empty from an answer's last byte until the next request's first byte reaches the model server.
The page compares this time with the time that a picker adds to a request that does not wait. One model server
has few slots and a deep queue. Client and model server run in this process, so that one clock times both.
Writes bench/results/refill.md.
"""

import asyncio
import itertools
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import uvloop

from bench.rig.fleet import fleet_config, picker_up, plain_envoy
from bench.rig.http import ModelServer, model_server
from bench.rig.report import describe_run, options_parser, percentile, table, write_page
from picker_fleet.domain.errors import PickerError
from picker_tools.load.generator import Client, Request, flow_header
from picker_tools.local_fleet.parts import MODES

_PLACES = 4
_WAITING = 48  # number of connections whose requests wait
_SERVED_S = (0.03, 0.07)  # seconds: random duration of an answer, so that answers end at different times
_PAUSE_S = (0.005, 0.02)  # seconds that a client pauses before its next request, so as not to disturb refills
_UNQUEUED = 400
_REFILLS = 500
_WARM_UP = 40
_LIMIT_S = 60.0
_P50_LIMIT, _P99_LIMIT = 1.5, 3.0


@dataclass(slots=True)
class Times:
    """The times at which requests were sent, arrived and ended, in µs of one clock. `served_s`: shortest and
    longest duration of an answer."""

    served_s: tuple[float, float] = (0.0, 0.0)
    sent_us: dict[bytes, int] = field(default_factory=dict)
    arrived_us: list[int] = field(default_factory=list)
    ended_us: list[int] = field(default_factory=list)
    on_the_way_us: list[int] = field(default_factory=list)


class _ModelServer(ModelServer):
    """A model server that records when requests arrive and end."""

    def __init__(self, times: Times) -> None:
        super().__init__(lambda: random.uniform(*times.served_s))
        self._times, self._id = times, b""

    def data_received(self, data: bytes) -> None:
        self._began_us = _now_us()
        super().data_received(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-sent":
            self._id = value

    def arrived(self) -> None:
        times = self._times
        times.arrived_us.append(self._began_us)
        times.on_the_way_us.append(self._began_us - times.sent_us.pop(self._id, self._began_us))

    def ended(self) -> None:
        self._times.ended_us.append(_now_us())


async def _ask_on(client: Client, times: Times, number: int, stop: asyncio.Event) -> None:
    """Send requests one by one until `stop` is set. Raises ConnectionError if a request is not served."""
    for count in itertools.count():
        name = f"{number}-{count}"
        times.sent_us[name.encode()] = _now_us()
        headers = (*flow_header(f"flow-{number % 4}"), ("x-sent", name))
        answer = await client.send(Request("the quick brown fox", 1, headers=headers))
        if not answer.served:
            raise ConnectionError(answer.outcome)
        if stop.is_set():
            return
        await asyncio.sleep(random.uniform(*_PAUSE_S))


def _now_us() -> int:
    return time.perf_counter_ns() // 1000


async def _load(url: str, times: Times, connections: int, requests: int) -> None:
    """Send requests over `connections` until `requests` more have ended."""
    target, stop = len(times.ended_us) + requests, asyncio.Event()
    with Client(url) as client:
        async with asyncio.timeout(_LIMIT_S), asyncio.TaskGroup() as tasks:
            for number in range(connections):
                tasks.create_task(_ask_on(client, times, number, stop))
            while len(times.ended_us) < target:  # noqa: ASYNC110 - the model servers notify nobody of it
                await asyncio.sleep(0.02)
            stop.set()


@dataclass(frozen=True, slots=True)
class Reading:
    """In µs: how long each request took from client to server, and how long each freed slot stayed empty."""

    way_us: list[int]
    refill_us: list[int]


async def _reading(url: str, times: Times, *, refill: bool) -> Reading:
    times.served_s = (0.001, 0.003)
    await _load(url, times, 2, _WARM_UP)
    times.on_the_way_us.clear()
    await _load(url, times, 2, _UNQUEUED)
    way_us, refill_us = list(times.on_the_way_us), []
    if refill:
        times.served_s = _SERVED_S
        times.arrived_us.clear()
        times.ended_us.clear()
        await _load(url, times, _PLACES + _WAITING, _REFILLS)
        # The server is full except during the measured gaps: the end of request n frees the slot for request
        # n + _PLACES.
        pairs = zip(times.ended_us[: _REFILLS - _PLACES], times.arrived_us[_PLACES:], strict=False)
        refill_us = [arrived - ended for ended, arrived in pairs][_WARM_UP:]
    return Reading(way_us, refill_us)


async def measure(rounds: int, modes: Sequence[str], replicas: Sequence[int]) -> dict[str, list[Reading]]:
    """Measure each variant (mode, replicas) in each round. Returns readings by variant (`none`: no
    picker)."""
    variants = [(mode, count) for mode in modes for count in replicas]
    found: dict[str, list[Reading]] = {"none": [], **{f"{mode}, {count}": [] for mode, count in variants}}
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        times = Times()
        async with model_server(partial(_ModelServer, times)) as address:
            with plain_envoy([address]) as envoy:
                found["none"].append(await _reading(envoy.url, times, refill=False))
        for mode, count in variants:
            times = Times()
            options = ("--replicas", str(count), "--endpoints", "0", "--mode", mode)
            async with (
                model_server(partial(_ModelServer, times)) as address,
                picker_up(fleet_config([address], bound=_PLACES), *options) as fleet,
            ):
                found[f"{mode}, {count}"].append(await _reading(fleet.url, times, refill=True))
    return found


def rows(found: dict[str, list[Reading]]) -> list[list[str]]:
    """Rows of the table, one per variant: medians over the rounds of times in ms and of ratios."""

    def of(values: list[int], share: float) -> float:
        return percentile(values, share) / 1000

    lines = []
    for name, readings in found.items():
        if name == "none":
            continue
        cells: list[str] = []
        for share, limit in ((0.5, _P50_LIMIT), (0.99, _P99_LIMIT)):
            pairs = zip(readings, found["none"], strict=True)
            added = [of(own.way_us, share) - of(none.way_us, share) for own, none in pairs]
            refill = [of(each.refill_us, share) for each in readings]
            ratio = statistics.median(r / max(a, 1e-3) for r, a in zip(refill, added, strict=True))
            met = "met" if ratio <= limit else "**missed**"
            cells += [*(f"{each:.2f}" for each in (*map(statistics.median, (added, refill)), ratio)), met]
        lines.append([*name.split(", "), *cells])
    return lines


def main(arguments: Sequence[str]) -> int:
    parser = options_parser("python -m bench.refill", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--replicas", nargs="+", type=int, default=(1, 3))
    args = parser.parse_args(arguments)
    about = describe_run(" ".join(["python -m bench.refill", *arguments]))
    try:
        found = uvloop.run(measure(args.rounds, args.modes, args.replicas))
    except (PickerError, OSError, ExceptionGroup) as fault:
        print(*getattr(fault, "exceptions", (fault,)), file=sys.stderr)
        return 1
    head = ["mode", "replicas"]
    for share, limit in (("p50", _P50_LIMIT), ("p99", _P99_LIMIT)):
        head += [f"added {share}, ms", f"refill {share}, ms", f"ratio (≤ {limit:g})", ""]
    page = (
        "# How long a freed place stays empty\n\n"
        f"{about} {args.rounds} rounds, new processes each. One model server has {_PLACES} places, and "
        f"{_WAITING} requests wait. `refill`: time from the last byte of an answer to the first byte of the "
        "next request at the model server. `added`: time from client to server of a request that does not "
        "wait, minus the same time without a picker. A client pauses for 5 to 20 ms before its next request, "
        "so that the new request does not take CPU from the refill. "
        f"Medians of the rounds.\n\n{table(head, rows(found))}\n"
    )
    write_page(args.out / "refill.md", page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
