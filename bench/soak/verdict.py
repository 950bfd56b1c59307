"""What the readings of a soak say: what grew, what drifted; and the page that tells it."""

from collections.abc import Mapping, Sequence
from statistics import median

from bench.soak.fleet import Reading

_MOST_GROWTH = 0.05  # of what a size was in the second quarter of the run, until its last quarter
_SIZES = (("replica_bytes", "a replica"), ("envoy_bytes", "Envoy"), ("redis_bytes", "Redis's data"),
          ("files", "open files"))  # fmt: skip


def growth(readings: Sequence[Reading], what: str) -> float:
    """By what share `what` grew from the second quarter of the run to the last."""
    quarter = len(readings) // 4
    values = [float(getattr(reading, what)) for reading in readings]
    early, late = median(values[quarter : 2 * quarter]), median(values[-quarter:])
    return late / early - 1


def verdict(readings: Sequence[Reading], counts: Mapping[str, int]) -> list[str]:
    """Every way in which the run was not as it should be."""
    faults = [
        f"{name} grew by {growth(readings, what):.1%}, {_MOST_GROWTH:.0%} at most"
        for what, name in _SIZES
        if growth(readings, what) > _MOST_GROWTH
    ]
    late = readings[len(readings) // 4 :]
    if late[-1].keys > max(reading.keys for reading in late[: len(late) // 2]):
        faults.append(f"keys in Redis grew to {late[-1].keys}")
    drifted = sum(reading.drift for reading in readings)
    if drifted:
        faults.append(f"counts drifted by {drifted}")
    if counts["failed"]:
        faults.append(f"{counts['failed']} requests failed")
    if not counts["served"] <= counts["finished"] <= counts["served"] + counts["left"]:
        faults.append(f"simulators finished {counts['finished']}, clients were served {counts['served']}")
    return faults


def page(
    command: str,
    date: str,
    readings: Sequence[Reading],
    counts: Mapping[str, int],
    faults: Sequence[str],
) -> str:
    """The results as Markdown."""
    mib = 1024 * 1024
    rows = [
        f"| {r.at_s / 60:.1f} | {r.served} | {r.replica_bytes / mib:.1f} | {r.envoy_bytes / mib:.1f} | "
        f"{r.redis_bytes / mib:.2f} | {r.keys} | {r.files} | {r.drift} |"
        for r in readings
    ]
    grew = ", ".join(f"{name} {growth(readings, what):+.1%}" for what, name in _SIZES)
    return "\n".join(
        [
            "# Soak", "",
            f"`{command}`, {date}: three replicas, four simulators, Envoy in `lean`, a Valkey; a closed",
            "loop of plain and streamed requests of six flows, bodies up to 60 KB, one client in ten leaves.",
            "Twelve times the load pauses, and everything is read: drift is the difference between the",
            "fleet's counts and the simulators' own, which must both be 0 then.", "",
            f"- requests {counts['asked']}: served {counts['served']}, left by their clients",
            f"  {counts['left']}, failed {counts['failed']}; the simulators finished {counts['finished']}",
            f"- growth from the second quarter to the last: {grew}",
            f"- drift: {sum(reading.drift for reading in readings)}",
            f"- **{'as it should be' if not faults else '; '.join(faults)}**", "",
            "| minutes | served | largest replica MiB | Envoy MiB | Redis MiB | keys | open files | drift |",
            "|---|---|---|---|---|---|---|---|",
            *rows, "",
        ]
    )  # fmt: skip
