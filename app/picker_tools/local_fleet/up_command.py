"""The command `picker up`: runs a whole fleet on this machine until Ctrl-C."""

import argparse
import asyncio
import os
from dataclasses import replace
from pathlib import Path

from picker_fleet.domain import config
from picker_fleet.domain.errors import ConfigError
from picker_tools.arguments import milliseconds, port, whole_number
from picker_tools.local_fleet.local_fleet import LocalFleet, UpOptions
from picker_tools.local_fleet.parts import MODES, SimOptions, trusted_headers
from picker_tools.local_fleet.processes import Report, logs_folder, on_signal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--replicas", type=whole_number(1), default=3, metavar="N", help="pickers (default: %(default)s)")
    about = "simulated model servers (default: %(default)s); 0: use the endpoints of --config"
    add("--endpoints", type=whole_number(0), default=4, metavar="N", help=about)
    about = "how many endpoints of each pool prefill for the rest, which decode (default: no roles)"
    add("--prefill", type=whole_number(0), default=0, metavar="N", help=about)
    about = "pools to serve, the default pool first; each has --endpoints (default: the pools of --config)"
    add("--pools", type=_pools, metavar="NAME,…", help=about)
    about = "how Envoy calls the pickers (default: %(default)s)"
    add("--mode", choices=MODES, default="lean", help=about)
    add("--redis", metavar="URL", help="use this Redis instead of an embedded Valkey")
    add("--port", type=port, default=8080, metavar="N", help="Envoy's port; 0: all ports are free ones")
    add("--admin-port", type=port, default=8081, metavar="N", help="first replica's; others: the next ones")
    add("--config", type=Path, metavar="FILE", help="the replicas' configuration")
    add("--state-file", type=Path, metavar="FILE", help="file to write once the fleet is ready")
    add("--no-restart", dest="restart", action="store_false", help="do not restart parts that end")
    add("--debug-headers", action="store_true", help="name the picked and the serving endpoint in answers")
    add("--sim-ttft", type=milliseconds, metavar="MS", help="simulators' time to first token")
    add("--sim-itl", type=milliseconds, metavar="MS", help="simulators' time from token to token")
    add("--seed", type=int, metavar="N", help="of the simulators")


def run(args: argparse.Namespace) -> int:
    """Run until SIGINT or SIGTERM, stop every child, and return 0.

    Raises:
        ConfigError: the configuration or an option cannot be used.
        StartupError: a part did not start; the message names the part and the folder with the logs.
    """
    if args.prefill and args.prefill >= args.endpoints:
        raise ConfigError(f"--prefill {args.prefill} leaves none of --endpoints {args.endpoints} to decode")
    if (state := args.state_file) is not None and (state.is_dir() or not os.access(state.parent, os.W_OK)):
        raise ConfigError(f"--state-file {state}: no file can be written there")
    # Without a configuration the fleet finds its limits; slow simulators with small batches save CPU time.
    sim = SimOptions() if args.config else SimOptions(ttft_ms=60.0, itl_ms=12.0, max_num_seqs=2)
    given = {"ttft_ms": args.sim_ttft, "itl_ms": args.sim_itl, "seed": args.seed}
    options = UpOptions(
        replicas=args.replicas,
        endpoints=args.endpoints,
        prefill=args.prefill,
        mode=args.mode,
        redis=args.redis,
        port=args.port,
        admin_port=args.admin_port,
        state_file=args.state_file,
        restart=args.restart,
        debug_headers=args.debug_headers,
        sim=replace(sim, **{name: value for name, value in given.items() if value is not None}),
    )
    asked = {"pool": args.pools[0], "pools": {name: {} for name in args.pools}} if args.pools else {}
    settings = config.load(args.config, os.environ, flags=asked)
    with logs_folder("picker-up-") as folder:
        asyncio.run(_up(options, settings, folder))
    return 0


async def _up(options: UpOptions, settings: config.Settings, folder: Path) -> None:
    report = Report()
    fleet = LocalFleet(options, settings, folder, report)
    work = asyncio.create_task(_run(fleet, settings, report, folder))
    on_signal(work.cancel)
    try:
        await work
    except asyncio.CancelledError:
        report.text("stopping")
    finally:
        on_signal(fleet.kill)  # from now on a signal kills all parts at once
        await fleet.stop()


async def _run(fleet: LocalFleet, settings: config.Settings, report: Report, folder: Path) -> None:
    loop = asyncio.get_running_loop()
    since = loop.time()
    await fleet.start()
    body = f'{{"model": "{await fleet.model()}", "prompt": "Hello", "max_tokens": 16}}'
    report.text(
        f"the fleet is ready after {loop.time() - since:.1f} s; logs in {folder}; Ctrl-C ends it\n"
        f"try:\n  curl {fleet.envoy_url}/v1/completions -H 'content-type: application/json' -d '{body}'\n"
        f"trusted: clients may set {', '.join(trusted_headers(settings))}\n"
        f"  and x-workload-context; elsewhere, let no untrusted client name flow or objective\n"
        f"dashboard: {fleet.dashboard}"
    )
    for pool in fleet.other_pools:
        report.text(f"pool {pool}: with -H 'host: {pool}'; dashboard: {fleet.dashboard}/pools/{pool}/")
    await fleet.watch()


def _pools(text: str) -> list[str]:
    return list(dict.fromkeys(text.split(",")))
