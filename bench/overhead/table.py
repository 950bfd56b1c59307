"""The run as Markdown."""

from collections.abc import Iterable, Sequence
from statistics import median

from bench.overhead.cases import CALM_CONNECTIONS, PACE_PER_S
from bench.overhead.figures import Row, Spread, comparisons, length_ratio, rows
from bench.overhead.measure import RigResult
from bench.overhead.memory import Memory
from bench.overhead.surroundings import Surroundings
from bench.overhead.targets import Target

_HOW = f"""\
Variants behind the same Envoy binary and the same bootstrap: `none` (no picker is asked; Envoy balances by
itself), `constant` (a picker that answers a constant, as many processes as replicas), `picker` (this
project on an embedded Valkey, asked over its socket as under `picker up`, bounds so high that nothing
waits), and `queued` (the same with a bound so low that nearly everything waits its turn; 64 connections).
The constant picker answers as is usual in full-duplex mode, headers and body in messages of their own after
the body's end is told. In `lean` the picker answers a body in one message (docs/decisions.md, 15), which is
a part of its cost; what the rest costs is seen beside `terse`, a constant picker that does the same. They
stand side by side and take turns in each round, in changing order, so that whatever else the machine does
touches all alike, and each round begins with new processes: two sets of the same ones differ by more than one
does from round to round. Figures are medians over the rounds; a ratio is taken within each round, then its
median, with the lowest and highest beside it.

CPU is that of all processes of a kind, divided by the requests of a busy pass (16 connections, 8 for 400 KB),
access logs included; requests/s are of the same pass, in which the load and the model servers use the same
cores. Latency is of a calm pass ({CALM_CONNECTIONS} connections) and up to the last byte; added latency is up
to the answer's headers, less that of `none` in the same round. Model servers answer without delay, up to 256
tokens in one write: in `standard`, where each chunk passes through the picker, a slower stream costs more.
The picker's CPU under `none` is its process that takes the access log.
"""


def markdown(
    surroundings: Surroundings,
    rounds: int,
    results: Sequence[RigResult],
    memory: Memory | None,
    targets: Sequence[Target],
) -> str:
    """The whole page."""
    parts = ["# What the picker costs", _preface(surroundings, rounds), "## Targets", _targets(targets)]
    if results:
        parts += [
            "## How it is measured",
            _HOW.rstrip(),
            "## Ratios: picker by constant",
            _ratios(results),
            *_lengths(results),
            "## Figures",
            _figures(row for result in results for row in rows(result)),
            "## At rest",
            "CPU in milliseconds a second while nothing is sent.",
            _idle(results),
        ]
    if memory is not None:
        parts += ["## Memory of one replica", _memory(memory)]
    return "\n\n".join(parts) + "\n"


def _preface(surroundings: Surroundings, rounds: int) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in surroundings.versions.items())
    return (
        f"`{surroundings.command}`, {surroundings.date}, {rounds} rounds.\n"
        f"{surroundings.cores} cores ({surroundings.processor}, {surroundings.system}), load average "
        f"{surroundings.load:.2f} before the start.\n{versions}."
    )


def _targets(targets: Sequence[Target]) -> str:
    lines = (
        [target.what, f"≤ {target.limit:g}", _spread(target.measured), "met" if target.met else "**missed**"]
        for target in targets
    )
    table = _table(["target", "limit", "measured", ""], lines)
    return f"Ratios of the picker to the constant picker, unless it says otherwise.\n\n{table}"


def _ratios(results: Sequence[RigResult]) -> str:
    lines = (
        [
            each.rig.name,
            each.case.name if each.floor == "constant" else f"{each.case.name}, by {each.floor}",
            *map(_spread, (each.cpu, each.cpu_with_valkey, each.added_p50, each.added_p99)),
        ]
        for result in results
        for each in comparisons(result)
    )
    head = ["mode", "request", "CPU", "CPU with Valkey", "added p50", "added p99"]
    return _table(head, lines)


def _lengths(results: Sequence[RigResult]) -> list[str]:
    """CPU of the longest answer by that of the shortest, by rig and variant."""
    lines = []
    for result in results:
        for variant, (short, long) in result.paced.items():
            ratio = length_ratio(result, variant)
            assert ratio is not None
            tokens = " by ".join(str(case.tokens) for case in reversed(result.rig.ends))
            figures = [f"{median(short):.0f}", f"{median(long):.0f}", _spread(ratio)]
            lines.append([result.rig.name, tokens, variant, *figures])
    if not lines:
        return []
    text = (
        f"CPU of the pickers' processes at {PACE_PER_S:.0f} requests/s, less what they use at rest. (At\n"
        "full speed, below, short answers come faster, and more of them share a call to Valkey.)"
    )
    head = ["mode", "tokens", "variant", "short, µs", "long, µs", "ratio"]
    return ["## Long answers by short ones", text, _table(head, lines)]


def _idle(results: Sequence[RigResult]) -> str:
    lines = (
        [
            result.rig.name,
            variant,
            *(f"{ns / 1e6:.1f}" for ns in (idle.picker_ns, idle.valkey_ns, idle.envoy_ns)),
        ]
        for result in results
        for variant, idle in result.idle.items()
    )
    return _table(["mode", "variant", "picker", "Valkey", "Envoy"], lines)


def _figures(found: Iterable[Row]) -> str:
    lines = (
        [
            row.rig.name,
            row.case.name,
            row.variant,
            f"{row.requests_per_s:.0f}",
            *(f"{figure:.0f}" for figure in (row.picker_us, row.valkey_us, row.envoy_us)),
            *(f"{figure:.2f}" for figure in (row.p50_ms, row.p99_ms)),
            *("–" if figure is None else f"{figure:.2f}" for figure in (row.added_p50_ms, row.added_p99_ms)),
            "–" if row.bypassed is None else f"{1 - row.bypassed:.1%}",
        ]
        for row in found
    )
    head = ["mode", "request", "variant", "req/s", "picker µs", "Valkey µs", "Envoy µs"]
    head += ["p50 ms", "p99 ms", "added p50", "added p99", "waited"]
    return _table(head, lines)


def _memory(memory: Memory) -> str:
    lines = (
        [str(mark.requests), f"{mark.replica_mib:.1f}", f"{mark.valkey_mib:.1f}"] for mark in memory.marks
    )
    table = _table(["requests", "replica MiB", "Valkey MiB"], lines)
    return (
        f"{table}\n\nFrom the first fifth on it grows by {memory.slope_kib:.1f} KiB per 1000 requests, "
        f"{memory.growth:+.1%} in all."
    )


def _spread(found: Spread) -> str:
    if not found.told_from_noise:
        return "–"
    if found.low == found.high:
        return f"{found.median:.2f}"
    return f"{found.median:.2f} ({found.low:.2f}–{found.high:.2f})"


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    written = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in written)
