"""Pages of results: Markdown tables, and the ratio of two versions measured in pairs."""

import math
import statistics
from collections.abc import Iterable, Sequence

T_95 = {9: 2.306, 12: 2.201, 15: 2.145, 20: 2.093}  # Student's t for a 95 % interval, by number of pairs


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean of paired ratios, and the ends of its 95 % confidence interval."""
    logs = [math.log(each) for each in ratios]
    mean, spread = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    reach = T_95[len(logs)] * spread
    return math.exp(mean), math.exp(mean - reach), math.exp(mean + reach)
