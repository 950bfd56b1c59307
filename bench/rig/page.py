"""What benchmarks share: options, the page that they write, Markdown tables, percentiles, paired ratios."""

import argparse
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

_RESULTS = Path(__file__).parents[1] / "results"

# Student's t for a 95 % interval, by number of pairs.
T_95 = {4: 3.182, 6: 2.571, 8: 2.365, 9: 2.306, 10: 2.262, 12: 2.201, 15: 2.145, 20: 2.093}


def options_parser(prog: str, description: str | None = None) -> argparse.ArgumentParser:
    """A parser with `--out`, the folder of the page."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--out", type=Path, default=_RESULTS, metavar="DIR", help="default: bench/results")
    return parser


def write_page(file: Path, text: str) -> None:
    """Write and print it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    print(text)


def total(page: str, series: str, **labels: str) -> float:
    """The sum of the samples of `series` on a page of metrics that have these labels; 0 without any."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    lines = [line for line in page.splitlines() if re.match(rf"{series}[{{ ]", line)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(each in line for each in wanted))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that at least `share` of them do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean of four or more paired ratios, and the ends of its 95 % confidence interval."""
    logs = [math.log(each) for each in ratios]
    mean, spread = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    reach = T_95[max(number for number in T_95 if number <= len(logs))] * spread  # rather too wide
    return math.exp(mean), math.exp(mean - reach), math.exp(mean + reach)
