"""The run as one picture."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.overhead.cases import PROMPT_NAMES, Prompt, Variant
from bench.overhead.figures import Comparison, Row, comparisons, rows
from bench.overhead.measure import RigResult
from bench.overhead.memory import Memory

_FLOOR, _PICKER, _VALKEY = "#9aa5b1", "#2563a8", "#c2410c"
_MODE_MARKS = {"headers": "^", "lean": "o", "standard": "s"}
_WIDTH = 0.38

# Of the one-token case of one rig: its rows by variant, and how they compare.
Short = tuple[dict[Variant, Row], Comparison]


def draw(results: Sequence[RigResult], memory: Memory | None, file: Path) -> None:
    """Write `file` (PNG): CPU and added latency by mode, CPU by length of answer, memory; what there is."""
    mpl.use("agg")
    panels: list[Callable[[Axes], None]] = []
    prompts: tuple[Prompt, ...] = ("small", "large")
    for prompt in prompts:
        short = _short(results, prompt)
        if short:
            panels += [partial(_cpu, short=short, prompt=prompt), partial(_added, short=short, prompt=prompt)]
    if results:
        panels.append(partial(_lengths, found=[row for result in results for row in rows(result)]))
    if memory is not None:
        panels.append(partial(_memory, memory=memory))
    lines = min(2, len(panels))
    columns = -(-len(panels) // lines)
    figure = Figure(figsize=(4.6 * columns, 3.8 * lines), layout="constrained")
    # Down the columns: each prompt's CPU above its latency.
    grid = figure.subplots(lines, columns, squeeze=False).T.flatten()
    for axes, panel in zip_longest(grid, panels):
        if panel is None:
            axes.axis("off")
        else:
            panel(axes)
            axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=130)


def _short(results: Sequence[RigResult], prompt: Prompt) -> list[Short]:
    found: list[Short] = []
    for result in results:
        for comparison in comparisons(result):
            if comparison.floor == "constant" and (comparison.case.prompt, comparison.case.tokens) == (
                prompt,
                1,
            ):
                own = {row.variant: row for row in rows(result) if row.case is comparison.case}
                found.append((own, comparison))
    return found


def _cpu(axes: Axes, short: Sequence[Short], prompt: Prompt) -> None:
    for at, (own, comparison) in enumerate(short):
        constant, picker = own["constant"], own["picker"]
        left, right = at - _WIDTH / 2, at + _WIDTH / 2
        labels = ("constant picker", "picker", "its Valkey") if at == 0 else (None, None, None)
        axes.bar(left, constant.picker_us, _WIDTH, color=_FLOOR, label=labels[0])
        axes.bar(right, picker.picker_us, _WIDTH, color=_PICKER, label=labels[1])
        axes.bar(right, picker.valkey_us, _WIDTH, bottom=picker.picker_us, color=_VALKEY, label=labels[2])
        top = picker.picker_us + picker.valkey_us
        axes.annotate(f"{comparison.cpu.median:.2f}×", (right, top), ha="center", va="bottom", fontsize=8)
    _by_rig(axes, short, f"CPU, {PROMPT_NAMES[prompt]} prompt (× of the processes without Valkey)")
    axes.set_ylabel("µs a request")


def _added(axes: Axes, short: Sequence[Short], prompt: Prompt) -> None:
    sides: tuple[tuple[Variant, float, str], ...] = (
        ("constant", -_WIDTH / 2, _FLOOR),
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
        told = comparison.added_p50.told_from_noise
        ratio = f"{comparison.added_p50.median:.2f}×" if told else "–"
        axes.annotate(ratio, (at + _WIDTH / 2, height), ha="center", va="bottom", fontsize=8)
    _by_rig(axes, short, f"Added latency, {PROMPT_NAMES[prompt]} prompt (× of p50)")
    axes.set_ylabel("ms")


def _by_rig(axes: Axes, short: Sequence[Short], title: str) -> None:
    names = [f"{comparison.rig.mode}\n× {comparison.rig.replicas}" for _, comparison in short]
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_xlim(-0.7, max(len(names), 3) - 0.3)  # a single pair of bars is no wider than others
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False, fontsize=8)


def _lengths(axes: Axes, found: Sequence[Row]) -> None:
    ticks: set[int] = set()
    for mode, mark in _MODE_MARKS.items():
        for variant, colour in (("constant", _FLOOR), ("picker", _PICKER)):
            line = sorted(
                (row.case.tokens, row.picker_us)
                for row in found
                if (row.case.prompt, row.variant, row.rig.mode, row.rig.replicas)
                == ("small", variant, mode, 1)
            )
            if len(line) > 1:
                axes.plot(*zip(*line, strict=True), marker=mark, color=colour, label=f"{mode}, {variant}")
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


def _memory(axes: Axes, memory: Memory) -> None:
    requests = [mark.requests for mark in memory.marks]
    axes.plot(requests, [mark.replica_mib for mark in memory.marks], "o-", color=_PICKER, label="replica")
    axes.plot(requests, [mark.valkey_mib for mark in memory.marks], "o-", color=_VALKEY, label="Valkey")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests")
    axes.set_ylabel("MiB resident")
    axes.set_title("Memory of one replica (lean)", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
