"""What a run shows while it goes on: a bar on a terminal, a line every few seconds elsewhere."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from picker_tools.load.answer import Kind
from picker_tools.load.drive import Counts
from picker_tools.load.sample import Sample

_LINE_EVERY_S = 2.0


class Shown:
    """`with Shown(...)`: `say` prints a line, `show` the load's progress towards `duration_s`."""

    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s
        self._console = Console(highlight=False)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._next_s = 0.0
        if sys.stdout.isatty():
            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, TextColumn("{task.fields[said]}"), console=self._console)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.console.print(text, markup=False, soft_wrap=True)

    def show(self, now_s: float, counts: Counts, state: Sample | None) -> None:
        said = _said(counts, state)
        if self._bar is None:
            if now_s >= self._next_s:
                self._next_s = now_s + _LINE_EVERY_S
                print(f"{now_s:5.1f} s  {said}", flush=True)
            return
        if self._task is None:
            self._task = self._bar.add_task("load", total=self._duration_s, said="")
        over = now_s > self._duration_s
        self._bar.update(
            self._task,
            completed=min(now_s, self._duration_s),
            description="last answers, rest" if over else "load",
            said=said,
        )


def _said(counts: Counts, state: Sample | None) -> str:
    parts = [f"sent {counts.sent}", f"open {counts.open}"]
    parts += [f"{kind.value} {count}" for kind, count in counts.ended.items() if count or kind is Kind.SERVED]
    if state is not None:
        parts.append(f"stock {state.stock:g}/{state.upper:g}, queued {state.total_queued}")
    return "  ".join(parts)
