"""Measures what a request costs in each mode, compared with an Envoy without a picker; writes overhead.md.

`--go FILE` also measures the Go picker, and both pickers with 100 endpoints, and writes beside-go.md
(gateway.py says how to build FILE). `--beside CHECKOUT` also measures another checkout, to see whether a
change made requests more expensive; `--tenants` also measures a fleet with tenant limits. Both only print.
"""

import contextlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop
from model_servers import simulators

from bench.overhead.measure import CASES, HEAD, Readings, Target
from bench.rig.fleet import RunningFleet, fleet_config, picker_up, plain_envoy
from bench.rig.passes import WrongAnswer
from bench.rig.report import describe_run, interval, options_parser, table, write_page
from picker_fleet.domain.errors import PickerError
from picker_tools.local_fleet.parts import MODES

_HOSTS = ("127.0.0.71", "127.0.0.72")
_MODEL = ("--ttft", "0", "--itl", "2", "--max-num-seqs", "256", "--kv-blocks", "1000000")
_SCORERS = ("queue-depth", "kv-cache", "prefix-affinity")
_NONE = "no picker"
_LIMIT = {"tokens": 10**12, "per": "1m"}
_TENANTS = {  # four limits on three levels of tenants; no request reaches a limit
    "nodes": [
        {"path": "acme", "limits": [_LIMIT], "max_parallel_requests": 10**6},
        {"path": "acme/search", "limits": [{"requests": 10**9, "per": "1s"}]},
        {"path": "acme/search/*", "limits": [_LIMIT]},
    ]
}

_HOW = """\
CPU is in µs a request at full speed (16 connections for short answers of 300 B, else 8), access logs
included; median of the rounds. Added latency is the time to the answer's headers over two connections, minus
the same with an Envoy without a picker. At rest: ms of CPU a second of picker and Valkey. All targets run at
the same time on the same cores, and are measured in turn, in changing order; each round starts new processes.
A target is one replica with Envoy and Valkey (`picker up`), with bounds so high that no request waits, and
scorers for queue, KV cache and prefixes. The two model servers answer at once, and send a token every 2 ms.
"""
_HOW_GO = """\
The Go picker (cmd/epp of sigs.k8s.io/gateway-api-inference-extension v1.5.0) and this picker in `standard`
each run behind an Envoy configured as a gateway, with one real API server and the scorers of the Go picker's
chart, without TLS and traces. A ratio divides by the Go picker's figure of the same round: geometric mean and
95 % interval.
"""
_HOW_HUNDRED = """\
One picker at a time has 100 model servers that answer at once, with vLLM's metrics page of 74 KB. Cores are
measured at rest and under an open loop of 20 requests a second with 40 random prompts in turn; medians of the
rounds. Latency is measured from the time when a request is due to the last byte of its answer.
"""


def _fleet(
    mode: str, endpoints: Sequence[str], checkout: Path | None = None, **others: Any
) -> contextlib.AbstractAsyncContextManager[RunningFleet]:
    """Run one replica in `mode`, from this checkout or from the one in `checkout`."""
    options = ("--replicas", "1", "--endpoints", "0", "--mode", mode)
    environment = {"PYTHONPATH": str(checkout / "app")} if checkout is not None else None
    return picker_up(fleet_config(endpoints, scorers=_SCORERS, **others), *options, environment=environment)


def _other(mode: str) -> str:
    return f"{mode}, other"


async def _measure(rounds: int, modes: Sequence[str], checkout: Path | None, tenants: Any) -> Readings:
    found = Readings()
    async with simulators(_HOSTS, *_MODEL) as servers:
        endpoints = list(servers)
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", flush=True)
            async with AsyncExitStack() as stack:
                targets: dict[str, Target] = {_NONE: stack.enter_context(plain_envoy(endpoints))}
                for mode in modes:
                    targets[mode] = await stack.enter_async_context(_fleet(mode, endpoints))
                    if checkout is not None or tenants is not None:
                        other = _fleet(mode, endpoints, checkout, tenants=tenants)
                        targets[_other(mode)] = await stack.enter_async_context(other)
                await found.round(targets, number)
    return found


async def _measure_beside_go(rounds: int, go: str) -> tuple[Readings, dict[str, Any]]:
    # Import the test modules here, because only `make` puts them on the path.
    from api_server import started
    from seat import opened

    from bench.overhead.gateway import GO, OURS, Hundred, behind_gateway, hundred_endpoints, put_pods

    found, hundred = Readings(), {OURS: Hundred(), GO: Hundred()}
    async with AsyncExitStack() as outer:
        folder = Path(outer.enter_context(tempfile.TemporaryDirectory()))
        cluster = outer.enter_context(started(folder / "cluster"))
        endpoints = list(await outer.enter_async_context(simulators(_HOSTS, *_MODEL)))
        put_pods(cluster, endpoints, "two")
        seat = await outer.enter_async_context(opened(folder / "servers"))
        put_pods(cluster, await hundred_endpoints(seat), "hundred")
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", flush=True)
            async with AsyncExitStack() as stack:
                own = folder / str(number)
                targets: dict[str, Target] = {
                    _NONE: stack.enter_context(plain_envoy(endpoints)),
                    GO: await stack.enter_async_context(behind_gateway(cluster, own / "go", "two", go)),
                    OURS: await stack.enter_async_context(behind_gateway(cluster, own / "ours", "two")),
                }
                for mode in ("lean", "http"):
                    fleet = await stack.enter_async_context(_fleet(mode, endpoints))
                    targets[f"this picker, {mode}"] = fleet
                await found.round(targets, number)
            for name, program in ((OURS, ""), (GO, go)):
                place = own / f"hundred{'-go' * bool(program)}"
                async with behind_gateway(cluster, place, "hundred", program) as target:
                    await hundred[name].measure(target)
    return found, hundred


def _spread(ratios: Sequence[float]) -> str:
    mean, low, high = interval(ratios)
    return f"{mean:.2f} ({low:.2f}–{high:.2f})"


def _figures(found: Readings) -> str:
    return table(HEAD, [row for case in CASES for row in found.rows(case.name, _NONE)])


def _beside_checkout(found: Readings, modes: Sequence[str]) -> str:
    rows = [
        [
            case.name,
            mode,
            *(
                _spread(found.ratios(case.name, mode, _other(mode), lambda each, of=of: getattr(each, of)))
                for of in ("picker_us", "valkey_us", "envoy_us")
            ),
        ]
        for case in CASES
        for mode in modes
    ]
    text = "CPU divided by the compared fleet's in the same round: geometric mean, 95 % interval."
    return f"{text}\n\n{table(['request', 'mode', 'replicas', 'Valkey', 'Envoy'], rows)}"


def _beside_go(found: Readings, hundred: Mapping[str, Any]) -> list[str]:
    from bench.overhead.gateway import GO

    rows = [
        [
            case.name,
            name,
            _spread(found.ratios(case.name, name, GO, lambda each: each.picker_us)),
            _spread(found.ratios(case.name, name, GO, lambda each: each.shared_us)),
        ]
        for case in CASES
        for name in found.by_case[case.name]
        if name not in (_NONE, GO)
    ]
    many = [
        row for rows in zip(*(each.rows(name) for name, each in hundred.items()), strict=True) for row in rows
    ]
    head = ["request", "target", "CPU: picker / Go picker", "CPU: picker and Valkey / Go picker"]
    return [_HOW_GO, table(head, rows), _HOW_HUNDRED, table(next(iter(hundred.values())).HEAD, many)]


def main(arguments: Sequence[str]) -> int:
    """Measure, and write the page of results. The exit status is 1 only if the measurement failed."""
    parser = options_parser("python -m bench.overhead", __doc__)
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    beside = parser.add_mutually_exclusive_group()
    beside.add_argument("--go", metavar="FILE", help="the Go picker's binary")
    beside.add_argument("--beside", type=Path, metavar="CHECKOUT", help="another version's folder")
    beside.add_argument("--tenants", action="store_const", const=_TENANTS, help="also with tenants")
    args = parser.parse_args(arguments)
    shown = ["--go FILE"] * bool(args.go) + ["--beside CHECKOUT"] * bool(args.beside)
    about = describe_run(" ".join(["python -m bench.overhead", *shown, f"--rounds {args.rounds}"]))
    try:
        if args.go:
            found, hundred = uvloop.run(_measure_beside_go(args.rounds, args.go))
        else:
            found = uvloop.run(_measure(args.rounds, args.modes, args.beside, args.tenants))
    except (PickerError, WrongAnswer) as fault:
        print(fault, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    parts = [about, _HOW, _figures(found)]
    if args.go:
        title, parts = "# What a request costs beside the Go picker", parts + _beside_go(found, hundred)
    elif args.beside or args.tenants:
        print(_figures(found), _beside_checkout(found, args.modes), sep="\n\n")
        return 0
    else:
        title = "# What a request costs"
    text = "\n\n".join(each.strip() for each in (title, *parts)) + "\n"
    write_page(args.out / ("beside-go.md" if args.go else "overhead.md"), text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
