"""The page that says what was measured."""

from collections.abc import Sequence

from bench.scraping.measure import INTERVAL_S, Cost, Rate
from bench.scraping.replica import HEARTBEAT_S

MOST_CORES = 0.6
MOST_GROWTH = 1.2


def markdown(rates: Sequence[Rate], control: Rate, costs: dict[int, Sequence[Cost]], gap_s: float) -> str:
    """The results in Markdown; the last line of each part says whether its bound holds."""
    small = [one for one in rates if one.page_bytes == rates[0].page_bytes]
    growth = max(one.mean for one in small) / small[0].mean
    cores = max(one.cores for one in small)
    lines = [
        "# Scraping",
        "",
        "`python -m bench.scraping`: each endpoint's metrics page is read by one replica of the fleet, every",
        f"{INTERVAL_S * 1000:.0f} ms. Replicas are processes; CPU is theirs alone, in cores of this machine.",
        "",
        "| replicas | endpoints | page, KB | scrapes/s of an endpoint | highest | CPU of the fleet | Redis |",
        "|---|---|---|---|---|---|---|",
        *(_row(one) for one in rates),
        _row(control),
        "",
        "The last row is the control: each replica scrapes everything for itself.",
        "",
        f"From 1 to {small[-1].replicas} replicas: x{growth:.2f} scrapes of an endpoint"
        f" (bound x{MOST_GROWTH}: {_held(growth <= MOST_GROWTH)}),"
        f" at most {cores:.2f} cores (bound {MOST_CORES}: {_held(cores <= MOST_CORES)}).",
        "",
        f"One replica of four killed with SIGKILL: no endpoint went unread for longer than"
        f" {gap_s * 1000:.0f} ms"
        f" (heartbeat {HEARTBEAT_S * 1000:.0f} ms and one interval:"
        f" {_held(gap_s <= HEARTBEAT_S + INTERVAL_S)}).",
        "",
        "One scrape, CPU in µs (the fetch has the server's half in it, the same for both):",
        "",
        "| page, KB | how | fetch | read | sum |",
        "|---|---|---|---|---|",
    ]
    for size, pair in costs.items():
        lines += [
            f"| {size / 1000:.1f} | {one.how} | {one.fetch_us:.0f} | {one.read_us:.0f} "
            f"| {one.fetch_us + one.read_us:.0f} |"
            for one in pair
        ]
    return "\n".join(lines) + "\n"


def _row(one: Rate) -> str:
    replicas = f"{one.replicas}" if one.shared else f"{one.replicas}, each for itself"
    return (
        f"| {replicas} | {one.endpoints} | {one.page_bytes / 1000:.1f} | {one.mean:.2f} | {one.highest:.2f} "
        f"| {one.cores:.2f} | {one.redis_cores:.2f} |"
    )


def _held(holds: bool) -> str:
    return "held" if holds else "**broken**"
