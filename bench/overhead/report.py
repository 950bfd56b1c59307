"""The run as Markdown and as one picture."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from statistics import median

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.overhead.cases import CALM_CONNECTIONS, PACE_PER_S, PROMPT_NAMES, Prompt, Variant
from bench.overhead.figures import Comparison, Row, Spread, Target, comparisons, length_ratio, rows
from bench.overhead.measure import Memory, SetupResult
from bench.rig.machine import Machine
from bench.rig.page import table

_HOW = f"""\
Variants behind the same Envoy binary and bootstrap: `none` (no picker; Envoy balances by
itself), `constant` (a picker that answers a constant, as many processes as replicas), `picker` (this
project on an embedded Valkey over its socket, as under `picker up`, with bounds so high that nothing
waits), and `queued` (the same with a bound so low that nearly everything waits; 64 connections).
The constant picker answers as is usual in full-duplex mode, with headers and body in separate messages after
the end of the body. In `lean` the picker answers a body in one message (docs/decisions.md); `terse` is a
constant picker that does the same. All run side by side and take turns in each round, in changing order, so
that other work of the machine affects all alike. Each round starts new processes: two sets differ more than
one set does between rounds. Figures are medians over the rounds; a ratio is taken within each round, then its
median, with the lowest and highest beside it.

CPU is that of all processes of a kind, divided by the requests of a busy pass (16 connections, 8 for 400 KB),
access logs included; requests/s are of the same pass, in which the load and the model servers use the same
cores. Latency is of a calm pass ({CALM_CONNECTIONS} connections) and up to the last byte; added latency is up
to the answer's headers, less that of `none` in the same round. Model servers answer without delay, up to 256
tokens in one write: in `standard`, where each chunk passes through the picker, a slower stream costs more.
The picker's CPU under `none` is its process that takes the access log.
"""


def markdown(
    machine: Machine,
    rounds: int,
    results: Sequence[SetupResult],
    memory: Memory | None,
    targets: Sequence[Target],
) -> str:
    """The whole page."""
    parts = ["# What the picker costs", _preface(machine, rounds), "## Targets", _targets(targets)]
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
            "CPU in milliseconds a second without requests.",
            _idle(results),
        ]
    if memory is not None:
        parts += ["## Memory of one replica", _memory(memory)]
    return "\n\n".join(parts) + "\n"


def _preface(machine: Machine, rounds: int) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in machine.versions.items())
    return (
        f"`{machine.command}`, {machine.date}, {rounds} rounds.\n"
        f"{machine.cores} cores ({machine.processor}, {machine.system}), load average "
        f"{machine.load:.2f} before the start.\n{versions}."
    )


def _targets(targets: Sequence[Target]) -> str:
    lines = (
        [target.what, f"≤ {target.limit:g}", _spread(target.measured), "met" if target.met else "**missed**"]
        for target in targets
    )
    written = table(["target", "limit", "measured", ""], lines)
    return f"Ratios of the picker to the constant picker, unless it says otherwise.\n\n{written}"


def _ratios(results: Sequence[SetupResult]) -> str:
    lines = (
        [
            each.setup.name,
            each.case.name if each.baseline == "constant" else f"{each.case.name}, by {each.baseline}",
            *map(_spread, (each.cpu, each.cpu_with_valkey, each.added_p50, each.added_p99)),
        ]
        for result in results
        for each in comparisons(result)
    )
    head = ["mode", "request", "CPU", "CPU with Valkey", "added p50", "added p99"]
    return table(head, lines)


def _lengths(results: Sequence[SetupResult]) -> list[str]:
    """CPU of the longest answer by that of the shortest, by rig and variant."""
    lines = []
    for result in results:
        for variant, (short, long) in result.paced.items():
            ratio = length_ratio(result, variant)
            assert ratio is not None
            tokens = " by ".join(str(case.tokens) for case in reversed(result.setup.ends))
            figures = [f"{median(short):.0f}", f"{median(long):.0f}", _spread(ratio)]
            lines.append([result.setup.name, tokens, variant, *figures])
    if not lines:
        return []
    text = (
        f"CPU of the pickers' processes at {PACE_PER_S:.0f} requests/s, less what they use at rest. (At\n"
        "full speed, below, short answers come faster, and more of them share a call to Valkey.)"
    )
    head = ["mode", "tokens", "variant", "short, µs", "long, µs", "ratio"]
    return ["## Long answers by short ones", text, table(head, lines)]


def _idle(results: Sequence[SetupResult]) -> str:
    lines = (
        [
            result.setup.name,
            variant,
            *(f"{ns / 1e6:.1f}" for ns in (idle.picker_ns, idle.valkey_ns, idle.envoy_ns)),
        ]
        for result in results
        for variant, idle in result.idle.items()
    )
    return table(["mode", "variant", "picker", "Valkey", "Envoy"], lines)


def _figures(found: Iterable[Row]) -> str:
    lines = (
        [
            row.setup.name,
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
    return table(head, lines)


def _memory(memory: Memory) -> str:
    lines = (
        [str(sample.requests), f"{sample.replica_mib:.1f}", f"{sample.valkey_mib:.1f}"]
        for sample in memory.samples
    )
    written = table(["requests", "replica MiB", "Valkey MiB"], lines)
    return (
        f"{written}\n\nFrom the first fifth on it grows by {memory.slope_kib:.1f} KiB per 1000 requests, "
        f"{memory.growth:+.1%} in all."
    )


def _spread(found: Spread) -> str:
    if not found.is_meaningful:
        return "–"
    if found.low == found.high:
        return f"{found.median:.2f}"
    return f"{found.median:.2f} ({found.low:.2f}–{found.high:.2f})"


_BASELINE, _PICKER, _VALKEY = "#9aa5b1", "#2563a8", "#c2410c"
_MODE_MARKS = {"headers": "^", "lean": "o", "standard": "s"}
_WIDTH = 0.38

# Of the one-token case of one rig: its rows by variant, and how they compare.
Short = tuple[dict[Variant, Row], Comparison]


def draw(results: Sequence[SetupResult], memory: Memory | None, file: Path) -> None:
    """Write `file` (PNG): CPU and added latency by mode, CPU by length of answer, memory; what there is."""
    mpl.use("agg")
    panels: list[Callable[[Axes], None]] = []
    prompts: tuple[Prompt, ...] = ("small", "large")
    for prompt in prompts:
        short = _one_token_rows(results, prompt)
        if short:
            panels += [
                partial(_plot_cpu, short=short, prompt=prompt),
                partial(_plot_added, short=short, prompt=prompt),
            ]
    if results:
        panels.append(partial(_plot_lengths, found=[row for result in results for row in rows(result)]))
    if memory is not None:
        panels.append(partial(_plot_memory, memory=memory))
    lines = min(2, len(panels))
    columns = -(-len(panels) // lines)
    figure = Figure(figsize=(4.6 * columns, 3.8 * lines), layout="constrained")
    # By columns: each prompt's CPU above its latency.
    grid = figure.subplots(lines, columns, squeeze=False).T.flatten()
    for axes, panel in zip_longest(grid, panels):
        if panel is None:
            axes.axis("off")
        else:
            panel(axes)
            axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=130)


def _one_token_rows(results: Sequence[SetupResult], prompt: Prompt) -> list[Short]:
    found: list[Short] = []
    for result in results:
        for comparison in comparisons(result):
            if comparison.baseline == "constant" and (comparison.case.prompt, comparison.case.tokens) == (
                prompt,
                1,
            ):
                own = {row.variant: row for row in rows(result) if row.case is comparison.case}
                found.append((own, comparison))
    return found


def _plot_cpu(axes: Axes, short: Sequence[Short], prompt: Prompt) -> None:
    for at, (own, comparison) in enumerate(short):
        constant, picker = own["constant"], own["picker"]
        left, right = at - _WIDTH / 2, at + _WIDTH / 2
        labels = ("constant picker", "picker", "its Valkey") if at == 0 else (None, None, None)
        axes.bar(left, constant.picker_us, _WIDTH, color=_BASELINE, label=labels[0])
        axes.bar(right, picker.picker_us, _WIDTH, color=_PICKER, label=labels[1])
        axes.bar(right, picker.valkey_us, _WIDTH, bottom=picker.picker_us, color=_VALKEY, label=labels[2])
        top = picker.picker_us + picker.valkey_us
        axes.annotate(f"{comparison.cpu.median:.2f}×", (right, top), ha="center", va="bottom", fontsize=8)
    _setup_axis(axes, short, f"CPU, {PROMPT_NAMES[prompt]} prompt (× of the processes without Valkey)")
    axes.set_ylabel("µs a request")


def _plot_added(axes: Axes, short: Sequence[Short], prompt: Prompt) -> None:
    sides: tuple[tuple[Variant, float, str], ...] = (
        ("constant", -_WIDTH / 2, _BASELINE),
        ("picker", _WIDTH / 2, _PICKER),
    )
    for at, (own, comparison) in enumerate(short):
        for variant, side, colour in sides:
            row = own[variant]
            first = at == 0
            label = f"{variant}, p50" if first else None
            axes.bar(at + side, row.added_p50_ms or 0.0, _WIDTH, color=colour, label=label)
            label = "p99" if first and variant == "picker" else None
            high = max(0.0, row.added_p99_ms or 0.0)
            axes.plot([at + side], [high], "_", color="black", markersize=12, label=label)
        height = own["picker"].added_p50_ms or 0.0
        arguments = comparison.added_p50.is_meaningful
        ratio = f"{comparison.added_p50.median:.2f}×" if arguments else "–"
        axes.annotate(ratio, (at + _WIDTH / 2, height), ha="center", va="bottom", fontsize=8)
    _setup_axis(axes, short, f"Added latency, {PROMPT_NAMES[prompt]} prompt (× of p50)")
    axes.set_ylabel("ms")


def _setup_axis(axes: Axes, short: Sequence[Short], title: str) -> None:
    names = [f"{comparison.setup.mode}\n× {comparison.setup.replicas}" for _, comparison in short]
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_xlim(-0.7, max(len(names), 3) - 0.3)  # a single pair of bars is not wider
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False, fontsize=8)


def _plot_lengths(axes: Axes, found: Sequence[Row]) -> None:
    ticks: set[int] = set()
    for mode, sample in _MODE_MARKS.items():
        for variant, colour in (("constant", _BASELINE), ("picker", _PICKER)):
            line = sorted(
                (row.case.tokens, row.picker_us)
                for row in found
                if (row.case.prompt, row.variant, row.setup.mode, row.setup.replicas)
                == ("small", variant, mode, 1)
            )
            if len(line) > 1:
                axes.plot(*zip(*line, strict=True), marker=sample, color=colour, label=f"{mode}, {variant}")
                ticks |= {tokens for tokens, _ in line}
    axes.set_xscale("log")
    axes.set_xticks(sorted(ticks), [f"{each}" for each in sorted(ticks)])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of the answer")
    axes.set_ylabel("µs a request")
    axes.set_title("CPU by length of answer, full speed, 1 replica", fontsize=10)
    if ticks:
        axes.legend(frameon=False, fontsize=7, loc="lower left", ncols=3)


def _plot_memory(axes: Axes, memory: Memory) -> None:
    requests = [sample.requests for sample in memory.samples]
    axes.plot(
        requests, [sample.replica_mib for sample in memory.samples], "o-", color=_PICKER, label="replica"
    )
    axes.plot(requests, [sample.valkey_mib for sample in memory.samples], "o-", color=_VALKEY, label="Valkey")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests")
    axes.set_ylabel("MiB resident")
    axes.set_title("Memory of one replica (lean)", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
