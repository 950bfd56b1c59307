"""The command `picker load`: runs a named load against a fleet and checks the fleet's promises."""

import argparse
import asyncio
import sys
from importlib.util import find_spec
from pathlib import Path

import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from picker_fleet.domain.errors import ConfigError
from picker_tools.arguments import decimal, whole_number
from picker_tools.load import fleet as fleets
from picker_tools.load.checks import check_promises
from picker_tools.load.fleet import OwnFleet, Target
from picker_tools.load.generator import Kind, Load
from picker_tools.load.result import RunResult, Sample
from picker_tools.load.scenarios import ITL_MS, SCENARIOS, TTFT_MS, Plan
from picker_tools.load.session import Session
from picker_tools.local_fleet.local_fleet import UpOptions
from picker_tools.local_fleet.parts import MODES, SimOptions
from picker_tools.local_fleet.processes import Report, first_error, logs_folder, on_signal

_LINE_EVERY_S = 2.0


class ProgressView:
    """Shows the progress of a load of `duration_s`: on a terminal as a `bar`, otherwise as lines."""

    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s
        self._next_s = 0.0
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        console = Console(highlight=False)
        self.bar = Progress(*columns, console=console, disable=not sys.stdout.isatty())
        self.report = Report(console)  # the report's lines appear above the progress bar
        self._task = self.bar.add_task("load", total=duration_s, visible=False)

    def show(self, load: Load, state: Sample | None) -> None:
        parts = [f"sent {load.sent}", f"open {load.open}", f"served {load.served}"]
        parts += [f"{kind.value} {count}" for kind, count in load.ended.items() if kind is not Kind.SERVED]
        if state is not None:
            parts.append(f"stock {state.stock:g}/{state.upper:g}, queued {state.queued}")
        status = "  ".join(parts)
        if self.bar.disable and load.now_s >= self._next_s:
            self._next_s = load.now_s + _LINE_EVERY_S
            self.report.text(f"{load.now_s:5.1f} s  {status}")
        done_s = min(load.now_s, self._duration_s)
        self.bar.update(self._task, completed=done_s, description=status, visible=True)


_INTERRUPTED = 130
_LONGEST_S = 600.0
_MAX_REQUESTS = 100_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    lines = "\n".join(f"  {scenario.name:<18} {scenario.summary}" for scenario in SCENARIOS.values())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"scenarios:\n{lines}\n\nexit status: 0 promises held, 1 a promise broken, 2 bad usage"
    add("scenario", choices=SCENARIOS, metavar="SCENARIO", help=", ".join(SCENARIOS))
    add("--target", metavar="URL", help=f"a fleet's Envoy (default: {fleets.DEFAULT_URL} if it answers)")
    add("--admin", metavar="URL", help="admin API of a replica of that fleet, for stock and queue")
    add("--state-file", type=Path, metavar="FILE", help="state file that the fleet's `picker up` wrote")
    add("--allow-remote", action="store_true", help="permit a target that is not on this machine's loopback")
    add("--own", action="store_true", help="start a fleet, even if one runs")
    add("--replicas", type=whole_number(1), metavar="N", help="replicas of the fleet to start (default: 3)")
    add("--endpoints", type=whole_number(1), metavar="N", help="endpoints of the fleet to start (default: 4)")
    add("--mode", choices=MODES, help="mode of the fleet to start (default: lean)")
    seconds = decimal("number of seconds", _LONGEST_S)
    add("--duration", type=seconds, metavar="S", help=f"seconds of arrivals, at most {_LONGEST_S:g}")
    about = "requests a second of all sources together (default: by the fleet's capacity)"
    add("--rate", type=decimal("rate", 10_000), metavar="N", help=about)
    most = whole_number(1, _MAX_REQUESTS)
    add("--max-requests", type=most, default=20_000, metavar="N", help="stop after N (%(default)s)")
    add("--seed", type=int, default=1, metavar="N", help="seed of arrivals, prompts and faults (%(default)s)")
    add("--report", type=Path, metavar="DIR", help="folder of the report (default: load-reports/SCENARIO)")


def run(args: argparse.Namespace) -> int:
    """Run `picker load`. Exit status 1 if a promise is broken (stdout says which), else 130 if interrupted,
    else 0.

    Raises:
        ConfigError: the arguments conflict with each other or with the fleet.
        StartupError: the fleet did not start or does not answer.
    """
    if find_spec("matplotlib") is None:  # the plots need matplotlib: without it, fail before the run
        raise ModuleNotFoundError(name="matplotlib")
    scenario = SCENARIOS[args.scenario]
    plan = Plan(
        scenario=scenario,
        duration_s=args.duration or scenario.duration_s,
        seed=args.seed,
        max_requests=args.max_requests,
        rate_per_s=args.rate,
    )
    report = args.report or Path("load-reports") / scenario.name
    try:
        report.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise ConfigError(f"--report: {report} cannot be written: {fault.strerror}") from None
    shown = ProgressView(plan.duration_s)
    with logs_folder("picker-load-") as folder, shown.bar:
        evidence = uvloop.run(_run(args, plan, folder, shown))
    if evidence is None:
        return _INTERRUPTED
    return write_report(evidence, report)


async def _run(args: argparse.Namespace, plan: Plan, folder: Path, shown: ProgressView) -> RunResult | None:
    """Run the load. Returns the run's result; None if the run was interrupted before the load began."""
    work = asyncio.create_task(_load(args, plan, folder, shown))
    on_signal(work.cancel)
    try:
        with first_error():
            return await work
    except asyncio.CancelledError:
        return None


async def _load(args: argparse.Namespace, plan: Plan, folder: Path, shown: ProgressView) -> RunResult:
    """Find or start the fleet, then run a session with the fleet. A signal before the load begins cancels
    the run; a later signal ends the load."""
    work = asyncio.current_task()
    assert work is not None

    async def run(target: Target, fleet: OwnFleet | None) -> RunResult:
        session = Session(plan, target, fleet, shown.show, shown.report.text)
        on_signal(lambda: session.stop() or work.cancel())
        return await session.run()

    found = await _found(args, plan)
    if found is not None:
        shown.report.text(f"{plan.scenario.name}: sends its load to the fleet at {found.url}")
        return await run(found, None)
    sim = SimOptions(ttft_ms=TTFT_MS, itl_ms=ITL_MS, seed=args.seed)
    options = UpOptions(args.replicas or 3, args.endpoints or 4, args.mode or "lean", sim)
    shown.report.text(
        f"{plan.scenario.name}: starts a fleet of its own, {options.replicas} replicas and "
        f"{options.endpoints} simulated model servers, mode {options.mode}"
    )
    fleet = OwnFleet(plan.scenario, options, folder, shown.report)
    try:
        target = await fleet.start()
        shown.report.text(f"dashboard: {target.admins[0]}")
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(fleet.watch())
            evidence = await run(target, fleet)
            watching.cancel()
        return evidence
    finally:
        on_signal(fleet.kill)
        await fleets.stop_shielded(fleet)


async def _found(args: argparse.Namespace, plan: Plan) -> Target | None:
    """The running fleet to which the load is sent; None if this run must start a fleet."""
    own = args.own or args.replicas or args.endpoints or args.mode
    given = args.target or args.state_file
    if own and (given or args.admin):
        raise ConfigError(
            "--own, --replicas, --endpoints and --mode start a fleet; "
            "--target, --state-file and --admin use a running fleet"
        )
    if plan.scenario.own_fleet_only and (given or args.admin):
        raise ConfigError(
            f"{plan.scenario.name} has to {plan.scenario.fault}, safe only in a fleet that it starts: "
            "omit --target, --state-file and --admin"
        )
    if plan.scenario.own_fleet_only or own or not (given or await fleets.default_fleet_answers()):
        if args.admin:
            raise ConfigError("--admin needs --target, the URL of the fleet's Envoy")
        return None
    found = await fleets.found(
        target=args.target, admin=args.admin, state_file=args.state_file, allow_remote=args.allow_remote
    )
    await fleets.check_needs(found, plan.scenario)
    return found


def write_report(evidence: RunResult, report: Path) -> int:
    """Write the report of the run and print the verdicts. Returns the exit status."""
    from picker_tools.load import report as reports  # imported late, since matplotlib loads slowly

    promises = check_promises(evidence)
    reports.write(evidence, promises, report)
    reports.show(promises)
    print(f"report: {report / 'report.md'}", flush=True)
    if reports.any_broken(promises):
        return 1
    return _INTERRUPTED if evidence.interrupted else 0
