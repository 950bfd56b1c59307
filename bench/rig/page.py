"""What pages of results share: Markdown tables, percentiles, the ratio of two versions measured in pairs."""

import math
import statistics
from collections.abc import Iterable, Sequence

# Student's t for a 95 % interval, by number of pairs.
T_95 = {4: 3.182, 6: 2.571, 8: 2.365, 9: 2.306, 10: 2.262, 12: 2.201, 15: 2.145, 20: 2.093}


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
